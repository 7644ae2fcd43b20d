"""Fixed priority: p = arrival + predicted peak / r, lowest first, set once per session and never changed.

The article's order (DESIGN section 2). Small sessions go ahead of large ones that came a little earlier; since p grows
with the arrival time, a session of peak W can be passed only by those that arrive within W / r seconds after it, so
nobody starves. What holds once and for all is a session's place at the door. Its calls inside are ordered by the same
formula with what is predicted of it by then (`Door.order`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeAwareOrder:
    """`tokens_per_s` is r: how many tokens of predicted peak weigh as much as a second of waiting."""

    tokens_per_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0:
            raise ValueError(f"tokens_per_s: must be positive, got {self.tokens_per_s}")

    def priority(self, arrived_s: float, peak_tokens: float) -> float:
        return arrived_s + peak_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """First come, first served, by session: every call of an earlier session before any of a later one."""

    def priority(self, arrived_s: float, peak_tokens: float) -> float:
        return arrived_s
