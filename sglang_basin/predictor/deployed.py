"""The predictor as an engine uses it: what each request tells, the model, and the session log, in one object.

All of it runs in the scheduler's thread, except that lines of the session log are written by a thread of their own. No
method raises or blocks: what fails is counted, and `policy.prediction.PeaksSeen` predicts in the model's place. Where
no model is asked for, nothing of one is imported.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

from sglang_basin.log_thread import LogThread
from sglang_basin.policy.prediction import Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.model_file import load_model
from sglang_basin.predictor.payload import TaskFeatures
from sglang_basin.predictor.seen import MAX_SESSIONS, PredictorCounts, SeenPredictor
from sglang_basin.predictor.session_log import Entry, SessionLog

MAX_LOGGED_CALLS = 512
"""Calls of a session that its line can hold; the last place then goes to the longest of the later ones."""


class SessionLogThread(LogThread[Entry]):
    """Writes entries in a thread of its own. A disk that is slow or full costs lines, which are counted."""

    def __init__(self, log: SessionLog, *, most_waiting: int = 1024) -> None:
        super().__init__(lambda entries: log.append(entries[0]), name="basin-session-log", most_waiting=most_waiting)


@dataclass(slots=True)
class _Logged:
    """What a session's line in the log will say: what its requests told, and its calls so far."""

    features: TaskFeatures | None = None
    """None until they told something."""
    seen: int = 0
    """The number of the last call in `calls`."""
    calls: array[int] = field(default_factory=lambda: array("I"))
    """Prompt and output of each call, by turns."""
    pauses_s: array[float] = field(default_factory=lambda: array("f"))
    """Before each call."""


class DeployedPredictor:
    """`policy.prediction.PeakPredictor` of an engine's door. Not thread-safe, like the door."""

    def __init__(
        self, predictor: SeenPredictor, log: SessionLogThread | None = None, *, max_sessions: int = MAX_SESSIONS
    ) -> None:
        """With a log, at most `max_sessions` are followed for it."""
        self.log = log
        self.predictor = predictor
        self._logged: dict[str, _Logged] = {}  # oldest first; nothing without a log
        self._max_sessions = max_sessions

    @classmethod
    def from_files(cls, model: Path | None, log: Path | None = None) -> DeployedPredictor:
        """Load the model, if any, and start the log's thread. Raises ModelFileError, and OSError when the log cannot be
        written: at a start both are errors, later nothing is. One log file has one writing process."""
        predictor = SeenPredictor() if model is None else _trained(model)
        if log is None:
            return cls(predictor)
        with log.open("ab"):
            pass
        return cls(predictor, SessionLogThread(SessionLog(log)))

    @property
    def counts(self) -> PredictorCounts:
        return self.predictor.counts

    @property
    def last_failure(self) -> str | None:
        return self.predictor.last_failure or (self.log.last_failure if self.log is not None else None)

    def describe(self, session_id: str, payload: object) -> None:
        """What `payload.task_payload` read from a request, before the door sees the call; None where nothing came.

        Cheap on a session's later calls, which tell the same; some ten microseconds on the first, and a hundred where
        the text's score has to be made here.
        """
        if not isinstance(payload, dict) or self._is_described(session_id):
            return
        try:
            features = TaskFeatures.from_payload(payload)
        except Exception as error:  # noqa: BLE001 - a prediction must never cost a call
            self.predictor.failed(error)
            return
        self.predictor.describe(session_id, task=features.task, kin=features.kin, score=features.score)
        if self.log is not None:
            self._follow(session_id).features = features

    def predict(self, session: Session) -> Prediction:
        if self.log is not None:
            try:
                self._note(session)
            except Exception as error:  # noqa: BLE001 - a log must never cost a call
                self.predictor.failed(error)
        return self.predictor.predict(session)

    def learn(self, session: Session) -> None:
        logged = self._logged.pop(session.session_id, None)
        self.predictor.learn(session)
        if logged is None or self.log is None or not logged.calls:
            return
        calls = tuple(zip(logged.calls[::2], logged.calls[1::2], strict=True))
        features, pauses_s = logged.features or TaskFeatures(), tuple(logged.pauses_s[1:])
        self.log.put(Entry(calls, features.kin, features.task, features.text, pauses_s))

    def forget(self, session_id: str) -> None:
        self._logged.pop(session_id, None)
        self.predictor.forget(session_id)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what the log still holds, for at most `timeout_s`."""
        if self.log is not None:
            self.log.close(timeout_s)

    def _is_described(self, session_id: str) -> bool:
        if self.log is None:
            return self.predictor.knows(session_id)
        logged = self._logged.get(session_id)
        return logged is not None and logged.features is not None

    def _follow(self, session_id: str) -> _Logged:
        logged = self._logged.get(session_id)
        if logged is None:
            logged = self._logged[session_id] = _Logged()
            if len(self._logged) > self._max_sessions:
                del self._logged[next(iter(self._logged))]
        return logged

    def _note(self, session: Session) -> None:
        logged, calls = self._follow(session.session_id), session.calls_seen
        if calls < logged.seen:  # another session of the same name
            logged.calls, logged.pauses_s, logged.seen = array("I"), array("f"), 0
        context = max(1, session.context_tokens)
        if calls > logged.seen:
            logged.seen = calls
            if len(logged.calls) < 2 * MAX_LOGGED_CALLS:
                logged.calls.extend((context, 0))
                logged.pauses_s.append(session.pause_s)
                return
        prompt, output = logged.calls[-2:] if logged.calls else (0, 0)
        if logged.seen > MAX_LOGGED_CALLS:  # the last place holds the longest context
            if context > prompt + output:
                logged.calls[-2:] = array("I", (context, 0))
        elif logged.calls:
            logged.calls[-1] = max(0, context - prompt)


def _trained(model: Path) -> SeenPredictor:
    """The predictor of this model file, or, counted as a failure, one without a model where the compiled code that it
    runs on cannot be loaded: numba refuses a NumPy that is newer than it knows."""
    try:
        from sglang_basin.predictor.predictor import TrainedPredictor
    except Exception as error:  # noqa: BLE001 - an engine serves without predictions as well
        seen = SeenPredictor()
        seen.failed(error)
        return seen
    return TrainedPredictor(load_model(model))
