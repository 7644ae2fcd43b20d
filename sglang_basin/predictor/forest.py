"""Extremely randomised trees that give a mean and a spread, take microseconds, and go on learning in their leaves.

Grown by scikit-learn (Geurts et al., 2006), one set of trees for each stage of a session, since what tells at its
second call does not at its sixtieth. Served without it: a tree is a complete binary tree in heap order, walked by
compiled code.

A leaf keeps three sums over the rows that fell into it: weight, target, target². Adding a row is adding to its leaves,
and forgetting is scaling all sums down, so the deployment's own sessions gradually replace what was fitted. The
questions stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.arithmetic import Floats, Ints, Questions, add_to_leaves, leaves_of, moments

MAX_TREES = 256
MAX_DEPTH = 10
LEFT = 1e30
"""The threshold of a question that every row answers with no: below a leaf that lies above the last level."""
_LEAST_WEIGHT = 1e-12
"""Of a leaf, so that what it says is not forgotten altogether before it has learned something else."""


@dataclass(frozen=True, kw_only=True)
class ForestSettings:
    trees: int = 40
    """A stage."""
    depth: int = 7
    features_share: float = 0.4
    """Columns, drawn at random, of which each question takes the best."""
    leaf_rows: int = 8
    """At least; a session has two rows a call."""
    smoothing: float = 2.0
    """Rows' worth of the stage's mean that every leaf starts with."""
    stage_rows: int = 60
    """A stage also learns from the rows of its neighbours, and from those of theirs until there are so many."""
    seed: int = 1


class Forest:
    """`questions` and `thresholds`: (stages, trees, 2**depth), column numbers (below 256) and values, of the question
    at each node; node 1 is the root, 2n and 2n + 1 the children of n: the second where the value is above the
    threshold. `sums`: (3, stages * trees * 2**depth), by leaf from left to right."""

    def __init__(self, questions: npt.NDArray[Any], thresholds: npt.NDArray[Any], sums: npt.NDArray[Any]) -> None:
        self.questions: Questions = np.array(questions, np.uint8, order="C")
        self.thresholds: Floats = np.array(thresholds, np.float64, order="C")
        self.sums: Floats = np.array(sums, np.float64, order="C")
        self.of_leaves: Floats = np.ascontiguousarray((self.sums[1:] / self.sums[0]).T)
        """(leaves, 2): mean and mean square of the targets in each."""
        self._columns = int(self.questions.max()) + 1
        self.unit = 1.0
        """What a row's weight is multiplied with before it is added: instead of all sums that shrink, it grows."""

    @property
    def stages(self) -> int:
        return len(self.questions)

    def check(self, columns: int, *stages: int) -> None:
        """Raises IndexError unless rows of so many columns and at these stages can be asked about: compiled code reads
        where it is told to."""
        if columns < self._columns or min(stages) < 0 or max(stages) >= self.stages:
            raise IndexError(
                f"a forest of {self.stages} stages on {self._columns} columns was asked about "
                f"stages {min(stages)} to {max(stages)}, {columns} columns"
            )

    def moments(self, row: Floats, stage: int) -> tuple[float, float]:
        """Mean and variance (≥ 0) of the target for one row."""
        self.check(len(row), stage)
        found: tuple[float, float] = moments(row, stage, self.questions, self.thresholds, self.of_leaves)
        return found

    def leaves_of(self, rows: Floats, stages: Ints) -> Ints:
        """(rows, trees): positions in `sums`."""
        rows, stages = np.ascontiguousarray(rows, np.float64), np.ascontiguousarray(stages, np.int64)
        self.check(rows.shape[1], int(stages.min(initial=0)), int(stages.max(initial=0)))
        leaves: Ints = leaves_of(rows, stages, self.questions, self.thresholds)
        return leaves

    def moments_of(self, rows: Floats, stages: Ints) -> tuple[Floats, Floats]:
        means, squares = self.of_leaves[self.leaves_of(rows, stages)].mean(axis=1).T
        return means, np.maximum(0.0, squares - means**2)

    def add(self, rows: Floats, stages: Ints, targets: Floats, weight: float, forget: float) -> None:
        """One session's rows, each with `weight`; what was there before counts (1 - forget) as much from now on."""
        leaves, targets = self.leaves_of(rows, stages), np.ascontiguousarray(targets, np.float64)
        self.forget(forget)
        add_to_leaves(leaves, targets, weight * self.unit, self.sums, self.of_leaves)

    def forget(self, part: float) -> None:
        """All that was added before counts (1 - part) as much from now on."""
        if self.unit > 1e9:
            self.sums[:] = self.settled_sums()
            self.unit = 1.0
        self.unit /= 1.0 - part

    def scaled(self, factor: float) -> Forest:
        """The same forest that holds so many times as firmly to its fit."""
        return Forest(self.questions, self.thresholds, self.settled_sums() * factor)

    def settled_sums(self) -> Floats:
        """The sums in the units of a forest that has forgotten nothing yet."""
        settled = self.sums / self.unit
        return np.asarray(settled * np.maximum(1.0, _LEAST_WEIGHT / settled[0]))


