"""The gate on a decode instance: asks prefill's door about sessions it does not know and holds their calls.

Holding on prefill alone would let decode reserve memory for a call that waits at the door, so both legs wait. The
verdict brings the session's priority; once a session has entered, its further calls pass here without a
question. A door that does not answer within the patience is taken for gone: the call goes on, further ones go on at
once until the door is heard again, and SGLang's own handling of a dead prefill applies.

A prefill instance with several data-parallel ranks has as many doors. All are asked; the one that has the call's other
leg answers, which tells this side where that is.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_basin.config import BasinConfig
from sglang_basin.engine import messages
from sglang_basin.engine.answers import Answer, drop, refuse, scheduler_answer
from sglang_basin.engine.control import DecodeEnd
from sglang_basin.engine.doors import Doors
from sglang_basin.engine.figures import cache_figures, control_figures
from sglang_basin.engine.finals import FinalAnswers
from sglang_basin.engine.identity import Stamp, stamp_of
from sglang_basin.engine.metrics import SHOW_EVERY_S, fault, log, metrics, show_control
from sglang_basin.engine.priorities import PriorityClock
from sglang_basin.engine.prompt_sessions import PromptSessions
from sglang_basin.engine.requests import (
    AbortReq,
    CloseSessionReqInput,
    TokenizedGenerateReqInput,
    aborts,
    failed,
    peers,
    radix_sessions,
)
from sglang_basin.engine.turn import Turn
from sglang_basin.engine.watch import EngineWatch
from sglang_basin.lending.holdings import Owner
from sglang_basin.lending.ranks import ForRanks
from sglang_basin.policy.decisions import Reason
from sglang_basin.policy.lineage import MIN_TOKENS
from sglang_basin.status import ControlFigures, Status

ASK_AGAIN_S = 5.0
"""A waiting call is asked about again this often: prefill's answer is its sign of life."""

LOOK_AT_HELD_S = 0.5

PATIENCE_S = 15.0
"""Without any answer for this long the call goes on. A busy scheduler reads its channel between two batches, and the
longest chunk of prefill stays well below this."""

REPORT_RUNNING_S = 30.0

SHORTENED_AT_ONCE = 1024
"""Sessions of which prefill is told once a second that less of them is kept."""


@dataclass(slots=True)
class _Held:
    request: TokenizedGenerateReqInput
    session_id: str | None
    """None while only prefill knows whose call it is, by its prompt."""
    conversation: str | None
    """Of such a call: by what name this gate will know its next one."""
    instance: str
    doors: tuple[str, ...]
    """That were asked."""
    since_s: float
    asked_s: float
    unanswered_s: float | None
    """When the first question was asked that has had no answer yet; a stall of this very process does not count."""


@dataclass(slots=True)
class _Entered:
    """A session that prefill let in."""

    door: str
    last_call_s: float
    priority_ms: int


@dataclass(frozen=True, slots=True)
class _Inside:
    """A call inside SGLang, to be reported when it leaves."""

    doors: tuple[str, ...]
    """The one that let it in, or all that it may belong to."""
    room: int
    session_id: str | None
    """As prefill knows it; None where this gate does not."""
    offered_tools: bool


