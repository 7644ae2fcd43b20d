"""Goodput: sessions an hour that were served well. Pure.

A session counts when it finished, took at most `stretch` (4) times its unloaded time in all, and at least
`steps_share` (95 %) of its decode steps met the per-token target (50 ms). Rejected, dropped, failed and unfinished
sessions are failures: they were offered and do not count. (Source: the article on Basin, evaluation section.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """What "served well" means."""

    stretch: float = 4.0
    tpot_s: float = 0.050
    steps_share: float = 0.95

    def __post_init__(self) -> None:
        if not self.stretch >= 1:
            raise ValueError(f"stretch must be at least 1, got {self.stretch!r}")
        if not self.tpot_s > 0:
            raise ValueError(f"tpot_s must be positive, got {self.tpot_s!r}")
        if not 0 <= self.steps_share <= 1:
            raise ValueError(f"steps_share must be between 0 and 1, got {self.steps_share!r}")


@dataclass(frozen=True, kw_only=True)
class ServedSession:
    """What goodput needs to know of one offered session."""

    finished: bool
    total_s: float
    unloaded_s: float
    steps: int
    """Decode steps measured: tokens after the first chunk of each call."""
    steps_on_time: int


def count_steps(chunks: Iterable[tuple[int, float]], tpot_s: float) -> tuple[int, int]:
    """(all, on time) decode steps of received chunks: n tokens after d seconds are n steps of d/n each."""
    steps = on_time = 0
    for tokens, seconds in chunks:
        steps += tokens
        if seconds <= tpot_s * tokens:
            on_time += tokens
    return steps, on_time


def within_target(session: ServedSession, target: Target) -> bool:
    """Whether the session counts. One without any decode step meets the per-token target."""
    return (
        session.finished
        and session.total_s <= target.stretch * session.unloaded_s
        and session.steps_on_time >= target.steps_share * session.steps
    )


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Rates are per hour of `span_s`, the time over which the sessions were offered."""

    offered: int
    within: int
    span_s: float

    @property
    def per_hour(self) -> float:
        return 3600 * self.within / self.span_s

    @property
    def offered_per_hour(self) -> float:
        return 3600 * self.offered / self.span_s

    @property
    def completed_share(self) -> float | None:
        """The share of offered sessions that finished within target; None when none was offered."""
        return self.within / self.offered if self.offered else None


def goodput(sessions: Sequence[ServedSession], span_s: float, target: Target) -> Goodput:
    """Judge all sessions offered during `span_s` seconds. Raises ValueError when the span is not positive."""
    if not span_s > 0:
        raise ValueError(f"span_s must be positive, got {span_s!r}")
    within = sum(within_target(session, target) for session in sessions)
    return Goodput(offered=len(sessions), within=within, span_s=span_s)
