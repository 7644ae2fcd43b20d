"""The trained predictor as it does on tasks that it has never seen, for a simulated run.

The tasks of a workload are split in two and a model is fitted on each half; a session is predicted by the model of the
other half. At its first call the model is told what a server knows there: task text, agent and model. A recorded
session may be drawn more than once; each draw counts as a new task, so that no memory of tasks can help. Each model
goes on learning from the sessions that it predicted and that have ended, as in service.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from sglang_basin.policy.prediction import PeakPredictor, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.predictor import TrainedPredictor
from sglang_basin.predictor.recorded import Recorded, read_recorded
from sglang_basin.predictor.text import fingerprint
from sglang_basin.predictor.training import fit_model
from sglang_basin.replay.plan import Plan
from sglang_basin.replay.trace import Scaling, find_trace, read_trace, scale_trace


@dataclasses.dataclass(frozen=True)
class Halves:
    """A workload's sessions by trace id, each with the half that its task is in, and the model fitted on each half."""

    sessions: dict[str, tuple[int, Recorded]]
    models: tuple[PeakModel, PeakModel]


@cache
def halves_of(trace: str, scaling: Scaling) -> Halves:
    """Fits both models, some seconds each; kept for the process."""
    recorded = {}
    traced = read_trace(find_trace(trace))
    for session, one in zip(traced, read_recorded(Path(find_trace(trace))), strict=True):
        recorded[session.trace_id] = one
    scaled = {
        session.trace_id: dataclasses.replace(
            recorded[session.trace_id],
            calls=tuple((call.prompt_tokens, call.output_tokens) for call in session.calls),
            pauses_s=tuple(call.tool_s for call in session.calls[:-1]),
        )
        for session in scale_trace(traced, scaling)
    }
    tasks = sorted({one.group for one in scaled.values()})
    half = dict(zip(tasks, np.random.default_rng(1).permutation(len(tasks)) % 2, strict=True))
    sides = {name: int(half[one.group]) for name, one in scaled.items()}
    models = tuple(fit_model([one for name, one in scaled.items() if sides[name] == side]) for side in (0, 1))
    return Halves({name: (sides[name], one) for name, one in scaled.items()}, (models[0], models[1]))


class HeldOut:
    """`PeakPredictor`: two trained ones, of which the one that does not know a session's task predicts it."""

    def __init__(self, plan: Plan, halves: Halves) -> None:
        self._by_side = tuple(TrainedPredictor(copy.deepcopy(model)) for model in halves.models)
        self._halves = halves
        self._trace_id = {planned.uid: planned.session.trace_id for planned in plan.sessions}

    def predict(self, session: Session) -> Prediction:
        known = self._known(session)
        if session.calls_seen <= 1 and known.task is not None:
            task = dataclasses.replace(known.task, fingerprint=fingerprint(session.session_id))
            self._of(session).describe(session.session_id, task=task, kin=known.kin)
        elif session.calls_seen <= 1:
            self._of(session).describe(session.session_id, kin=known.kin)
        return self._of(session).predict(session)

    def learn(self, session: Session) -> None:
        self._of(session).learn(session)

    def forget(self, session_id: str) -> None:
        for predictor in self._by_side:
            predictor.forget(session_id)

    def _known(self, session: Session) -> Recorded:
        return self._halves.sessions[self._trace_id[session.session_id]][1]

    def _of(self, session: Session) -> TrainedPredictor:
        side = self._halves.sessions[self._trace_id[session.session_id]][0]
        return self._by_side[1 - side]


def held_out(plan: Plan, trace: str, scaling: Scaling) -> Callable[[], PeakPredictor]:
    """A factory of fresh predictors for the sessions of `plan`, which are of `trace` brought to size by `scaling`."""
    halves = halves_of(trace, scaling)
    return lambda: HeldOut(plan, halves)
