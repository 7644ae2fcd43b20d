"""One patch: a header in the manner of Debian's DEP-3, then a `-p1` diff, as `git apply` takes it.

    Subject: Says in a line what changes
    Why-no-hook: Why no flag, extension point or hook does it; further lines
     start with a space
    Upstream-Version: 0.5.23
    Upstream-SHA256: <64 hex digits> sglang/srt/managers/io.py
    Forwarded: https://… or no, with the reason
    Test: tests/engine/test_that_holds_it.py
    Remove-When: What must have happened upstream
    ---
    --- a/sglang/srt/managers/io.py
    +++ b/sglang/srt/managers/io.py
    @@ …

`Upstream-SHA256` stands once for each file: the hash of the file as upstream ships it, before any patch of the series.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from sglang_basin import SGLANG_VERSION

FIELDS = ("Subject", "Why-no-hook", "Upstream-Version", "Upstream-SHA256", "Forwarded", "Test", "Remove-When")
"""What every header has."""

_HASH = re.compile(r"([0-9a-f]{64}) +(\S+)")
_DIFF = re.compile(r"^(?:---\n)?(?=(?:diff --git |--- )\S)", re.MULTILINE)


class PatchError(ValueError):
    """A patch is malformed or does not fit the installed SGLang; the message names the patch, the place, the mend."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines (with their ends) that stand at `start` (from 1), and those that take their place.

    `new_start` is where they stand in the patched file.
    """

    start: int
    new_start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a patch does to one file. `path` is relative to the folder that holds the package `sglang`."""

    patch: str
    path: str
    upstream_sha256: str
    hunks: tuple[Hunk, ...]

    @property
    def module(self) -> str:
        """The dotted name that the file is imported as."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch file. `header` has the fields of `FIELDS` but the hashes, each on one line."""

    name: str
    header: dict[str, str]
    changes: tuple[FileChange, ...]


def read_patch(path: Path) -> Patch:
    """Parse one patch file. Raises PatchError for what is missing or cannot be applied in memory."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"{path.name}: cannot be read ({error})") from None
    head, diff = _split(text)
    fields = HeaderParser().parsestr(head)
    if missing := [name for name in FIELDS if not (fields[name] or "").strip()]:
        raise PatchError(f"{path.name}: the header lacks {', '.join(missing)}")
    header = {name: " ".join(fields[name].split()) for name in FIELDS if name != "Upstream-SHA256"}
    if header["Upstream-Version"] != SGLANG_VERSION:
        raise PatchError(f"{path.name}: Upstream-Version: must be {SGLANG_VERSION}, got {header['Upstream-Version']}")
    hashes = _hashes(path.name, fields.get_all("Upstream-SHA256", []))
    try:
        files = PatchSet(diff)
    except UnidiffParseError as error:
        raise PatchError(f"{path.name}: not a diff ({error})") from None
    changes = tuple(_change(path.name, file, hashes) for file in files)
    if not changes:
        raise PatchError(f"{path.name}: there is no diff behind the header")
    if unused := sorted(set(hashes) - {change.path for change in changes}):
        raise PatchError(f"{path.name}: Upstream-SHA256 of {', '.join(unused)}, which the diff does not touch")
    return Patch(path.name, header, changes)


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def apply(changes: Iterable[FileChange], text: str) -> str:
    """The file's text with all of `changes`, one after the other. Exact lines at exact places: raises PatchError."""
    for change in changes:
        edits = [(hunk.start, hunk.before, hunk.after) for hunk in change.hunks]
        text = _replace(change, edits, text)
    return text


def undo(changes: Sequence[FileChange], text: str) -> str:
    """The text before `changes` were applied to it. Raises PatchError when they were not."""
    for change in reversed(changes):
        edits = [(hunk.new_start, hunk.after, hunk.before) for hunk in change.hunks]
        text = _replace(change, edits, text)
    return text


def _replace(change: FileChange, edits: Iterable[tuple[int, tuple[str, ...], tuple[str, ...]]], text: str) -> str:
    lines = io.StringIO(text).readlines()
    out: list[str] = []
    done = 0
    for start, old, new in edits:
        first = start - 1
        if first < done or tuple(lines[first : first + len(old)]) != old:
            raise PatchError(f"{change.patch}: {change.path}: the hunk at line {start} does not fit")
        out += lines[done:first]
        out += new
        done = first + len(old)
    return "".join(out + lines[done:])


def _split(text: str) -> tuple[str, str]:
    found = _DIFF.search(text)
    return (text[: found.start()], text[found.end() :]) if found else (text, "")


def _hashes(patch: str, lines: Iterable[str]) -> dict[str, str]:
    hashes = {}
    for line in lines:
        found = _HASH.fullmatch(line.strip())
        if not found:
            raise PatchError(f"{patch}: Upstream-SHA256: expected 64 hex digits and a path, got {line!r}")
        hashes[found[2]] = found[1]
    return hashes


def _change(patch: str, file: Any, hashes: dict[str, str]) -> FileChange:
    path = str(file.path)
    if not (file.is_modified_file and path.startswith("sglang/") and path.endswith(".py")) or file.is_rename:
        raise PatchError(f"{patch}: {path}: only existing Python files of the package sglang can be patched")
    if path not in hashes:
        raise PatchError(f"{patch}: {path}: the header lacks its Upstream-SHA256")
    return FileChange(patch, path, hashes[path], tuple(_hunk(patch, path, hunk) for hunk in file))


def _hunk(patch: str, path: str, hunk: Any) -> Hunk:
    lines = [(line.line_type, line.value) for line in hunk]
    if any(kind == "\\" for kind, _ in lines):
        raise PatchError(f"{patch}: {path}: a file must end in a newline before and after")
    before = tuple(value for kind, value in lines if kind in " -")
    after = tuple(value for kind, value in lines if kind in " +")
    if not before or not after:
        raise PatchError(f"{patch}: {path}: the hunk at line {hunk.source_start} has no context; make it with diff -U3")
    return Hunk(hunk.source_start, hunk.target_start, before, after)
