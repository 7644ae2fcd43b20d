"""All patches, in the order of `series`, and how they stand to the installed SGLang. Imports nothing of SGLang."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sglang_basin
from sglang_basin import SGLANG_VERSION
from sglang_basin.patching.patch import FileChange, Patch, PatchError, apply, read_patch, sha256, undo

FOLDER_VARIABLE = "BASIN_PATCHES"
"""Environment variable naming another folder of patches, to try one before it ships. Inherited by all processes."""

State = Literal["applicable", "in file", "mismatch"]


@dataclass(frozen=True, slots=True)
class Standing:
    """How the patches of one file stand to that file as it is installed.

    "applicable": the file is upstream's own and all hunks fit. "in file": somebody applied them to the file itself,
    exactly, so there is nothing left to do. "mismatch": neither; `detail` says why.
    """

    path: str
    changes: tuple[FileChange, ...]
    state: State
    detail: str = ""

    @property
    def module(self) -> str:
        return self.changes[0].module

    @property
    def mend(self) -> str:
        return f"pip install --force-reinstall --no-deps sglang=={SGLANG_VERSION}" if self.state == "mismatch" else ""


def patches_folder() -> Path:
    """Where the patches are: `BASIN_PATCHES`, or inside the installed package, or beside it in a checkout."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    package = Path(sglang_basin.__file__).parent
    shipped = package / "patches"
    return shipped if (shipped / "series").exists() else package.parent / "patches"


def read_series(folder: Path) -> tuple[Patch, ...]:
    """The listed patches, in order. Raises PatchError when the list or a patch is missing or malformed."""
    series = folder / "series"
    try:
        lines = series.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PatchError(f"{series}: {error.strerror}; reinstall sglang-basin") from None
    names = [name for line in lines if (name := line.split("#")[0].strip())]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PatchError(f"{series}: lists {', '.join(sorted(twice))} twice")
    return tuple(read_patch(folder / name) for name in names)


def unlisted(folder: Path, patches: Iterable[Patch]) -> list[str]:
    """Patch files that `series` does not name; they have no effect."""
    listed = {patch.name for patch in patches}
    return sorted(path.name for path in folder.glob("*.patch") if path.name not in listed)


def sglang_root() -> Path:
    """The folder that holds the package `sglang`, found without importing it. Raises PatchError."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(f"sglang is not installed; run: pip install sglang=={SGLANG_VERSION}")
    return Path(spec.submodule_search_locations[0]).parent


def standings(patches: Iterable[Patch], root: Path) -> list[Standing]:
    """One standing for each file that is patched, in the order of the series."""
    by_path: dict[str, list[FileChange]] = {}
    for patch in patches:
        for change in patch.changes:
            by_path.setdefault(change.path, []).append(change)
    return [_standing(path, tuple(changes), root) for path, changes in by_path.items()]


def patched_text(changes: tuple[FileChange, ...], path: Path) -> str:
    """The patched text of an upstream file. Raises PatchError when its hash or a hunk does not fit."""
    original = _read(path)
    for change in changes:
        if change.upstream_sha256 != sha256(original):
            raise PatchError(
                f"{change.patch}: {path} is not the file of sglang {SGLANG_VERSION} "
                f"(sha256 {sha256(original)[:12]}…, expected {change.upstream_sha256[:12]}…)"
            )
    return apply(changes, importlib.util.decode_source(original))


def _standing(path: str, changes: tuple[FileChange, ...], root: Path) -> Standing:
    try:
        patched_text(changes, root / path)
    except PatchError as error:
        if _in_file(changes, root / path):
            return Standing(path, changes, "in file")
        return Standing(path, changes, "mismatch", str(error))
    return Standing(path, changes, "applicable")


def _in_file(changes: tuple[FileChange, ...], path: Path) -> bool:
    try:
        original = undo(changes, importlib.util.decode_source(_read(path)))
    except PatchError:
        return False
    return all(change.upstream_sha256 == sha256(original.encode()) for change in changes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror}") from None


def by_module(found: Iterable[Standing]) -> Mapping[str, Standing]:
    """The standings whose modules must be patched as they are imported."""
    return {standing.module: standing for standing in found if standing.state == "applicable"}
