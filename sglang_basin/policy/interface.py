"""What a serving policy is asked, by the engine's gate and by the simulator alike.

`Door` (Basin) and the rivals in `policy.rivals` implement `ServingPolicy`. Whatever drives a policy calls, in this
order per call: `call` when it arrives, `prefilled`, `finish`; and `poll` after every change and at `wake_s`. A policy
sees only what a serving system can see at that moment: prompts and outputs that have happened, and `EngineView`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_basin.policy.decisions import Decision, Outcome
from sglang_basin.policy.prediction import PeakPredictor, Prediction

__all__ = ["EngineView", "PeakPredictor", "Prediction", "ServingPolicy"]


class EngineView(NamedTuple):
    """What an instance's scheduler knows about itself. Tokens unless the name says otherwise."""

    cache_tokens: int
    """Prefill's KV pool on the device."""
    host_tokens: int = 0
    """Its host tier; 0 without one."""
    lent_tokens: int = 0
    """Idle decode memory that is really available to keep finished calls' KV."""
    cache_used_share: float = 0.0
    """Part of the device pool that holds KV, of running calls or cached."""
    hit_rate: float | None = None
    """Cached over prompt tokens of the calls prefilled in the last minute; None while there were none."""
    prefill_waiting_calls: int = 0
    decode_tokens: int = 0
    decode_used_share: float = 0.0
    """Part of decode's pool that running calls hold or have reserved."""
    decode_waiting_calls: int = 0
    read_tokens_per_s: float | None = None
    """How fast lent KV comes back into this cache while it is being read; None while that is not known."""

    @property
    def capacity_tokens(self) -> int:
        """All memory that can give a prefix back: device, host, lent."""
        return self.cache_tokens + self.host_tokens + self.lent_tokens


class ServingPolicy(Protocol):
    """Decides which call goes on when, in which order queues serve calls, and what stays cached on purpose."""

    name: str

    def call(
        self,
        call_id: str,
        session_id: str | None,
        prompt_tokens: int,
        now_s: float,
        *,
        ends_session: bool = False,
    ) -> Decision:
        """A call arrived: it goes on, waits, or is turned away."""

    def prefilled(self, call_id: str, now_s: float, *, cached_tokens: int | None = None) -> None:
        """Prefill is done with the call, of whose prompt it found `cached_tokens` cached; decode has it now."""

    def finish(self, call_id: str, output_tokens: int, now_s: float) -> None:
        """The call is over after so much output; its session runs a tool now, or has ended."""

    def abandon(self, call_id: str, now_s: float) -> None:
        """The client left (disconnect, time-out) while the call waited or ran."""

    def end(self, session_id: str, now_s: float) -> Sequence[Outcome]:
        """The client ended the session; calls of it that still wait are turned away."""

    def poll(self, now_s: float) -> list[Outcome]:
        """Whose wait ends now."""

    def observe(self, view: EngineView, now_s: float) -> None:
        """The engine's present state; given once a second and before a `poll` after a change."""

    def wake_s(self, now_s: float) -> float | None:
        """When `poll` should be called next if nothing happens before; None if it need not."""

    def order(self, session_id: str, call_arrived_s: float) -> float:
        """Key of a call in prefill's and decode's queues, lowest first."""

    def keep_until_s(self, session_id: str, now_s: float) -> float | None:
        """Until when the KV of a call that just finished is pinned in prefill's cache; None leaves it to LRU."""
