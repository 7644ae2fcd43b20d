"""Basin's own session log: one line per finished session, numbers and hashed features only.

The first line says what the file is: {"basin_session_log": 1}. A session's line has its calls' token counts, the
fingerprints of its task and of its agent and model, and the task's hashed word counts. No text and no name is in it
unless `Entry.text` was given, which the engine does only where the operator asked for it.

The writer rotates (`rotation`). A torn line, as a crash leaves it, is passed over when reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from sglang_basin.predictor.text import BUCKETS, Task
from sglang_basin.replay.trace import MAX_LINE_BYTES, TraceError
from sglang_basin.rotation import RotatingFile

VERSION = 1
MAX_CALLS = 10_000
"""Calls that a line keeps; a longer session loses the ones after these, but never its peak."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
_Bucket = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished session. `calls` are (prompt tokens, output tokens)."""

    calls: tuple[tuple[int, int], ...]
    kin: int | None = None
    task: Task | None = None
    text: str | None = None
    pauses_s: tuple[float, ...] = ()
    """From each call's end to the next one's arrival, one fewer than calls; empty where they are not known."""
    group: str = ""
    """Made when reading: the task's fingerprint, or the line where there is none."""


class _Header(msgspec.Struct):
    basin_session_log: int


class _Line(msgspec.Struct, omit_defaults=True):
    calls: Annotated[list[tuple[_Tokens, _Tokens]], msgspec.Meta(min_length=1, max_length=100_000)]
    kin: _Hash | None = None
    task: _Hash | None = None
    characters: _Tokens = 0
    terms: Annotated[list[tuple[_Bucket, _Count]], msgspec.Meta(max_length=BUCKETS)] = []
    text: str | None = None
    pauses_ms: Annotated[list[_Milliseconds], msgspec.Meta(max_length=100_000)] = []


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode
_HEADER = _encode({"basin_session_log": VERSION}) + b"\n"


class SessionLog:
    """Appends finished sessions. One writer per file; call it off the scheduler's critical path."""

    def __init__(self, path: Path, *, max_bytes: int = 16 * 2**20, kept_files: int = 4) -> None:
        """Raises ValueError naming a wrong setting."""
        self._file = RotatingFile(path, max_bytes=max_bytes, kept_files=kept_files, header=_HEADER)

    def append(self, entry: Entry) -> None:
        """Raises OSError when the disk does not take it, ValueError for an entry without calls."""
        if not entry.calls:
            raise ValueError("session log: a session needs at least one call")
        calls = list(entry.calls[:MAX_CALLS])
        if len(entry.calls) > MAX_CALLS:
            calls[-1] = max(entry.calls[MAX_CALLS - 1 :], key=sum)
        line = _Line(
            calls=calls,
            kin=None if entry.kin is None else f"{entry.kin:016x}",
            task=None if entry.task is None else f"{entry.task.fingerprint:016x}",
            characters=0 if entry.task is None else min(entry.task.characters, 100_000_000),
            terms=[] if entry.task is None else list(entry.task.terms),
            text=entry.text,
            pauses_ms=[round(1000 * pause_s) for pause_s in entry.pauses_s[: len(calls) - 1]],
        )
        self._file.append(_encode(line) + b"\n")


def is_log(first_line: bytes) -> bool:
    """Whether a file that starts with this line is a session log of a version this package reads."""
    try:
        return _decode_header(first_line).basin_session_log == VERSION
    except (msgspec.DecodeError, UnicodeError):
        return False


def read_lines(file: BinaryIO, path: Path) -> Iterator[Entry]:
    """The entries after the first line. Raises TraceError for a line that is whole and yet wrong."""
    number = 1
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not line.strip():
            continue
        try:
            read = _decode_line(line)
        except (msgspec.DecodeError, UnicodeError) as error:
            if not line.endswith(b"\n") or not line.rstrip().endswith(b"}"):
                continue  # torn by a crash
            raise TraceError(f"{path}:{number}: {error}") from None
        task = None
        if read.task is not None:
            task = Task(int(read.task, 16), read.characters, tuple(read.terms))
        if read.pauses_ms and len(read.pauses_ms) != len(read.calls) - 1:
            raise TraceError(f"{path}:{number}: pauses_ms: one fewer than calls expected, got {len(read.pauses_ms)}")
        yield Entry(
            calls=tuple(read.calls),
            kin=None if read.kin is None else int(read.kin, 16),
            task=task,
            text=read.text,
            pauses_s=tuple(pause_ms / 1000 for pause_ms in read.pauses_ms),
            group=f"{path}:{number}" if task is None else f"{task.fingerprint:016x}",
        )
