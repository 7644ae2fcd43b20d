"""When sessions arrive: a Poisson process or an even pace, with a surge. Pure: no clock, no input or output.

Both processes are made in *operational time*, the expected number of arrivals so far Λ(t) = ∫ rate, and mapped back
through Λ⁻¹. A surge therefore only compresses time: the draws of one seed stay the same with and without it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal


class ArrivalError(ValueError):
    """An arrival profile that makes no sense; the message names the field."""


@dataclass(frozen=True)
class Surge:
    """The rate is (1 + `extra`) times the base rate for `from_s` ≤ t < `to_s`."""

    extra: float
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        if not -1 <= self.extra < math.inf:
            raise ArrivalError(f"surge: a change of {self.extra:+.0%} leaves no rate")
        if not 0 <= self.from_s < self.to_s < math.inf:
            raise ArrivalError(f"surge: the window must have 0 ≤ from < to, got {self.from_s:g}s to {self.to_s:g}s")


@dataclass(frozen=True, kw_only=True)
class ArrivalProfile:
    """Arrivals over `duration_s` seconds, and at the same pace for `tail_s` more.

    Sessions of the tail keep the load on while late sessions finish; they do not count as offered.
    """

    rate_per_s: float
    duration_s: float
    surge: Surge | None = None
    tail_s: float = 0.0
    process: Literal["poisson", "fixed"] = "poisson"

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < math.inf:
            raise ArrivalError(f"rate: must be positive, got {self.rate_per_s:g}/s")
        if not 0 < self.duration_s < math.inf:
            raise ArrivalError(f"duration: must be positive, got {self.duration_s:g}s")
        if not 0 <= self.tail_s < math.inf:
            raise ArrivalError(f"tail: must not be negative, got {self.tail_s:g}s")
        if self.surge is not None and self.surge.to_s > self.duration_s:
            raise ArrivalError(
                f"surge: the window {self.surge.from_s:g}s to {self.surge.to_s:g}s ends after "
                f"the run of {self.duration_s:g}s"
            )
        if self.process not in ("poisson", "fixed"):
            raise ArrivalError(f"process: must be poisson or fixed, got {self.process!r}")

    @property
    def end_s(self) -> float:
        """When the last session may arrive."""
        return self.duration_s + self.tail_s

    def pieces(self) -> list[tuple[float, float, float]]:
        """(from_s, to_s, rate_per_s) of each stretch of constant rate, in order."""
        if self.surge is None:
            return [(0.0, self.end_s, self.rate_per_s)]
        surge = self.surge
        made = [
            (0.0, surge.from_s, self.rate_per_s),
            (surge.from_s, surge.to_s, self.rate_per_s * (1 + surge.extra)),
            (surge.to_s, self.end_s, self.rate_per_s),
        ]
        return [piece for piece in made if piece[1] > piece[0]]

    def expected(self, time_s: float) -> float:
        """Λ(t): the expected number of arrivals before `time_s`."""
        return math.fsum(rate * (min(time_s, to_s) - from_s) for from_s, to_s, rate in self.pieces() if time_s > from_s)

    def time_of(self, expected: float) -> float:
        """Λ⁻¹: the time by which `expected` arrivals are expected; infinity past the end of the profile."""
        left = expected
        for from_s, to_s, rate in self.pieces():
            here = rate * (to_s - from_s)
            if left < here:
                return min(from_s + left / rate, math.nextafter(to_s, 0.0))
            left -= here
        return math.inf


def arrival_times(profile: ArrivalProfile, seed: int) -> list[float]:
    """Seconds from the start of the run, ascending, all below `profile.end_s`. Same profile and seed, same times.

    The even pace puts arrival i at Λ⁻¹(i + ½), so that each window holds its expected number within one.
    """
    draws = random.Random(f"{seed}/arrivals")
    times: list[float] = []
    operational = 0.5 if profile.process == "fixed" else draws.expovariate(1.0)
    while (time_s := profile.time_of(operational)) < math.inf:
        times.append(time_s)
        operational += 1.0 if profile.process == "fixed" else draws.expovariate(1.0)
    return times
