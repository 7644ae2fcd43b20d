"""A peak model as `evaluate.Fitted`: frozen as it was fitted, or learning from each session right after judging it."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.kept import History
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.predictor import TrainedPredictor
from sglang_basin.predictor.recorded import Recorded


class Frozen:
    """Learns nothing any more: what cross-validation judges."""

    def __init__(self, model: PeakModel) -> None:
        self.model = model

    def quantiles(self, session: Recorded, calls: Sequence[int]) -> list[Sequence[float]]:
        subject = self.model.subject(session.task, session.kin)
        history = History()
        wanted = set(calls)
        made: list[Sequence[float]] = []
        for call, prompt, output, pause_s in session.steps():
            history.advance(call, prompt, pause_s)
            if call in wanted:
                made.append(self.model.explain(history, subject).tokens)
            history.advance(call, prompt + output)
        return made


class Serving:
    """As in a deployment: each session is predicted call by call and then learned, one after the other."""

    def __init__(self, predictor: TrainedPredictor) -> None:
        self.predictor = predictor
        self._number = 0

    def quantiles(self, session: Recorded, calls: Sequence[int]) -> list[Sequence[float]]:
        self._number += 1
        name = str(self._number)
        self.predictor.describe(name, task=session.task, kin=session.kin)
        policy = Session(name, 0.0, 0, 0.0, first_tokens=session.calls[0][0])
        wanted = set(calls)
        made: list[Sequence[float]] = []
        for call, prompt, output, pause_s in session.steps():
            policy.calls_seen, policy.pause_s = call, pause_s
            for context in (prompt, prompt + output):
                policy.context_tokens = context
                policy.peak_tokens = max(policy.peak_tokens, context)
                policy.prediction = self.predictor.predict(policy)
                if context == prompt and call in wanted and len(made) < len(calls):
                    made.append(list(policy.prediction.tokens))
                    wanted.discard(call)
        self.predictor.learn(policy)
        return made
