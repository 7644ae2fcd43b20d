"""The policy's `PeakPredictor`, made of a peak model; the policy's own `PeaksSeen` where it fails (`seen`).

Called in the scheduler's thread, so both calls take microseconds: `predict` one or two, or six where it guesses anew,
which is one call in three; `learn` some thirty. What the policy's session does not carry is kept here by session id:
`describe` once, before the first `predict`, with what the request's text says. Reading the text (about a millisecond)
is a step of its own, `text.read_task`, that runs in another process or thread; its result is small.
"""

from __future__ import annotations

import random
from array import array

from sglang_basin.policy.prediction import Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.arithmetic import ANOTHER, HOLDS, KEPT_ROWS, follow
from sglang_basin.predictor.kept import KeptSessions, Subject
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.recorded import kin_of
from sglang_basin.predictor.seen import MAX_SESSIONS, SeenPredictor
from sglang_basin.predictor.text import Task, read_task

_UNKNOWN = Subject()


class TrainedPredictor(SeenPredictor):
    """`policy.prediction.PeakPredictor` with a model. Not thread-safe, like the door that asks it."""

    def __init__(self, model: PeakModel, *, max_sessions: int = MAX_SESSIONS, seed: int = 1) -> None:
        """`seed` draws which rows of a session it learns from."""
        super().__init__()
        self.model = model
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
        place = self._kept.find(session_id)
        return place is not None and self._kept.is_told(place)

    def predict(self, session: Session) -> Prediction:
        self.counts.predictions += 1
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
        return self._by_peaks_seen(session)

    def learn(self, session: Session) -> None:
        super().learn(session)
        place = self._kept.find(session.session_id)
        if place is None:
            return
        try:
            kin, task = self._kept.keys_told(place)
            self.model.learn(*self._kept.record(place), kin, task, session.peak_tokens)
        except Exception as error:  # noqa: BLE001 - learning must never cost a call
            self.failed(error)
        self._kept.forget(session.session_id)

    def forget(self, session_id: str) -> None:
        self._kept.forget(session_id)
