"""The door: sessions enter while their reservations fit the budget, by fixed priority, and run to completion.

Rules (DESIGN, section 2), each held by a test in `tests/policy`:

1. A call of a live session passes at once, whatever the working set. So does the first call of a session that a live
   one has started and waits for: at the door it would wait for room that its parent holds. While it is active its
   parent is not idle.
2. Below the budget admission is off and every session enters, the one that crosses it included. From there on it is
   armed, until nobody waits and the reservations are well below the budget again.
3. Armed, a new session enters when nobody waits who goes before it and its reservation fits the rest of the budget.
4. With no session live the head enters even over budget.
5. Otherwise the session waits. The queue is sorted by the fixed priority; nobody passes a head that does not fit.
   Inside, calls are served by the same formula with their session's latest prediction (`order`).
6. A held call is refused after `hold_limit_s`. Its session keeps its place for `ticket_grace_s` after its last call
   left; while it is away others may enter before it.
7. A session ends explicitly; with a call announced as its last one; `final_grace_s` after a final answer that no call
   followed; or when idle for longer than this deployment's tools run (`policy.idle`) while no call is held or
   prefilling. Its reservation is given back at that moment; a call after that begins a new session.
8. A session that outgrows its reservation reserves more. When the contexts of the live sessions together come near
   the budget's reference all the same, sessions are paused, the shortest first: the next call of such a session waits
   until it fits again (`policy.pausing`). A call under way is never stopped.
9. What live sessions share counts once: each reserves without the shared front that its first call found cached, and
   the longest of these fronts is added once (`policy.sharing`; a first call that has not run yet is expected to find
   what recent ones found). Of sessions that began with the same prompt each but the first live one reserves without
   all that it found of it. The working set that is shown stays the plain sum of contexts, as a client would add it
   up; `distinct_tokens` is what a cache needs for it. Nothing is credited when the engine does not say what was cached.
10. Shedding drops the waiting session of the highest priority value, and only under `shedding`'s rule.

All times are seconds of one clock that never runs backwards; a jump backwards is taken as no time passing.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sglang_basin.policy.budget import Budget
from sglang_basin.policy.decisions import Admit, Decision, Outcome, Queue, Reason, Refuse
from sglang_basin.policy.idle import IdleTimeout, MeanPause
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.pausing import PausedSessions, PauseSettings, victims
from sglang_basin.policy.prediction import PeakPredictor
from sglang_basin.policy.priority import ArrivalOrder
from sglang_basin.policy.reservation import ReservationLaw
from sglang_basin.policy.sessions import DECODING, HELD, NO_CALLS, PREFILLING, Call, Session
from sglang_basin.policy.sharing import FirstPrompts, SharedFront
from sglang_basin.policy.shedding import Rates, SheddingSettings

RETRY_AFTER_S = 30.0
"""What a refused client is told to wait at most: under the 60 s above which SDKs ignore the advice."""

DISARM_SHARE = 0.9
"""Admission arms once the reservations are over the budget and disarms below this share of it, with nobody waiting."""


MAX_GENERATIONS = 8
"""How far up activity is passed on; clients name parents as they like, in circles even."""


class Order(Protocol):
    """Gives a session its fixed priority."""

    def priority(self, arrived_s: float, peak_tokens: float) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Times in seconds."""

    idle_timeout_s: float
    """The longest that a session may be idle."""
    idle_floor_s: float | None = None
    """The shortest, once the tool times seen allow a shorter time-out; None keeps to `idle_timeout_s`."""
    final_grace_s: float | None = None
    """How long after a final answer a session still counts; None waits for the idle time-out."""
    hold_limit_s: float
    ticket_grace_s: float = 0.0
    """How long a waiting session keeps its place without a call."""
    max_sessions: int = 100_000
    """Sessions that may be live at once, above which the longest idle one is forgotten; and that may wait at most."""
    max_queued: int | None = None
    """Sessions that may wait at once, if fewer; above it new ones are turned away at once."""
    peak_share: float = 0.5
    """The quantile of the predicted peak that the priority is made of."""
    updates_order: bool = True
    """Inside, calls go by their session's latest prediction; False: by its fixed priority, the article's order. First
    predictions are poor and get better with every call, and a session that outgrows its prediction makes way."""
    shared_once: bool = True
    """What sessions share counts once in the budget, not once a session."""
    enabled: bool = True
    """False lets every call pass but keeps the table, so that the working set can still be watched."""

    @property
    def retry_after_s(self) -> float:
        """What a refused client is told to wait: who does as told must find its place still there."""
        return min(RETRY_AFTER_S, self.ticket_grace_s / 2) if self.ticket_grace_s > 0 else RETRY_AFTER_S


