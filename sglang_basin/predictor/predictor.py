"""The policy's `PeakPredictor`, made of a peak model; the policy's own `PeaksSeen` when there is none or it fails.

Called in the scheduler's thread, so both calls take microseconds: `predict` two, or thirty where it guesses anew, which
is one call in three; `learn` some hundreds. What the policy's session does not carry is kept here by session id:
`describe` once, before the first `predict`, with what the request's text says. Reading the text (about a millisecond)
is a step of its own, `text.read_task`, that runs in another process or thread; its result is small.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from sglang_basin.policy.prediction import PeaksSeen, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.history import PACKED_BYTES, History
from sglang_basin.predictor.lessons import Lessons
from sglang_basin.predictor.model import PeakModel, Subject
from sglang_basin.predictor.online import stage_begins
from sglang_basin.predictor.recorded import kin_of
from sglang_basin.predictor.text import Task, read_task

STALE_FACTOR = 1.1
"""A prediction holds until the context has changed by this factor. No door takes it for less than the context."""

MAX_SESSIONS = 20_000
"""Sessions remembered at once, about 0.7 KB each; beyond, the oldest one is forgotten and then unknown."""

OPEN_SESSIONS = 128
"""Of these so many, the ones asked about last, are at hand; the others are packed, which takes microseconds."""

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


_HEAD = struct.Struct("<bIBQQdI")
"""Stage, tokens; what was told of the subject; kin, task, text score and characters."""
_HISTORY_AT, _LESSONS_AT = _HEAD.size, _HEAD.size + PACKED_BYTES
_DESCRIBED, _KIN, _TASK = 1, 2, 4


class _Followed:
    """What is known of one session."""

    __slots__ = ("history", "lessons", "stage", "subject", "tokens", "until_calls")

    def __init__(self) -> None:
        self.subject: Subject | None = None
        """None until it was described."""
        self.begin()

    def begin(self) -> None:
        self.history = History()
        self.lessons = Lessons()
        self.guessed(-1, 0)

    def guessed(self, stage: int, tokens: int) -> None:
        self.stage = stage
        """Of its last guess; -1 before the first one."""
        self.until_calls = stage_begins(stage + 1)
        """That guess holds before this call, with which a new stage begins,"""
        self.tokens = tokens
        """and while the context is about this long."""

    def holds(self, calls: int, tokens: int) -> bool:
        return calls < self.until_calls and self.tokens < STALE_FACTOR * tokens and tokens < STALE_FACTOR * self.tokens

    def packed(self) -> bytes:
        """All of it, in as little space as that takes. Raises struct.error for numbers beyond what a context can be."""
        subject = self.subject or _UNKNOWN
        told = _DESCRIBED * (self.subject is not None) + _KIN * (subject.kin is not None)
        told += _TASK * (subject.task is not None)
        kin, task = subject.kin or 0, subject.task or 0
        head = _HEAD.pack(self.stage, self.tokens, told, kin, task, subject.text_score, subject.characters)
        return head + self.history.packed() + self.lessons.packed()

    @classmethod
    def unpacked(cls, packed: bytes) -> _Followed:
        followed = cls.__new__(cls)
        stage, tokens, told, kin, task, text_score, characters = _HEAD.unpack_from(packed)
        followed.guessed(stage, tokens)
        followed.subject = None
        if told & _DESCRIBED:
            known_kin, known_task = kin if told & _KIN else None, task if told & _TASK else None
            followed.subject = Subject(known_kin, known_task, text_score, characters)
        followed.history = History(packed[_HISTORY_AT:_LESSONS_AT])
        followed.lessons = Lessons(packed[_LESSONS_AT:])
        return followed


class TrainedPredictor:
    """`policy.prediction.PeakPredictor`. Not thread-safe, like the door that asks it."""

    def __init__(self, model: PeakModel | None, *, max_sessions: int = MAX_SESSIONS, seed: int = 1) -> None:
        """`seed` draws which rows of a session it learns from."""
        self.model = model
        self.counts = PredictorCounts()
        self.last_failure: str | None = None
        self._seen = PeaksSeen()
        self._of: dict[str, bytes] = {}  # all sessions, packed, oldest first; of those at hand nothing
        self._open: OrderedDict[str, _Followed] = OrderedDict()  # those at hand, last used last
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
            followed = self._follow(session_id)
            followed.subject = _UNKNOWN  # described all the same, should this fail
            followed.subject = self.model.subject(task, kin, score)
        except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
            self.failed(error)

    def knows(self, session_id: str) -> bool:
        """Whether the session was described, or need not be."""
        if self.model is None:
            return True
        return session_id in self._of and self._follow(session_id).subject is not None

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
        followed = self._take(session.session_id)
        if followed is None or self.model is None:
            return
        try:
            self.model.learn(followed.lessons, followed.subject or _UNKNOWN, session.peak_tokens)
        except Exception as error:  # noqa: BLE001 - learning must never cost a call
            self.failed(error)

    def forget(self, session_id: str) -> None:
        """The session went away without having shown its peak: refused, or never admitted."""
        self._of.pop(session_id, None)
        self._open.pop(session_id, None)

    def _follow(self, session_id: str) -> _Followed:
        followed = self._open.get(session_id)
        if followed is not None:
            self._open.move_to_end(session_id)
            return followed
        packed = self._of.get(session_id)
        followed = _Followed() if packed is None else _Followed.unpacked(packed)
        self._of[session_id] = b""
        self._open[session_id] = followed
        if len(self._open) > OPEN_SESSIONS:
            self._put_away(*self._open.popitem(last=False))
        if len(self._of) > self._max_sessions:
            self.forget(next(iter(self._of)))
        return followed

    def _put_away(self, session_id: str, followed: _Followed) -> None:
        try:
            self._of[session_id] = followed.packed()
        except struct.error as error:
            del self._of[session_id]
            self.failed(error)

    def _take(self, session_id: str) -> _Followed | None:
        packed, followed = self._of.pop(session_id, None), self._open.pop(session_id, None)
        return _Followed.unpacked(packed) if packed else followed

    def _predict(self, session: Session, model: PeakModel) -> Prediction:
        """`session.prediction` is what was answered last, if the caller keeps it there."""
        followed = self._follow(session.session_id)
        calls, tokens = session.calls_seen, max(1, session.context_tokens)
        if calls < followed.history.calls:  # another session of the same name
            followed.begin()
        changed = followed.history.advance(calls, tokens, session.pause_s)
        last = session.prediction
        if last is not None and followed.stage >= 0 and (not changed or followed.holds(calls, tokens)):
            return last
        followed.guessed(-1, 0)  # should the model fail
        guess = model.guess(followed.history, followed.subject or _UNKNOWN)
        followed.lessons.note(guess, self._draw)
        followed.guessed(guess.stage, tokens)
        return Prediction(array("d", guess.tokens))

    def failed(self, error: Exception) -> None:
        """Count an exception that the caller kept from going further."""
        self.counts.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
