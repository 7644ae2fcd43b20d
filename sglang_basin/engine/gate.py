"""The hooks' own code in the scheduler: where requests come in, where calls leave, and the fall-back to stock.

Everything here runs in the scheduler's thread. On rank 0 (the first of tensor and context parallelism; each
data-parallel rank has one) `pull` sees requests before they are broadcast, so all ranks get one order. The gate proper
is `PrefillGate` or `DecodeGate`; should it ever raise, this module lets go of every held call, counts the fault and
leaves SGLang alone from then on.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sglang_basin.config import BasinConfig
from sglang_basin.engine.metrics import fault, label_rank, log, metrics
from sglang_basin.engine.ranks import Rank
from sglang_basin.engine.rooms import DroppedRooms, RoomTables
from sglang_basin.status import Status


class Gate(Protocol):
    """What a gate owes to this module. All methods run on rank 0's scheduler thread; none blocks."""

    def pass_on(self, requests: list[Any]) -> list[Any]:
        """Requests that go on now, in order: of the new ones those that need not wait, of the held ones the freed."""

    def left(self, request: Any) -> None:
        """A call has left SGLang: finished, handed over to decode, aborted or failed."""

    def describe(self, status: Status) -> None:
        """Put this gate's figures into `status`, for whoever watches."""

    def post(self, peer: Any, message: Any) -> bool:
        """Send a message to one of the other side's gates; False where it cannot go. For lending."""

    def let_go(self) -> list[Any]:
        """Give up: return every request that is held or was under way, and hold none from now on. Must not raise."""


@dataclass(slots=True)
class _Attached:
    """What Basin has in this scheduler process."""

    gate: Gate | None
    """None off rank 0, and after a fault."""
    rooms: RoomTables | None
    """On every rank of a prefill instance."""
    failed: bool = False


_here = _Attached(None, None)


def condition() -> Literal["on", "failed", "absent"]:
    """How this process's gate is doing; absent off rank 0."""
    return "failed" if _here.failed else "absent" if _here.gate is None else "on"


def describe(status: Status) -> None:
    """Let the gate, if there is one, put its figures into `status`."""
    if _here.gate is not None:
        _here.gate.describe(status)


def post(peer: Any, message: Any) -> bool:
    """Send a message of lending's through the gate's control channel, in the scheduler's thread of rank 0. False where
    it cannot go."""
    return _here.gate is not None and _here.gate.post(peer, message)


def attach(result: Any, self: Any) -> None:
    """After `Scheduler.init_request_receiver`: build this process's gate. Raises when Basin cannot protect."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_basin.engine import hooks
    from sglang_basin.engine.plugin import stop_message

    config = BasinConfig.from_environment(os.environ)
    if config is None:
        raise RuntimeError("Basin's hooks are in place but its configuration is gone from the environment")
    if wrong := hooks.unapplied(hooks.needed(config)):
        raise RuntimeError(stop_message(wrong))
    rank = Rank.here()
    if rank.count > 1:
        label_rank(rank.own)
    role = self.disaggregation_mode.value
    parallel = get_parallel()
    first_rank = parallel.pp_rank == parallel.attn_tp_rank == parallel.attn_cp_rank == 0
    if role == "prefill":
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        _here.rooms = RoomTables(manager, shown=first_rank, hold_limit_s=config.hold_limit_s)
    if not first_rank:
        return
    if role == "decode":
        from sglang_basin.engine.decode_gate import DecodeGate

        _here.gate = DecodeGate.for_scheduler(self, config)
    else:
        from sglang_basin.engine.prefill_gate import PrefillGate

        _here.gate = PrefillGate.for_scheduler(self, config)
    metrics().gate_up.set(1)
    log.info("Basin's gate is in place: %s, %s", role, _here.gate)


def pull(original: Any, self: Any) -> list[Any] | None:
    """Around `SchedulerRequestReceiver._pull_raw_reqs`: what comes in passes the gate first."""
    requests = original(self)
    if requests is None or _here.gate is None:
        return requests
    try:
        return _here.gate.pass_on(requests)
    except Exception:  # noqa: BLE001 - whatever it was, the calls must go on
        return _give_up()


def calls_left(result: Any, self: Any, reqs: Any, return_logprob: Any = None, skip_req: Any = None) -> None:
    """After `SchedulerOutputStreamer.stream_output`, on every rank: the finished ones among `reqs` have left."""
    for req in reqs:
        if req.finished_reason is not None:
            _left(req)


def call_aborted(result: Any, self: Any, abort_req: Any, req: Any) -> None:
    """After `Scheduler.send_abort_output`, on every rank: the call was ended while it waited in one of SGLang's queues,
    or at the gate."""
    if _here.rooms is not None and (sender := getattr(req, "disagg_kv_sender", None)) is not None:
        _here.rooms.abort(sender)
    _left(req)


def clear_dropped_rooms(result: Any, self: Any, local_reqs: Any = None) -> list[Any] | None:
    """After `SchedulerRequestReceiver.recv_requests`, on every rank: forget the transfers of dropped calls."""
    rooms = _here.rooms
    if rooms is None:
        return None
    now_s = time.monotonic()
    dropped = [message for message in result or () if isinstance(message, DroppedRooms)]
    try:
        for message in dropped:
            rooms.drop(message.rooms, now_s)
        rooms.sweep(now_s)
    except Exception:  # noqa: BLE001 - stale table entries are harmless, a dead scheduler is not
        fault("rooms", "could not clear the transfer tables of dropped calls")
    return [message for message in result if not isinstance(message, DroppedRooms)] if dropped else None


def _left(req: Any) -> None:
    try:
        if _here.rooms is not None and req.bootstrap_room is not None:
            _here.rooms.end(req.bootstrap_room, time.monotonic())
        if _here.gate is not None:
            _here.gate.left(req)
    except Exception:  # noqa: BLE001
        fault("left", "could not note the end of a call; its session will end by idle time-out")


def _give_up() -> list[Any]:
    fault("gate", "the gate failed and is off until a restart; all calls go on as in stock SGLang")
    gate, _here.gate = _here.gate, None
    _here.failed = True
    metrics().gate_up.set(0)
    return gate.let_go() if gate is not None else []
