"""Ridge regression kept as sums, so that it goes on learning: the straight parts of the model.

Columns are standardised by the fit and cut off at ±`CUT`, which bounds what a value never seen before can do. With
exponential forgetting this is recursive least squares, solved anew at each session's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.features import ZEROS_AT_FIRST

Floats = npt.NDArray[np.float64]

CUT = 4.0
PENALTY = 0.03
"""On each standardised coefficient, per unit of the rows' weight: the fit of n rows has a ridge penalty of 0.03 · n."""


class Line:
    """`columns`: which of a row's numbers it looks at. `middle`, `scale`: one number for each of them. `gram`:
    (columns + 1, columns + 1) and `moment`: (columns + 1,), the constant last; both are weighted sums over rows."""

    def __init__(
        self,
        columns: npt.NDArray[Any],
        middle: npt.NDArray[Any],
        scale: npt.NDArray[Any],
        gram: npt.NDArray[Any],
        moment: npt.NDArray[Any],
    ) -> None:
        self.columns = np.ascontiguousarray(columns, dtype=np.intp)
        self.middle = np.ascontiguousarray(middle, dtype=np.float64)
        self.scale = np.ascontiguousarray(scale, dtype=np.float64)
        self.gram = np.array(gram, dtype=np.float64)
        self.moment = np.array(moment, dtype=np.float64)
        self._places, self._middles = self.columns.tolist(), self.middle.tolist()
        self._inverses = (1.0 / self.scale).tolist()
        zeros = np.isin(self.columns, list(ZEROS_AT_FIRST))
        self._others_at_first = np.flatnonzero(~zeros).tolist()
        self._zeros_at_first = np.where(zeros, np.clip(-self.middle / self.scale, -CUT, CUT), 0.0)
        self._ridge = np.diag([PENALTY] * len(self._places) + [1e-9])
        self._solve()

    def _solve(self) -> None:
        solved = np.linalg.solve(self.gram + self.gram[-1, -1] * self._ridge, self.moment).tolist()
        self._constant: float = solved.pop()
        self._slopes = np.array(solved)
        self._terms = list(zip(self._places, self._middles, self._inverses, solved, strict=True))
        # In the row of a first call most numbers are 0: what they add is known.
        self._constant_at_first = self._constant + float(self._slopes @ self._zeros_at_first)
        self._terms_at_first = [self._terms[place] for place in self._others_at_first]

    def value(self, row: Sequence[float], *, first: bool = False) -> float:
        """The target for one row; `first`, of a first call. Number by number: an array's operations cost more."""
        value, terms = self._constant, self._terms
        if first:
            value, terms = self._constant_at_first, self._terms_at_first
        for place, middle, inverse, slope in terms:
            standard = (row[place] - middle) * inverse
            value += slope * (CUT if standard > CUT else -CUT if standard < -CUT else standard)
        return value

    def values_of(self, rows: Floats) -> Floats:
        return np.asarray(self._standard(rows) @ self._slopes + self._constant)

    def add(self, rows: Floats, targets: Floats, weight: float, forget: float) -> None:
        """One session's rows, each with `weight`; what was there before counts (1 - forget) as much from now on."""
        standard = np.ones((len(rows), len(self._places) + 1))
        standard[:, :-1] = self._standard(rows)
        self.gram *= 1.0 - forget
        self.moment *= 1.0 - forget
        self.gram += weight * (standard.T @ standard)
        self.moment += weight * (standard.T @ targets)
        self._solve()

    def scaled(self, weight: float) -> Line:
        """The same line, held to its fit as firmly as by `weight` rows."""
        factor = weight / self.gram[-1, -1]
        return Line(self.columns, self.middle, self.scale, self.gram * factor, self.moment * factor)

    def _standard(self, rows: Floats) -> Floats:
        standard = (rows.take(self.columns, axis=1) - self.middle) / self.scale
        return np.asarray(np.minimum(np.maximum(standard, -CUT), CUT))


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
