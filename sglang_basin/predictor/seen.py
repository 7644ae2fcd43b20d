"""What an engine without a model predicts with, and what remains of one whose model fails: the policy's `PeaksSeen`,
counted. Imports nothing of the model, whose compiled code takes a second to load and 140 MiB."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_basin.policy.prediction import PeaksSeen, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.text import Task

MAX_SESSIONS = 20_000
"""Sessions remembered at once, 0.6 KB each; beyond, the oldest one is forgotten and then unknown."""


@dataclass(slots=True)
class PredictorCounts:
    """How often what happened, for metrics."""

    predictions: int = 0
    learned: int = 0
    fallbacks: int = 0
    """Predictions by `PeaksSeen`: no model, or a failure."""
    failures: int = 0
    """Exceptions in the model; none of them reaches the caller."""


class SeenPredictor:
    """`policy.prediction.PeakPredictor`. Not thread-safe, like the door that asks it."""

    def __init__(self) -> None:
        self.counts = PredictorCounts()
        self.last_failure: str | None = None
        self._seen = PeaksSeen()

    def __len__(self) -> int:
        """Sessions of which something is remembered by name."""
        return 0

    def describe(
        self,
        session_id: str,
        *,
        text: str | bytes | None = None,
        task: Task | None = None,
        agent: str | None = None,
        model: str | None = None,
        kin: int | None = None,
        score: float | None = None,
    ) -> None:
        """What is known beside the numbers, before the first `predict`; each part may be missing.

        `task` is a text already read and `score` what a model's text score makes of it, `kin` the fingerprint of
        whatever agent's sessions have in common.
        """

    def knows(self, session_id: str) -> bool:
        """Whether the session was described, or need not be."""
        return True

    def predict(self, session: Session) -> Prediction:
        """`session.prediction` is what was answered last, if the caller keeps it there."""
        self.counts.predictions += 1
        return self._by_peaks_seen(session)

    def learn(self, session: Session) -> None:
        self.counts.learned += 1
        self._seen.learn(session)

    def forget(self, session_id: str) -> None:
        """The session went away without having shown its peak: refused, or never admitted."""

    def failed(self, error: Exception) -> None:
        """Count an exception that was kept from going further."""
        self.counts.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"

    def _by_peaks_seen(self, session: Session) -> Prediction:
        self.counts.fallbacks += 1
        return self._seen.predict(session)
