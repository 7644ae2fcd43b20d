"""A forest of oblivious trees that gives a mean and a spread, takes microseconds, and goes on learning in its leaves.

An oblivious tree asks the same question at every node of a level, so a row's leaf is the binary number of its D
answers: all trees together are one gather, one comparison and one product (Kohavi, 1994; CatBoost uses the same form).
Questions are drawn at random and the best of a few is kept, as in extremely randomised trees (Geurts et al., 2006).

A leaf keeps three sums over the rows that fell into it: weight, target, target². Adding a row is adding to its leaves,
and forgetting is scaling all sums down, so the deployment's own sessions gradually replace what was fitted. The
questions stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_TREES = 1024
MAX_DEPTH = 10


@dataclass(frozen=True, kw_only=True)
class ForestSettings:
    trees: int = 64
    depth: int = 7
    candidates: int = 12
    """Random questions of which the best is kept at each level."""
    smoothing: float = 6.0
    """Rows' worth of the forest's overall mean that every leaf starts with."""
    seed: int = 1


class Forest:
    """`questions` (trees x depth): column numbers; `thresholds` alike; `sums` (3, trees * 2**depth)."""

    def __init__(self, questions: npt.NDArray[Any], thresholds: npt.NDArray[Any], sums: npt.NDArray[Any]) -> None:
        trees, depth = questions.shape
        self.questions = np.ascontiguousarray(questions, dtype=np.intp)
        self.thresholds = np.ascontiguousarray(thresholds, dtype=np.float64)
        self.sums = np.ascontiguousarray(sums, dtype=np.float64)
        self._places = (1 << np.arange(depth)).astype(np.float64)
        self._offsets = np.arange(trees) * float(1 << depth)
        self._flat = self.questions.reshape(-1)
        self._shape = (trees, depth)
        self._unit = 1.0
        self._refresh()

    def _refresh(self) -> None:
        """Leaf means and mean squares, side by side: (leaves, 2)."""
        self._means = np.ascontiguousarray((self.sums[1:] / self.sums[0]).T)

    def moments(self, row: npt.NDArray[Any]) -> tuple[float, float]:
        """Mean and variance (≥ 0) of the target for one row."""
        values = row[self._flat].reshape(self._shape)
        leaves = ((values > self.thresholds) @ self._places + self._offsets).astype(np.intp)
        mean, square = (self._means[leaves].sum(axis=0) / len(leaves)).tolist()
        return mean, max(0.0, square - mean * mean)

    def leaves_of(self, rows: Floats) -> npt.NDArray[np.intp]:
        """(rows, trees): positions in `sums`."""
        values = rows[:, self._flat].reshape(len(rows), *self._shape)
        leaves = (values > self.thresholds) @ self._places + self._offsets
        return leaves.astype(np.intp)

    def moments_of(self, rows: Floats) -> tuple[Floats, Floats]:
        both = self._means[self.leaves_of(rows)].mean(axis=1)
        return both[:, 0], np.maximum(0.0, both[:, 1] - both[:, 0] ** 2)

    def add(self, rows: Floats, targets: Floats, weight: float, forget: float) -> None:
        """One session's rows, each with `weight`; what was there before counts (1 - forget) as much from now on."""
        self._unit /= 1.0 - forget
        leaves = self.leaves_of(rows)
        share = weight * self._unit
        for sums, values in zip(self.sums, (np.ones_like(targets), targets, targets**2), strict=True):
            np.add.at(sums, leaves, (share * values)[:, None])
        if self._unit > 1e9:
            self.sums /= self._unit
            self._unit = 1.0
        touched = leaves.reshape(-1)  # some more than once: cheaper than finding out which
        self._means[touched] = (self.sums[1:, touched] / self.sums[0, touched]).T

    def scaled(self, weight: float) -> Forest:
        """The same forest whose leaves together weigh as much as `weight` rows: how firmly it holds to its fit."""
        total = self.sums[0].sum() / self._shape[0]
        return Forest(self.questions, self.thresholds, self.sums * (weight / total))

    def settled_sums(self) -> Floats:
        """The sums in the units of a forest that has forgotten nothing yet."""
        return self.sums / self._unit


def fit_forest(rows: Floats, targets: Floats, weights: Floats, settings: ForestSettings) -> Forest:
    """Grow the trees on all rows. Same rows and seed, same forest."""
    if len(rows) == 0:
        raise ValueError("a forest needs at least one row")
    rng = np.random.default_rng(settings.seed)
    count, columns = rows.shape
    trees, depth = settings.trees, settings.depth
    questions = np.zeros((trees, depth), dtype=np.intp)
    thresholds = np.zeros((trees, depth))
    sums = np.zeros((3, trees << depth))
    overall = np.average(targets, weights=weights)
    overall_square = np.average(targets**2, weights=weights)
    weighted = weights * targets
    mean_weight = weights.mean()
    for tree in range(trees):
        leaf = np.zeros(count, dtype=np.intp)
        for level in range(depth):
            best = (-np.inf, 0, 0.0, leaf)
            for column in rng.integers(columns, size=settings.candidates):
                threshold = _threshold(rows[:, column], rng)
                divided = leaf + ((rows[:, column] > threshold).astype(np.intp) << level)
                weight = np.bincount(divided, weights)
                total = np.bincount(divided, weighted)
                gain = float((total**2 / (weight + settings.smoothing * mean_weight)).sum())
                if gain > best[0]:
                    best = (gain, int(column), threshold, divided)
            _, questions[tree, level], thresholds[tree, level], leaf = best
        span = slice(tree << depth, (tree + 1) << depth)
        size = 1 << depth
        pseudo = settings.smoothing * mean_weight
        sums[0, span] = np.bincount(leaf, weights, size) + pseudo
        sums[1, span] = np.bincount(leaf, weighted, size) + pseudo * overall
        sums[2, span] = np.bincount(leaf, weighted * targets, size) + pseudo * overall_square
    return Forest(questions, thresholds, sums)


def _threshold(column: Floats, rng: np.random.Generator) -> float:
    """Between two rows drawn at random: dense regions are divided more often."""
    one, other = column[rng.integers(len(column), size=2)]
    return float(one + (other - one) * rng.random())
