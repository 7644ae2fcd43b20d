"""What a session leaves to learn from when it ends: a few hundred bytes, however long it gets.

The first guess of each stage counts. How far off it was is learned for every stage (the calibration); what it was made
of teaches the other parts, for which four of a session's rows do: they all share one target, the session's peak, and
differ less than sessions do. They are chosen uniformly over the stages (reservoir sampling; Vitter, "Random sampling
with a reservoir", 1985) and stand for all of them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.features import NAMES

KEPT_ROWS = 4

PARTS = 3
"""Trend, line and forest."""

_HALF = np.dtype("<f2")
_ERROR = struct.Struct("<Bf2e")
_FIRST = struct.Struct("<BBf2eB")
"""Bytes of errors, an error, place of the row that follows."""
_ERRORS = np.dtype([("stage", "u1"), ("log_context", "<f4"), ("mean", "<f2"), ("spread", "<f2")])
_ROWS = np.dtype([("place", "u1"), ("values", "<f2", (len(NAMES),)), ("parts", "<f2", (PARTS,))])

NO_LESSONS = b"\0"


class Guess(NamedTuple):
    """A prediction, and what it was made of."""

    row: npt.NDArray[np.float64]
    """The features, and after them the means of trend, line and forest."""
    stage: int
    log_context: float
    mean: float
    spread: float
    """Of ln(peak / context)."""
    tokens: Sequence[float]
    """The peak at each of `policy.prediction.SHARES`."""


class Lessons:
    """One session's: 9 bytes a stage and 69 a row. Half precision keeps three digits of what a session's rows say, more
    than they are worth."""

    __slots__ = ("_errors", "_rows")

    def __init__(self, packed: bytes = NO_LESSONS) -> None:
        """As they were when they were `packed`; else none."""
        rows_at = 1 + packed[0]
        self._errors, self._rows = packed[1:rows_at], packed[rows_at:]

    @staticmethod
    def first(guess: Guess) -> bytes:
        """The `packed` form of one guess, a session's first: nothing to read, nothing to draw."""
        return _FIRST.pack(_ERROR.size, *guess[1:5], 0) + guess.row.astype(_HALF).tobytes()

    def __len__(self) -> int:
        """Stages noted so far."""
        return len(self._errors) // _ERROR.size

    def packed(self) -> bytes:
        return bytes((len(self._errors),)) + self._errors + self._rows

    def note(self, guess: Guess, draw: random.Random) -> bool:
        """Take in a guess, if it is the first one of a stage after those noted; whether it is."""
        noted = len(self)
        if noted and guess.stage <= self._errors[-_ERROR.size]:
            return False
        self._keep(guess, noted, noted if noted < KEPT_ROWS else draw.randrange(noted + 1))
        return True

    def _keep(self, guess: Guess, noted: int, place: int) -> None:
        self._errors += _ERROR.pack(guess.stage, guess.log_context, guess.mean, guess.spread)
        if place < KEPT_ROWS:
            start, stop = place * _ROWS.itemsize, (place + 1) * _ROWS.itemsize
            row = bytes((noted,)) + guess.row.astype(_HALF).tobytes()
            self._rows = self._rows[:start] + row + self._rows[stop:]

    def errors(self) -> npt.NDArray[Any]:
        """(stages,) records of `stage`, `log_context`, `mean` and `spread`, as guessed."""
        return np.frombuffer(self._errors, _ERRORS)

    def rows(self) -> npt.NDArray[Any]:
        """(at most KEPT_ROWS,) records of `place` among the errors, `values` and `parts`, as guessed."""
        return np.frombuffer(self._rows, _ROWS)
