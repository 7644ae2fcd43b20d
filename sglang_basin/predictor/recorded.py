"""Finished sessions to learn from and to be measured by: read from a trace or from Basin's own session log.

A trace may carry `task_text`, `task_id`, `agent` and `model` beside the numbers that a replay reads (see
`sglang_basin.replay.trace`). A session log holds fingerprints and hashed terms in their place.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from sglang_basin.predictor import session_log
from sglang_basin.predictor.text import Task, fingerprint, read_task
from sglang_basin.replay.trace import MAX_FILE_BYTES, MAX_LINE_BYTES, TraceError, find_trace

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One finished session. `calls` are (prompt tokens, output tokens) in order, at least one."""

    calls: tuple[tuple[int, int], ...]
    group: str
    """What must not be split between fitting and judging: the task, or the session itself where none is named."""
    kin: int | None = None
    """Fingerprint of agent and model."""
    task: Task | None = None
    text: str | None = None
    """The task text itself, for the baseline alone; a session log has none."""
    pauses_s: tuple[float, ...] = ()
    """From each call's end to the next one's arrival, one fewer than calls; empty where they are not known."""

    def steps(self) -> Iterator[tuple[int, int, int, float]]:
        """(call from 1, prompt, output, pause before it) of each call."""
        pauses_s = (0.0, *(self.pauses_s or (0.0,) * (len(self.calls) - 1)))
        for call, ((prompt, output), pause_s) in enumerate(zip(self.calls, pauses_s, strict=True), 1):
            yield call, prompt, output, pause_s

    @property
    def peak_tokens(self) -> int:
        return max(1, max(prompt + output for prompt, output in self.calls))


class _Call(msgspec.Struct, frozen=True):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
    output_tokens: _Tokens = 0
    tool_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None


class _Session(msgspec.Struct, frozen=True):
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    calls: Annotated[list[_Call], msgspec.Meta(min_length=1, max_length=100_000)]
    agent: str | None = None
    model: str | None = None
    task_id: str | None = None
    task_text: str | None = None


_decode = msgspec.json.Decoder(_Session).decode


def kin_of(agent: str | None, model: str | None) -> int | None:
    """The fingerprint of an agent and its model; None where neither is known."""
    return fingerprint(f"{agent or ''}\n{model or ''}") if agent or model else None


def _recorded(session: _Session) -> Recorded:
    return Recorded(
        calls=tuple((call.prompt_tokens, call.output_tokens) for call in session.calls),
        group=session.task_id or session.session_id,
        kin=kin_of(session.agent, session.model),
        task=read_task(session.task_text),
        text=session.task_text,
        pauses_s=tuple(call.tool_s or 0.0 for call in session.calls[:-1]),
    )


def _logged(entry: session_log.Entry) -> Recorded:
    return Recorded(calls=entry.calls, group=entry.group, kin=entry.kin, task=entry.task, pauses_s=entry.pauses_s)


def read_recorded(name: str | Path) -> list[Recorded]:
    """Sessions of a trace (a path, or a shipped one's bare name) or of a session log. Raises TraceError."""
    path = find_trace(str(name))
    sessions: list[Recorded] = []
    number = read_bytes = 0
    try:
        with cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
            first = file.readline(MAX_LINE_BYTES + 1)
            if session_log.is_log(first):
                return [_logged(entry) for entry in session_log.read_lines(file, path)]
            line = first
            while line:
                number += 1
                read_bytes += len(line)
                if len(line) > MAX_LINE_BYTES or read_bytes > MAX_FILE_BYTES:
                    raise TraceError(
                        f"{path}:{number}: too large (a line {MAX_LINE_BYTES:,}, all {MAX_FILE_BYTES:,} bytes)"
                    )
                if line.strip():
                    sessions.append(_recorded(_decode(line)))
                line = file.readline(MAX_LINE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: broken gzip after line {number} ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if not sessions:
        raise TraceError(f"{path}: no session in it")
    return sessions


def read_all(names: Sequence[str | Path]) -> list[Recorded]:
    """The sessions of several files, one after the other."""
    return [session for name in names for session in read_recorded(name)]
