"""The policy's `PeakPredictor`, made of a peak model; the policy's own `PeaksSeen` when there is none or it fails.

Called in the scheduler's thread, so both calls take microseconds: `predict` two, or ten where it guesses anew, which is
one call in three; `learn` some fifty. What the policy's session does not carry is kept here by session id:
`describe` once, before the first `predict`, with what the request's text says. Reading the text (about a millisecond)
is a step of its own, `text.read_task`, that runs in another process or thread; its result is small.
"""

from __future__ import annotations

import random
import struct
from array import array
from dataclasses import dataclass

from sglang_basin.policy.prediction import PeaksSeen, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.arithmetic import MOST
from sglang_basin.predictor.history import HISTORY_BYTES, NOTHING, History
from sglang_basin.predictor.lessons import NO_LESSONS, Guess, Lessons
from sglang_basin.predictor.model import PeakModel, Subject
from sglang_basin.predictor.online import stage_begins
from sglang_basin.predictor.recorded import kin_of
from sglang_basin.predictor.text import Task, read_task

STALE_FACTOR = 1.1
"""A prediction holds until the context has changed by this factor. No door takes it for less than the context."""

MAX_SESSIONS = 20_000
"""Sessions remembered at once, about 0.7 KB each; beyond, the oldest one is forgotten and then unknown."""

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


# What is kept of a session, as bytes, for there are many: its history, stage and tokens of its last guess (stage
# -1 before the first one), what was told of it, its lessons.
_GUESS = struct.Struct("<bI")
_TOLD = struct.Struct("<BQQdI")
"""Which of the following were told; kin, task, text score and characters."""
_DESCRIBED, _KIN, _TASK = 1, 2, 4
_GUESS_AT = HISTORY_BYTES
_TOLD_AT = _GUESS_AT + _GUESS.size
_LESSONS_AT = _TOLD_AT + _TOLD.size
_NOTHING_TOLD = _TOLD.pack(0, 0, 0, 0.0, 0)


def _begun(told: bytes = _NOTHING_TOLD) -> bytearray:
    """Of a session of which only this is known."""
    return bytearray(NOTHING + _GUESS.pack(-1, 0) + told + NO_LESSONS)


def _tell(kept: bytearray, subject: Subject) -> None:
    """Raises struct.error for numbers that cannot be."""
    told = _DESCRIBED + _KIN * (subject.kin is not None) + _TASK * (subject.task is not None)
    kin, task = subject.kin or 0, subject.task or 0
    _TOLD.pack_into(kept, _TOLD_AT, told, kin, task, subject.text_score, subject.characters)


def _told(kept: bytearray) -> Subject:
    told, kin, task, text_score, characters = _TOLD.unpack_from(kept, _TOLD_AT)
    return Subject(kin if told & _KIN else None, task if told & _TASK else None, text_score, characters)


def _holds(stage: int, guessed_tokens: int, calls: int, tokens: int) -> bool:
    """Whether a guess does until a new stage begins, and while the context is about as long as it was."""
    return (
        calls < stage_begins(stage + 1)
        and guessed_tokens < STALE_FACTOR * tokens
        and tokens < STALE_FACTOR * guessed_tokens
    )


class TrainedPredictor:
    """`policy.prediction.PeakPredictor`. Not thread-safe, like the door that asks it."""

    def __init__(self, model: PeakModel | None, *, max_sessions: int = MAX_SESSIONS, seed: int = 1) -> None:
        """`seed` draws which rows of a session it learns from."""
        self.model = model
        self.counts = PredictorCounts()
        self.last_failure: str | None = None
        self._seen = PeaksSeen()
        self._of: dict[str, bytearray] = {}  # what is kept of each session, oldest first
        self._max_sessions = max_sessions
        self._draw = random.Random(seed)

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
            kept = self._follow(session_id)
            _tell(kept, _UNKNOWN)  # described all the same, should this fail
            _tell(kept, self.model.subject(task, kin, score))
        except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
            self.failed(error)

    def knows(self, session_id: str) -> bool:
        """Whether the session was described, or need not be."""
        if self.model is None:
            return True
        kept = self._of.get(session_id)
        return kept is not None and bool(kept[_TOLD_AT])

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
        kept = self._of.pop(session.session_id, None)
        if kept is None or self.model is None:
            return
        try:
            self.model.learn(Lessons(bytes(kept[_LESSONS_AT:])), _told(kept), session.peak_tokens)
        except Exception as error:  # noqa: BLE001 - learning must never cost a call
            self.failed(error)

    def forget(self, session_id: str) -> None:
        """The session went away without having shown its peak: refused, or never admitted."""
        self._of.pop(session_id, None)

    def _follow(self, session_id: str) -> bytearray:
        kept = self._of.get(session_id)
        if kept is None:
            kept = self._of[session_id] = _begun()
            if len(self._of) > self._max_sessions:
                self.forget(next(iter(self._of)))
        return kept

    def _predict(self, session: Session, model: PeakModel) -> Prediction:
        """`session.prediction` is what was answered last, if the caller keeps it there."""
        session_id = session.session_id
        kept, history = self._at(session_id)
        calls, tokens = session.calls_seen, max(1, session.context_tokens)
        if calls < history.calls:  # another session of the same name
            self._of[session_id] = _begun(bytes(kept[_TOLD_AT:_LESSONS_AT]))
            kept, history = self._at(session_id)
        changed = history.advance(calls, tokens, session.pause_s)
        last, (stage, guessed_tokens) = session.prediction, _GUESS.unpack_from(kept, _GUESS_AT)
        if last is not None and stage >= 0 and (not changed or _holds(stage, guessed_tokens, calls, tokens)):
            return last
        if stage >= 0:
            _GUESS.pack_into(kept, _GUESS_AT, -1, 0)  # should the model fail
        guess = model.guess(history, _told(kept))
        kept = self._of[session_id] = self._noted(kept, guess)
        _GUESS.pack_into(kept, _GUESS_AT, guess.stage, min(tokens, MOST))
        return Prediction(array("d", guess.tokens))

    def _noted(self, kept: bytearray, guess: Guess) -> bytearray:
        """What is kept of the session from now on, for it to teach when it ends."""
        if kept[_LESSONS_AT:] == NO_LESSONS:
            return kept[:_LESSONS_AT] + Lessons.first(guess)
        lessons = Lessons(bytes(kept[_LESSONS_AT:]))
        return kept[:_LESSONS_AT] + lessons.packed() if lessons.note(guess, self._draw) else kept

    def _at(self, session_id: str) -> tuple[bytearray, History]:
        kept = self._follow(session_id)
        return kept, History(kept)

    def failed(self, error: Exception) -> None:
        """Count an exception that the caller kept from going further."""
        self.counts.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
