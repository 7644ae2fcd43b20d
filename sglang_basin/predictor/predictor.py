"""The policy's `PeakPredictor`, made of a peak model; the policy's own `PeaksSeen` when there is none or it fails.

Called in the scheduler's thread, so both calls take microseconds: `predict` about 40, `learn` some hundreds. What the
policy's session does not carry is kept here by session id: `describe` once, before the first `predict`, with what the
request's text says. Reading the text (about a millisecond) is a step of its own, `text.read_task`, that runs in
another process or thread; its result is small.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from sglang_basin.policy.prediction import PeaksSeen, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.features import History
from sglang_basin.predictor.lessons import Lessons
from sglang_basin.predictor.model import PeakModel, Subject
from sglang_basin.predictor.online import stage_begins
from sglang_basin.predictor.recorded import kin_of
from sglang_basin.predictor.text import Task, read_task

STALE_FACTOR = 1.1
"""A prediction holds until the context has changed by this factor. No door takes it for less than the context."""

MAX_SESSIONS = 20_000
"""Sessions remembered at once, about 1 KB each; beyond, the oldest one is forgotten and then unknown."""

_NOTHING_YET = History().packed()
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


class _Followed:
    """One session, in as little space as its next prediction and its lessons allow."""

    __slots__ = ("history", "lessons", "prediction", "subject", "tokens", "until_calls")

    def __init__(self) -> None:
        self.subject: Subject | None = None
        """None until it was described."""
        self.begin()

    def begin(self) -> None:
        self.history = _NOTHING_YET
        self.lessons = Lessons()
        self.prediction: Prediction | None = None
        self.until_calls = 0.0
        """The prediction holds before this call, with which a new stage begins,"""
        self.tokens = 0
        """and while the context is about this long."""

    def holds(self, calls: int, tokens: int) -> bool:
        return calls < self.until_calls and self.tokens < STALE_FACTOR * tokens and tokens < STALE_FACTOR * self.tokens


class TrainedPredictor:
    """`policy.prediction.PeakPredictor`. Not thread-safe, like the door that asks it."""

    def __init__(self, model: PeakModel | None, *, max_sessions: int = MAX_SESSIONS, seed: int = 1) -> None:
        """`seed` draws which rows of a session it learns from."""
        self.model = model
        self.counts = PredictorCounts()
        self.last_failure: str | None = None
        self._seen = PeaksSeen()
        self._of: dict[str, _Followed] = {}  # oldest first
        self._max_sessions = max_sessions
        self._draw = random.Random(seed)
        self._history = History()  # of whichever session is looked at

    def __len__(self) -> int:
        return len(self._of)

    def describe(
        self,
        session_id: str,
        *,
        text: str | bytes | None = None,
        task: Task | None = None,
        agent: str | None = None,
        model: str | None = None,
        kin: int | None = None,
    ) -> None:
        """What is known beside the numbers, before the first `predict`; each part may be missing.

        `task` is a text already read, `kin` the fingerprint of whatever agent's sessions have in common.
        """
        if self.model is None:
            return
        try:
            task = task if task is not None else read_task(text)
            kin = kin if kin is not None else kin_of(agent, model)
            followed = self._follow(session_id)
            followed.subject = _UNKNOWN  # described all the same, should this fail
            followed.subject = self.model.subject(task, kin)
        except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
            self.failed(error)

    def knows(self, session_id: str) -> bool:
        """Whether the session was described, or need not be."""
        followed = self._of.get(session_id)
        return self.model is None or (followed is not None and followed.subject is not None)

    def predict(self, session: Session) -> Prediction:
        self.counts.predictions += 1
        if self.model is not None:
            try:
                return self._predict(session, self.model)
            except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
                self.failed(error)
        self.counts.fallbacks += 1
        return self._seen.predict(session)

    def learn(self, session: Session) -> None:
        self.counts.learned += 1
        self._seen.learn(session)
        followed = self._of.pop(session.session_id, None)
        if followed is None or self.model is None:
            return
        try:
            self.model.learn(followed.lessons, followed.subject or _UNKNOWN, session.peak_tokens)
        except Exception as error:  # noqa: BLE001 - learning must never cost a call
            self.failed(error)

    def forget(self, session_id: str) -> None:
        """The session went away without having shown its peak: refused, or never admitted."""
        self._of.pop(session_id, None)

    def _follow(self, session_id: str) -> _Followed:
        followed = self._of.get(session_id)
        if followed is None:
            followed = self._of[session_id] = _Followed()
            if len(self._of) > self._max_sessions:
                del self._of[next(iter(self._of))]
        return followed

    def _predict(self, session: Session, model: PeakModel) -> Prediction:
        followed, history = self._follow(session.session_id), self._history
        history.unpack(followed.history)
        calls, tokens = session.calls_seen, session.context_tokens
        if calls < history.calls:  # another session of the same name
            followed.begin()
            history.unpack(followed.history)
        changed = history.advance(calls, tokens, session.pause_s)
        if changed:
            followed.history = history.packed()
        if followed.prediction is not None and (not changed or followed.holds(calls, tokens)):
            return followed.prediction
        guess = model.guess(history, followed.subject or _UNKNOWN)
        followed.lessons.note(guess, self._draw)
        followed.until_calls = stage_begins(guess.stage + 1)
        followed.tokens = tokens
        followed.prediction = Prediction(array("d", [quantile for _, quantile in model.quantiles(guess)]))
        return followed.prediction

    def failed(self, error: Exception) -> None:
        """Count an exception that the caller kept from going further."""
        self.counts.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
