"""The policy's `PeakPredictor`, made of a peak model; the policy's own `PeaksSeen` when there is none or it fails.

Called in the scheduler's thread, so both calls take microseconds: `predict` one or two, or six where it guesses anew,
which is one call in three; `learn` a hundred. What the policy's session does not carry is kept here by session id:
`describe` once, before the first `predict`, with what the request's text says. Reading the text (about a millisecond)
is a step of its own, `text.read_task`, that runs in another process or thread; its result is small.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from sglang_basin.policy.prediction import PeaksSeen, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.arithmetic import ANOTHER, HOLDS, KEPT_ROWS, follow
from sglang_basin.predictor.kept import KeptSessions, Lessons, Subject
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.recorded import kin_of
from sglang_basin.predictor.text import Task, read_task

MAX_SESSIONS = 20_000
"""Sessions remembered at once, 0.6 KB each; beyond, the oldest one is forgotten and then unknown."""

_UNKNOWN = Subject()


@dataclass(slots=True)
class PredictorCounts:
    """How often what happened, for metrics."""

    predictions: int = 0
    learned: int = 0
    fallbacks: int = 0
    """Predictions by `PeaksSeen`: no model, or a failure."""
    failures: int = 0
    """Exceptions in the model; none of them reaches the caller."""


class TrainedPredictor:
    """`policy.prediction.PeakPredictor`. Not thread-safe, like the door that asks it."""

    def __init__(self, model: PeakModel | None, *, max_sessions: int = MAX_SESSIONS, seed: int = 1) -> None:
        """`seed` draws which rows of a session it learns from."""
        self.model = model
        self.counts = PredictorCounts()
        self.last_failure: str | None = None
        self._seen = PeaksSeen()
        self._kept = KeptSessions(max_sessions)
        self._draw = random.Random(seed)

    def __len__(self) -> int:
        return len(self._kept)

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

        `task` is a text already read and `score` what the model's text score makes of it, `kin` the fingerprint of
        whatever agent's sessions have in common.
        """
        if self.model is None:
            return
        try:
            task = task if task is not None else read_task(text)
            kin = kin if kin is not None else kin_of(agent, model)
            place = self._kept.find(session_id)
            if place is None:
                place = self._kept.begin(session_id)
            self._kept.tell(place, _UNKNOWN)  # described all the same, should this fail
            self._kept.tell(place, self.model.subject(task, kin, score))
        except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
            self.failed(error)

    def knows(self, session_id: str) -> bool:
        """Whether the session was described, or need not be."""
        if self.model is None:
            return True
        place = self._kept.find(session_id)
        return place is not None and self._kept.is_told(place)

    def predict(self, session: Session) -> Prediction:
        """`session.prediction` is what was answered last, if the caller keeps it there."""
        self.counts.predictions += 1
        if self.model is not None:
            kept, calls = self._kept, session.calls_seen
            try:
                place = kept.find(session.session_id)
                if place is None:
                    place = kept.begin(session.session_id)
                records, at = kept.record(place)
                answer = follow(records, at, calls, session.context_tokens, session.pause_s)
                if answer == HOLDS and session.prediction is not None:
                    return session.prediction
                if answer == ANOTHER:
                    kept.begin_again(place)
                    answer = follow(records, at, calls, session.context_tokens, session.pause_s)
                row_place = answer if answer < KEPT_ROWS else self._draw.randrange(answer + 1)
                return Prediction(array("d", self.model.guess(records, at, calls, *kept.keys_told(place), row_place)))
            except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
                self.failed(error)
        self.counts.fallbacks += 1
        return self._seen.predict(session)

    def learn(self, session: Session) -> None:
        self.counts.learned += 1
        self._seen.learn(session)
        place = self._kept.find(session.session_id)
        if place is None or self.model is None:
            return
        try:
            kin, task = self._kept.keys_told(place)
            self.model.learn(Lessons.of(*self._kept.record(place)), kin, task, session.peak_tokens)
        except Exception as error:  # noqa: BLE001 - learning must never cost a call
            self.failed(error)
        self._kept.forget(session.session_id)

    def forget(self, session_id: str) -> None:
        """The session went away without having shown its peak: refused, or never admitted."""
        self._kept.forget(session_id)

    def failed(self, error: Exception) -> None:
        """Count an exception that the caller kept from going further."""
        self.counts.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
