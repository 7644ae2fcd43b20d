"""What prediction error costs in goodput: the door with the real predictor against the same door with an oracle.

    python benchmarks/predictor_ablation.py --trace FILE [--rate 5.5/min] [--seeds 1,2,3] [--lend] [--json OUT]

The tasks are split in two. The predictor is fitted on one half and the simulator serves the other, so that no served
task was seen in fitting; then the other way round. At a session's first call the predictor is told what a server knows
there: task text, agent and model. A recorded session may be drawn more than once; each draw counts as a new task, so
the memory of tasks cannot help. The oracle knows every peak exactly. Minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.prediction import PeakPredictor, PeaksSeen, Prediction
from sglang_basin.policy.priority import SizeAwareOrder
from sglang_basin.policy.reservation import law_named
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.model_file import load_model, save_model
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

    def __init__(self, predictor: TrainedPredictor, plan: Plan, recorded: dict[str, Recorded]) -> None:
        self._predictor = predictor
        self._trace_id = {planned.uid: planned.session.trace_id for planned in plan.sessions}
        self._recorded = recorded

    def predict(self, session: Session) -> Prediction:
        if session.calls_seen <= 1 and session.session_id in self._trace_id:
            known = self._recorded[self._trace_id.pop(session.session_id)]
            task = known.task
            if task is not None:
                task = dataclasses.replace(task, fingerprint=fingerprint(session.session_id))
            self._predictor.describe(session.session_id, task=task, kin=known.kin)
        return self._predictor.predict(session)

    def learn(self, session: Session) -> None:
        self._predictor.learn(session)


def halves(names: Sequence[str], seed: int) -> np.ndarray:
    """0 or 1 per session, the same for all sessions of a task."""
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
    model_path: Path,
    law: dict[str, object],
) -> float:
    """Sessions per hour within the target."""
    plan = build_plan(sessions, arrivals, seed)

    def predictor() -> PeakPredictor:
        if predictor_name == "oracle":
            return NoisyOracle(plan, OracleSettings(rank_correlation=1.0))
        if predictor_name == "seen":
            return PeaksSeen()
        return Described(TrainedPredictor(load_model(model_path)), plan, recorded)

    def door() -> Door:
        options = dict(law)
        peak_share = options.pop("peak_share", 0.5)
        return Door(
            DoorSettings(idle_timeout_s=600.0, hold_limit_s=1e9, ticket_grace_s=60.0, peak_share=peak_share),
            law=law_named(**options),
            budget=Budget(BudgetSettings(), profile.capacity_tokens),
            order=SizeAwareOrder(30.0),
            predictor=predictor(),
        )

    log = simulate(plan, profile, door)
    unloaded_s = {session.trace_id: profile.unloaded_s(session) for session in sessions}
    return summarize(log, unloaded_s, Target()).goodput_per_hour


LAWS: dict[str, dict[str, object]] = {
    "current": {"name": "current"},
    "partial 0.25 of P50": {"name": "partial", "alpha": 0.25, "share": 0.5},
    "partial 0.5 of P25": {"name": "partial", "alpha": 0.5, "share": 0.25},
    "partial 0.5 of P50": {"name": "partial", "alpha": 0.5, "share": 0.5},
    "peak, P50": {"name": "peak", "share": 0.5},
    "peak, P25": {"name": "peak", "share": 0.25},
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
    parser.add_argument("--lend", action="store_true", help="decode lends its idle memory")
    parser.add_argument("--laws", nargs="+", default=list(LAWS), metavar="LAW", help=", ".join(LAWS))
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
    side = halves([one.group for one in recorded], 1)
    by_id = {session.trace_id: one for session, one in zip(traced, recorded, strict=True)}
    results: dict[str, dict[str, list[float]]] = {law: {name: [] for name in PREDICTORS} for law in options.laws}
    for served in (0, 1):
        model_path = Path(f"ablation-half-{served}.npz")
        others = [one for one, at in zip(recorded, side, strict=True) if at != served]
        save_model(fit_model(others), model_path, fitted_on={})
        sessions = scale_trace([one for one, at in zip(traced, side, strict=True) if at == served], scaling)
        seeds = [int(seed) for seed in options.seeds.split(",")]
        for law, name, seed in itertools.product(options.laws, PREDICTORS, seeds):
            found = goodput(sessions, by_id, profile, arrivals, seed, name, model_path, LAWS[law])
            results[law][name].append(found)
        model_path.unlink()
    best = max(statistics.mean(results[law]["oracle"]) for law in options.laws)
    print(f"{'law':22s} " + " ".join(f"{name:>9s}" for name in PREDICTORS) + "  trained/oracle  trained/best oracle")
    for law in options.laws:
        means = {name: statistics.mean(results[law][name]) for name in PREDICTORS}
        print(
            f"{law:22s} "
            + " ".join(f"{means[name]:9.1f}" for name in PREDICTORS)
            + f"  {means['trained'] / means['oracle']:14.3f}  {means['trained'] / best:19.3f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _scaled(one: Recorded, factor: float) -> Recorded:
    calls = tuple((max(1, round(prompt * factor)), round(output * factor)) for prompt, output in one.calls)
    return dataclasses.replace(one, calls=calls)


if __name__ == "__main__":
    raise SystemExit(main())
