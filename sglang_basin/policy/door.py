"""The door: sessions enter while their reservations fit the budget, in arrival order, and run to completion.

Rules (DESIGN, section 2), each held by a test in `tests/policy`:

1. A call of a session that has entered passes at once, whatever the working set.
2. A new session enters when nobody waits before it and its reservation fits the rest of the budget.
3. With no session live the head enters even over budget.
4. Otherwise the session waits; nobody passes an earlier one.
5. A held call is refused after `hold_limit_s`; its session leaves the queue with its last call.
6. A session ends explicitly, with a call announced as its last one, or by `idle_timeout_s` without activity while no
   call is held or prefilling. Its reservation is given back at that moment.

All times are seconds of one clock that never runs backwards; a jump backwards is taken as no time passing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from sglang_basin.policy.decisions import Admit, Decision, Outcome, Queue, Reason, Refuse
from sglang_basin.policy.reservation import ReservationLaw
from sglang_basin.policy.sessions import Call, Session, Stage

RETRY_AFTER_S = 30.0
"""What a refused client is told to wait: under the 60 s above which SDKs ignore the advice."""


@dataclass(frozen=True, slots=True)
class DoorState:
    """A snapshot for metrics and reports."""

    live_sessions: int
    queued_sessions: int
    held_calls: int
    working_set_tokens: int
    reserved_tokens: int
    budget_tokens: int


class Door:
    """Admission of sessions against a token budget. One per prefill instance; not thread-safe.

    `enabled=False` lets every call pass but keeps the table, so that the working set can still be watched.
    """

    def __init__(
        self,
        *,
        law: ReservationLaw,
        budget_tokens: int,
        idle_timeout_s: float,
        hold_limit_s: float,
        max_sessions: int,
        enabled: bool = True,
    ) -> None:
        if budget_tokens < 1:
            raise ValueError(f"budget_tokens: must be at least 1, got {budget_tokens}")
        self.law = law
        self.budget_tokens = budget_tokens
        self.idle_timeout_s = idle_timeout_s
        self.hold_limit_s = hold_limit_s
        self.max_sessions = max_sessions
        self.enabled = enabled
        self._live: OrderedDict[str, Session] = OrderedDict()  # least recently active first
        self._queue: OrderedDict[str, Session] = OrderedDict()  # first come first
        self._calls: dict[str, Call] = {}
        self._held: deque[Call] = deque()  # by arrival; entries may be stale
        self._reserved_tokens = 0
        self._working_set_tokens = 0
        self._held_count = 0
        self._tickets = 0
        self._now_s = float("-inf")
        self._ended: list[str] = []

    # What happens to calls and sessions.

    def call(
        self,
        call_id: str,
        session_id: str | None,
        prompt_tokens: int,
        now_s: float,
        *,
        ends_session: bool = False,
        here: bool = True,
    ) -> Decision:
        """A call arrived: its prefill leg (`here`), or a decode instance asks about it.

        Asking again about a known call gives its present state. `call_id` is unique among unfinished calls, the same
        for both legs; `prompt_tokens` counts the whole prompt, cached or not.
        """
        now_s = self._advance(now_s)
        known = self._calls.get(call_id)
        if known is not None:
            if here and not known.here:
                known.here = True
                if known.stage is Stage.DECODING:
                    known.stage = Stage.PREFILLING
            return self._present(known, now_s)
        if session_id is None:
            return Admit(call_id, Reason.NO_IDENTITY)

        session = self._live.get(session_id) or self._queue.get(session_id)
        if session is None:
            session = Session(session_id, now_s, prompt_tokens, now_s)
        else:
            self._observe(session, prompt_tokens)
        call = Call(call_id, session_id, prompt_tokens, now_s, Stage.HELD, ends_session, here)
        call.stage = call.admitted_stage
        session.calls[call_id] = call
        self._calls[call_id] = call

        if session.live:
            self._touch(session, now_s)
            return Admit(call_id, Reason.LIVE_SESSION)
        if session_id not in self._queue:
            self._forget_over_bound()
            reason = self._may_enter(session)
            if reason in (Reason.FITS, Reason.NOBODY_LIVE, Reason.ADMISSION_OFF):
                self._enter(session, now_s)
                return Admit(call_id, reason)
            self._tickets += 1
            session.ticket = self._tickets
            self._queue[session_id] = session
        call.stage = Stage.HELD
        self._held.append(call)
        self._held_count += 1
        return self._present(call, now_s)

    def present(self, call_id: str, now_s: float) -> Decision | None:
        """Where a known call stands; None for one that is over or was never brought here."""
        call = self._calls.get(call_id)
        return None if call is None else self._present(call, self._advance(now_s))

    def prefilled(self, call_id: str, now_s: float) -> None:
        """This instance is done with the call and has handed it to a decode instance."""
        now_s = self._advance(now_s)
        call = self._calls.get(call_id)
        if call is None or call.stage is not Stage.PREFILLING:
            return
        call.stage = Stage.DECODING
        self._touch(self._live[call.session_id], now_s)

    def decoding(self, call_id: str, now_s: float) -> None:
        """A decode instance says that the call is still running there."""
        now_s = self._advance(now_s)
        call = self._calls.get(call_id)
        if call is not None and (session := self._live.get(call.session_id)) is not None:
            self._touch(session, now_s)

    def finish(self, call_id: str, output_tokens: int, now_s: float) -> None:
        """The call is over (finished, aborted or failed) after `output_tokens` tokens of output."""
        now_s = self._advance(now_s)
        call = self._drop(call_id)
        if call is None:
            return
        session = self._live.get(call.session_id)
        if session is None:  # it was still held: its session leaves the queue with its last call
            queued = self._queue.get(call.session_id)
            if queued is not None and not queued.calls:
                del self._queue[call.session_id]
            return
        grown = call.prompt_tokens + max(0, output_tokens)
        self._set_context(session, max(session.context_tokens, grown) if session.calls else grown)
        self._touch(session, now_s)
        if call.ends_session and not session.calls:
            self._end(session)

    def abandon(self, call_id: str, now_s: float) -> None:
        """The call is gone without having told us anything new about its session's context."""
        call = self._calls.get(call_id)
        if call is not None:
            session = self._live.get(call.session_id)
            known_output = max(0, session.context_tokens - call.prompt_tokens) if session is not None else 0
            self.finish(call_id, known_output, now_s)

    def end(self, session_id: str, now_s: float) -> list[Refuse]:
        """The client ended the session. Calls of it that still wait are refused; running ones go on, uncounted."""
        now_s = self._advance(now_s)
        session = self._live.get(session_id)
        if session is not None:
            self._end(session)
            return []
        session = self._queue.pop(session_id, None)
        if session is None:
            return []
        return [self._refuse(call, Reason.SESSION_ENDED, now_s) for call in list(session.calls.values())]

    def poll(self, now_s: float) -> list[Outcome]:
        """Whose wait ends now: calls to let go on, calls to refuse. Call it after every change and once a second."""
        now_s = self._advance(now_s)
        self._expire_idle(now_s)
        outcomes: list[Outcome] = self._refuse_overdue(now_s)
        while self._queue:
            head = next(iter(self._queue.values()))
            reason = self._fit(head)
            if reason is Reason.NO_HEADROOM:
                break
            del self._queue[head.session_id]
            self._enter(head, now_s)
            for call in head.calls.values():
                call.stage = call.admitted_stage
                self._held_count -= 1
                outcomes.append(Admit(call.call_id, reason, now_s - call.arrived_s))
        return outcomes

    def take_ended(self) -> list[str]:
        """Ids of sessions that ended since the last time, for those who remember them elsewhere."""
        ended, self._ended = self._ended, []
        return ended

    # What others look at.

    @property
    def holds_any(self) -> bool:
        return self._held_count > 0

    def state(self) -> DoorState:
        return DoorState(
            live_sessions=len(self._live),
            queued_sessions=len(self._queue),
            held_calls=self._held_count,
            working_set_tokens=self._working_set_tokens,
            reserved_tokens=self._reserved_tokens,
            budget_tokens=self.budget_tokens,
        )

    def live_session(self, session_id: str) -> Session | None:
        return self._live.get(session_id)

    # The rules.

    def _may_enter(self, session: Session) -> Reason:
        if not self.enabled:
            return Reason.ADMISSION_OFF
        if self._queue:
            return Reason.BEHIND_QUEUE
        return self._fit(session)

    def _fit(self, session: Session) -> Reason:
        if not self._live:
            return Reason.NOBODY_LIVE
        fits = self.law.tokens(session) <= self.budget_tokens - self._reserved_tokens
        return Reason.FITS if fits else Reason.NO_HEADROOM

    def _present(self, call: Call, now_s: float) -> Decision:
        if call.stage is not Stage.HELD:
            return Admit(call.call_id, Reason.LIVE_SESSION, now_s - call.arrived_s)
        session = self._queue[call.session_id]
        ahead = session.ticket - next(iter(self._queue.values())).ticket
        return Queue(
            call.call_id,
            Reason.BEHIND_QUEUE if ahead else Reason.NO_HEADROOM,
            need_tokens=self.law.tokens(session),
            free_tokens=self.budget_tokens - self._reserved_tokens,
            ahead=ahead,
        )

    def _enter(self, session: Session, now_s: float) -> None:
        session.live = True
        self._live[session.session_id] = session
        self._working_set_tokens += session.context_tokens
        session.reserved_tokens = self.law.tokens(session)
        self._reserved_tokens += session.reserved_tokens
        self._touch(session, now_s)

    def _observe(self, session: Session, prompt_tokens: int) -> None:
        before = session.context_tokens
        session.observe_prompt(prompt_tokens)
        after, session.context_tokens = session.context_tokens, before
        self._set_context(session, after)

    def _set_context(self, session: Session, context_tokens: int) -> None:
        """Change a session's context and, once it has entered, what it reserves: it may outgrow, never deadlock."""
        if not session.live:
            session.context_tokens = context_tokens
            return
        self._working_set_tokens += context_tokens - session.context_tokens
        session.context_tokens = context_tokens
        reserved = self.law.tokens(session)
        self._reserved_tokens += reserved - session.reserved_tokens
        session.reserved_tokens = reserved

    def _end(self, session: Session) -> None:
        del self._live[session.session_id]
        session.live = False
        self._working_set_tokens -= session.context_tokens
        self._reserved_tokens -= session.reserved_tokens
        for call_id in session.calls:
            del self._calls[call_id]
        session.calls.clear()
        self._ended.append(session.session_id)

    def _drop(self, call_id: str) -> Call | None:
        call = self._calls.pop(call_id, None)
        if call is None:
            return None
        if call.stage is Stage.HELD:
            self._held_count -= 1
        session = self._live.get(call.session_id) or self._queue.get(call.session_id)
        if session is not None:
            session.calls.pop(call_id, None)
        return call

    def _refuse(self, call: Call, reason: Reason, now_s: float) -> Refuse:
        self._drop(call.call_id)
        return Refuse(call.call_id, reason, now_s - call.arrived_s, RETRY_AFTER_S)

    def _refuse_overdue(self, now_s: float) -> list[Outcome]:
        refused: list[Outcome] = []
        while self._held:
            call = self._held[0]
            if self._calls.get(call.call_id) is call and call.stage is Stage.HELD:
                if now_s - call.arrived_s < self.hold_limit_s:
                    break
                session = self._queue[call.session_id]
                refused.append(self._refuse(call, Reason.HELD_TOO_LONG, now_s))
                if not session.calls:
                    del self._queue[call.session_id]
            self._held.popleft()
        return refused

    def _expire_idle(self, now_s: float) -> None:
        while self._live:
            oldest = next(iter(self._live.values()))
            if now_s - oldest.last_active_s < self.idle_timeout_s:
                return
            if oldest.busy():
                self._touch(oldest, now_s)
            else:
                self._end(oldest)

    def _forget_over_bound(self) -> None:
        """Keep the table bounded: forget the longest idle sessions, whose return would make them new ones."""
        while len(self._live) + len(self._queue) >= self.max_sessions and self._live:
            self._end(next(iter(self._live.values())))

    def _touch(self, session: Session, now_s: float) -> None:
        session.last_active_s = now_s
        self._live.move_to_end(session.session_id)

    def _advance(self, now_s: float) -> float:
        self._now_s = max(self._now_s, now_s)
        return self._now_s
