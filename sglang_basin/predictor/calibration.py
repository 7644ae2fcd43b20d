"""How wrong predictions were, stage by stage: from mean and spread to quantiles that hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.arithmetic import Floats, move_scores
from sglang_basin.predictor.online import STAGES


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
        self.scores: Floats = np.sort(np.array(scores, np.float64, order="C"), axis=1)
        self.step = step

    def learn(self, at_stage: int, error: float) -> None:
        """`error`: the truth's standard score, (truth - mean) / spread. Raises IndexError for no stage."""
        if not 0 <= at_stage < STAGES:
            raise IndexError(f"there are {STAGES} stages, got {at_stage}")
        move_scores(self.scores, at_stage, error, self.step)


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
