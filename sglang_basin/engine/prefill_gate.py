"""The gate on a prefill instance: it owns the door and answers the decode gates that ask.

Prefill sees every call of its sessions and guards its own cache, so this is where admission runs. A call is known by
its bootstrap room, the same on both legs. It comes to the door with its own leg; a decode gate that asks before that
waits for it.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang_basin.config import BasinConfig
from sglang_basin.engine import messages
from sglang_basin.engine.answers import Answer, drop, refuse, scheduler_answer
from sglang_basin.engine.control import PrefillEnd
from sglang_basin.engine.decision_log import KINDS, DecisionLog
from sglang_basin.engine.door import door_for, predictor_for
from sglang_basin.engine.figures import cache_figures, control_figures, door_figures
from sglang_basin.engine.identity import INFERRED_PREFIX, Stamp, stamp_of
from sglang_basin.engine.metrics import (
    SHOW_EVERY_S,
    log,
    metrics,
    show_cache,
    show_control,
    show_door,
    show_failures,
    show_prediction,
)
from sglang_basin.engine.priorities import PriorityClock
from sglang_basin.engine.prompt_sessions import PromptSessions
from sglang_basin.engine.ranks import ONLY_RANK, Rank
from sglang_basin.engine.requests import (
    AbortReq,
    CloseSessionReqInput,
    TokenizedGenerateReqInput,
    aborts,
    call_id,
    failed,
    has_room,
    peers,
    radix_sessions,
)
from sglang_basin.engine.rooms import DroppedRooms
from sglang_basin.engine.turn import Turn
from sglang_basin.engine.watch import EngineWatch
from sglang_basin.lending.copies import Copies
from sglang_basin.lending.ranks import ForRanks, Kept
from sglang_basin.policy.decisions import Admit, Decision, Outcome, Queue, Reason, Refuse
from sglang_basin.policy.door import Door
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.recording import RecordedDoor
from sglang_basin.predictor.deployed import DeployedPredictor
from sglang_basin.status import ControlFigures, Status

T = TypeVar("T")

POLL_EVERY_S = 1.0
"""The door is asked whose wait is over after every change, and this often for those that time alone ends."""


MAX_REMEMBERED = 100_000
LENT_FOR_S = 5.0
"""A decode that has not said for so long what it can lend lends nothing: it reports every second."""

REMEMBER_FOR_S = 60.0
"""So long are kept a question about a call whose own leg has not come, and a verdict that decode has not asked for; its
patience is shorter."""


@dataclass(frozen=True, slots=True)
class _Held:
    request: TokenizedGenerateReqInput
    session_id: str | None
    """As its client named it, or as its prompt told."""


class PrefillGate:
    """Holds calls of sessions that may not enter yet. One per prefill instance (or unified server), on rank 0; with
    data parallelism one for each data-parallel rank, which knows nothing of the others."""

    def __init__(
        self,
        door: Door | RecordedDoor,
        control: PrefillEnd | None,
        answer: Answer,
        watch: EngineWatch | None = None,
        decision_log: DecisionLog | None = None,
        predictor: DeployedPredictor | None = None,
        by_prompt: PromptSessions | None = None,
        copies: Copies | None = None,
        rank: Rank = ONLY_RANK,
        has_radix_session: Callable[[str], bool] = lambda session_id: False,
        read_tokens_per_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`control` is None for a unified server, which has no decode instances; without a `watch` the budget stays
        where it is. `predictor` is the door's, told here what requests say about their tasks. Without a `by_prompt`
        calls that name no session pass. `copies` is None where nothing is lent. `has_radix_session` as
        `radix_sessions`. `read_tokens_per_s` says how fast lent KV comes back, if that is known."""
        self.door = door
        self.control = control
        self._answer = answer
        self._watch = watch
        self._view: EngineView | None = None  # what the watch saw last
        self._decision_log = decision_log
        self._predictor = predictor
        self._by_prompt = by_prompt
        self._copies = copies
        self._rank = rank
        self._has_radix_session = has_radix_session
        self._read_tokens_per_s = read_tokens_per_s
        self._turn = Turn()
        self._clock = clock
        self._priorities = PriorityClock(clock)
        self._held: dict[str, _Held] = {}  # by call id
        self._inside: dict[str, str] = {}  # rid of a call inside SGLang -> its call id
        self._askers: dict[str, bytes] = {}  # held call's id -> the decode gate that waits for its verdict
        self._early: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # asked about before its own leg came
        self._verdicts: OrderedDict[str, tuple[messages.FromPrefill, float]] = OrderedDict()  # before decode has asked
        self._gates: dict[bytes, float] = {}  # every decode gate heard of -> when last
        self._lent: dict[bytes, tuple[int, float]] = {}  # decode gate -> what it can lend, and when it said so
        self._dropped_rooms: list[int] = []
        self._changed = False  # something happened at the door since the last poll
        self._next_poll_s = 0.0
        self._next_show_s = 0.0

    @classmethod
    def for_scheduler(cls, scheduler: Any, config: BasinConfig) -> PrefillGate:
        """Build the gate of a live scheduler; binds the control channel. Raises ControlError when it cannot."""
        from sglang.srt.runtime_context import get_disagg

        from sglang_basin.lending.prefill import read_tokens_per_s

        rank = Rank.here()
        control = None
        if scheduler.disaggregation_mode.value == "prefill":
            port = get_disagg().disaggregation_bootstrap_port + config.control_port_offset + rank.own
            poller = None if scheduler.idle_sleeper is None else scheduler.idle_sleeper.poller
            control = PrefillEnd(config.control_host or scheduler.server_args.host, port, poller)
        predictor = predictor_for(config, rank)
        door = door_for(config, scheduler.max_total_num_tokens, predictor, rank)
        decisions = None if config.decision_log is None else DecisionLog(Path(rank.file(config.decision_log)))
        by_prompt = PromptSessions(config.max_live_sessions, door.runs) if config.infer_sessions == "on" else None
        copies = Copies(config.max_live_sessions) if config.lending == "on" else None
        return cls(
            door,
            control,
            scheduler_answer(scheduler),
            EngineWatch(scheduler),
            decisions,
            predictor,
            by_prompt,
            copies,
            rank,
            radix_sessions(scheduler),
            read_tokens_per_s,
        )

    def __repr__(self) -> str:
        rule = f"admission by {self.door.law.name} reservation" if self.door.settings.enabled else "admission off"
        where = f", control channel at {self.control.address}" if self.control else ""
        return f"{rule}, budget {self.door.budget.tokens} tokens{where}"

    # What a gate owes to `gate`.

    def pass_on(self, requests: list[Any]) -> list[Any]:
        now_s = self._clock()
        self._turn.begin(requests)
        if self.control is not None:
            for peer, message in self.control.receive():
                self._hear(peer, message, now_s)
        self._turn.judge_all(lambda request: self._take(request, now_s))
        if self._changed or requests or now_s >= self._next_poll_s:
            self._changed = False
            self._next_poll_s = now_s + POLL_EVERY_S
            for outcome in self.door.poll(now_s):
                self._conclude(outcome, now_s)
            self._tell_ended()
        if self._dropped_rooms:
            self._turn.go_on(DroppedRooms(tuple(self._dropped_rooms)))
            self._dropped_rooms.clear()
        if now_s >= self._next_show_s:
            self._next_show_s = now_s + SHOW_EVERY_S
            self._look(now_s)
        return self._turn.end()

    def left(self, request: Any) -> None:
        known, has_failed = self._inside.pop(request.rid, None), failed(request)
        if has_failed or self.control is None:  # else decode says how it ended
            self._note_left(call_id(request), answered=not has_failed)
        if known is None:
            return
        self._changed = True
        now_s = self._clock()
        if has_failed:
            self.door.abandon(known, now_s)
            return
        if self._watch is not None:
            self._watch.prefilled(request, now_s)
        if self.control is None:
            self.door.finish(known, len(request.output_ids), now_s)
        else:
            self.door.prefilled(known, now_s, cached_tokens=request.cached_tokens)

    def describe(self, status: Status) -> None:
        now_s = self._clock()
        state = self.door.state()
        status.door = door_figures(self.door, now_s)
        status.held_calls = len(self._held)
        status.entered_sessions = state.live_sessions
        if self._view is not None:
            status.cache = cache_figures(self._view, state.high_hit_rate)
        if self.control is not None:
            status.control = self._control_figures(self.control.address, now_s)

    def post(self, peer: bytes, message: messages.FromPrefill) -> bool:
        sent = self._send(peer, message)
        if not sent and isinstance(message, messages.Borrow):
            self._turn.go_on(ForRanks(peer, messages.Lease(message.room)))  # nobody else will answer
        return sent

    def let_go(self) -> list[Any]:
        held = [*(held.request for held in self._held.values()), *self._turn.rest()]
        self._held.clear()
        if self.control is not None:
            self.control.close()
        if self._predictor is not None:
            self._predictor.close(timeout_s=0.0)
        return held

    # How calls come and go.

    def _take(self, request: Any, now_s: float) -> None:
        if isinstance(request, TokenizedGenerateReqInput):
            call = call_id(request)
            if call in self._held or (self.control is not None and not has_room(request)):
                request.priority = self._priorities.stamp(now_s)
                self._turn.go_on(request)  # no call that a router sends; SGLang has its own answer to it
                return
            try:
                self._arrive(call, request, now_s)
            except Exception:
                self._held.pop(call, None)  # it goes on, and the door must not decide about it any more
                self.door.abandon(call, now_s)
                raise
            return
        if isinstance(request, AbortReq):
            self._abort(request, now_s)
        elif isinstance(request, CloseSessionReqInput):
            for refused in self.door.end(request.session_id, now_s):
                self._conclude(refused, now_s)
        self._turn.go_on(request)

    def _arrive(self, call: str, request: TokenizedGenerateReqInput, now_s: float) -> None:
        stamp = stamp_of(request)
        session_id = stamp.session_id if stamp.session_id is not None else self._infer(call, request, stamp)
        if session_id is not None and self._predictor is not None:
            self._predictor.describe(session_id, stamp.task)
        decision = self.door.call(
            call,
            session_id,
            len(request.input_ids or ()),
            now_s,
            ends_session=stamp.ends_session,
            parent_id=stamp.parent_id,
            prompt_id=self._first_prompt(session_id, request),
        )
        order_s = now_s if session_id is None else self.door.order(session_id, now_s)
        request.priority = self._priorities.stamp(order_s)
        self._note(decision, request, session_id)
        if (early := self._early.pop(call, None)) is not None:
            self._askers[call] = early[0]
        if isinstance(decision, Queue):
            self._held[call] = _Held(request, session_id)
            log.info("Basin holds a call of session %r: %s", session_id, decision)
            if early is not None:
                self._send(early[0], messages.Wait(int(call)))
        elif isinstance(decision, Refuse):
            self._held[call] = _Held(request, session_id)
            self._turn_away(decision, now_s)
        else:
            self._enter(call, request, now_s, track=session_id is not None)

    def _first_prompt(self, session_id: str | None, request: TokenizedGenerateReqInput) -> int | None:
        """What tells the door which sessions began with the same prompt: this process's hash of it, 0.1 ms for a long
        one, and so not taken of a live session's further calls."""
        if session_id is None or request.input_ids is None or self.door.live_session(session_id) is not None:
            return None
        return hash(bytes(request.input_ids) if isinstance(request.input_ids, array) else tuple(request.input_ids))

    def _infer(self, call: str, request: TokenizedGenerateReqInput, stamp: Stamp) -> str | None:
        """The session of a call that names none, unless it is the engine's own, such as a health check."""
        if self._by_prompt is None or (self.control is not None and not peers(request)):
            return None
        return self._by_prompt.session_of(call, request, stamp)

    def _enter(self, call: str, request: TokenizedGenerateReqInput, now_s: float, *, track: bool = True) -> None:
        if track:
            self._inside[request.rid] = call
        if (asker := self._askers.pop(call, None)) is not None:
            self._send(asker, self._let_in(call, request.priority))
        elif self.control is not None:  # the door may have forgotten the call by the time that decode asks
            _remember(self._verdicts, call, (self._let_in(call, request.priority), now_s))
        if self._copies is not None:
            self._tell_copy(self._copies, call, now_s)
        self._turn.go_on(request)

    def _tell_copy(self, copies: Copies, call: str, now_s: float) -> None:
        """Tell all ranks which decode of those that are alive keeps most of the call's session."""
        session_id = self.door.session_of(call)
        if session_id is None:
            return
        alive = frozenset(gate for gate, heard_s in self._gates.items() if now_s - heard_s <= LENT_FOR_S)
        if (copy := copies.longest(session_id, alive)) is not None:
            self._turn.go_on(ForRanks(copy.holder, Kept(int(call), copy.tokens)))

    def _let_in(self, call: str, priority_ms: int) -> messages.Enter:
        session_id = self.door.session_of(call)
        is_inferred = session_id is not None and session_id.startswith(INFERRED_PREFIX)
        return messages.Enter(int(call), priority_ms, session_id if is_inferred else None)

    def _note_left(self, call: str, *, answered: bool) -> None:
        if self._by_prompt is not None:
            self._by_prompt.left(call, self.door.session_of(call), answered=answered)

    def _abort(self, abort: Any, now_s: float) -> None:
        for call, held in [item for item in self._held.items() if aborts(abort, item[1].request.rid)]:
            self._forget_held(call)
            drop(self._answer, held.request)
            self.door.abandon(call, now_s)
            self._tell_turned(call, Reason.CLIENT_LEFT, 0.0, now_s)

    def _conclude(self, outcome: Outcome, now_s: float) -> None:
        """A wait at the door has ended: tell both legs. The call counts as held until it has been handed on or
        answered, so that it is not lost should that fail."""
        call = outcome.call_id
        held = self._held[call]
        self._note(outcome, held.request, held.session_id)
        if isinstance(outcome, Admit):
            metrics().door_wait.observe(outcome.waited_s)
            self._enter(call, held.request, now_s)
            del self._held[call]
        else:
            self._turn_away(outcome, now_s)

    def _turn_away(self, refused: Refuse, now_s: float) -> None:
        """Answer a refused call's own leg, and have decode answer the other one."""
        refuse(self._answer, self._held[refused.call_id].request, refused.reason, refused.retry_after_s)
        self._forget_held(refused.call_id)
        self._tell_turned(refused.call_id, refused.reason, refused.retry_after_s, now_s)

    def _tell_turned(self, call: str, reason: Reason, retry_after_s: float, now_s: float) -> None:
        """Tell the decode gate that waits for the verdict, and keep it for one that asks yet."""
        if self.control is None:
            return
        verdict = messages.Turned(int(call), reason, retry_after_s)
        if (asker := self._askers.pop(call, None)) is not None:
            self._send(asker, verdict)
        _remember(self._verdicts, call, (verdict, now_s))

    def _forget_held(self, call: str) -> TokenizedGenerateReqInput | None:
        held = self._held.pop(call, None)
        if held is None:
            return None
        if held.request.bootstrap_room is not None:
            self._dropped_rooms.append(held.request.bootstrap_room)
        return held.request

    # How decode gates are heard and told.

    def _hear(self, peer: bytes, message: messages.FromDecode, now_s: float) -> None:
        if peer not in self._gates and self._rank.count > 1:
            self._send(peer, messages.Ranks(self._rank.count))
        self._gates[peer] = now_s
        if isinstance(message, messages.Ask):
            self._asked(peer, message.room, now_s)
        elif isinstance(message, messages.Left):
            self._changed = True
            self._left_decode(peer, message, now_s)
        elif isinstance(message, messages.Lends):
            self._lent[peer] = message.tokens, now_s
        elif isinstance(message, messages.Keeps):
            if self._copies is not None:
                for session_id, tokens in message.sessions:
                    self._copies.shorten(session_id, peer, tokens)
        elif isinstance(message, messages.Lease):
            if not message.busy:
                self._note_copy(self.door.session_of(str(message.room)), peer, message.tokens)
            self._turn.go_on(ForRanks(peer, message))
        else:
            for room in message.rooms:
                self.door.decoding(str(room), now_s)

    def _asked(self, peer: bytes, room: int, now_s: float) -> None:
        call = str(room)
        if call in self._held:
            self._askers[call] = peer
            self._send(peer, messages.Wait(room))
        elif (session_id := self.door.session_of(call)) is not None:
            self._send(peer, self._let_in(call, self._priorities.stamp(self.door.order(session_id, now_s))))
        elif (verdict := self._verdicts.get(call)) is not None:
            self._send(peer, verdict[0])
        else:
            _remember(self._early, call, (peer, now_s))

    def _left_decode(self, peer: bytes, message: messages.Left, now_s: float) -> None:
        """Decode is done with a call. If it waits here still, its client has gone and this leg goes the same way."""
        call = str(message.room)
        self._early.pop(call, None)
        self._askers.pop(call, None)
        if (request := self._forget_held(call)) is not None:
            drop(self._answer, request)
            self.door.abandon(call, now_s)
        else:
            self._note_left(call, answered=message.answered)
            session_id = self.door.session_of(call)
            if message.kept_tokens:
                self._note_copy(session_id, peer, message.kept_tokens)
            self.door.finish(call, message.output_tokens, now_s, final=message.final)
            if message.priority_ms is not None and session_id is not None:
                priority_ms = self._priorities.stamp(self.door.order(session_id, now_s))
                if priority_ms != message.priority_ms and self.door.live_session(session_id) is not None:
                    self._send(peer, messages.Reorder(session_id, priority_ms))

    def _note_copy(self, session_id: str | None, peer: bytes, tokens: int) -> None:
        if self._copies is not None and session_id is not None:
            self._copies.note(session_id, peer, tokens)

    def _tell_ended(self) -> None:
        sessions = self.door.take_ended()
        for session in sessions:
            show_prediction(session)
            if self._by_prompt is not None:
                self._by_prompt.ended(session.session_id)
            if self._copies is not None:
                self._copies.ended(session.session_id)
            if self._has_radix_session(session.session_id) and self.door.live_session(session.session_id) is None:
                self._turn.go_on(CloseSessionReqInput(session_id=session.session_id))
        self._tell_gates([session.session_id for session in sessions], paused=False)
        self._tell_gates(self.door.take_sent_back(), paused=True)

    def _tell_gates(self, session_ids: list[str], *, paused: bool) -> None:
        """Decode is to ask about these sessions' next calls."""
        for start in range(0, len(session_ids), messages.SESSIONS_PER_MESSAGE):
            some = session_ids[start : start + messages.SESSIONS_PER_MESSAGE]
            for gate in list(self._gates):
                self._send(gate, messages.Ended(some, paused))

    def _note(self, decision: Decision, request: TokenizedGenerateReqInput, session_id: str | None) -> None:
        """Count a decision about `request`, and log it where that was asked for."""
        metrics().decisions.labels(KINDS[type(decision)], decision.reason.value).inc()
        if self._decision_log is None:
            return
        session = None if session_id is None else self.door.live_session(session_id)
        self._decision_log.note(
            decision,
            session_id,
            self.door.state(),
            priority_ms=request.priority,
            need_tokens=None if session is None else round(session.reserved_tokens),
        )

    def _look(self, now_s: float) -> None:
        """Once a second: let the budget follow the engine, show the state, forget what was asked in vain."""
        if self._watch is not None:
            self._view = self._watch.view(
                now_s, lent_tokens=self._lent_tokens(now_s), read_tokens_per_s=self._read_tokens_per_s()
            )
            self.door.observe(self._view, now_s)
            show_cache(self._view)
        show_door(self.door.state())
        if self.control is not None:
            show_control(self._control_figures(self.control.address, now_s))
        if self._predictor is not None:
            show_failures("predictor", self._predictor.counts.failures, self._predictor.last_failure)
            if self._predictor.log is not None:
                show_failures("session_log", self._predictor.log.lost, self._predictor.log.last_failure)
        for kept in (self._early, self._verdicts):
            while kept and now_s - next(iter(kept.values()))[1] > REMEMBER_FOR_S:
                kept.popitem(last=False)

    def _lent_tokens(self, now_s: float) -> int:
        """What decode instances can lend now, as far as they still say so."""
        for peer in [peer for peer, (_, at_s) in self._lent.items() if now_s - at_s > LENT_FOR_S]:
            del self._lent[peer]
        return sum(tokens for tokens, _ in self._lent.values())

    def _send(self, peer: bytes, message: messages.FromPrefill) -> bool:
        sent = self.control is not None and self.control.send(peer, message)
        if not sent and self._gates.pop(peer, None) is not None and self._copies is not None:
            self._copies.gone(peer)
        return sent

    def _control_figures(self, address: str, now_s: float) -> ControlFigures:
        heard_s = {peer.hex(): at_s for peer, at_s in self._gates.items()}
        unanswered = len(self._early) if self._rank.count == 1 else 0  # with several ranks most are other doors' calls
        return control_figures(address, heard_s, unanswered, now_s)


def _remember(kept: OrderedDict[str, T], call: str, what: T) -> None:
    kept[call] = what
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)
