"""The model file: a ZIP archive of arrays in NumPy's own form (an .npz) and one JSON header. Nothing is unpickled.

A file from elsewhere is read like any untrusted input: names, shapes, kinds and sizes are checked before memory is
taken, numbers must be finite, and what is wrong is said with the file's name and what to do about it.

The HTTP process reads the text score alone: the model's own parts, whose compiled code takes a second to load, are
imported where a whole model is read.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.online import FIRST_CALLS, STAGES
from sglang_basin.predictor.text import BUCKETS, TextScore

if TYPE_CHECKING:
    from sglang_basin.predictor.line import Line
    from sglang_basin.predictor.model import OnlineSettings, PeakModel

FORMAT = "sglang-basin peak model"
VERSION = 2
MAX_FILE_BYTES = 32 * 2**20
MAX_ENTRY_BYTES = 64 * 2**20
KEPT_KEYS = 2_000
"""Agents that a file remembers. Tasks are not kept: their number has no bound, and they are a deployment's own."""

Read = TypeVar("Read")

_MEND = "fit a new one with python -m sglang_basin.fit_predictor"


class ModelFileError(ValueError):
    """A model file that cannot be used; the message names the file and the mend."""


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int
    features: list[str]
    shares: list[float]
    first_calls: list[int]
    text_buckets: int
    log_peak: Annotated[float, msgspec.Meta(ge=0, le=30)]
    kins: dict[str, Any]
    fitted_on: dict[str, int]
    """Sessions by the name of the file they came from."""
    package: str = ""


_decode_header = msgspec.json.Decoder(_Header).decode


def default_model_path() -> Path:
    """The model that comes with this package, fitted on the traces that may be passed on."""
    return Path(str(resources.files("sglang_basin.predictor") / "data" / "default.npz"))


def named_model_path(name: str) -> Path | None:
    """The file of `--basin-predictor NAME`: none for 'seen', the default's for 'trained', else the name itself."""
    return None if name == "seen" else default_model_path() if name == "trained" else Path(name)


def save_model(model: PeakModel, path: Path, *, fitted_on: dict[str, int]) -> None:
    """Write the file in one step: it is there whole or not at all. Same model, same bytes. Raises OSError."""
    from sglang_basin import __version__

    header = _Header(
        format=FORMAT,
        version=VERSION,
        features=list(NAMES),
        shares=list(SHARES),
        first_calls=list(FIRST_CALLS),
        text_buckets=BUCKETS,
        log_peak=model.log_peak,
        kins=model.kins.as_lists(KEPT_KEYS),
        fitted_on=fitted_on,
        package=__version__,
    )
    arrays: dict[str, npt.NDArray[Any]] = {
        **_line_arrays("trend", model.trend),
        **_line_arrays("line", model.line),
        "questions": model.forest.questions.astype(np.uint8),
        "thresholds": model.forest.thresholds.astype(np.float32),
        "sums": model.forest.settled_sums().astype(np.float32),
        "scores": model.calibration.scores,
        "mixture": model.mixture.products,
    }
    if model.text is not None:
        arrays["idf"] = np.array(model.text.idf, np.float32)
        arrays["weights"] = np.array(model.text.weights, np.float32)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        _put(archive, "header.json", msgspec.json.encode(header))
        for name, array in arrays.items():
            data = io.BytesIO()
            np.save(data, array, allow_pickle=False)
            _put(archive, f"{name}.npy", data.getvalue())
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(packed.getvalue())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def load_model(path: Path, settings: OnlineSettings | None = None) -> PeakModel:
    """Raises ModelFileError for whatever is not a whole model file of this version."""
    return _of_file(path, lambda archive: _read(archive, settings))


def load_text_score(path: Path) -> TextScore | None:
    """The part of a model that reads task texts; None of a model without it. Raises ModelFileError as `load_model`."""

    def read(archive: zipfile.ZipFile) -> TextScore | None:
        _header(archive)
        return _text(archive)

    return _of_file(path, read)


def _of_file(path: Path, read: Callable[[zipfile.ZipFile], Read]) -> Read:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelFileError(
                f"{path}: {size:,} bytes, more than a model file may have ({MAX_FILE_BYTES:,}); {_MEND}"
            )
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            return read(archive)
    except ModelFileError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}; give the path of a model file, or {_MEND}") from None
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        msgspec.MsgspecError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ) as error:
        raise ModelFileError(f"{path}: not a whole {FORMAT} file ({error}); {_MEND}") from None


def _header(archive: zipfile.ZipFile) -> _Header:
    """Raises ValueError for one of another version or package."""
    header = _decode_header(_entry(archive, "header.json"))
    if header.format != FORMAT:
        raise ValueError(f"its format is {header.format[:80]!r}")
    if header.version != VERSION:
        raise ValueError(f"its version is {header.version}, this package reads {VERSION}")
    if (header.features, header.first_calls, header.text_buckets) != (list(NAMES), list(FIRST_CALLS), BUCKETS):
        raise ValueError("it was fitted with other features than this package computes")
    if header.shares != list(SHARES):
        raise ValueError(f"its quantiles are {header.shares[:10]}, this package uses {list(SHARES)}")
    return header


