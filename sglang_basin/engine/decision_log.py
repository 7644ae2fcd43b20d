"""The decision log: one JSON line for each thing the door decided, in files of bounded size.

The first line of a file says what it is: {"basin_decision_log": 1}. A line's fields: `time` (Unix seconds), `call`
(the bootstrap room), `session` (the first 16 hex digits of the name's SHA-256: names may tell who a user is, and
whoever knows one finds its lines with `printf %s NAME | sha256sum`), `decision` (admit, queue, refuse), `reason`,
`waited_s`, `priority_ms`, `need_tokens` (what the session reserves or would), `free_tokens` of the budget, and the
budget, the reservations and the working set as they were then. `ahead` counts the sessions before a queued one.

Writing happens in a thread of its own. The scheduler only puts a line into a bounded queue: what does not fit, or what
the disk does not take, is counted and lost, and nothing else happens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglang_basin.config import ConfigError
from sglang_basin.engine.metrics import fault, metrics
from sglang_basin.log_thread import LogThread
from sglang_basin.policy.decisions import Admit, Decision, Queue, Refuse
from sglang_basin.policy.door import DoorState
from sglang_basin.rotation import RotatingFile

MAX_BYTES = 64 * 2**20
KEPT_FILES = 4
QUEUED_LINES = 10_000
"""A minute of a busy door, some 5 MB."""

HEADER = b'{"basin_decision_log":1}\n'
LINES_AT_ONCE = 100
KINDS: dict[type, str] = {Admit: "admit", Queue: "queue", Refuse: "refuse"}


class Line(msgspec.Struct, kw_only=True):
    """One decision. Fields as in the module's text; those that do not apply are null."""

    time: float
    call: str
    session: str | None
    decision: str
    reason: str
    waited_s: float
    priority_ms: int | None
    need_tokens: int | None
    free_tokens: int | None
    ahead: int | None
    budget_tokens: int
    reserved_tokens: int
    working_set_tokens: int


class DecisionLog:
    """One per door. `note` is the scheduler's; the rest belongs to the writing thread."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = MAX_BYTES,
        kept_files: int = KEPT_FILES,
        queued_lines: int = QUEUED_LINES,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError when the file cannot be opened."""
        self._file = RotatingFile(path, max_bytes=max_bytes, kept_files=kept_files, header=HEADER)
        self._wall_clock = wall_clock
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise ConfigError(f"--basin-decision-log {path}: {error.strerror}") from None
        self._thread: LogThread[Line] = LogThread(
            self._write,
            name="basin-decision-log",
            most_waiting=queued_lines,
            most_at_once=LINES_AT_ONCE,
            on_lost=_lost,
        )

    def note(
        self,
        decision: Decision,
        session_id: str | None,
        state: DoorState,
        *,
        priority_ms: int | None = None,
        need_tokens: int | None = None,
    ) -> None:
        """Log a decision; `need_tokens` is given for those that do not carry it. Never blocks, never raises."""
        is_queue = isinstance(decision, Queue)
        line = Line(
            time=round(self._wall_clock(), 3),
            call=decision.call_id,
            session=session_id,
            decision=KINDS[type(decision)],
            reason=decision.reason.value,
            waited_s=0.0 if is_queue else round(decision.waited_s, 3),
            priority_ms=priority_ms,
            need_tokens=decision.need_tokens if is_queue else need_tokens,
            free_tokens=decision.free_tokens if is_queue else state.budget_tokens - state.reserved_tokens,
            ahead=decision.ahead if is_queue else None,
            budget_tokens=state.budget_tokens,
            reserved_tokens=state.reserved_tokens,
            working_set_tokens=state.working_set_tokens,
        )
        self._thread.put(line)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for at most `timeout_s`, and stop."""
        self._thread.close(timeout_s)

    def _write(self, lines: Sequence[Line]) -> None:
        self._file.append(b"".join(_encode(line) for line in lines))


def _lost(count: int, cause: str) -> None:
    metrics().log_dropped.labels(cause).inc(count)
    if cause == "disk":
        fault("decision_log", "could not write to the decision log; admission goes on without those lines")


def hashed(session_id: str) -> str:
    """How a session is named in the log."""
    return hashlib.sha256(session_id.encode(errors="surrogatepass")).hexdigest()[:16]


def _encode(line: Line) -> bytes:
    if line.session is not None:
        line.session = hashed(line.session)
    return msgspec.json.encode(line) + b"\n"
