"""Ridge regression kept as sums, so that it goes on learning: the straight half of the model.

Columns are standardised by the fit and cut off at ±`CUT`, which bounds what a value never seen before can do. With
exponential forgetting this is recursive least squares, solved anew at each session's end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CUT = 4.0
PENALTY = 0.03
"""On each standardised coefficient, per unit of the rows' weight: the fit of n rows has a ridge penalty of 0.03 · n."""


class Line:
    """`middle`, `scale`: (columns,). `gram`: (columns + 1, columns + 1) and `moment`: (columns + 1,), with the
    constant last; both are weighted sums over rows."""

    def __init__(
        self, middle: npt.NDArray[Any], scale: npt.NDArray[Any], gram: npt.NDArray[Any], moment: npt.NDArray[Any]
    ) -> None:
        self.middle = np.ascontiguousarray(middle, dtype=np.float64)
        self.scale = np.ascontiguousarray(scale, dtype=np.float64)
        self.gram = np.array(gram, dtype=np.float64)
        self.moment = np.array(moment, dtype=np.float64)
        self._solve()

    def _solve(self) -> None:
        """Coefficients as plain floats: for one row that is faster than an array."""
        columns = len(self.scale)
        ridge = np.full(columns + 1, PENALTY * self.gram[-1, -1])
        ridge[-1] = 1e-9 * self.gram[-1, -1]
        solved = np.linalg.solve(self.gram + np.diag(ridge), self.moment)
        self._slopes = solved[:-1]
        self._constant = float(solved[-1])
        self._inverse = 1.0 / self.scale

    def value(self, row: npt.NDArray[Any]) -> float:
        """The target for one row."""
        standard = (row - self.middle) * self._inverse
        np.minimum(standard, CUT, out=standard)
        np.maximum(standard, -CUT, out=standard)
        return float(standard @ self._slopes) + self._constant

    def values_of(self, rows: Floats) -> Floats:
        return np.asarray(self._standard(rows) @ self._slopes + self._constant)

    def add(self, rows: Floats, targets: Floats, weight: float, forget: float) -> None:
        """One session's rows, each with `weight`; what was there before counts (1 - forget) as much from now on."""
        standard = np.column_stack([self._standard(rows), np.ones(len(rows))])
        self.gram *= 1.0 - forget
        self.moment *= 1.0 - forget
        self.gram += weight * (standard.T @ standard)
        self.moment += weight * (standard.T @ targets)
        self._solve()

    def scaled(self, weight: float) -> Line:
        """The same line, held to its fit as firmly as by `weight` rows."""
        factor = weight / self.gram[-1, -1]
        return Line(self.middle, self.scale, self.gram * factor, self.moment * factor)

    def _standard(self, rows: Floats) -> Floats:
        return np.clip((rows - self.middle) / self.scale, -CUT, CUT)


def fit_line(rows: Floats, targets: Floats, weights: Floats) -> Line:
    middle = np.average(rows, axis=0, weights=weights)
    scale = np.sqrt(np.average((rows - middle) ** 2, axis=0, weights=weights))
    scale = np.where(scale > 1e-3, scale, 1.0)
    standard = np.column_stack([np.clip((rows - middle) / scale, -CUT, CUT), np.ones(len(rows))])
    weighted = standard * weights[:, None]
    return Line(middle, scale, weighted.T @ standard, weighted.T @ targets)
