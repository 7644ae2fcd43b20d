"""Reservation laws: what a session counts for in the budget.

A law sees what the door sees of a session now, its predicted peak included; it never sees output lengths, peaks or end
times that lie ahead. A reservation has a mean and a variance: a law that reserves a number outright has no variance,
one that multiplexes statistically has, and the door adds up both: Σ mean + z · √(Σ variance) ≤ budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from sglang_basin.policy.sessions import Session

Reservation = tuple[float, float]
"""Tokens that a session counts for, and the variance (tokens²) of that count."""


class ReservationLaw(Protocol):
    """Maps a session to its reservation. Must be pure: same context, prediction and number of calls, same answer. It is
    asked when these change."""

    @property
    def name(self) -> str: ...

    @property
    def z(self) -> float:
        """How many standard deviations of the sum the budget must leave room for; 0 for laws without variance."""

    def reserve(self, session: Session) -> Reservation:
        """The reservation of `session`: at least its context."""


@dataclass(frozen=True, slots=True)
class CurrentContext:
    """Reserve the context that a session has now. The working set is then exactly the sum of reservations."""

    name: str = "current"
    z: float = 0.0

    def reserve(self, session: Session) -> Reservation:
        return session.context_tokens, 0.0


@dataclass(frozen=True, slots=True)
class PartialPeak:
    """Reserve current + α · (predicted peak - current). α = 1 is the article's law, α = 0 the current context.

    Peaks do not coincide, so reserving all of them leaves cache idle (DESIGN section 2, b). `share` is the quantile of
    the prediction that is taken for the peak.
    """

    alpha: float
    share: float = 0.5
    name: str = "partial"
    z: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: must be between 0 and 1, got {self.alpha}")
        if not 0 < self.share < 1:
            raise ValueError(f"share: must be between 0 and 1, got {self.share}")

    def reserve(self, session: Session) -> Reservation:
        now = session.context_tokens
        return now + self.alpha * (session.predicted_peak(self.share) - now), 0.0


class StatisticalMultiplexing:
    """Admit while the chance that the total working set exceeds the budget within a horizon stays under ε.

    A live session's context a horizon ahead is taken as its current context plus its expected growth until then, at
    most up to the predicted peak; the spread of the prediction gives the variance, in proportion to how much of the
    growth falls into the horizon. Sessions are independent, so the sum is normal: the sum of means plus z standard
    deviations must fit, with z the (1 - ε) quantile of the normal distribution. This is the "effective bandwidth" of
    admission control for bursty sources (Guérin, Ahmadi, Naghshineh, 1991, the stationary approximation). The mean
    grows with the prediction; the spread need not: a sharper prediction of a longer session can count for less.
    """

    name = "multiplex"

    def __init__(self, epsilon: float = 0.05, horizon_calls: float = 10.0) -> None:
        if not 0 < epsilon < 0.5:
            raise ValueError(f"epsilon: must be between 0 and 0.5, got {epsilon}")
        if not horizon_calls > 0:
            raise ValueError(f"horizon_calls: must be positive, got {horizon_calls}")
        self.z = NormalDist().inv_cdf(1 - epsilon)
        self.horizon_calls = horizon_calls

    def reserve(self, session: Session) -> Reservation:
        now = session.context_tokens
        middle = max(0.0, session.predicted_peak(0.5) - now)
        spread = max(0.0, session.predicted_peak(0.9) - session.predicted_peak(0.1)) / 2.56  # ±1.28 standard deviations
        per_call = session.growth_per_call()
        reached = min(middle, per_call * self.horizon_calls) if per_call is not None else middle
        part = reached / middle if middle > 0 else 1.0
        return now + reached, (part * spread) ** 2


def law_named(
    name: str, *, alpha: float = 0.5, share: float = 0.5, epsilon: float = 0.05, horizon_calls: float = 10.0
) -> ReservationLaw:
    """The law of a configuration. Raises ValueError for an unknown name or a wrong parameter."""
    if name == "current":
        return CurrentContext()
    if name == "peak":
        return PartialPeak(1.0, share, name="peak")
    if name == "partial":
        return PartialPeak(alpha, share)
    if name == "multiplex":
        return StatisticalMultiplexing(epsilon, horizon_calls)
    raise ValueError(f"law: must be one of current, peak, partial, multiplex, got {name!r}")