@dataclass(frozen=True, slots=True)
class DoorState:
    """A snapshot for metrics and reports."""

    live_sessions: int
    queued_sessions: int
    """Sessions that have not entered yet."""
    paused_sessions: int
    """Sessions that had entered and went back to the door, those of them that run a tool included."""
    held_calls: int
    working_set_tokens: int
    """Contexts of the live sessions, added up."""
    distinct_tokens: int
    """The same with what they share counted once: what a cache must hold."""
    reserved_tokens: int
    budget_tokens: int
    reference_tokens: int
    armed: bool
    tickets: int
    """Waiting sessions without a call: their client left, and they keep their place for a while."""
    head_wait_s: float
    """How long the first in the queue has waited; 0 while nobody waits."""
    high_hit_rate: float
    """The hit rate of this deployment while all is well, as the budget has learned it."""


class Door:
    """Admission of sessions against a token budget. One per prefill instance; not thread-safe."""

    name = "basin"

    __slots__ = (  # beyond 30 attributes an object's own table is slow: a decision takes a tenth longer
        *("settings", "law", "budget", "_by", "_predictor", "_max_waiting", "_shedding", "_rates", "_pausing"),
        *("_live", "_waiting", "_queue", "_away", "_answered", "_turned_away", "_calls", "_held", "_paused"),
        *("_idle", "_pauses", "_front", "_fronts", "_prompts"),
        *("_reserved_tokens", "_reserved_variance", "_working_set_tokens", "_once_tokens", "_credited_tokens"),
        *("_leaving_tokens", "_held_count", "_tickets", "_armed", "_rescued", "_sent_back", "_ended"),
        *("_next_look_s", "_next_shed_s", "_active_since_s", "_away_since_s", "_now_s"),
    )

    def __init__(
        self,
        settings: DoorSettings,
        *,
        law: ReservationLaw,
        budget: Budget,
        order: Order | None = None,
        predictor: PeakPredictor | None = None,
        shedding: SheddingSettings | None = None,
        pausing: PauseSettings | None = None,
    ) -> None:
        """Without `pausing` every session that has entered runs to completion."""
        self.settings = settings
        self.law = law
        self.budget = budget
        self._by = order or ArrivalOrder()
        self._predictor = predictor
        self._max_waiting = settings.max_sessions if settings.max_queued is None else settings.max_queued
        self._shedding = shedding if shedding is not None and shedding.enabled else None
        self._rates = Rates(shedding or SheddingSettings())
        self._live: OrderedDict[str, Session] = OrderedDict()  # least recently active first
        self._waiting: dict[str, Session] = {}
        self._queue: list[tuple[float, int, str]] = []  # of those with a call, sorted: (priority, ticket, id)
        self._away: OrderedDict[str, float] = OrderedDict()  # waiting sessions without a call -> since when
        self._answered: OrderedDict[str, float] = OrderedDict()  # live sessions after their final answer -> since when
        self._idle = IdleTimeout(settings.idle_timeout_s, settings.idle_floor_s)
        self._pauses = MeanPause()
        self._turned_away: OrderedDict[str, float] = OrderedDict()  # sessions that left the queue unserved -> when
        self._calls: dict[str, Call] = {}
        self._held: deque[Call] = deque()  # by arrival; entries may be stale
        self._reserved_tokens = 0.0
        self._reserved_variance = 0.0
        self._working_set_tokens = 0
        self._front = SharedFront()
        self._fronts: list[int] = []  # what live sessions are credited with of it, ascending
        self._once_tokens = 0  # the longest of these, which counts once: the others are parts of it
        self._prompts = FirstPrompts()
        self._credited_tokens = 0  # all that live sessions are credited with
        self._held_count = 0
        self._tickets = 0
        self._armed = False
        self._pausing = pausing
        self._paused = PausedSessions()
        self._leaving_tokens = 0  # contexts of the live sessions that are to be paused
        self._rescued: Call | None = None  # the last call that went on over the budget
        self._sent_back: list[str] = []
        self._next_look_s = float("-inf")
        self._next_shed_s = float("-inf")
        self._active_since_s = self._away_since_s = float("-inf")  # no live session was last active before, none left
        self._now_s = float("-inf")
        self._ended: list[Session] = []

    # What happens to calls and sessions.

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
        """A call arrived. `call_id` is unique among unfinished calls, the same for both legs; a known one gets its
        present state. `prompt_tokens` counts the whole prompt, cached or not. `parent_id` names the session that
        started this one. `prompt_id`, equal for equal prompts, matters with a session's first call.
        """
        if now_s > self._now_s:
            self._now_s = now_s
        now_s = self._now_s
        known = self._calls.get(call_id)
        if known is not None:
            return self._present(known, now_s)
        if session_id is None:
            return Admit(call_id, Reason.NO_IDENTITY)

        session = self._live.get(session_id) or self._waiting.get(session_id) or self._paused.get(session_id)
        call = Call(call_id, session_id, prompt_tokens, now_s, PREFILLING, ends_session)
        if session is None:
            session = Session(session_id, now_s, prompt_tokens, now_s, parent_id, prompt_id)
            return self._first_call(session, call, now_s)

        session.calls_seen += 1
        session.pause_s = 0.0
        if (session.live or session.paused) and not session.calls:  # it ran a tool
            session.pause_s = now_s - session.last_active_s
            self._pauses.note(session.pause_s)
            self._idle.resumed(session.pause_s)
        self._set_context(session, session.context_with(prompt_tokens))
        self._keep(session, call)
        if session.live:
            self._answered.pop(session_id, None)
            self._touch(session, now_s)
            return Admit(call_id, Reason.LIVE_SESSION)
        if session.paused:
            if not self._paused.waiting and self._fits_again(session):
                self._resume(session, now_s)
                return Admit(call_id, Reason.FITS)
            self._paused.wait(session, now_s)
        elif self._away.pop(session_id, None) is not None:
            self._line_up(session)
        self._hold(call)
        return self._present(call, now_s)

    def _first_call(self, session: Session, call: Call, now_s: float) -> Decision:
        """A session that is not known yet enters with this call, lines up, or finds the queue full."""
        session.first_tokens = call.prompt_tokens
        session.calls_seen = 1
        self._set_context(session, call.prompt_tokens)
        session.priority = self._by.priority(now_s, session.predicted_peak(self.settings.peak_share))
        if self._turned_away.pop(session.session_id, None) is None:
            self._rates.arrived(now_s)  # a client that comes again is no new demand
        self._forget_over_bound()
        self._idle.returned(session.session_id, now_s)

        reason = self._may_enter(session)
        if reason is not None:
            self._keep(session, call)
            self._enter(session, now_s)
            return Admit(call.call_id, reason)
        if len(self._waiting) >= self._max_waiting:
            self._remember_turned_away(session.session_id, now_s)
            return Refuse(call.call_id, Reason.QUEUE_FULL, 0.0, self.settings.retry_after_s)
        self._tickets += 1
        session.ticket = self._tickets
        self._waiting[session.session_id] = session
        self._keep(session, call)
        self._hold(call)
        return self._queued(session, call, self._line_up(session))

    def prefilled(self, call_id: str, now_s: float, *, cached_tokens: int | None = None) -> None:
        """This instance is done with the call and has handed it to a decode instance.

        `cached_tokens` of its prompt were found cached, in whatever tier; None if the engine cannot say.
        """
        if now_s > self._now_s:
            self._now_s = now_s
        now_s = self._now_s
        call = self._calls.get(call_id)
        if call is None or call.stage is not PREFILLING:
            return
        call.stage = DECODING
        session = self._live[call.session_id]
        if cached_tokens is not None and session.found_tokens is None:
            session.found_tokens = min(max(0, cached_tokens), call.prompt_tokens)
            if not session.repeats:
                self._front.learn(session.found_tokens)
            self._reserve(session)
        self._touch(session, now_s)

    def decoding(self, call_id: str, now_s: float) -> None:
        """A decode instance says that the call is still running there."""
        now_s = self._advance(now_s)
        call = self._calls.get(call_id)
        if call is not None and (session := self._live.get(call.session_id)) is not None:
            self._touch(session, now_s)

    def finish(self, call_id: str, output_tokens: int, now_s: float, *, final: bool = False) -> None:
        """The call is over (finished, aborted or failed) after `output_tokens` tokens of output; `final` if it answered
        without asking for a tool, as an agent does that is done."""
        if now_s > self._now_s:
            self._now_s = now_s
        now_s = self._now_s
        call = self._drop(call_id, now_s)
        session = self._live.get(call.session_id) if call is not None else None
        if call is None or session is None:
            return
        grown = call.prompt_tokens + max(0, output_tokens)
        self._set_context(session, max(session.context_tokens, grown) if session.calls else grown)
        self._touch(session, now_s)
        if session.calls:
            return
        if call.ends_session:
            self._end(session, completed=True)
        elif session.leaving:
            self._pause(session, now_s)
        elif final and self.settings.final_grace_s is not None:
            self._answered[session.session_id] = now_s

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
        session = self._known(session_id)
        if session is None:
            return []
        if session.live:
            self._end(session, completed=True)
            return []
        if session.paused:
            refused = [self._refuse(call, Reason.SESSION_ENDED, now_s) for call in list(session.calls.values())]
            self._end(session, completed=True)
            return refused
        return self._turn_away(session, Reason.SESSION_ENDED, now_s)

    def observe(self, view: EngineView, now_s: float) -> None:
        """The engine's present state, about once a second: the budget follows it."""
        self._advance(now_s)
        self.budget.observe(view, queued=bool(self._queue), reserved_tokens=self._need(), pause_s=self._pauses.mean_s)

    def poll(self, now_s: float) -> list[Outcome]:
        """Whose wait ends now: calls to let go on, calls to refuse. Call it after every change and once a second."""
        if now_s > self._now_s:
            self._now_s = now_s
        now_s = self._now_s
        if now_s - self._active_since_s >= self._idle.timeout_s:
            self._expire_idle(now_s)
        if self._paused.resting:
            self._expire_resting(now_s)
        if self._answered:
            self._expire_answered(now_s)
        if now_s - self._away_since_s >= self.settings.ticket_grace_s:
            self._expire_away(now_s)
        outcomes: list[Outcome] = []
        if self._held:
            outcomes += self._refuse_overdue(now_s)
        shedding, head = self._shedding, self._head()
        if shedding is not None and head is not None and now_s - head.arrived_s >= shedding.head_wait_s:
            outcomes += self._shed(head, now_s)
        if self._pausing is not None and (now_s >= self._next_look_s or not self._live):
            self._next_look_s = now_s + self._pausing.every_s
            if self._paused.waiting:
                outcomes += self._resume_those_that_fit(self._pausing, now_s)
            self._pause_those_that_do_not(self._pausing, now_s)
        while (head := self._head()) is not None:
            reason = self._fit(head)
            if reason is None:
                break
            self._leave_queue(head)
            self._enter(head, now_s)
            outcomes += self._let_on(head, reason, now_s)
        return outcomes

    def take_ended(self) -> list[Session]:
        """Sessions that ended since the last time, for those who remember them elsewhere or judge the predictions."""
        ended, self._ended = self._ended, []
        return ended

    def take_sent_back(self) -> list[str]:
        """Names of the sessions that were paused, or will be when their calls are over, since the last time: whoever
        remembers that they have entered must ask about their next calls."""
        names, self._sent_back = self._sent_back, []
        return names

    # What others look at.

    @property
    def holds_any(self) -> bool:
        return self._held_count > 0

    def wake_s(self, now_s: float) -> float | None:
        """When the next wait or idle time-out runs out, if nothing happens before."""
        times = []
        if self._held:
            times.append(self._held[0].arrived_s + self.settings.hold_limit_s)
        if self._away:
            times.append(next(iter(self._away.values())) + self.settings.ticket_grace_s)
        if self._queue and self._live:
            times.append(next(iter(self._live.values())).last_active_s + self._idle.timeout_s)
        if self._queue and self._answered and self.settings.final_grace_s is not None:
            times.append(next(iter(self._answered.values())) + self.settings.final_grace_s)
        return max(now_s, min(times)) if times else None

    def order(self, session_id: str, call_arrived_s: float) -> float:
        """The key of a call in prefill's and decode's queues, lowest first; to be asked anew for each call.

        A call without a session counts as a session of its own. No call waits for ever: the key of a waiting one is
        fixed, and sessions that arrive later than it go behind it.
        """
        session = self._known(session_id)
        if session is None:
            return call_arrived_s
        if not (session.live and self.settings.updates_order):
            return session.priority
        return self._by.priority(session.arrived_s, session.predicted_peak(self.settings.peak_share))

    def keep_until_s(self, session_id: str, now_s: float) -> float | None:
        """Basin pins nothing: admission keeps the working set within what LRU can hold."""
        return None

    def state(self) -> DoorState:
        head = self._head()
        return DoorState(
            live_sessions=len(self._live),
            queued_sessions=len(self._waiting),
            paused_sessions=len(self._paused),
            held_calls=self._held_count,
            working_set_tokens=self._working_set_tokens,
            distinct_tokens=self._working_set_tokens - self._credited_tokens + self._once_tokens,
            reserved_tokens=round(self._need()),
            budget_tokens=self.budget.tokens,
            reference_tokens=self.budget.reference_tokens,
            armed=self._armed,
            tickets=len(self._away),
            head_wait_s=0.0 if head is None else self._now_s - head.arrived_s,
            high_hit_rate=self.budget.high_hit_rate,
        )

    def sessions(self) -> Iterator[Session]:
        """All that are known, in no useful order. The door must not change meanwhile."""
        yield from self._live.values()
        yield from self._waiting.values()
        yield from self._paused

    def runs(self, session_id: str) -> bool:
        """Whether a call of the session is held or under way."""
        session = self._known(session_id)
        return session is not None and bool(session.calls)

    def session_of(self, call_id: str) -> str | None:
        """The session of a call that is held or runs; None for one that is over or was never brought here."""
        call = self._calls.get(call_id)
        return None if call is None else call.session_id

    def live_session(self, session_id: str) -> Session | None:
        return self._live.get(session_id)

    def _known(self, session_id: str) -> Session | None:
        return self._live.get(session_id) or self._waiting.get(session_id) or self._paused.get(session_id)

    # The rules.

    def _need(self) -> float:
        """Σ mean + z · √(Σ variance) of the live sessions, in tokens; what they share counts once."""
        return self._reserved_tokens + self._once_tokens + self._spread(self._reserved_variance)

    def _need_with(self, session: Session) -> float:
        """The same with one more; never less."""
        credit, front = self._credit(session)
        tokens = self._reserved_tokens + (session.law_tokens - credit)
        return tokens + max(self._once_tokens, front) + self._spread(self._reserved_variance + session.law_variance)

    def _spread(self, variance: float) -> float:
        return self.law.z * math.sqrt(max(0.0, variance)) if self.law.z else 0.0

    def _credit(self, session: Session) -> tuple[int, int]:
        """What the session need not reserve, since others have it cached already; and how much of it is the front."""
        if not self.settings.shared_once:
            return 0, 0
        front, found_tokens, context_tokens = self._front, session.found_tokens, session.context_tokens
        if found_tokens is None:
            expected_tokens = min(front.expected_tokens, context_tokens)
            return expected_tokens, expected_tokens
        # Raised for those that came before the front was known; kept when the front of newer sessions is another.
        if found_tokens > session.shared_tokens < front.tokens:
            session.shared_tokens = min(found_tokens, front.tokens)
        if session.prompt_id is not None and self._prompts.is_shared(session.prompt_id, session.session_id):
            return min(found_tokens, context_tokens), 0  # the front with it, which the prompt's owner counts
        shared_tokens = session.shared_tokens
        if shared_tokens > context_tokens:
            shared_tokens = context_tokens
        return shared_tokens, shared_tokens

    def _may_enter(self, session: Session) -> Reason | None:
        """Why a new session may enter; None if it must wait."""
        if not self.settings.enabled:
            return Reason.ADMISSION_OFF
        if session.parent_id in self._live:
            return Reason.CHILD
        if self._queue and self._queue[0][0] <= session.priority:
            return None
        return self._fit(session)

    def _fit(self, session: Session) -> Reason | None:
        """Why a session that nobody goes before may enter; None if there is no headroom.

        Admission is armed from above the budget on, until well below it with nobody waiting.
        """
        if not self._live:
            return Reason.NOBODY_LIVE
        need_tokens, budget_tokens = self._need(), self.budget.tokens
        if need_tokens > budget_tokens:
            self._armed = True
            return None
        if not self._queue and need_tokens < DISARM_SHARE * budget_tokens:
            self._armed = False
        if not self._armed:
            return Reason.BELOW_BUDGET
        return Reason.FITS if self._need_with(session) <= budget_tokens else None

    def _head(self) -> Session | None:
        """The first waiting session that has a call to let in."""
        return self._waiting[self._queue[0][2]] if self._queue else None

    def _present(self, call: Call, now_s: float) -> Decision:
        if call.stage is not HELD:
            return Admit(call.call_id, Reason.LIVE_SESSION, now_s - call.arrived_s)
        session = self._waiting.get(call.session_id)
        if session is None:
            session = self._paused.waiting[call.session_id]
            shorter = sum(one.context_tokens < session.context_tokens for one in self._paused.waiting.values())
            free_tokens = self._resume_tokens() - self._staying_tokens()
            return Queue(call.call_id, Reason.PAUSED, self._own_tokens(session), round(free_tokens), shorter)
        return self._queued(session, call, bisect.bisect_left(self._queue, _place(session)))

    def _queued(self, session: Session, call: Call, ahead: int) -> Queue:
        reason = Reason.BEHIND_QUEUE if ahead else Reason.NO_HEADROOM
        free_tokens = self.budget.tokens - self._need()
        return Queue(call.call_id, reason, round(session.law_tokens), round(free_tokens), ahead)

    # Pausing.

    def _staying_tokens(self) -> int:
        """Contexts of the live sessions that are not about to leave, what they share counted once."""
        return self._working_set_tokens - self._leaving_tokens - self._credited_tokens + self._once_tokens

    def _own_tokens(self, session: Session) -> int:
        """What the session's context adds to those inside."""
        return session.context_tokens - self._credit(session)[0]

    def _resume_tokens(self) -> float:
        return self._pausing.resume_share * self.budget.reference_tokens if self._pausing is not None else 0.0

    def _fits_again(self, session: Session) -> bool:
        return not self._live or self._staying_tokens() + self._own_tokens(session) <= self._resume_tokens()

    def _pause_those_that_do_not(self, pausing: PauseSettings, now_s: float) -> None:
        reference_tokens = self.budget.reference_tokens
        if self._staying_tokens() <= pausing.above_share * reference_tokens:
            return
        for session in victims(self._live.values())[:-1]:  # the last one always fits
            if self._staying_tokens() <= pausing.down_to_share * reference_tokens:
                return
            if session.leaving:
                continue
            self._sent_back.append(session.session_id)
            if session.calls:
                session.leaving = True
                self._leaving_tokens += session.context_tokens
                if session.prompt_id is not None:
                    self._part(session)
                self._reserve(session)
            else:
                self._pause(session, now_s)

    def _pause(self, session: Session, now_s: float) -> None:
        self._take_out(session)
        self._paused.rest(session, now_s)

    def _resume_those_that_fit(self, pausing: PauseSettings, now_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for one in self._paused.by_length():
            if self._fits_again(one):
                self._resume(one, now_s)
                outcomes += self._let_on(one, Reason.FITS, now_s)
        if self._rescued is not None and self._calls.get(self._rescued.call_id) is self._rescued:
            return outcomes
        session = self._paused.overdue(now_s - pausing.patience_s)
        if session is not None:
            self._rescued = next(iter(session.calls.values()))
            self._resume(session, now_s)
            outcomes += self._let_on(session, Reason.WAITED_LONGEST, now_s)
        return outcomes

    def _resume(self, session: Session, now_s: float) -> None:
        self._paused.release(session)
        self._enter(session, now_s)

    # Keeping the tables.

    def _hold(self, call: Call) -> None:
        call.stage = HELD
        self._held.append(call)
        self._held_count += 1

    def _let_on(self, session: Session, reason: Reason, now_s: float) -> list[Outcome]:
        """The calls of a session that has just entered, all of which were held."""
        for call in session.calls.values():
            call.stage = PREFILLING
            self._held_count -= 1
        return [Admit(call.call_id, reason, now_s - call.arrived_s) for call in session.calls.values()]

    def _keep(self, session: Session, call: Call) -> None:
        if not session.calls:
            session.calls = {}
        session.calls[call.call_id] = call
        self._calls[call.call_id] = call

    def _enter(self, session: Session, now_s: float) -> None:
        session.live = True
        self._live[session.session_id] = session
        self._working_set_tokens += session.context_tokens
        session.reserved_tokens = session.reserved_variance = 0.0
        session.credited_tokens = session.front_tokens = 0
        if session.prompt_id is not None:
            session.repeats = self._prompts.enter(session.prompt_id, session.session_id)
        self._reserve(session)
        self._touch(session, now_s)

    def _set_context(self, session: Session, context_tokens: int) -> None:
        """Change a session's context, predict anew and, once it has entered, change what it reserves."""
        if session.live:
            self._working_set_tokens += context_tokens - session.context_tokens
            if session.leaving:
                self._leaving_tokens += context_tokens - session.context_tokens
        session.context_tokens = context_tokens
        if context_tokens > session.peak_tokens:
            session.peak_tokens = context_tokens
        if self._predictor is not None:
            session.prediction = self._predictor.predict(session)
            if session.first_predicted_tokens is None:
                session.first_predicted_tokens = session.prediction.at(0.5)
        if context_tokens < session.first_tokens and session.prompt_id is not None:
            self._part(session)  # cut short, it begins otherwise now
        session.law_tokens, session.law_variance = self.law.reserve(session)
        if session.live:
            self._reserve(session)

    def _part(self, session: Session) -> None:
        """The session no longer holds its first prompt, which may now be another's own."""
        assert session.prompt_id is not None
        heir_id = self._prompts.leave(session.prompt_id, session.session_id)
        session.prompt_id = None
        if heir_id is not None:
            self._reserve(self._live[heir_id])

    def _reserve(self, session: Session) -> None:
        """Change what is reserved for a live session and what it is credited with to what they are now."""
        credit, front = self._credit(session)
        tokens, variance = session.law_tokens - credit, session.law_variance
        if session.leaving:
            tokens, variance, credit, front = 0.0, 0.0, 0, 0
        if front != session.front_tokens:
            self._change_front(session, front)
        self._credited_tokens += credit - session.credited_tokens
        session.credited_tokens = credit
        self._reserved_tokens += tokens - session.reserved_tokens
        self._reserved_variance += variance - session.reserved_variance
        session.reserved_tokens, session.reserved_variance = tokens, variance

    def _change_front(self, session: Session, front_tokens: int) -> None:
        if session.front_tokens:
            del self._fronts[bisect.bisect_right(self._fronts, session.front_tokens) - 1]
        if front_tokens:
            bisect.insort_right(self._fronts, front_tokens)
        session.front_tokens = front_tokens
        self._once_tokens = self._fronts[-1] if self._fronts else 0

    def _take_out(self, session: Session) -> None:
        """A live session is live no more, and nothing is reserved for it."""
        del self._live[session.session_id]
        self._answered.pop(session.session_id, None)
        self._working_set_tokens -= session.context_tokens
        self._leaving_tokens -= session.context_tokens if session.leaving else 0
        self._reserved_tokens -= session.reserved_tokens
        self._reserved_variance -= session.reserved_variance
        self._credited_tokens -= session.credited_tokens
        self._change_front(session, 0)
        if session.prompt_id is not None:
            self._part(session)
        session.live = session.leaving = False
        if not self._live:  # no rounding error outlives the sessions that caused it
            self._reserved_tokens = self._reserved_variance = 0.0

    def _end(self, session: Session, *, completed: bool) -> None:
        """A live or paused session has ended."""
        if session.live:
            self._take_out(session)
        self._paused.release(session)
        for call_id in session.calls:
            del self._calls[call_id]
        session.calls = NO_CALLS
        self._ended.append(session)
        if completed:
            self._rates.completed(self._now_s)
            if self._predictor is not None:
                self._predictor.learn(session)
        elif self._predictor is not None:
            self._predictor.forget(session.session_id)

    def _drop(self, call_id: str, now_s: float) -> Call | None:
        """Forget a call. A waiting session that loses its last call goes away, or leaves the queue without a grace."""
        call = self._calls.pop(call_id, None)
        if call is None:
            return None
        if call.stage is HELD:
            self._held_count -= 1
        session = self._known(call.session_id)
        assert session is not None
        del session.calls[call_id]
        if not session.calls:
            session.calls = NO_CALLS
        if session.paused:
            if not session.calls:
                self._paused.rest(session, now_s)
        elif not session.live and not session.calls:
            if self.settings.ticket_grace_s > 0:
                self._step_out(session)
                self._away[session.session_id] = now_s
            else:
                self._leave_queue(session)
                self._remember_turned_away(session.session_id, now_s)
        return call

    def _remember_turned_away(self, session_id: str, now_s: float) -> None:
        if self._predictor is not None:
            self._predictor.forget(session_id)
        self._turned_away[session_id] = now_s
        if len(self._turned_away) > self.settings.max_sessions:
            self._turned_away.popitem(last=False)

    def _line_up(self, session: Session) -> int:
        """Returns how many go before it."""
        place = _place(session)
        ahead = bisect.bisect_left(self._queue, place)
        self._queue.insert(ahead, place)
        return ahead

    def _step_out(self, session: Session) -> None:
        del self._queue[bisect.bisect_left(self._queue, _place(session))]

    def _leave_queue(self, session: Session) -> None:
        del self._waiting[session.session_id]
        if self._away.pop(session.session_id, None) is None:
            self._step_out(session)

    def _refuse(self, call: Call, reason: Reason, now_s: float) -> Refuse:
        self._drop(call.call_id, now_s)
        return Refuse(call.call_id, reason, now_s - call.arrived_s, self.settings.retry_after_s)

    def _turn_away(self, session: Session, reason: Reason, now_s: float) -> list[Refuse]:
        """A waiting session leaves for good: it keeps no place."""
        refused = [self._refuse(call, reason, now_s) for call in list(session.calls.values())]
        if session.session_id in self._waiting:
            self._leave_queue(session)
            self._remember_turned_away(session.session_id, now_s)
        return refused

    def _refuse_overdue(self, now_s: float) -> list[Outcome]:
        refused: list[Outcome] = []
        while self._held:
            call = self._held[0]
            if self._calls.get(call.call_id) is call and call.stage is HELD:
                if now_s - call.arrived_s < self.settings.hold_limit_s:
                    break
                refused.append(self._refuse(call, Reason.HELD_TOO_LONG, now_s))
            self._held.popleft()
        return refused

    def _shed(self, head: Session, now_s: float) -> list[Refuse]:
        """The head has waited for too long."""
        if self._fit(head) is not None:
            return []
        excess = self._rates.excess_per_s(now_s)
        if now_s < self._next_shed_s or excess <= 0:
            return []
        self._next_shed_s = now_s + 1 / excess  # what arrives beyond the capacity is what must go
        return self._turn_away(self._waiting[self._queue[-1][2]], Reason.SHED, now_s)

    def _expire_idle(self, now_s: float) -> None:
        self._active_since_s = now_s
        while self._live:
            oldest = next(iter(self._live.values()))
            if now_s - oldest.last_active_s < self._idle.timeout_s:
                self._active_since_s = oldest.last_active_s
                return
            if oldest.busy():
                self._touch(oldest, now_s)
            else:
                self._idle.given_up(oldest.session_id, oldest.last_active_s)
                self._end(oldest, completed=True)

    def _expire_resting(self, now_s: float) -> None:
        while resting := self._paused.resting:
            oldest = next(iter(resting.values()))
            if now_s - oldest.last_active_s < self._idle.timeout_s:
                return
            self._idle.given_up(oldest.session_id, oldest.last_active_s)
            self._end(oldest, completed=True)

    def _expire_answered(self, now_s: float) -> None:
        while self._answered and self.settings.final_grace_s is not None:
            session_id, since_s = next(iter(self._answered.items()))
            if now_s - since_s < self.settings.final_grace_s:
                return
            self._end(self._live[session_id], completed=True)

    def _expire_away(self, now_s: float) -> None:
        self._away_since_s = now_s
        while self._away:
            session_id, since_s = next(iter(self._away.items()))
            if now_s - since_s < self.settings.ticket_grace_s:
                self._away_since_s = since_s
                return
            self._leave_queue(self._waiting[session_id])
            self._remember_turned_away(session_id, now_s)

    def _forget_over_bound(self) -> None:
        """Keep the table bounded: forget the longest idle sessions, whose return would make them new ones."""
        paused, most = self._paused, self.settings.max_sessions
        while len(self._live) + len(paused.resting) + len(paused.waiting) >= most:
            oldest = next(iter(paused.resting.values()), None) or next(iter(self._live.values()), None)
            if oldest is None:
                return  # all of them wait at the door
            self._end(oldest, completed=False)

    def _touch(self, session: Session, now_s: float, generation: int = 0) -> None:
        """The session is active, and with it those that wait for it."""
        session.last_active_s = now_s
        if session.live:
            self._live.move_to_end(session.session_id)
        elif session.session_id in self._paused.resting:
            self._paused.resting.move_to_end(session.session_id)
        if session.parent_id is not None and generation + 1 < MAX_GENERATIONS:
            parent = self._known(session.parent_id)
            if parent is not None:
                self._touch(parent, now_s, generation + 1)

    def _advance(self, now_s: float) -> float:
        """What every call goes through does this by itself, in place of a method call: a hundredth of a simulated run's
        time (`benchmarks/sim_speed.py`)."""
        if now_s > self._now_s:
            self._now_s = now_s
        return self._now_s


def _place(session: Session) -> tuple[float, int, str]:
    return session.priority, session.ticket, session.session_id
