"""Predicted peaks: the form of a prediction, and the simplest predictor, which needs nothing but finished sessions."""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from sglang_basin.policy.sessions import Session

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""The quantiles that a prediction carries."""

_PLACES = {share: place for place, share in enumerate(SHARES)}


class Prediction(NamedTuple):
    """A session's peak context: `tokens` are its quantiles at `SHARES`, ascending."""

    tokens: Sequence[float]

    def at(self, share: float) -> float:
        """The peak, in tokens, that is not exceeded with probability `share`; linear between the known quantiles."""
        if (place := _PLACES.get(share)) is not None:
            return self.tokens[place]
        high = bisect.bisect_left(SHARES, share)
        if high == len(SHARES):
            return self.tokens[-1]
        if high == 0:
            return self.tokens[0]
        part = (share - SHARES[high - 1]) / (SHARES[high] - SHARES[high - 1])
        return self.tokens[high - 1] + (self.tokens[high] - self.tokens[high - 1]) * part


class PeakPredictor(Protocol):
    """Predicts a session's peak context from what it did so far, in the scheduler's thread: microseconds only."""

    def predict(self, session: Session) -> Prediction:
        """Called when the session arrives and after each of its calls. Never below the present context."""

    def learn(self, session: Session) -> None:
        """The session has ended; `session.peak_tokens` is its true peak."""

    def forget(self, session_id: str) -> None:
        """The session went away without having shown its peak: turned away at the door, or known no longer."""


@functools.cache
def _places_of(count: int) -> tuple[int, ...]:
    """Where the quantiles at `SHARES` stand among so many ascending numbers."""
    return tuple(int(share * (count - 1)) for share in SHARES)


class PeaksSeen:
    """The peaks of the last sessions that ended, cut off below the session's present context.

    An empirical survival function: of the sessions that got at least this far, how far did they get? Needs no text and
    no training, follows drift, and is what remains when a trained predictor fails. Until `MIN_SEEN` sessions of that
    length have ended it falls back to a multiple of the present context.
    """

    MIN_SEEN = 8
    BLIND = (1.0, 1.2, 2.0, 3.0, 5.0)
    """Peak over present context at the start of a session, at `SHARES`, roughly as in recorded coding agents."""

    def __init__(self, memory: int = 512) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[float] = []
        self._memory = memory

    def predict(self, session: Session) -> Prediction:
        now_tokens = max(1, session.context_tokens)
        first = bisect.bisect_left(self._sorted, now_tokens)
        count = len(self._sorted) - first
        if count < self.MIN_SEEN:
            return Prediction(tuple([now_tokens * factor for factor in self.BLIND]))
        return Prediction(tuple([self._sorted[first + place] for place in _places_of(count)]))

    def learn(self, session: Session) -> None:
        bisect.insort(self._sorted, float(session.peak_tokens))
        self._recent.append(session.peak_tokens)
        if len(self._recent) > self._memory:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def forget(self, session_id: str) -> None:
        """Nothing is kept by session."""
