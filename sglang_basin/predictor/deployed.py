"""The predictor as an engine uses it: what each request tells, the model, and the session log, in one object.

All of it runs in the scheduler's thread, except that lines of the session log are written by a thread of their own. No
method raises or blocks: what fails is counted, and `policy.prediction.PeaksSeen` predicts in the model's place.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from sglang_basin.log_thread import LogThread
from sglang_basin.policy.prediction import Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.model_file import load_model
from sglang_basin.predictor.payload import TaskFeatures
from sglang_basin.predictor.predictor import MAX_SESSIONS, PredictorCounts, TrainedPredictor
from sglang_basin.predictor.session_log import Entry, SessionLog

MAX_LOGGED_CALLS = 512
"""Calls of a session that its line can hold; the last place then goes to the longest of the later ones."""


class SessionLogThread(LogThread[Entry]):
    """Writes entries in a thread of its own. A disk that is slow or full costs lines, which are counted."""

    def __init__(self, log: SessionLog, *, most_waiting: int = 1024) -> None:
        super().__init__(lambda entries: log.append(entries[0]), name="basin-session-log", most_waiting=most_waiting)


@dataclass(slots=True)
class _Told:
    """What a session's requests told, and its calls so far where they are logged."""

    described: bool = False
    features: TaskFeatures = field(default_factory=TaskFeatures)
    seen: int = 0
    """The number of the last call in `calls`."""
    calls: array[int] = field(default_factory=lambda: array("L"))
    """Prompt and output of each call, by turns."""
    pauses_s: array[float] = field(default_factory=lambda: array("f"))
    """Before each call."""


class DeployedPredictor:
    """`policy.prediction.PeakPredictor` of an engine's door. Not thread-safe, like the door."""

    def __init__(
        self, model: PeakModel | None, log: SessionLogThread | None = None, *, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """Without a model `PeaksSeen` predicts, and sessions are logged all the same."""
        self.log = log
        self.trained = TrainedPredictor(model, max_sessions=max_sessions)
        self._told: OrderedDict[str, _Told] = OrderedDict()
        self._max_sessions = max_sessions

    @classmethod
    def from_files(cls, model: Path | None, log: Path | None = None) -> DeployedPredictor:
        """Load the model and start the log's thread. Raises ModelFileError, and OSError when the log cannot be
        written: at a start both are errors, later nothing is. One log file has one writing process."""
        loaded = None if model is None else load_model(model)
        if log is None:
            return cls(loaded)
        with log.open("ab"):
            pass
        return cls(loaded, SessionLogThread(SessionLog(log)))

    @property
    def counts(self) -> PredictorCounts:
        return self.trained.counts

    @property
    def last_failure(self) -> str | None:
        return self.trained.last_failure or (self.log.last_failure if self.log is not None else None)

    def describe(self, session_id: str, payload: object) -> None:
        """What `payload.task_payload` read from a request, before the door sees the call; None where nothing came.

        Cheap on a session's later calls, which tell the same; some 300 microseconds on the first.
        """
        told = self._told.get(session_id)
        if not isinstance(payload, dict) or (told is not None and told.described):
            return
        try:
            features = TaskFeatures.from_payload(payload)
        except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
            self.trained.failed(error)
            return
        self.trained.describe(session_id, task=features.task, kin=features.kin)
        told = self._follow(session_id)
        told.described = True
        if self.log is not None:
            told.features = features

    def predict(self, session: Session) -> Prediction:
        if self.log is not None:
            try:
                self._note(session)
            except Exception as error:  # noqa: BLE001 - a log must never cost a call
                self.trained.failed(error)
        return self.trained.predict(session)

    def learn(self, session: Session) -> None:
        told = self._told.pop(session.session_id, None)
        self.trained.learn(session)
        if told is None or self.log is None or not told.calls:
            return
        calls = tuple(zip(told.calls[::2], told.calls[1::2], strict=True))
        features, pauses_s = told.features, tuple(told.pauses_s[1:])
        self.log.put(Entry(calls, features.kin, features.task, features.text, pauses_s))

    def forget(self, session_id: str) -> None:
        self._told.pop(session_id, None)
        self.trained.forget(session_id)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what the log still holds, for at most `timeout_s`."""
        if self.log is not None:
            self.log.close(timeout_s)

    def _follow(self, session_id: str) -> _Told:
        told = self._told.get(session_id)
        if told is None:
            told = self._told[session_id] = _Told()
            if len(self._told) > self._max_sessions:
                self._told.popitem(last=False)
        else:
            self._told.move_to_end(session_id)
        return told

    def _note(self, session: Session) -> None:
        told, calls = self._follow(session.session_id), session.calls_seen
        if calls < told.seen:  # another session of the same name
            told.calls, told.pauses_s, told.seen = array("L"), array("f"), 0
        context = max(1, session.context_tokens)
        if calls > told.seen:
            told.seen = calls
            if len(told.calls) < 2 * MAX_LOGGED_CALLS:
                told.calls.extend((context, 0))
                told.pauses_s.append(session.pause_s)
                return
        prompt, output = told.calls[-2:] if told.calls else (0, 0)
        if told.seen > MAX_LOGGED_CALLS:  # the last place holds the longest context
            if context > prompt + output:
                told.calls[-2:] = array("L", (context, 0))
        elif told.calls:
            told.calls[-1] = max(0, context - prompt)