class DecodeGate:
    """Holds calls of unknown sessions until prefill's verdict. One per decode instance, on rank 0, or one for each of
    its data-parallel ranks."""

    def __init__(
        self,
        control: DecodeEnd,
        answer: Answer,
        *,
        default_bootstrap_port: int,
        control_port_offset: int,
        idle_timeout_s: float,
        max_sessions: int,
        finals: FinalAnswers,
        watch: EngineWatch | None = None,
        by_prompt: PromptSessions | None = None,
        lendable: Callable[[], int] | None = None,
        kept: Callable[[Any, Owner | None], int] = lambda request, owner: 0,
        shortened: Callable[[int], list[tuple[Owner, int]]] = lambda most: [],
        has_radix_session: Callable[[str], bool] = lambda session_id: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `by_prompt`, calls that name no session are asked about too, for prefill infers their sessions.
        `lendable` says how many tokens finished calls may keep here now; None where nothing is lent. `kept` says how
        many of an answered call's, and notes whose they are; `shortened` of which sessions less is kept since then,
        and how much. `has_radix_session` as `radix_sessions`."""
        self._control = control
        self._answer = answer
        self._turn = Turn()
        self._default_bootstrap_port = default_bootstrap_port
        self._doors = Doors(control_port_offset)
        self._idle_timeout_s = idle_timeout_s
        self._max_sessions = max_sessions
        self._finals = finals
        self._watch = watch
        self._lendable = lendable
        self._kept = kept
        self._shortened = shortened
        self._has_radix_session = has_radix_session
        self._heard_s: dict[str, float] = {}  # door -> when its last message came
        self._silent: set[str] = set()  # prefill instances that let the patience run out and were not heard since
        self._by_prompt = by_prompt
        self._names: OrderedDict[str, tuple[str, str]] = OrderedDict()  # conversation -> (prefill, its name there)
        self._clock = clock
        self._priorities = PriorityClock(clock)
        self._held: dict[int, _Held] = {}  # by bootstrap room
        self._entered: OrderedDict[tuple[str, str], _Entered] = (
            OrderedDict()
        )  # by (prefill instance, session), oldest call first
        self._inside: dict[str, _Inside] = {}  # by rid
        self._next_look_s = 0.0
        self._next_report_s = 0.0
        self._next_show_s = 0.0

    @classmethod
    def for_scheduler(cls, scheduler: Any, config: BasinConfig) -> DecodeGate:
        """Build the gate of a live scheduler. Connections are made when the first call names a prefill instance."""
        from sglang.srt.runtime_context import get_disagg

        from sglang_basin.lending.decode import kept_tokens_of, lendable_tokens, take_shortened

        sleeper = scheduler.idle_sleeper
        return cls(
            DecodeEnd(None if sleeper is None else sleeper.poller),
            scheduler_answer(scheduler),
            default_bootstrap_port=get_disagg().disaggregation_bootstrap_port,
            control_port_offset=config.control_port_offset,
            idle_timeout_s=config.idle_timeout_s,
            max_sessions=config.max_live_sessions,
            finals=FinalAnswers.for_scheduler(scheduler),
            watch=EngineWatch(scheduler),
            by_prompt=PromptSessions(config.max_live_sessions) if config.infer_sessions == "on" else None,
            lendable=lendable_tokens if config.lending == "on" else None,
            kept=kept_tokens_of,
            shortened=take_shortened,
            has_radix_session=radix_sessions(scheduler),
        )

    def __repr__(self) -> str:
        return f"asks prefill at its bootstrap port + {self._doors.port_offset}"

    # What a gate owes to `gate`.

    def pass_on(self, requests: list[Any]) -> list[Any]:
        now_s = self._clock()
        self._turn.begin(requests)
        for door in self._control.renewed():
            self._forget_sessions(door)
        for door, message in self._control.receive():
            self._hear(door, message, now_s)
        self._turn.judge_all(lambda request: self._take(request, now_s))
        if self._held and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_AT_HELD_S
            self._ask_again(now_s)
        if now_s >= self._next_show_s:
            self._next_show_s = now_s + SHOW_EVERY_S
            metrics().held_calls.set(len(self._held))
            self._report_lendable()
            self._report_shortened()
            show_control(self._control_figures(now_s))
        if now_s >= self._next_report_s:
            self._report_running(now_s)
            self._forget_instances(now_s)
        return self._turn.end()

    def left(self, request: Any) -> None:
        call = self._inside.pop(request.rid, None)
        if call is not None:
            output_tokens = len(getattr(request, "output_ids", None) or ())
            final, answered = self._is_final(request, call), not failed(request)
            owner = None if call.session_id is None else (call.doors[0], call.session_id)
            kept_tokens = self._kept(request, owner) if answered else 0
            entered = None if owner is None else self._entered.get(owner)
            priority_ms = None if entered is None else entered.priority_ms
            self._send(call.doors, messages.Left(call.room, output_tokens, final, answered, kept_tokens, priority_ms))
            self._note_left(call.room, answered=answered)

    def describe(self, status: Status) -> None:
        now_s = self._clock()
        status.held_calls = len(self._held)
        status.entered_sessions = len(self._entered)
        status.control = self._control_figures(now_s)
        if self._watch is not None:
            status.cache = cache_figures(self._watch.view(now_s))

    def _control_figures(self, now_s: float) -> ControlFigures:
        unanswered = sum(waiting.unanswered_s is not None for waiting in self._held.values())
        return control_figures(None, {door: self._heard_s.get(door) for door in self._control.peers}, unanswered, now_s)

    def post(self, peer: str, message: messages.FromDecode) -> bool:
        return self._control.send(peer, message)

    def let_go(self) -> list[Any]:
        held = [*(waiting.request for waiting in self._held.values()), *self._turn.rest()]
        self._held.clear()
        self._control.close()
        return held

    # How calls come and go.

    def _take(self, request: Any, now_s: float) -> None:
        if isinstance(request, TokenizedGenerateReqInput):
            self._arrive(request, now_s)
            return
        if isinstance(request, AbortReq):
            self._abort(request)
        self._turn.go_on(request)

    def _arrive(self, request: TokenizedGenerateReqInput, now_s: float) -> None:
        stamp = stamp_of(request)
        session_id = stamp.session_id
        is_nobodys = session_id is None and (self._by_prompt is None or not _could_be_known(request, stamp))
        if is_nobodys or not peers(request) or request.bootstrap_room in self._held:
            reason = Reason.NO_IDENTITY if is_nobodys else Reason.ADMISSION_OFF
            metrics().decisions.labels("admit", reason.value).inc()
            request.priority = self._priorities.stamp(now_s)
            self._turn.go_on(request)
            return
        port = request.bootstrap_port or self._default_bootstrap_port
        instance = self._doors.instance(request.bootstrap_host, port, now_s)
        if instance is None:
            metrics().decisions.labels("admit", Reason.NO_ANSWER.value).inc()
            self._let_on(request, (), self._priorities.stamp(now_s))
            return
        doors = self._doors.of(instance)
        if (rank := request.disagg_prefill_dp_rank) is not None and 0 <= rank < len(doors):
            doors = (doors[rank],)  # the router's or the client's choice
        room = request.bootstrap_room
        conversation = None
        if session_id is None:
            conversation, session_id = self._infer(request, stamp, instance)
        entered = self._entered.get((instance, session_id)) if session_id is not None else None
        if session_id is not None and entered is not None and entered.door in doors:
            metrics().decisions.labels("admit", Reason.LIVE_SESSION.value).inc()
            self._enter(request, entered.door, session_id, entered.priority_ms, now_s)
            return
        self._send(doors, messages.Ask(room))
        if instance in self._silent:  # the question asks for a sign of life alone
            metrics().decisions.labels("admit", Reason.NO_ANSWER.value).inc()
            self._let_on(request, doors, self._priorities.stamp(now_s))
        else:
            self._held[room] = _Held(request, session_id, conversation, instance, doors, now_s, now_s, now_s)

    def _infer(self, request: TokenizedGenerateReqInput, stamp: Stamp, instance: str) -> tuple[str | None, str | None]:
        """The conversation that an unnamed call belongs to, as this gate sees it, and its session's name on prefill."""
        assert self._by_prompt is not None
        conversation = self._by_prompt.session_of(str(request.bootstrap_room), request, stamp)
        if conversation is None or (known := self._names.get(conversation)) is None or known[0] != instance:
            return conversation, None
        self._names.move_to_end(conversation)
        return conversation, known[1]

    def _learn(self, conversation: str, instance: str, session_id: str) -> None:
        self._names[conversation] = (instance, session_id)
        self._names.move_to_end(conversation)
        if len(self._names) > self._max_sessions:
            self._names.popitem(last=False)

    def _note_left(self, room: int, *, answered: bool) -> None:
        if self._by_prompt is not None:
            self._by_prompt.left(str(room), None, answered=answered)

    def _enter(self, request: Any, door: str, session_id: str, priority_ms: int, now_s: float) -> None:
        known = self._doors.instance_of(door), session_id
        self._entered[known] = _Entered(door, now_s, priority_ms)
        self._entered.move_to_end(known)
        while len(self._entered) > self._max_sessions:
            self._entered.popitem(last=False)
        self._let_on(request, (door,), priority_ms, session_id)

    def _let_on(self, request: Any, doors: tuple[str, ...], priority_ms: int, session_id: str | None = None) -> None:
        request.priority = priority_ms
        if len(doors) == 1 and (rank := self._doors.rank_of(doors[0])) is not None:
            request.disagg_prefill_dp_rank = rank
        self._inside[request.rid] = _Inside(doors, request.bootstrap_room, session_id, stamp_of(request).tools)
        self._turn.go_on(request)

    def _send(self, doors: tuple[str, ...], message: messages.FromDecode) -> None:
        for door in doors:
            self._control.send(door, message)

    def _forget_sessions(self, door: str) -> None:
        """The connection to a door was broken and stands again: the door may be a new one, and what the old one said
        meanwhile is lost. So its sessions are asked about again, and of the first door all of its instance."""
        instance = self._doors.instance_of(door)
        gone = [
            known for known, entered in self._entered.items() if entered.door == door or (known[0] == instance == door)
        ]
        for known in gone:
            del self._entered[known]
        if door == instance:
            self._doors.count(instance, 1)  # until it says otherwise

    def _forget_instances(self, now_s: float) -> None:
        """Prefill instances that are gone, as far as one can tell: no call has named them for as long as a session may
        be idle, and there is no connection."""
        busy = {door for call in (*self._inside.values(), *self._held.values()) for door in call.doors}
        for instance in self._doors.unnamed_since(now_s - self._idle_timeout_s):
            doors = self._doors.all_of(instance)
            if not busy.isdisjoint(doors) or any(self._control.stands(door) for door in doors):
                continue
            for door in doors:
                self._control.forget(door)
                self._heard_s.pop(door, None)
            for known in [known for known in self._entered if known[0] == instance]:
                del self._entered[known]
            self._silent.discard(instance)
            self._doors.forget(instance)

    def _is_final(self, request: Any, call: _Inside) -> bool:
        try:
            return self._finals.is_final(request, offered_tools=call.offered_tools)
        except Exception:  # noqa: BLE001 - the session then ends by idle time-out
            fault("final", "could not tell whether an answer is final")
            return False

    def _abort(self, abort: Any) -> None:
        for room, waiting in [item for item in self._held.items() if aborts(abort, item[1].request.rid)]:
            del self._held[room]
            drop(self._answer, waiting.request)
            self._send(waiting.doors, messages.Left(room, 0))
            self._note_left(room, answered=False)

    # How prefill is heard and asked.

    def _hear(self, door: str, message: messages.FromPrefill, now_s: float) -> None:
        instance = self._doors.instance_of(door)
        self._heard_s[door] = now_s
        self._silent.discard(instance)
        if isinstance(message, messages.Ranks):
            self._ask_further(instance, message.count)
            return
        if isinstance(message, messages.Ended):
            for session_id in message.session_ids:
                if self._entered_by(door, session_id) is not None:
                    del self._entered[instance, session_id]
                if not message.paused and self._has_radix_session(session_id):
                    self._turn.go_on(CloseSessionReqInput(session_id=session_id))
            return
        if isinstance(message, messages.Reorder):
            if (entered := self._entered_by(door, message.session_id)) is not None:
                entered.priority_ms = message.priority_ms
            return
        if isinstance(message, messages.Borrow | messages.Return):
            self._turn.go_on(ForRanks(door, message))
            return
        waiting = self._held.get(message.room)
        if waiting is None or door not in waiting.doors:
            return
        if isinstance(message, messages.Wait):
            waiting.unanswered_s = None
            return
        del self._held[message.room]
        if isinstance(message, messages.Enter):
            metrics().door_wait.observe(now_s - waiting.since_s)
            metrics().decisions.labels("admit", Reason.ENTERED.value).inc()
            session_id = waiting.session_id if message.session_id is None else message.session_id
            if waiting.conversation is not None and message.session_id is not None:
                self._learn(waiting.conversation, instance, message.session_id)
            if session_id is None:
                self._let_on(waiting.request, (door,), message.priority_ms)
            else:
                self._enter(waiting.request, door, session_id, message.priority_ms, now_s)
        else:
            self._note_left(message.room, answered=False)
            metrics().decisions.labels("refuse", message.reason.value).inc()
            refuse(self._answer, waiting.request, message.reason, message.retry_after_s)

    def _entered_by(self, door: str, session_id: str) -> _Entered | None:
        entered = self._entered.get((self._doors.instance_of(door), session_id))
        return entered if entered is not None and entered.door == door else None

    def _ask_further(self, instance: str, ranks: int) -> None:
        """There are more doors than were known: one of them may have the calls that wait."""
        self._doors.count(instance, ranks)
        doors = self._doors.of(instance)
        for room, waiting in self._held.items():
            if waiting.instance == instance and len(waiting.doors) < len(doors):
                self._send(tuple(door for door in doors if door not in waiting.doors), messages.Ask(room))
                waiting.doors = doors

    def _ask_again(self, now_s: float) -> None:
        given_up: Counter[str] = Counter()
        for room, waiting in list(self._held.items()):
            if waiting.unanswered_s is not None and now_s - waiting.unanswered_s > PATIENCE_S:
                del self._held[room]
                metrics().decisions.labels("admit", Reason.NO_ANSWER.value).inc()
                given_up[waiting.instance] += 1
                if max(self._heard_s.get(door, -math.inf) for door in waiting.doors) < waiting.unanswered_s:
                    self._silent.add(waiting.instance)
                self._let_on(waiting.request, waiting.doors, self._priorities.stamp(waiting.since_s))
            elif now_s - waiting.asked_s > ASK_AGAIN_S:
                waiting.asked_s = now_s
                waiting.unanswered_s = now_s if waiting.unanswered_s is None else waiting.unanswered_s
                self._send(waiting.doors, messages.Ask(room))
        for instance, calls in given_up.items():
            log.warning("Basin: no answer from %s for %.0f s; calls go on without: %d", instance, PATIENCE_S, calls)

    def _report_lendable(self) -> None:
        """Once a second, to each door its part: each guards a cache of its own."""
        if self._lendable is None:
            return
        doors = self._control.peers
        for door in doors:
            self._control.send(door, messages.Lends(self._lendable() // len(doors)))

    def _report_shortened(self) -> None:
        """Once a second: prefill need not ask for what has been dropped here."""
        sessions: dict[str, list[tuple[str, int]]] = {}
        for (door, session_id), tokens in self._shortened(SHORTENED_AT_ONCE):
            sessions.setdefault(door, []).append((session_id, tokens))
        for door, shortened in sessions.items():
            if door not in self._control.peers:
                continue  # a prefill that is gone
            for start in range(0, len(shortened), messages.SESSIONS_PER_MESSAGE):
                self._control.send(door, messages.Keeps(shortened[start : start + messages.SESSIONS_PER_MESSAGE]))

    def _report_running(self, now_s: float) -> None:
        self._next_report_s = now_s + REPORT_RUNNING_S
        rooms: dict[str, list[int]] = {}
        for call in self._inside.values():
            for door in call.doors:
                rooms.setdefault(door, []).append(call.room)
        for door, running in rooms.items():
            for start in range(0, len(running), messages.ROOMS_PER_MESSAGE):
                self._control.send(door, messages.Running(running[start : start + messages.ROOMS_PER_MESSAGE]))
        while self._entered and now_s - next(iter(self._entered.values())).last_call_s > self._idle_timeout_s:
            self._entered.popitem(last=False)


def _could_be_known(request: TokenizedGenerateReqInput, stamp: Stamp) -> bool:
    """Whether the prompt is long enough for prefill to infer a session from it."""
    return request.input_ids is not None and len(request.input_ids) - stamp.tail_tokens >= MIN_TOKENS
