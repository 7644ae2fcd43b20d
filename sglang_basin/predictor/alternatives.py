"""Other ways to predict a peak from the same rows, to be compared out of fold. None of them serves.

All are `evaluate.Method`s: given sessions, they return something with `quantiles`. They see the same features as the
model that serves, except its memory of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
from sklearn.isotonic import IsotonicRegression
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.evaluate import Method
from sglang_basin.predictor.kept import History
from sglang_basin.predictor.recorded import Recorded
from sglang_basin.predictor.training import Prepared, TrainingSettings, prepare

Rows = Any
"""(rows, features)"""


class _OnRows:
    """Log growth at `SHARES` from feature rows, by a function made from the training rows."""

    def __init__(self, sessions: Sequence[Recorded], make: Callable[[Prepared], Callable[[Rows], Any]]) -> None:
        self._prepared = prepare(sessions, TrainingSettings(unknown_share=0.0))
        self._growth = make(self._prepared)

    def quantiles(self, session: Recorded, calls: Sequence[int]) -> list[Sequence[float]]:
        kin, score, characters = self._prepared.known_of(session)
        history, wanted = History(), set(calls)
        rows = []
        for call, prompt, output, pause_s in session.steps():
            history.advance(call, prompt, pause_s)
            if call in wanted:
                rows.append(history.row(kin, score, characters))
            history.advance(call, prompt + output)
        if not rows:
            return []
        values = np.array(rows)
        growth = np.clip(np.sort(self._growth(values), axis=1), 0.0, 12.0)
        return list((np.exp(values[:, :1]) * np.exp(growth)).tolist())


def quantile_boosting(prepared: Prepared) -> Callable[[Rows], Any]:
    """Gradient-boosted trees on the pinball loss, one ensemble per quantile."""
    models = [
        HistGradientBoostingRegressor(
            loss="quantile", quantile=share, max_iter=60, learning_rate=0.06, max_depth=3, min_samples_leaf=40
        ).fit(prepared.values, prepared.targets, sample_weight=prepared.weights)
        for share in SHARES
    ]
    return lambda rows: np.column_stack([model.predict(rows) for model in models])


def extra_trees(prepared: Prepared) -> Callable[[Rows], Any]:
    """Ordinary extremely randomised trees, deeper than the serving forest; spread from their own errors."""
    forest = ExtraTreesRegressor(60, min_samples_leaf=25, max_features=0.5, random_state=1)
    forest.fit(prepared.values, prepared.targets, sample_weight=prepared.weights)
    return _with_errors(forest.predict, prepared)


def nearest_sessions(prepared: Prepared) -> Callable[[Rows], Any]:
    """The growth that followed the 40 most similar moments of other sessions."""
    scale = StandardScaler().fit(prepared.values)
    near = NearestNeighbors(n_neighbors=min(40, len(prepared.values))).fit(scale.transform(prepared.values))

    def growth(rows: Rows) -> Any:
        found = near.kneighbors(scale.transform(rows), return_distance=False)
        return np.quantile(prepared.targets[found], SHARES, axis=1).T

    return growth


def isotonic(prepared: Prepared) -> Callable[[Rows], Any]:
    """Peak as an increasing function of the present context, stage by stage; nothing else is looked at."""
    stages = np.unique(prepared.stages)
    curves: dict[int, IsotonicRegression] = {}
    for stage in stages:
        here = prepared.stages == stage
        context = prepared.values[here, 0]
        curves[int(stage)] = IsotonicRegression(out_of_bounds="clip").fit(context, context + prepared.targets[here])
    first_calls = {int(stage): float(prepared.values[prepared.stages == stage, 2].min()) for stage in stages}

    def mean(rows: Rows) -> Any:
        made = np.empty(len(rows))
        for index, row in enumerate(rows):
            stage = max(
                (stage for stage, first in first_calls.items() if first <= row[2] + 1e-9), default=int(stages[0])
            )
            made[index] = curves[stage].predict([row[0]])[0] - row[0]
        return made

    return _with_errors(mean, prepared)


def survival(prepared: Prepared) -> Callable[[Rows], Any]:
    """Remaining growth as accelerated failure time: exponential with a mean that is log-linear in the features."""
    scale = StandardScaler().fit(prepared.values)
    standard = np.column_stack([np.clip(scale.transform(prepared.values), -4, 4), np.ones(len(prepared.values))])
    target, weight = np.maximum(prepared.targets, 1e-3), prepared.weights / prepared.weights.mean()
    slopes = np.zeros(standard.shape[1])
    slopes[-1] = math.log(float(np.average(target, weights=weight)))
    penalty = np.full(len(slopes), 0.03 * len(target))
    penalty[-1] = 0.0
    for _ in range(30):  # Newton's steps on the exponential likelihood
        ratio = target * np.exp(np.clip(-(standard @ slopes), -20, 20))
        gradient = standard.T @ (weight * (ratio - 1)) - penalty * slopes
        curvature = (standard * (weight * np.maximum(ratio, 1e-6))[:, None]).T @ standard + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        slopes += step * min(1.0, 2.0 / max(1e-9, float(np.abs(step).max())))
    scores = -np.log1p(-np.array(SHARES))

    def growth(rows: Rows) -> Any:
        mean = np.exp(np.column_stack([np.clip(scale.transform(rows), -4, 4), np.ones(len(rows))]) @ slopes)
        return mean[:, None] * scores

    return growth


def _with_errors(mean: Callable[[Rows], Any], prepared: Prepared) -> Callable[[Rows], Any]:
    """Quantiles of a point prediction: its own errors on what it was fitted on, hence too narrow."""
    errors = np.quantile(prepared.targets - mean(prepared.values), SHARES)
    return lambda rows: mean(rows)[:, None] + errors


def _method(make: Callable[[Prepared], Callable[[Rows], Any]]) -> Method:
    return lambda sessions: _OnRows(sessions, make)


ALTERNATIVES: dict[str, Method] = {
    "quantile boosting": _method(quantile_boosting),
    "extra trees": _method(extra_trees),
    "nearest sessions": _method(nearest_sessions),
    "survival": _method(survival),
    "isotonic": _method(isotonic),
}
