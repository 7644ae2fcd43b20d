"""What finished sessions teach: how long tasks and agents ran before, and how wrong the predictions were.

Everything here has a fixed size and forgets exponentially: after as many sessions as its `horizon`, what was learned
weighs 1/e of what it did.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.policy.prediction import SHARES

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


class Mixture:
    """How much each of several predictions counts in their weighted mean: the shares, all ≥ 0 and 1 together, of least
    squared error among tenths. Kept as the sums of the errors' products, so that the shares follow a deployment where
    another part turns out the better one."""

    STEPS = 10

    def __init__(self, products: npt.NDArray[Any]) -> None:
        """`products`: (parts, parts), weighted sums of error · error over past predictions."""
        self.products = np.array(products, dtype=np.float64)
        parts = len(self.products)
        tenths = itertools.product(range(self.STEPS + 1), repeat=parts)
        self._choices = np.array([one for one in tenths if sum(one) == self.STEPS]) / self.STEPS
        self.shares = np.empty(parts)
        self._choose()

    def _choose(self) -> None:
        losses = ((self._choices @ self.products) * self._choices).sum(axis=1)
        self.shares[:] = self._choices[int(losses.argmin())]

    def learn(self, errors: npt.NDArray[Any], weight: float, forget: float) -> None:
        """`errors`: (predictions, parts), each with `weight`; what was there before counts (1 - forget) as much."""
        self.products = (1.0 - forget) * self.products + weight * (errors.T @ errors)
        self._choose()


class Calibration:
    """Standard scores of the quantiles, by stage: score[stage][share], ascending in the shares.

    A model says mean and spread; the quantile for a share is mean + spread · score. Fitted scores are the quantiles of
    standardised errors out of fold (split conformal prediction; Vovk et al., 2005). Online each moves up a little when
    the truth was above its quantile and down when below, in the proportion that holds still exactly when a part
    `share` of the truths is below: adaptive conformal inference (Gibbs and Candès, 2021), so coverage survives drift.
    """

    def __init__(self, scores: npt.NDArray[Any], step: float = 0.05) -> None:
        if scores.shape != (STAGES, len(SHARES)):
            raise ValueError(f"calibration: scores must be {STAGES} x {len(SHARES)}, got {scores.shape}")
        self.scores = np.sort(np.array(scores, np.float64, order="C"), axis=1)
        self.step = step

    def learn(self, at_stage: int, error: float, weight: float = 1.0) -> None:
        """`error`: the truth's standard score, (truth - mean) / spread."""
        row = self.scores[at_stage].tolist()
        for place, share in enumerate(SHARES):
            row[place] += self.step * weight * (share - (error <= row[place]))
        row.sort()
        self.scores[at_stage] = row


ENOUGH_ROWS = 60


def fit_scores(
    stages: npt.NDArray[Any], errors: npt.NDArray[Any], weights: npt.NDArray[Any], groups: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """The (STAGES, SHARES) scores of out-of-fold errors. A stage with few rows borrows from its neighbours.

    `groups` numbers the rows' tasks: rows of one task stand or fall together, so it is tasks that are counted.
    """
    scores = np.zeros((STAGES, len(SHARES)))
    for at_stage in range(STAGES):
        for reach in range(STAGES):
            near = np.abs(stages - at_stage) <= reach
            if near.sum() >= ENOUGH_ROWS or near.all():
                break
        if near.any():
            scores[at_stage] = weighted_quantiles(errors[near], weights[near], SHARES, len(np.unique(groups[near])))
        else:
            scores[at_stage] = (-1.28, -0.67, 0.0, 0.67, 1.28)
    return scores


def weighted_quantiles(
    values: npt.NDArray[Any], weights: npt.NDArray[Any], shares: Sequence[float], count: int
) -> npt.NDArray[np.float64]:
    """The smallest value up to which a part share · (count + 1) / count of the weight lies: the conformal correction
    for `count` independent observations, after which a new one is below with at least the wanted probability."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    wanted = np.minimum(np.asarray(shares) * (count + 1) / count, 1.0)
    places = np.minimum(np.searchsorted(below, wanted - 1e-12), len(values) - 1)
    return np.asarray(values[order][places], dtype=np.float64)


def ascending(values: Sequence[float]) -> bool:
    return all(low <= high for low, high in itertools.pairwise(values))
