import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_sessions import made

from sglang_basin.predictor import model_file
from sglang_basin.predictor.arithmetic import NOTHING
from sglang_basin.predictor.evaluate import predict
from sglang_basin.predictor.fitted import Frozen
from sglang_basin.predictor.model_file import ModelFileError, default_model_path, load_model, save_model


@pytest.fixture
def path(model, tmp_path):
    target = tmp_path / "peaks.npz"
    save_model(model, target, fitted_on={"made": 80})
    return target


def rewritten(path, **changes):
    """The same archive with entries replaced; None leaves one out."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries |= {name.replace("__", "."): data for name, data in changes.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if data is not None:
                archive.writestr(name, data)
    return path


def npy(array, **kwargs):
    data = io.BytesIO()
    np.save(data, array, **kwargs)
    return data.getvalue()


def test_a_loaded_model_predicts_the_same(model, path):
    sessions = [session for session in made(20, seed=4)]
    before, after = (predict(Frozen(one), sessions) for one in (model, load_model(path)))
    assert after.tokens == pytest.approx(before.tokens, rel=1e-4)


def test_same_model_same_bytes(model, path, tmp_path):
    save_model(model, tmp_path / "again.npz", fitted_on={"made": 80})
    assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.npz", "peaks.npz"]


def test_a_model_that_learned_is_kept(model, tmp_path):
    frozen = Frozen(model)
    model.learn(NOTHING, 0, 5, None, 100_000)
    save_model(model, tmp_path / "m.npz", fitted_on={})
    loaded = load_model(tmp_path / "m.npz")
    assert loaded.kins.shrunk(5, 0.0) == pytest.approx(frozen.model.kins.shrunk(5, 0.0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"header__json": None}, "header.json"),
        ({"sums__npy": None}, "sums"),
        ({"header__json": b"{}"}, "format"),
        ({"header__json": b"\xff\x00"}, "whole"),
        ({"sums__npy": b"\x93NUMPY"}, "whole"),
        ({"sums__npy": npy(np.zeros((3, 12 * 16 * 16), np.float32))}, "weight above 0"),
        ({"sums__npy": npy(np.full((3, 12 * 16 * 16), np.nan, np.float32))}, "finite"),
        ({"sums__npy": npy(np.zeros((3, 7), np.float32))}, "shape"),
        ({"questions__npy": npy(np.full((12, 16, 16), 99, np.uint8))}, "columns"),
        ({"questions__npy": npy(np.zeros((12, 16, 15), np.uint8))}, "leaves"),
        ({"questions__npy": npy(np.zeros((7, 16, 16), np.uint8))}, "stages"),
        ({"questions__npy": npy(np.zeros((12, 300, 16), np.uint8))}, "trees"),
        ({"questions__npy": npy(np.zeros((12, 16, 16)))}, "uint8"),
        ({"questions__npy": npy(np.array([object()]), allow_pickle=True)}, "questions"),
        ({"scores__npy": npy(np.tile([5.0, 4, 3, 2, 1], (12, 1)))}, "ascend"),
    ],
)
def test_a_wrong_part_is_named(path, changes, says):
    with pytest.raises(ModelFileError, match=says) as caught:
        load_model(rewritten(path, **changes))
    assert str(path) in str(caught.value)
    assert "fit_predictor" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("format", "something else", "something else"),
        ("version", 99, "version is 99"),
        ("features", ["log_context"], "other features"),
        ("shares", [0.5], "quantiles"),
        ("log_peak", 1e9, "log_peak"),
        ("kins", {"keys": [["zz", 1, 1]], "all": [1, 1], "variance": [0, 0]}, "whole"),
    ],
)
def test_a_wrong_header_is_named(path, field, value, says):
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
    with pytest.raises(ModelFileError, match=says):
        load_model(rewritten(path, header__json=json.dumps(header | {field: value}).encode()))


def test_a_claimed_size_takes_no_memory(path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (3, 10**13)})
    with pytest.raises(ModelFileError):
        load_model(rewritten(path, sums__npy=head.getvalue()))


def test_an_oversized_file_is_not_read(path, monkeypatch):
    monkeypatch.setattr(model_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelFileError, match="more than a model file may have"):
        load_model(path)
    monkeypatch.undo()
    monkeypatch.setattr(model_file, "MAX_ENTRY_BYTES", 500)
    with pytest.raises(ModelFileError, match="larger than 500"):
        load_model(path)


def test_no_file(tmp_path):
    for path in (tmp_path / "absent.npz", tmp_path):
        with pytest.raises(ModelFileError, match=str(path)):
            load_model(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=4))
def test_a_damaged_file_is_refused_or_still_whole(path, tmp_path, cut, flips):
    """Cut anywhere or with bytes changed: an error that names the file, or a model that predicts finite numbers."""
    data = bytearray(path.read_bytes())
    if not flips:
        data = data[: int(cut * (len(data) - 1))]
    for place, change in flips:
        data[int(place * (len(data) - 1))] ^= change
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(data)
    try:
        model = load_model(damaged)
    except ModelFileError as error:
        refused = str(error)
    else:
        refused = ""
        assert flips
        assert np.isfinite(predict(Frozen(model), made(3)).tokens).all()
    assert not refused or str(damaged) in refused


@given(st.binary(max_size=500))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_foreign_file_is_refused(tmp_path, data):
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="foreign"):
        load_model(path)


def test_the_shipped_model_loads():
    model = load_model(default_model_path())
    assert np.isfinite(predict(Frozen(model), made(5)).tokens).all()
