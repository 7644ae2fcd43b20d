"""What prediction error costs in goodput: the door with the real predictor against the same door with an oracle.

    python benchmarks/predictor_ablation.py --trace FILE [--rate 5.5/min] [--seeds 1,2,3] [--split runs] [--lend]

The tasks are split in two. The predictor is fitted on one half and the simulator serves the other, so that no served
task was seen in fitting; then the other way round. At a session's first call the predictor is told what a server knows
there: task text, agent and model. A recorded session may be drawn more than once; each draw counts as a new task, so
the memory of tasks cannot help. The oracle knows every peak exactly. Minutes.

With --split runs each task's runs are split instead, as where tasks come again: the predictor knows other runs of the
served tasks from its fit. It does not learn in service then, for a session drawn twice would teach its own peak.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.prediction import PeakPredictor, PeaksSeen, Prediction
from sglang_basin.policy.priority import SizeAwareOrder
from sglang_basin.policy.reservation import law_named
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.predictor import TrainedPredictor
from sglang_basin.predictor.recorded import Recorded, read_recorded
from sglang_basin.predictor.text import fingerprint
from sglang_basin.predictor.training import fit_model
from sglang_basin.replay.arrivals import ArrivalProfile, Surge
from sglang_basin.replay.goodput import Target
from sglang_basin.replay.plan import Plan, build_plan
from sglang_basin.replay.quantities import rate_per_s, scale_factor
from sglang_basin.replay.trace import Scaling, read_trace, scale_trace
from sglang_basin.replay.trace import Session as TraceSession
from sglang_basin.simulator.oracle import NoisyOracle, OracleSettings
from sglang_basin.simulator.profile import HardwareProfile, read_profile
from sglang_basin.simulator.records import summarize
from sglang_basin.simulator.simulation import simulate

PREDICTORS = ("oracle", "trained", "seen")


class Described:
    """Tells a trained predictor at a session's first call what the request would have told."""

    def __init__(
        self, predictor: TrainedPredictor, plan: Plan, recorded: dict[str, Recorded], *, tasks_again: bool
    ) -> None:
        self._tasks_again = tasks_again
        self._predictor = predictor
        self._trace_id = {planned.uid: planned.session.trace_id for planned in plan.sessions}
        self._recorded = recorded

    def predict(self, session: Session) -> Prediction:
        if session.calls_seen <= 1 and session.session_id in self._trace_id:
            known = self._recorded[self._trace_id.pop(session.session_id)]
            task = known.task
            if task is not None and not self._tasks_again:
                task = dataclasses.replace(task, fingerprint=fingerprint(session.session_id))
            self._predictor.describe(session.session_id, task=task, kin=known.kin)
        return self._predictor.predict(session)

    def learn(self, session: Session) -> None:
        if self._tasks_again:
            self._predictor.forget(session.session_id)
        else:
            self._predictor.learn(session)

    def forget(self, session_id: str) -> None:
        self._predictor.forget(session_id)


def halves(names: Sequence[str], seed: int, *, tasks_again: bool) -> np.ndarray:
    """0 or 1 per session: the same for all sessions of a task, or by turns within it."""
    if tasks_again:
        turn = Counter[str]()
        side = []
        for name in names:
            side.append(turn[name] % 2)
            turn[name] += 1
        return np.array(side)
    distinct = sorted(set(names))
    side = dict(zip(distinct, np.random.default_rng(seed).permutation(len(distinct)) % 2, strict=True))
    return np.array([side[name] for name in names])


def goodput(
    sessions: list[TraceSession],
    recorded: dict[str, Recorded],
    profile: HardwareProfile,
    arrivals: ArrivalProfile,
    seed: int,
    predictor_name: str,
    model: PeakModel,
    tasks_again: bool,
    law: dict[str, Any],
) -> float:
    """Sessions per hour within the target."""
    plan = build_plan(sessions, arrivals, seed)

    def predictor() -> PeakPredictor:
        if predictor_name == "oracle":
            return NoisyOracle(plan, OracleSettings(rank_correlation=1.0))
        if predictor_name == "seen":
            return PeaksSeen()
        return Described(TrainedPredictor(copy.deepcopy(model)), plan, recorded, tasks_again=tasks_again)

    def door() -> Door:
        options = dict(law)
        peak_share = options.pop("peak_share", 0.5)
        order = SizeAwareOrder(options.pop("order_tokens_per_s", 30.0))
        return Door(
            DoorSettings(idle_timeout_s=600.0, hold_limit_s=1e9, ticket_grace_s=60.0, peak_share=peak_share),
            law=law_named(**options),
            budget=Budget(BudgetSettings(), profile.capacity_tokens),
            order=order,
            predictor=predictor(),
        )

    log = simulate(plan, profile, door)
    unloaded_s = {session.trace_id: profile.unloaded_s(session) for session in sessions}
    return summarize(log, unloaded_s, Target()).goodput_per_hour


