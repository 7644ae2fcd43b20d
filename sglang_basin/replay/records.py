"""What a run measured: a JSON line for the run, one as each session opens, and one as each call and session ends.

The file is complete by itself: `read_records` gives back everything a report needs, also of a run that was cut short.
All times are seconds; those ending in `_at_s` count from the start of the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

CallOutcome = Literal["ok", "rejected", "aborted", "dropped", "timeout", "error", "cancelled"]
"""ok; refused before a token (503, 429); aborted by the server; connection lost or stream cut; `--call-timeout`;
any other answer; the run ended first."""

SessionOutcome = Literal["finished", "rejected", "dropped", "failed", "unfinished"]

MAX_LINE_BYTES = 64 * 2**20


class RecordError(ValueError):
    """A records file that cannot be read; the message names the file and the line."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """The run's first line: what was offered and how."""

    trace: str
    seed: int
    process: str
    rate_per_s: float
    duration_s: float
    tail_s: float = 0.0
    surge: tuple[float, float, float] | None = None
    """(extra share of the base rate, from_s, to_s)"""
    endpoint: str = "generate"
    planned_sessions: int = 0
    started_at_unix_s: float = 0.0
    settings: dict[str, Any] = {}
    """How the command was given; for the reader, nothing is computed from it."""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, tag="call", tag_field="kind", omit_defaults=True):
    """One attempt at a call. The token counts `planned_*` are the plan's; the others are the server's usage."""

    uid: str
    call: int
    attempt: int = 0
    retried: bool = False
    """Another attempt followed: this line is not the call's last word."""
    due_at_s: float
    """When the session asked for it (the first attempt's start)."""
    sent_at_s: float
    first_token_at_s: float | None = None
    end_at_s: float
    planned_prompt_tokens: int
    planned_cached_tokens: int
    planned_output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    steps: list[tuple[int, float]] = []
    """Decode steps after the first token, one entry a received chunk: (tokens, seconds since the chunk before)."""
    outcome: CallOutcome
    status: int | None = None
    retry_after_s: float | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token as the session saw it, retries included."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self.due_at_s


class OpenedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="open", tag_field="kind", omit_defaults=True):
    """A session, written when it arrives."""

    uid: str
    trace_id: str
    arrival_at_s: float
    counted: bool = True
    calls_planned: int
    peak_tokens: int
    """The longest context the plan gives it."""
    unloaded_s: float | None = None
    """How long it takes on an idle server, tool waits included; None when that was not measured."""

    def ended(self, end_at_s: float, outcome: SessionOutcome, calls_done: int) -> SessionRecord:
        fields = msgspec.structs.asdict(self)
        return SessionRecord(**fields, end_at_s=end_at_s, outcome=outcome, calls_done=calls_done)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, tag="session", tag_field="kind", omit_defaults=True):
    """A session, written when it ends: `OpenedRecord`, and how it went."""

    uid: str
    trace_id: str
    arrival_at_s: float
    end_at_s: float
    outcome: SessionOutcome
    counted: bool = True
    calls_done: int
    calls_planned: int
    peak_tokens: int
    unloaded_s: float | None = None

    @property
    def total_s(self) -> float:
        return self.end_at_s - self.arrival_at_s


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """The run's last line. A file without it was cut short by force."""

    elapsed_s: float
    interrupted: bool = False


Record = RunRecord | OpenedRecord | CallRecord | SessionRecord | EndRecord


@dataclass
class RunResult:
    """Everything measured in one run, in memory."""

    run: RunRecord
    calls: list[CallRecord] = field(default_factory=list)
    sessions: list[SessionRecord] = field(default_factory=list)
    elapsed_s: float = 0.0
    interrupted: bool = False


class RecordWriter:
    """Keeps the records of a run and, with a path, appends each as a line at once. A context manager."""

    def __init__(self, run: RunRecord, path: Path | None = None) -> None:
        self.result = RunResult(run)
        self._file: TextIO | None = None
        self._encoder = msgspec.json.Encoder()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8", buffering=1)
        self._line(run)

    def _line(self, record: Record) -> None:
        if self._file is not None:
            self._file.write(self._encoder.encode(record).decode() + "\n")

    def opened(self, record: OpenedRecord) -> None:
        self._line(record)

    def call(self, record: CallRecord) -> None:
        self.result.calls.append(record)
        self._line(record)

    def session(self, record: SessionRecord) -> None:
        self.result.sessions.append(record)
        self._line(record)

    def end(self, elapsed_s: float, interrupted: bool) -> None:
        self.result.elapsed_s = elapsed_s
        self.result.interrupted = interrupted
        self._line(EndRecord(elapsed_s=elapsed_s, interrupted=interrupted))

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_records(path: Path) -> RunResult:
    """A run from its file. Raises RecordError.

    A run that was ended by force counts as interrupted: a last line that was cut in the middle is skipped, and the
    sessions that were open are unfinished.
    """
    decoder = msgspec.json.Decoder(Record)
    result: RunResult | None = None
    ended = False
    open_sessions: dict[str, OpenedRecord] = {}
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                try:
                    record = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                        break
                    raise RecordError(f"{path}:{number}: {error}") from None
                if isinstance(record, RunRecord):
                    if result is not None:
                        raise RecordError(f"{path}:{number}: a second run in one file")
                    result = RunResult(record)
                    continue
                if result is None:
                    raise RecordError(f"{path}:{number}: the first line must describe the run (kind: run)")
                match record:
                    case CallRecord():
                        result.calls.append(record)
                        result.elapsed_s = max(result.elapsed_s, record.end_at_s)
                    case OpenedRecord():
                        open_sessions[record.uid] = record
                        result.elapsed_s = max(result.elapsed_s, record.arrival_at_s)
                    case SessionRecord():
                        result.sessions.append(record)
                        open_sessions.pop(record.uid, None)
                    case EndRecord():
                        result.elapsed_s, result.interrupted, ended = record.elapsed_s, record.interrupted, True
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    if result is None:
        raise RecordError(f"{path}: empty, no run in it")
    if not ended:
        result.interrupted = True
        done = Counter(call.uid for call in result.calls if call.outcome == "ok")
        for uid, opened in open_sessions.items():
            result.sessions.append(opened.ended(result.elapsed_s, "unfinished", done[uid]))
    return result
