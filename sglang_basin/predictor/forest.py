"""Extremely randomised trees that give a mean and a spread, take microseconds, and go on learning in their leaves.

Grown by scikit-learn (Geurts et al., 2006), one set of trees for each stage of a session, since what tells at its
second call does not at its sixtieth. Served without it: a tree is a complete binary tree in heap order, so that all
trees of a stage are walked together, one gather a level.

A leaf keeps three sums over the rows that fell into it: weight, target, target². Adding a row is adding to its leaves,
and forgetting is scaling all sums down, so the deployment's own sessions gradually replace what was fitted. The
questions stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.tree_code import LEFT, Walk, walk_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_TREES = 256
MAX_DEPTH = 10
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


TOP_LEVELS = 5
"""Of these `Forest` answers all questions, though a row's way through a tree asks but one a level: they are few, and a
step for all costs less than a short one a level."""


class Forest:
    """`questions` and `thresholds`: (stages, trees, 2**depth), column numbers and values, of the question at each node;
    node 1 is the root, 2n and 2n + 1 the children of n: the second where the value is above the threshold. `sums`:
    (3, stages * trees * 2**depth), by leaf from left to right."""

    def __init__(self, questions: npt.NDArray[Any], thresholds: npt.NDArray[Any], sums: npt.NDArray[Any]) -> None:
        stages, trees, leaves = questions.shape
        self.questions = np.ascontiguousarray(questions, dtype=np.intp)
        self.thresholds = np.ascontiguousarray(thresholds, dtype=np.float64)
        self.sums = np.ascontiguousarray(sums, dtype=np.float64)
        self._depth = leaves.bit_length() - 1
        self._leaves = leaves
        self._flat_questions = self.questions.reshape(-1)
        self._flat_thresholds = self.thresholds.reshape(-1)
        self._starts = (np.arange(stages * trees) * leaves).reshape(stages, trees)
        places = np.arange(stages * trees * leaves)
        self._no = 2 * places - places // leaves * leaves  # where a row goes that answers with no
        # The upper levels on their own, a stage's side by side; from the last of them a row goes on to the others.
        self._top_levels = min(TOP_LEVELS, self._depth)
        top = 1 << self._top_levels
        self._top_questions = self.questions[:, :, :top].reshape(stages, -1)
        self._top_thresholds = self.thresholds[:, :, :top].reshape(stages, -1)
        tree, node = np.divmod(np.arange(trees * top), top)
        within = 2 * node + tree * top
        self._top_no = [np.where(2 * node < top, within, 2 * node + start[tree]) for start in self._starts]
        self._top_roots = np.arange(trees) * top + 1
        self._unit = 1.0
        self._means, self._squares = self.sums[1:] / self.sums[0]
        """Of the targets in each leaf."""
        self._first_walk: Walk | None = None
        self._first_places: dict[int, int] = {}  # the leaves that it asks for -> their places in these two:
        self._first_means: list[float] = []
        self._first_squares: list[float] = []

    @property
    def stages(self) -> int:
        return len(self._starts)

    def know_first(self, zeros: Collection[int]) -> None:
        """The rows of first calls, all of stage 0, have zeros in these columns: turn what that leaves of their trees
        into code, which takes some ten milliseconds and halves the time that such a row takes."""
        self._first_walk, leaves = walk_of(self.questions[0], self.thresholds[0], zeros)
        self._first_places = {leaf: place for place, leaf in enumerate(leaves)}
        self._first_means, self._first_squares = self._means[leaves].tolist(), self._squares[leaves].tolist()

    def moments(self, row: Sequence[float], stage: int, *, first: bool = False) -> tuple[float, float]:
        """Mean and variance (≥ 0) of the target for one row; `first`, of a first call."""
        trees = self.questions.shape[1]
        if first and self._first_walk is not None:
            mean, square = self._first_walk(row, self._first_means, self._first_squares)
        else:
            leaves = self._leaves_of_row(np.array(row), stage)
            mean, square = sum(self._means.take(leaves).tolist()), sum(self._squares.take(leaves).tolist())
        mean, square = mean / trees, square / trees
        return mean, max(0.0, square - mean * mean)

    def _leaves_of_row(self, row: npt.NDArray[Any], stage: int) -> npt.NDArray[np.intp]:
        answers = row.take(self._top_questions[stage]) > self._top_thresholds[stage]
        next_node = (self._top_no[stage] + answers).take
        node = self._top_roots
        for _ in range(self._top_levels):
            node = next_node(node)
        questions, thresholds, no = self._flat_questions, self._flat_thresholds, self._no
        for _ in range(self._depth - self._top_levels):
            node = no.take(node) + (row.take(questions.take(node)) > thresholds.take(node))
        leaves: npt.NDArray[np.intp] = node - self._leaves
        return leaves

    def leaves_of(self, rows: Floats, stages: Ints) -> npt.NDArray[np.intp]:
        """(rows, trees): positions in `sums`."""
        values, row_starts = rows.reshape(-1), (np.arange(len(rows)) * rows.shape[1])[:, None]
        questions, thresholds, no = self._flat_questions, self._flat_thresholds, self._no
        node = self._starts[stages] + 1
        for _ in range(self._depth):
            answers = values.take(row_starts + questions.take(node)) > thresholds.take(node)
            node = no.take(node) + answers
        return np.asarray(node - self._leaves, dtype=np.intp)

    def moments_of(self, rows: Floats, stages: Ints) -> tuple[Floats, Floats]:
        leaves = self.leaves_of(rows, stages)
        means, squares = self._means[leaves].mean(axis=1), self._squares[leaves].mean(axis=1)
        return means, np.maximum(0.0, squares - means**2)

    def add(self, rows: Floats, stages: Ints, targets: Floats, weight: float, forget: float) -> None:
        """One session's rows, each with `weight`; what was there before counts (1 - forget) as much from now on."""
        self._unit /= 1.0 - forget
        leaves = self.leaves_of(rows, stages)
        share = weight * self._unit
        for sums, values in zip(self.sums, (np.ones_like(targets), targets, targets**2), strict=True):
            np.add.at(sums, leaves, (share * values)[:, None])
        if self._unit > 1e9:
            self.sums = self.settled_sums()
            self._unit = 1.0
        touched = leaves.reshape(-1)  # some more than once: cheaper than finding out which
        weights, targets, squares = self.sums.take(touched, axis=1)
        self._means[touched] = targets / weights
        self._squares[touched] = squares / weights
        for leaf in self._first_places.keys() & touched.tolist():
            place = self._first_places[leaf]
            self._first_means[place], self._first_squares[place] = float(self._means[leaf]), float(self._squares[leaf])

    def scaled(self, factor: float) -> Forest:
        """The same forest that holds so many times as firmly to its fit."""
        return Forest(self.questions, self.thresholds, self.settled_sums() * factor)

    def settled_sums(self) -> Floats:
        """The sums in the units of a forest that has forgotten nothing yet."""
        settled = self.sums / self._unit
        return np.asarray(settled * np.maximum(1.0, _LEAST_WEIGHT / settled[0]))


def fit_forest(
    rows: Floats, row_stages: Ints, targets: Floats, weights: Floats, stages: int, settings: ForestSettings
) -> Forest:
    """Grow trees for each of so many stages. Same rows and settings, same forest."""
    if len(rows) == 0:
        raise ValueError("a forest needs at least one row")
    size = 1 << settings.depth
    questions = np.zeros((stages, settings.trees, size), dtype=np.intp)
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
) -> list[tuple[npt.NDArray[np.intp], Floats]]:
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


def _heap(tree: Any, depth: int) -> tuple[npt.NDArray[np.intp], Floats]:
    columns, thresholds = np.zeros(1 << depth, dtype=np.intp), np.full(1 << depth, LEFT)
    lefts, rights = tree.children_left.tolist(), tree.children_right.tolist()
    places = [1] * tree.node_count  # a node comes before its children
    for node, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        if left >= 0:
            places[left], places[right] = 2 * places[node], 2 * places[node] + 1
    inner = tree.children_left >= 0
    asked = np.array(places)[inner]
    columns[asked], thresholds[asked] = tree.feature[inner], tree.threshold[inner]
    return columns, thresholds