# r, in tokens a second, and the quantile after the comma are the order's: its default is 30 by P50.
LAWS: dict[str, dict[str, Any]] = {
    "current": {"name": "current"},
    "partial 0.25 of P50": {"name": "partial", "alpha": 0.25, "share": 0.5},
    "partial 0.25 of P25": {"name": "partial", "alpha": 0.25, "share": 0.25},
    "partial 0.5 of P25": {"name": "partial", "alpha": 0.5, "share": 0.25},
    "partial 0.5 of P50": {"name": "partial", "alpha": 0.5, "share": 0.5},
    "peak, P50": {"name": "peak", "share": 0.5},
    "peak, P25": {"name": "peak", "share": 0.25},
    "partial 0.5 of P25, r 15": {"name": "partial", "alpha": 0.5, "share": 0.25, "order_tokens_per_s": 15.0},
    "partial 0.5 of P25, r 8": {"name": "partial", "alpha": 0.5, "share": 0.25, "order_tokens_per_s": 8.0},
    "partial 0.5 of P25, r 8 P75": {
        "name": "partial",
        "alpha": 0.5,
        "share": 0.25,
        "order_tokens_per_s": 8.0,
        "peak_share": 0.75,
    },
    "partial 0.5 of P10, r 8 P75": {
        "name": "partial",
        "alpha": 0.5,
        "share": 0.1,
        "order_tokens_per_s": 8.0,
        "peak_share": 0.75,
    },
    "multiplex": {"name": "multiplex"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--profile", default="h200-1p3d")
    parser.add_argument("--rate", type=rate_per_s, default=rate_per_s("5.5/min"), metavar="R")
    parser.add_argument("--surge", type=float, default=1.0, metavar="F", help="added between minutes 15 and 25 (1.0)")
    parser.add_argument("--scale-tokens", type=scale_factor, default=1.0, metavar="F")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--split", choices=("tasks", "runs"), default="tasks", help="what is split in two (tasks)")
    parser.add_argument("--lend", action="store_true", help="decode lends its idle memory")
    parser.add_argument("--laws", nargs="+", default=list(LAWS), metavar="LAW", help=", ".join(LAWS))
    parser.add_argument("--predictors", nargs="+", default=list(PREDICTORS), choices=PREDICTORS)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()

    profile = read_profile(options.profile).changed({"decode.lend": "true"} if options.lend else {})
    scaling = Scaling(tool_cap_s=120.0, tokens=options.scale_tokens)
    arrivals = ArrivalProfile(
        rate_per_s=options.rate,
        duration_s=3600.0,
        tail_s=900.0,
        surge=Surge(options.surge, 900.0, 1500.0) if options.surge else None,
    )
    traced, recorded = read_trace(options.trace), read_recorded(options.trace)
    if options.scale_tokens != 1:
        recorded = [_scaled(one, options.scale_tokens) for one in recorded]
    tasks_again = options.split == "runs"
    side = halves([one.group for one in recorded], 1, tasks_again=tasks_again)
    by_id = {session.trace_id: one for session, one in zip(traced, recorded, strict=True)}
    results: dict[str, dict[str, list[float]]] = {
        law: {name: [] for name in options.predictors} for law in options.laws
    }
    for served in (0, 1):
        model = fit_model([one for one, at in zip(recorded, side, strict=True) if at != served])
        sessions = scale_trace([one for one, at in zip(traced, side, strict=True) if at == served], scaling)
        seeds = [int(seed) for seed in options.seeds.split(",")]
        for law, name, seed in itertools.product(options.laws, options.predictors, seeds):
            found = goodput(sessions, by_id, profile, arrivals, seed, name, model, tasks_again, LAWS[law])
            results[law][name].append(found)
    means = {law: {name: statistics.mean(found) for name, found in results[law].items()} for law in options.laws}
    best = max(of_law.get("oracle", 0.0) for of_law in means.values())
    print(
        f"{'law':28s} " + " ".join(f"{name:>9s}" for name in options.predictors) + "  trained / oracle, / best oracle"
    )
    for law, of_law in means.items():
        line = f"{law:28s} " + " ".join(f"{of_law[name]:9.1f}" for name in options.predictors)
        if {"trained", "oracle"} <= of_law.keys():
            line += f"  {of_law['trained'] / of_law['oracle']:16.3f}  {of_law['trained'] / best:13.3f}"
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _scaled(one: Recorded, factor: float) -> Recorded:
    calls = tuple((max(1, round(prompt * factor)), round(output * factor)) for prompt, output in one.calls)
    return dataclasses.replace(one, calls=calls)


if __name__ == "__main__":
    raise SystemExit(main())
