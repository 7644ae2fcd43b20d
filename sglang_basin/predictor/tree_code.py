"""Trees as Python code: a question costs some ten nanoseconds, each operation on an array half a microsecond.

Worth it only where the same short code runs again and again, as for rows most of whose columns are known beforehand:
the code of a whole forest takes longer to fetch from memory than arrays do. It is made of a checked model's numbers
alone, each written by `repr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy.typing as npt

LEFT = 1e30
"""The threshold of a question that every row answers with no: below a leaf that lies above the last level."""

Walk = Callable[[Sequence[float], Sequence[float], Sequence[float]], tuple[float, float]]
"""From a row, and two numbers of each leaf that such rows can fall into, to their sums over the leaves that this row
falls into."""


def walk_of(
    questions: npt.NDArray[Any], thresholds: npt.NDArray[Any], zeros: Collection[int]
) -> tuple[Walk, list[int]]:
    """The code, and the leaves whose numbers it asks for. `questions` and `thresholds`: (trees, leaves), as in
    `forest.Forest`; leaves are numbered from left to right, tree by tree. The columns `zeros` are 0 in every row that
    is asked about, so that questions about them are answered here. Raises ValueError for a threshold that is no number.
    """
    if not all(map(math.isfinite, thresholds.ravel().tolist())):
        raise ValueError("thresholds must be finite")
    leaves: list[int] = []
    size = questions.shape[1]

    def branch(asked: list[int], cuts: list[float], node: int, first: int) -> str:
        """The expression of a node and what is below it: the place of a leaf."""
        if node >= size:
            leaves.append(first + node - size)
            return str(len(leaves) - 1)
        column, cut = asked[node], cuts[node]
        if cut >= LEFT or column in zeros:
            return branch(asked, cuts, 2 * node + (cut < 0.0), first)
        no, yes = (branch(asked, cuts, 2 * node + answer, first) for answer in (0, 1))
        return f"({yes} if r{column} > {cut!r} else {no})"

    columns = sorted({int(column) for column in questions.ravel()} - set(zeros))
    lines = [
        "def walk(row, ones, others):",
        *(f" r{column} = row[{column}]" for column in columns),
        " one = other = 0.0",
    ]
    for tree, (asked, cuts) in enumerate(zip(questions.tolist(), thresholds.tolist(), strict=True)):
        place = branch(asked, cuts, 1, tree * size)
        lines += [f" leaf = {place}", " one += ones[leaf]", " other += others[leaf]"]
    made: dict[str, Any] = {}
    exec(compile("\n".join([*lines, " return one, other"]), "<trees>", "exec"), made)
    walk: Walk = made["walk"]
    return walk, leaves
