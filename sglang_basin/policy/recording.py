"""A door's life as lines of JSON, and back: what it was told, in order, and what it answered.

The engine writes such a recording when asked to (`--basin-record`); `replay` tells a fresh door the same things and
compares its answers. That holds engine and simulator to the very same decisions, and turns a surprise in production
into a test case. Recordings hold session names as they came, token counts and times; no text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_basin.policy.budget import Budget
from sglang_basin.policy.decisions import Admit, Decision, Outcome, Queue, Refuse
from sglang_basin.policy.door import Door, DoorSettings, DoorState
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.reservation import ReservationLaw
from sglang_basin.policy.sessions import Session

MAX_BYTES = 256 * 2**20
"""A recording stops here: it is for looking at an hour, not for keeping."""


class RecordedDoor:
    """A door that writes down what happens to it. Takes the place of the door that it wraps, for the engine's gate."""

    def __init__(self, door: Door, write: Callable[[str], Any]) -> None:
        """`write` gets one line at a time, with its end of line."""
        self.door = door
        self._write = write
        self._bytes = 0
        self._ended: list[Session] = []

    @property
    def settings(self) -> DoorSettings:
        return self.door.settings

    @property
    def law(self) -> ReservationLaw:
        return self.door.law

    @property
    def budget(self) -> Budget:
        return self.door.budget

    @property
    def holds_any(self) -> bool:
        return self.door.holds_any

    def call(
        self,
        call_id: str,
        session_id: str | None,
        prompt_tokens: int,
        now_s: float,
        *,
        ends_session: bool = False,
        parent_id: str | None = None,
        prompt_id: int | None = None,
    ) -> Decision:
        answer = self.door.call(
            call_id,
            session_id,
            prompt_tokens,
            now_s,
            ends_session=ends_session,
            parent_id=parent_id,
            prompt_id=prompt_id,
        )
        self._note("call", (call_id, session_id, prompt_tokens, now_s, ends_session, parent_id, prompt_id), answer)
        return answer

    def prefilled(self, call_id: str, now_s: float, *, cached_tokens: int | None = None) -> None:
        self.door.prefilled(call_id, now_s, cached_tokens=cached_tokens)
        self._note("prefilled", (call_id, now_s, cached_tokens), None)

    def decoding(self, call_id: str, now_s: float) -> None:
        self.door.decoding(call_id, now_s)
        self._note("decoding", (call_id, now_s), None)

    def finish(self, call_id: str, output_tokens: int, now_s: float, *, final: bool = False) -> None:
        self.door.finish(call_id, output_tokens, now_s, final=final)
        self._note("finish", (call_id, output_tokens, now_s, final), None)

    def abandon(self, call_id: str, now_s: float) -> None:
        self.door.abandon(call_id, now_s)
        self._note("abandon", (call_id, now_s), None)

    def end(self, session_id: str, now_s: float) -> list[Refuse]:
        answer = self.door.end(session_id, now_s)
        self._note("end", (session_id, now_s), answer)
        return answer

    def observe(self, view: EngineView, now_s: float) -> None:
        self.door.observe(view, now_s)
        self._note("observe", (tuple(view), now_s), None)

    def poll(self, now_s: float) -> list[Outcome]:
        outcomes = self.door.poll(now_s)
        ended = self.door.take_ended()
        self._ended += ended
        self._note("poll", (now_s,), (outcomes, _names(ended)))
        return outcomes

    def take_ended(self) -> list[Session]:
        """What ended up to the last poll: part of that poll's line."""
        ended, self._ended = self._ended, []
        return ended

    def take_sent_back(self) -> list[str]:
        return self.door.take_sent_back()

    def state(self) -> DoorState:
        return self.door.state()

    def runs(self, session_id: str) -> bool:
        return self.door.runs(session_id)

    def session_of(self, call_id: str) -> str | None:
        return self.door.session_of(call_id)

    def order(self, session_id: str, call_arrived_s: float) -> float:
        return self.door.order(session_id, call_arrived_s)

    def sessions(self) -> Iterator[Session]:
        return self.door.sessions()

    def live_session(self, session_id: str) -> Session | None:
        return self.door.live_session(session_id)

    def _note(self, what: str, told: tuple[Any, ...], answer: Any) -> None:
        if self._bytes < MAX_BYTES:
            line = json.dumps([what, list(told), _plain(answer)], separators=(",", ":")) + "\n"
            self._bytes += len(line)
            self._write(line)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replayed door answered otherwise than the recorded one."""

    line: int
    told: str
    recorded: Any
    replayed: Any


def replay(lines: Iterable[str], door: Door) -> Iterator[Difference]:
    """Tell `door`, fresh and of the recorded settings, what the recording says; yield every answer that differs.

    Raises ValueError, with the line's number, for a line that is not of a recording.
    """
    for number, line in enumerate(lines, start=1):
        try:
            what, told, recorded = json.loads(line)
            answer = _tell(door, what, told)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number}: not of a door's recording ({error})") from None
        replayed = json.loads(json.dumps(_plain(answer)))
        if replayed != recorded:
            yield Difference(number, line.strip(), recorded, replayed)


def _tell(door: Door, what: str, told: list[Any]) -> Any:
    if what == "call":
        call_id, session_id, prompt_tokens, now_s, ends_session, *since = told  # older recordings say less
        parent_id, prompt_id = (*since, None, None)[:2]
        return door.call(
            call_id,
            session_id,
            prompt_tokens,
            now_s,
            ends_session=ends_session,
            parent_id=parent_id,
            prompt_id=prompt_id,
        )
    if what == "prefilled":
        call_id, now_s, *found = told  # older recordings do not say what was found cached
        door.prefilled(call_id, now_s, cached_tokens=found[0] if found else None)
        return None
    if what == "observe":
        door.observe(EngineView(*told[0]), told[1])
        return None
    if what == "finish":
        call_id, output_tokens, now_s, final = told
        door.finish(call_id, output_tokens, now_s, final=final)
        return None
    if what == "poll":
        return door.poll(*told), _names(door.take_ended())
    known: dict[str, Callable[..., Any]] = {
        "decoding": door.decoding,
        "abandon": door.abandon,
        "end": door.end,
    }
    return known[what](*told)


def _names(sessions: list[Session]) -> list[str]:
    return [session.session_id for session in sessions]


def _plain(answer: Any) -> Any:
    """An answer as JSON: decisions become their kind and fields, reasons their names."""
    if isinstance(answer, Admit | Queue | Refuse):
        return [type(answer).__name__, *(getattr(value, "value", value) for value in answer)]
    if isinstance(answer, list | tuple):
        return [_plain(part) for part in answer]
    return answer
