"""What a record holds to learn from, and learning by its definition: numpy, one step after the other."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.arithmetic import CONSTANT_PENALTY, CUT, KEPT_ROWS, PARTS, PENALTY


class Lessons(NamedTuple):
    """`arithmetic.KEPT` says what each is."""

    stages: np.ndarray
    log_contexts: np.ndarray
    means: np.ndarray
    spreads: np.ndarray
    places: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, records, at=0):
        record = records[at].copy()
        noted = int(record["noted"])
        rows = min(noted, KEPT_ROWS)
        return cls(
            stages=record["stage"][:noted],
            log_contexts=record["log_context"][:noted].astype(float),
            means=record["mean"][:noted].view(np.float16).astype(float),
            spreads=record["spread"][:noted].view(np.float16).astype(float),
            places=record["place"][:rows],
            rows=record["row"][:rows].view(np.float16).astype(float),
        )


def teach(model, lessons, peak_tokens):
    """What `model.PeakModel.learn` does to everything but the averages."""
    if not len(lessons.stages):
        return
    targets = np.maximum(0.0, math.log(max(1, peak_tokens)) - lessons.log_contexts)
    for stage, error in zip(lessons.stages, (targets - lessons.means) / lessons.spreads, strict=True):
        row = model.calibration.scores[stage]
        row[:] = np.sort(row + model.calibration.step * (np.array(SHARES) - (error <= row)))
    values, parts = lessons.rows[:, :-PARTS], lessons.rows[:, -PARTS:]
    stages, reached = lessons.stages[lessons.places], targets[lessons.places]
    weight, keep = math.sqrt(len(targets)) / len(values), 1 - 1 / model.settings.horizon_sessions
    for line in (model.trend, model.line):
        standard = np.clip((values[:, line.columns] - line.middle) / line.scale, -CUT, CUT)
        standard = np.column_stack([standard, np.ones(len(values))])
        line.gram[:] = keep * line.gram + weight * standard.T @ standard
        line.moment[:] = keep * line.moment + weight * standard.T @ reached
        penalty = np.full(len(line.moment), PENALTY)
        penalty[-1] = CONSTANT_PENALTY
        line.slopes[:] = np.linalg.solve(line.gram + line.gram[-1, -1] * np.diag(penalty), line.moment)
    forest = model.forest
    sums = forest.settled_sums() * keep
    for row, stage, target in zip(values, stages, reached, strict=True):
        for leaf in forest.leaves_of(row[None], np.array([stage]))[0]:
            sums[:, leaf] += weight * np.array([1.0, target, target**2])
    forest.sums[:], forest.unit = sums, 1.0
    forest.of_leaves[:] = (sums[1:] / sums[0]).T
    errors, mixture = reached[:, None] - parts, model.mixture
    mixture.products[:] = keep * mixture.products + weight * errors.T @ errors
    losses = [choice @ mixture.products @ choice for choice in mixture.choices]
    mixture.shares[:] = mixture.choices[int(np.argmin(losses))]
