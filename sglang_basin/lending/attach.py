"""Puts a scheduler's side of lending in place, by its role."""

from __future__ import annotations

import os
from typing import Any

from sglang_basin.config import BasinConfig


def attach(result: Any, self: Any) -> None:
    """After `Scheduler.init_request_receiver`, on every rank: pools, tree and queues exist, no call has come."""
    config = BasinConfig.from_environment(os.environ)
    if config is None or config.lending == "off":
        return
    role = self.disaggregation_mode.value
    if role == "prefill":
        from sglang_basin.lending import prefill

        prefill.attach(self, config.lending_patience_s, config.lending_transport)
    elif role == "decode":
        from sglang_basin.lending import decode

        decode.attach(self, config.lent_share)
