"""What finished sessions teach: how long tasks and agents ran before; and the stages by which sessions are told apart.

Everything here has a fixed size and forgets exponentially: after as many sessions as its `horizon`, what was learned
weighs 1/e of what it did. How wrong predictions were: `calibration` and `mixture`.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

FIRST_CALLS: tuple[int, ...] = (1, 2, 3, 4, 6, 9, 13, 19, 28, 41, 65, 97)
"""Calls at which a new stage of a session begins; each stage has its own calibration."""

STAGES = len(FIRST_CALLS)


def stage(calls: int) -> int:
    """Which stage a session is in at its so-manieth call, from 0."""
    return max(0, bisect.bisect_right(FIRST_CALLS, calls) - 1)


class Averages:
    """Running mean log peak by key (a task's or an agent's fingerprint), the least recently seen forgotten first."""

    HOLD = 3.0
    """Sessions' worth of the mean of all that a key's own mean starts with."""

    def __init__(self, *, capacity: int, horizon: float) -> None:
        self._of: OrderedDict[int, tuple[float, float]] = OrderedDict()  # key -> (weight, mean)
        self._capacity = capacity
        self._keep = 1.0 - 1.0 / horizon
        self._all = (0.0, 0.0)
        self._variance = (0.0, 0.0)

    def __len__(self) -> int:
        return len(self._of)

    @property
    def mean(self) -> float | None:
        """Over all keys; None before the first session."""
        return self._all[1] if self._all[0] > 0 else None

    def shrunk(self, key: int | None, otherwise: float) -> float:
        """The key's mean, held towards the mean of all, or towards `otherwise` before anything was learned."""
        middle = self._all[1] if self._all[0] > 0 else otherwise
        weight, mean = self._of.get(key, (0.0, 0.0)) if key is not None else (0.0, 0.0)
        return (weight * mean + self.HOLD * middle) / (weight + self.HOLD)

    def alone(self, key: int | None) -> tuple[float, float]:
        """(sessions, mean) of the key itself; (0, 0) for a stranger."""
        return self._of.get(key, (0.0, 0.0)) if key is not None else (0.0, 0.0)

    def within_variance(self, otherwise: float, hold: float = 10.0) -> float:
        """Of sessions around their key's mean, held towards `otherwise` until enough keys came again."""
        weight, mean = self._variance
        return (weight * mean + hold * otherwise) / (weight + hold)

    def learn(self, key: int | None, log_peak: float) -> None:
        self._all = self._step(self._all, log_peak)
        if key is None:
            return
        weight, mean = self._of.pop(key, (0.0, 0.0))
        if weight > 0:
            # The error of a mean over n has variance v·(1 + 1/n).
            self._variance = self._step(self._variance, (log_peak - mean) ** 2 / (1.0 + 1.0 / weight))
        self._of[key] = self._step((weight, mean), log_peak)
        if len(self._of) > self._capacity:
            self._of.popitem(last=False)

    def _step(self, old: tuple[float, float], value: float) -> tuple[float, float]:
        weight = old[0] * self._keep
        return weight + 1.0, (weight * old[1] + value) / (weight + 1.0)

    def as_lists(self, most: int) -> dict[str, Any]:
        """For a model file: the `most` recently seen keys and the sums over all."""
        kept = list(self._of.items())[-most:] if most else []
        return {
            "keys": [[f"{key:016x}", weight, mean] for key, (weight, mean) in kept],
            "all": list(self._all),
            "variance": list(self._variance),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """From `as_lists`. Raises ValueError, KeyError or TypeError for another form."""
        self._all = _pair(saved["all"])
        self._variance = _pair(saved["variance"])
        for key, weight, mean in saved["keys"][-self._capacity :]:
            self._of[int(key, 16)] = _pair((weight, mean))


def _pair(values: Sequence[float]) -> tuple[float, float]:
    weight, mean = (float(value) for value in values)
    if not (math.isfinite(weight) and math.isfinite(mean) and weight >= 0):
        raise ValueError(f"a weight and a mean must be finite numbers, got {values!r}")
    return weight, mean