def _text(archive: zipfile.ZipFile) -> TextScore | None:
    if "idf.npy" not in archive.namelist():
        return None
    idf = _array(archive, "idf", np.dtype(np.float32), (BUCKETS,))
    return TextScore(idf.tolist(), _array(archive, "weights", np.dtype(np.float32), (BUCKETS,)).tolist())


def _read(archive: zipfile.ZipFile, settings: OnlineSettings | None) -> PeakModel:
    from sglang_basin.predictor.calibration import Calibration
    from sglang_basin.predictor.forest import MAX_DEPTH, MAX_TREES, Forest
    from sglang_basin.predictor.mixture import Mixture
    from sglang_basin.predictor.model import TREND_COLUMNS, OnlineSettings, PeakModel

    header = _header(archive)
    questions = _array(archive, "questions", np.dtype(np.uint8))
    sizes = [1 << depth for depth in range(1, MAX_DEPTH + 1)]
    if questions.ndim != 3 or questions.shape[0] != STAGES or questions.shape[2] not in sizes:
        raise ValueError(f"questions: {STAGES} stages x trees x leaves expected, got {questions.shape}")
    if not 1 <= questions.shape[1] <= MAX_TREES:
        raise ValueError(f"questions: at most {MAX_TREES} trees a stage, got {questions.shape[1]}")
    if questions.max() >= len(NAMES):
        raise ValueError(f"questions: columns must be below {len(NAMES)}")
    thresholds = _array(archive, "thresholds", np.dtype(np.float32), questions.shape)
    sums = _array(archive, "sums", np.dtype(np.float32), (3, questions.size))
    if not (sums[0] > 0).all():
        raise ValueError("sums: every leaf must have a weight above 0")
    scores = _array(archive, "scores", np.dtype(np.float64), (STAGES, len(SHARES)))
    if not (np.diff(scores) >= 0).all():
        raise ValueError("scores: must ascend")
    products = _array(archive, "mixture", np.dtype(np.float64), (3, 3))
    online = settings or OnlineSettings()
    model = PeakModel(
        _line(archive, "trend", TREND_COLUMNS),
        _line(archive, "line", range(len(NAMES))),
        Forest(questions, thresholds, sums),
        Calibration(scores, online.calibration_step),
        _text(archive),
        mixture=Mixture(products),
        log_peak=header.log_peak,
        settings=online,
    )
    model.kins.restore(header.kins)
    return model


def _line_arrays(name: str, line: Line) -> dict[str, npt.NDArray[Any]]:
    parts = {"middle": line.middle, "scale": line.scale, "gram": line.gram, "moment": line.moment}
    return {f"{name}_{part}": array for part, array in parts.items()}


def _line(archive: zipfile.ZipFile, name: str, columns: Sequence[int]) -> Line:
    from sglang_basin.predictor.line import Line

    count, kind = len(columns), np.dtype(np.float64)
    middle = _array(archive, f"{name}_middle", kind, (count,))
    scale = _array(archive, f"{name}_scale", kind, (count,))
    gram = _array(archive, f"{name}_gram", kind, (count + 1, count + 1))
    moment = _array(archive, f"{name}_moment", kind, (count + 1,))
    if not ((scale > 0).all() and gram[-1, -1] > 0):
        raise ValueError(f"{name}: scale and total weight must be above 0")
    try:
        return Line(np.array(columns), middle, scale, gram, moment)
    except ArithmeticError:
        raise ValueError(f"{name}: gram has no solution") from None


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as file:
        data = file.read(MAX_ENTRY_BYTES + 1)
    if len(data) > MAX_ENTRY_BYTES:
        raise ValueError(f"{name} is larger than {MAX_ENTRY_BYTES:,} bytes")
    return data


def _array(
    archive: zipfile.ZipFile, name: str, kind: np.dtype[Any], shape: tuple[int, ...] | None = None
) -> npt.NDArray[Any]:
    """An array of just this kind and shape, all finite. Its claimed size is compared with what is really there."""
    data = io.BytesIO(_entry(archive, f"{name}.npy"))
    if np.lib.format.read_magic(data) != (1, 0):  # type: ignore[no-untyped-call]
        raise ValueError(f"{name}: array form 1.0 expected")
    found, fortran, dtype = np.lib.format.read_array_header_1_0(data)  # type: ignore[no-untyped-call]
    if dtype != kind or fortran or (shape is not None and found != shape):
        raise ValueError(f"{name}: {kind} of shape {shape or 'stages x trees x leaves'} expected, got {dtype} {found}")
    rest = data.read()
    if math.prod(found) * kind.itemsize != len(rest):
        raise ValueError(f"{name}: {len(rest):,} bytes do not make an array of shape {found}")
    array = np.frombuffer(rest, kind).reshape(found)
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: all numbers must be finite")
    return array
