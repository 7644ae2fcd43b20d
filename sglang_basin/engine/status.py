"""From a live scheduler to `/basin/status`: asked through SGLang's own question for a scheduler's state.

The HTTP process marks its question (`STATUS_RID`), and only that one is answered with Basin's state: `/server_info` and
whoever else asks get what stock SGLang says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_basin.engine import gate
from sglang_basin.engine.metrics import counts, fault, metrics
from sglang_basin.engine.ranks import ONLY_RANK, Rank
from sglang_basin.lending import prefill
from sglang_basin.status import MAX_PEERS, LenderFigures, Status

STATUS_RID = "basin.status"

_started_s = time.monotonic()


def report_state(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around `Scheduler.get_internal_state`: answer Basin's own question, leave all others to SGLang."""
    if recv_req.rid != STATUS_RID:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    state = msgspec.to_builtins(status_of(self.disaggregation_mode.value, Rank.here()))
    return GetInternalStateReqOutput(internal_state={"basin": state})


def status_of(mode: str, rank: Rank = ONLY_RANK) -> Status:
    """This scheduler's state; `mode` is SGLang's disaggregation mode. Does not raise."""
    status = Status(
        role="unified" if mode == "null" else mode,  # type: ignore[arg-type]
        dp_rank=rank.own,
        dp_ranks=rank.count,
        gate=gate.condition(),
        uptime_s=round(time.monotonic() - _started_s, 1),
        door=None,
        held_calls=0,
        entered_sessions=0,
        cache=None,
        control=None,
        decisions=counts(metrics().decisions),
        faults=counts(metrics().faults),
        lenders=[
            LenderFigures(name=name, transport=choice.transport, why=choice.why)
            for name, choice in list(prefill.lenders().items())[:MAX_PEERS]
        ],
    )
    try:
        gate.describe(status)
    except Exception:  # noqa: BLE001 - a question must not cost the scheduler
        fault("status", "could not tell the gate's state")
    return status