def fit_forest(
    rows: Floats, row_stages: Ints, targets: Floats, weights: Floats, stages: int, settings: ForestSettings
) -> Forest:
    """Grow trees for each of so many stages. Same rows and settings, same forest."""
    if len(rows) == 0:
        raise ValueError("a forest needs at least one row")
    size = 1 << settings.depth
    questions = np.zeros((stages, settings.trees, size), dtype=np.uint8)
    thresholds = np.full((stages, settings.trees, size), LEFT)
    for stage in range(stages):
        near = near_stage(row_stages, stage, settings.stage_rows)
        grown = _grow(rows[near], targets[near], weights[near], settings, stage)
        for tree, (columns, cuts) in enumerate(grown):
            questions[stage, tree], thresholds[stage, tree] = columns, cuts
    forest = Forest(questions, thresholds, np.ones((3, stages * settings.trees * size)))
    sums = np.zeros_like(forest.sums)
    for stage in range(stages):
        near = near_stage(row_stages, stage, settings.stage_rows)
        weight, target = weights[near], targets[near]
        pseudo = settings.smoothing * weight.mean()
        span = slice(stage * settings.trees * size, (stage + 1) * settings.trees * size)
        leaves = forest.leaves_of(rows[near], row_stages[near] * 0 + stage) - span.start
        own = weight.sum() / weights[row_stages == stage].sum() if (row_stages == stage).any() else np.inf
        for kept, values in zip(sums, (np.ones_like(target), target, target**2), strict=True):
            mean = np.average(values, weights=weight)
            counted = np.bincount(
                leaves.ravel(), np.repeat(weight * values, settings.trees), minlength=settings.trees * size
            )
            # What neighbours lend shapes the leaves, but a stage weighs only as much as its own rows.
            kept[span] = (counted + pseudo * mean) / min(own, 1e6)
    return Forest(questions, thresholds, sums)


def near_stage(row_stages: Ints, stage: int, enough: int) -> npt.NDArray[np.bool_]:
    """Which rows are of this stage or its neighbours, or as near as it takes to be enough."""
    distance = np.abs(row_stages - stage)
    reach = 1
    while (distance <= reach).sum() < min(enough, len(row_stages)):
        reach += 1
    return np.asarray(distance <= reach)


def _grow(
    rows: Floats, targets: Floats, weights: Floats, settings: ForestSettings, stage: int
) -> list[tuple[Ints, Floats]]:
    """Each tree's (columns, thresholds) in heap order."""
    from sklearn.tree import ExtraTreeRegressor  # a serving process never needs it

    columns, wanted = np.ascontiguousarray(rows, dtype=np.float32), np.ascontiguousarray(targets[:, None])
    grown = []
    for tree in range(settings.trees):
        made = ExtraTreeRegressor(
            max_depth=settings.depth,
            max_features=settings.features_share,
            min_samples_leaf=settings.leaf_rows,
            random_state=settings.seed + 100_000 * stage + tree,
        ).fit(columns, wanted, sample_weight=weights, check_input=False)
        grown.append(_heap(made.tree_, settings.depth))
    return grown


def _heap(tree: Any, depth: int) -> tuple[Ints, Floats]:
    columns, thresholds = np.zeros(1 << depth, dtype=np.int64), np.full(1 << depth, LEFT)
    lefts, rights = tree.children_left.tolist(), tree.children_right.tolist()
    places = [1] * tree.node_count  # a node comes before its children
    for node, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        if left >= 0:
            places[left], places[right] = 2 * places[node], 2 * places[node] + 1
    inner = tree.children_left >= 0
    asked = np.array(places)[inner]
    columns[asked], thresholds[asked] = tree.feature[inner], tree.threshold[inner]
    return columns, thresholds
