"""The gate on a prefill instance: it owns the door and answers the decode gates that ask.

Prefill sees every call of its sessions and guards its own cache, so this is where admission runs. A call is known by
its bootstrap room, the same on both legs; whichever leg is seen first brings it to the door.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_basin.config import BasinConfig, ConfigError
from sglang_basin.engine import messages
from sglang_basin.engine.answers import Answer, drop, refuse, scheduler_answer
from sglang_basin.engine.control import PrefillEnd
from sglang_basin.engine.identity import stamped
from sglang_basin.engine.metrics import SHOW_EVERY_S, fault, log, metrics, show_door
from sglang_basin.engine.requests import (
    AbortReq,
    CloseSessionReqInput,
    TokenizedGenerateReqInput,
    aborts,
    call_id,
)
from sglang_basin.engine.rooms import DroppedRooms
from sglang_basin.engine.turn import Turn
from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Admit, Decision, Outcome, Queue, Reason, Refuse
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.prediction import PeaksSeen
from sglang_basin.policy.recording import RecordedDoor
from sglang_basin.policy.reservation import law_named

POLL_EVERY_S = 1.0
"""The door is asked whose wait is over after every change, and this often for those that time alone ends."""


class PrefillGate:
    """Holds calls of sessions that may not enter yet. One per prefill instance (or unified server), on rank 0."""

    def __init__(
        self,
        door: Door | RecordedDoor,
        control: PrefillEnd | None,
        answer: Answer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`control` is None for a unified server, which has no decode instances."""
        self.door = door
        self.control = control
        self._answer = answer
        self._turn = Turn()
        self._clock = clock
        self._held: dict[str, TokenizedGenerateReqInput] = {}  # by call id
        self._inside: dict[str, str] = {}  # rid of a call inside SGLang -> its call id
        self._askers: dict[str, bytes] = {}  # call id -> the decode gate that waits for a verdict
        self._gates: set[bytes] = set()  # every decode gate heard of
        self._dropped_rooms: list[int] = []
        self._changed = False  # something happened at the door since the last poll
        self._next_poll_s = 0.0
        self._next_show_s = 0.0

    @classmethod
    def for_scheduler(cls, scheduler: Any, config: BasinConfig) -> PrefillGate:
        """Build the gate of a live scheduler; binds the control channel. Raises ControlError when it cannot."""
        from sglang.srt.runtime_context import get_disagg

        control = None
        if scheduler.disaggregation_mode.value == "prefill":
            port = get_disagg().disaggregation_bootstrap_port + config.control_port_offset
            control = PrefillEnd(config.control_host or scheduler.server_args.host, port)
            if scheduler.idle_sleeper is not None:
                import zmq

                scheduler.idle_sleeper.poller.register(control.socket, zmq.POLLIN)
        door: Door | RecordedDoor = Door(
            DoorSettings(
                idle_timeout_s=config.idle_timeout_s,
                hold_limit_s=config.hold_limit_s,
                max_sessions=config.max_live_sessions,
                enabled=config.admission != "off",
            ),
            law=law_named("current" if config.admission == "off" else config.admission, alpha=config.reserved_growth),
            budget=Budget(BudgetSettings(fixed_tokens=config.budget_tokens), scheduler.max_total_num_tokens),
            predictor=PeaksSeen(),
        )
        if config.record is not None:
            door = RecordedDoor(door, _recording(config.record))
        return cls(door, control, scheduler_answer(scheduler))

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
                self._conclude(outcome)
            self._tell_ended()
        if self._dropped_rooms:
            self._turn.go_on(DroppedRooms(tuple(self._dropped_rooms)))
            self._dropped_rooms.clear()
        if now_s >= self._next_show_s:
            self._next_show_s = now_s + SHOW_EVERY_S
            show_door(self.door.state())
        return self._turn.end()

    def left(self, request: Any) -> None:
        known = self._inside.pop(request.rid, None)
        if known is None:
            return
        self._changed = True
        now_s = self._clock()
        if self.control is None:
            self.door.finish(known, len(request.output_ids), now_s)
        elif _failed(request):
            self.door.abandon(known, now_s)
        else:
            self.door.prefilled(known, now_s)

    def let_go(self) -> list[Any]:
        held = [*self._held.values(), *self._turn.rest()]
        self._held.clear()
        if self.control is not None:
            self.control.close()
        return held

    # How calls come and go.

    def _take(self, request: Any, now_s: float) -> None:
        if isinstance(request, TokenizedGenerateReqInput):
            self._arrive(request, now_s)
            return
        if isinstance(request, AbortReq):
            self._abort(request, now_s)
        elif isinstance(request, CloseSessionReqInput):
            for refused in self.door.end(request.session_id, now_s):
                self._conclude(refused)
        self._turn.go_on(request)

    def _arrive(self, request: TokenizedGenerateReqInput, now_s: float) -> None:
        session = stamped(request)
        call = call_id(request)
        session_id, ends_session = session if session is not None else (None, False)
        decision = self.door.call(call, session_id, len(request.input_ids or ()), now_s, ends_session=ends_session)
        _count(decision)
        if isinstance(decision, Queue):
            self._held[call] = request
            log.info("Basin holds a call of session %r: %s", session_id, decision)
        elif isinstance(decision, Refuse):
            self._held[call] = request
            self._turn_away(decision)
        else:
            self._enter(call, request, track=session is not None)

    def _enter(self, call: str, request: TokenizedGenerateReqInput, *, track: bool = True) -> None:
        if track:
            self._inside[request.rid] = call
        self._turn.go_on(request)

    def _abort(self, abort: Any, now_s: float) -> None:
        for call, request in [item for item in self._held.items() if aborts(abort, item[1].rid)]:
            self._forget_held(call)
            drop(self._answer, request)
            self.door.abandon(call, now_s)
            if (asker := self._askers.pop(call, None)) is not None:
                self._send(asker, messages.Turned(int(call), Reason.CLIENT_LEFT, 0.0))

    def _conclude(self, outcome: Outcome) -> None:
        """A wait at the door has ended: tell both legs."""
        _count(outcome)
        call = outcome.call_id
        if isinstance(outcome, Admit):
            metrics().door_wait.observe(outcome.waited_s)
            if (request := self._held.pop(call, None)) is not None:
                self._enter(call, request)
            if (asker := self._askers.pop(call, None)) is not None:
                self._send(asker, messages.Enter(int(call)))
        else:
            self._turn_away(outcome)

    def _turn_away(self, refused: Refuse) -> None:
        """Answer a refused call's own leg, and the decode gate that waits for a verdict."""
        call = refused.call_id
        if (request := self._forget_held(call)) is not None:
            refuse(self._answer, request, refused.reason, refused.retry_after_s)
        if (asker := self._askers.pop(call, None)) is not None:
            self._send(asker, messages.Turned(int(call), refused.reason, refused.retry_after_s))

    def _forget_held(self, call: str) -> TokenizedGenerateReqInput | None:
        request = self._held.pop(call, None)
        if request is not None and request.bootstrap_room is not None:
            self._dropped_rooms.append(request.bootstrap_room)
        return request

    # How decode gates are heard and told.

    def _hear(self, peer: bytes, message: messages.FromDecode, now_s: float) -> None:
        self._gates.add(peer)
        self._changed = True
        if isinstance(message, messages.Ask):
            call = str(message.room)
            decision = self.door.call(
                call, message.session_id, message.prompt_tokens, now_s, ends_session=message.ends_session, here=False
            )
            self._reply(peer, message.room, decision)
        elif isinstance(message, messages.AskAgain):
            decision = self.door.present(str(message.room), now_s)
            if decision is not None:
                self._reply(peer, message.room, decision)
        elif isinstance(message, messages.Left):
            self._askers.pop(str(message.room), None)
            self.door.finish(str(message.room), message.output_tokens, now_s)
        else:
            for room in message.rooms:
                self.door.decoding(str(room), now_s)

    def _reply(self, peer: bytes, room: int, decision: Decision) -> None:
        if isinstance(decision, Queue):
            self._askers[str(room)] = peer
            self._send(peer, messages.Wait(room))
        elif isinstance(decision, Refuse):
            self._send(peer, messages.Turned(room, decision.reason, decision.retry_after_s))
        else:
            self._send(peer, messages.Enter(room))

    def _tell_ended(self) -> None:
        ended = self.door.take_ended()
        for start in range(0, len(ended), 64):
            for gate in list(self._gates):
                self._send(gate, messages.Ended(ended[start : start + 64]))

    def _send(self, peer: bytes, message: messages.FromPrefill) -> None:
        if self.control is None or not self.control.send(peer, message):
            self._gates.discard(peer)


def _recording(path: str) -> Callable[[str], Any]:
    """Where lines of a recording go: the end of a file, line by line. Raises ConfigError when it cannot be opened; a
    write that fails later, on a full disk say, costs that line and nothing else."""
    try:
        file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the engine runs
    except OSError as error:
        raise ConfigError(f"--basin-record {path}: {error.strerror}") from None

    def write(line: str) -> None:
        try:
            file.write(line)
        except OSError:
            fault("recording", "could not write to the recording; admission goes on without it")

    return write


def _failed(request: Any) -> bool:
    """Whether a request that left prefill was aborted or failed, rather than handed over to decode."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = getattr(request, "finished_reason", None)
    return reason is None or isinstance(reason, FINISH_ABORT)


def _count(decision: Decision) -> None:
    kind = {Admit: "admit", Queue: "queue", Refuse: "refuse"}[type(decision)]
    metrics().decisions.labels(kind, decision.reason.value).inc()
