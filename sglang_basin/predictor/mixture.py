"""How much each part of the model counts: the one that has been right lately counts most."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.arithmetic import Floats, add_to_mixture, choose_shares


class Mixture:
    """How much each of several predictions counts in their weighted mean: the shares, all ≥ 0 and 1 together, of least
    squared error among tenths. Kept as the sums of the errors' products, so that the shares follow a deployment where
    another part turns out the better one."""

    STEPS = 10

    def __init__(self, products: npt.NDArray[Any]) -> None:
        """`products`: (parts, parts), weighted sums of error · error over past predictions."""
        self.products: Floats = np.array(products, dtype=np.float64, order="C")
        parts = len(self.products)
        tenths = itertools.product(range(self.STEPS + 1), repeat=parts)
        self.choices = np.array([one for one in tenths if sum(one) == self.STEPS]) / self.STEPS
        """(choices, parts)"""
        self.shares = np.empty(parts)
        choose_shares(self.products, self.choices, self.shares)

    def learn(self, errors: npt.NDArray[Any], weight: float, forget: float) -> None:
        """`errors`: (predictions, parts), each with `weight`; what was there before counts (1 - forget) as much."""
        errors = np.ascontiguousarray(errors, np.float64)
        add_to_mixture(errors, weight, 1.0 - forget, self.products, self.choices, self.shares)
