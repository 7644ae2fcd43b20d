"""Ridge regression kept as sums, so that it goes on learning: the straight parts of the model.

Columns are standardised by the fit and cut off at ±`CUT`, which bounds what a value never seen before can do. With
exponential forgetting this is recursive least squares, solved anew at each session's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.arithmetic import CUT, Floats, Ints, add_to_line, solve_line, value


class Line:
    """`columns`: which of a row's numbers it looks at. `middle`, `scale`: one number for each of them. `gram`:
    (columns + 1, columns + 1) and `moment`: (columns + 1,), the constant last; both are weighted sums over rows. Raises
    ArithmeticError for sums that are those of no rows."""

    def __init__(
        self,
        columns: npt.NDArray[Any],
        middle: npt.NDArray[Any],
        scale: npt.NDArray[Any],
        gram: npt.NDArray[Any],
        moment: npt.NDArray[Any],
    ) -> None:
        self.columns: Ints = np.array(columns, np.int64)
        self.lines: Floats = np.zeros((3, len(self.columns) + 1))
        """As compiled code takes them: `middle`, `scale`, `slopes`."""
        self.middle[:], self.scale[:] = middle, scale
        self.gram = np.array(gram, dtype=np.float64, order="C")
        self.moment = np.array(moment, dtype=np.float64)
        must_be_solved(solve_line(self.gram, self.moment, self.lines))

    # Looked up each time: kept, they would be other arrays in a copy of the line, which then would not learn.

    @property
    def middle(self) -> Floats:
        found: Floats = self.lines[0, :-1]
        return found

    @property
    def scale(self) -> Floats:
        found: Floats = self.lines[1, :-1]
        return found

    @property
    def slopes(self) -> Floats:
        """Of the standardised columns; the constant last."""
        found: Floats = self.lines[2]
        return found

    def value(self, row: Floats) -> float:
        """The target for one row."""
        found: float = value(row, self.columns, self.lines)
        return found

    def values_of(self, rows: Floats) -> Floats:
        standard = (rows[:, self.columns] - self.middle) / self.scale
        return np.asarray(np.clip(standard, -CUT, CUT) @ self.slopes[:-1] + self.slopes[-1])

    def add(self, rows: Floats, targets: Floats, weight: float, forget: float) -> None:
        """One session's rows, each with `weight`; what was there before counts (1 - forget) as much from now on.
        Raises ArithmeticError once the sums are those of no rows."""
        rows, targets = np.ascontiguousarray(rows, np.float64), np.ascontiguousarray(targets, np.float64)
        must_be_solved(
            add_to_line(rows, targets, weight, 1.0 - forget, self.columns, self.lines, self.gram, self.moment)
        )

    def scaled(self, weight: float) -> Line:
        """The same line, held to its fit as firmly as by `weight` rows."""
        factor = weight / self.gram[-1, -1]
        return Line(self.columns, self.middle, self.scale, self.gram * factor, self.moment * factor)


def must_be_solved(solved: bool) -> None:
    """Raises ArithmeticError where compiled code says that a line's sums have no solution."""
    if not solved:
        raise ArithmeticError("a line's sums are not those of any rows")


def fit_line(rows: Floats, targets: Floats, weights: Floats, columns: Sequence[int] | None = None) -> Line:
    """On all columns, or on some."""
    places = np.arange(rows.shape[1]) if columns is None else np.array(columns)
    chosen = rows[:, places]
    middle = np.average(chosen, axis=0, weights=weights)
    scale = np.sqrt(np.average((chosen - middle) ** 2, axis=0, weights=weights))
    scale = np.where(scale > 1e-3, scale, 1.0)
    standard = np.column_stack([np.clip((chosen - middle) / scale, -CUT, CUT), np.ones(len(rows))])
    weighted = standard * weights[:, None]
    return Line(places, middle, scale, weighted.T @ standard, weighted.T @ targets)
