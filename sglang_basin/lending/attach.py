"""Puts a scheduler's side of lending in place, by its role, and hands its ranks what the gate has for them."""

from __future__ import annotations

import os
from typing import Any

from sglang_basin.config import BasinConfig
from sglang_basin.lending import decode, prefill
from sglang_basin.lending.ranks import take_out


def attach(result: Any, self: Any) -> None:
    """After `Scheduler.init_request_receiver`, on every rank: pools, tree and queues exist, no call has come."""
    config = BasinConfig.from_environment(os.environ)
    if config is None or config.lending == "off":
        return
    role = self.disaggregation_mode.value
    if role == "prefill":
        prefill.attach(self, config.lending_patience_s, config.lending_transport)
    elif role == "decode":
        decode.attach(self, config.lent_share, config.max_live_sessions)


def hear(result: Any, self: Any, local_reqs: Any = None) -> list[Any] | None:
    """After `SchedulerRequestReceiver.recv_requests`, once a turn on every rank, behind the broadcast."""
    told, requests = take_out(result)
    for message in told:
        prefill.hear(message)
        decode.hear(message)
    decode.settle()
    return requests if told else None
