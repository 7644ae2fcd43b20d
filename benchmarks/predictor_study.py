"""Peak prediction, measured out of fold and printed beside what it must reach.

    python benchmarks/predictor_study.py --traces DIR [--only NAME …] [--json OUT] [--folds N] [--quick]

DIR holds the recorded traces with task texts. Per trace: the serving model, the article's baseline and the
alternatives with unseen tasks; with repeated tasks where there are any; the learning curve; what is lost without the
text and without the agent's identity; and how well a peak could be predicted at all (`predictor_ceiling.py`). At the
end the speed, on this machine. Ten minutes of computing per trace; `predictor_page.py` makes a page of the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yardstick
from predictor_ceiling import feature_study, task_study

from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.alternatives import ALTERNATIVES
from sglang_basin.predictor.baseline import Baseline
from sglang_basin.predictor.evaluate import ContextAlone, Gain, Method, Predicted, Score, cross_validate, gains, score
from sglang_basin.predictor.fitted import Frozen
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.predictor import TrainedPredictor
from sglang_basin.predictor.recorded import Recorded, read_recorded
from sglang_basin.predictor.report import LEARNING_SHARES, repeats, table
from sglang_basin.predictor.training import fit_model

TRACES = ("terminal_bench", "swe_bench", "swe_rebench_claude_code", "claude_code_kvtester")
GAIN_CALLS = (4, 9, 16)
GAIN = 0.10
P90_RANGE = (0.85, 0.95)
FIRST_CALL_RANK = 0.64


def basin(sessions: Sequence[Recorded]) -> Frozen:
    return Frozen(fit_model(sessions))


@dataclasses.dataclass
class Study:
    """Of one trace."""

    scores: dict[str, list[Score]]
    """Each method's, by its label."""
    gains: dict[str, list[Gain]]
    """Over the present context at `GAIN_CALLS`, with intervals."""
    features: list[dict[str, Any]]
    tasks: list[dict[str, Any]]


def study(name: str, sessions: list[Recorded], *, quick: bool, most_folds: int) -> Study:
    """Few groups, many folds: otherwise the folds' differing means, which always lean against the held-out tasks,
    hide the order of sessions across folds."""
    folds = min(most_folds if len(sessions) < 200 else 5, most_folds, len({session.group for session in sessions}))
    found = Study({}, {}, [], [])

    def run(label: str, sessions: list[Recorded], method: Method, *, grouped: bool = True, share: float = 1.0) -> None:
        started = time.perf_counter()
        predicted = cross_validate(sessions, method, folds=folds, grouped=grouped, train_share=share)
        keep(label, predicted, time.perf_counter() - started)

    def keep(label: str, predicted: Predicted, took_s: float) -> None:
        found.scores[label] = score(predicted)
        found.gains[label] = gains(predicted, GAIN_CALLS)
        print(f"\n{name}: {label} ({took_s:.0f} s)\n{table(found.scores[label])}", flush=True)

    run("basin", sessions, basin)
    run("baseline", sessions, Baseline)
    if repeats(sessions):
        run("basin, repeated tasks", sessions, basin, grouped=False)
        run("baseline, repeated tasks", sessions, Baseline, grouped=False)
    if quick:
        return found
    run("context alone", sessions, ContextAlone)
    for label, method in ALTERNATIVES.items():
        run(label, sessions, method)
    for share in LEARNING_SHARES[:-1]:
        run(f"learning curve {share:.0%}", sessions, basin, share=share)
    if any(session.task is not None for session in sessions):
        run("without text", [dataclasses.replace(session, task=None) for session in sessions], basin)
    run("without agent and model", [dataclasses.replace(session, kin=None) for session in sessions], basin)
    for call in GAIN_CALLS:
        found.features.append(feature_study(sessions, call, folds=folds))
        print(f"\n{name}: {json.dumps(found.features[-1])}", flush=True)
        if repeats(sessions) and (of_tasks := task_study(sessions, call, folds=folds)) is not None:
            found.tasks.append(of_tasks)
            print(f"\n{name}: {json.dumps(of_tasks)}", flush=True)
    return found


def verdicts(name: str, study: Study) -> list[str]:
    found = study.scores
    lines = [
        f"{name:24s} call {one.call:2d}: gain in rank over the context alone {one.gain:+.2f} ({one.low:+.2f} to "
        f"{one.high:+.2f}), must be {GAIN:+.2f}: {'yes' if one.gain >= GAIN else 'NO'}"
        for one in study.gains["basin"]
    ]
    for one in found["basin"]:
        inside = P90_RANGE[0] <= one.p90_coverage <= P90_RANGE[1]
        lines.append(
            f"{name:24s} call {one.call:2d}: P90 coverage {one.p90_coverage:.2f} of {one.sessions} sessions "
            f"(must be {P90_RANGE[0]} to {P90_RANGE[1]}): {'yes' if inside else 'NO'}"
        )
    if again := found.get("basin, repeated tasks"):
        reached = again[0].rank >= FIRST_CALL_RANK
        lines.append(
            f"{name:24s} repeated tasks, first call: rank {again[0].rank:.2f} (must be {FIRST_CALL_RANK}): "
            f"{'yes' if reached else 'NO'}"
        )
    return lines


def speed(model: PeakModel, sessions: Sequence[Recorded]) -> list[str]:
    """In the thread's own CPU time: what other processes of the machine take is not the predictor's."""
    text = " ".join(session.text or "fix the parser of nested lists" for session in sessions)
    firsts, updates, learns = [], [], []
    for number in range(1000):
        predictor = TrainedPredictor(model)
        task_text = text[number : number + 8000]
        started = time.thread_time_ns()
        predictor.describe("s", text=task_text, agent="agent", model="model")
        predictor.predict(Session("s", 0.0, 5000, 0.0, calls_seen=1, first_tokens=5000))
        firsts.append(time.thread_time_ns() - started)
    predictor = TrainedPredictor(model)
    for number, session in enumerate(sessions[:100]):
        policy = Session(str(number), 0.0, 0, 0.0)
        for call, (prompt, output) in enumerate(session.calls, 1):
            policy.calls_seen = call
            for context in (prompt, prompt + output):
                policy.context_tokens = context
                policy.peak_tokens = max(policy.peak_tokens, context)
                started = time.thread_time_ns()
                policy.prediction = predictor.predict(policy)
                updates.append(time.thread_time_ns() - started)
        started = time.thread_time_ns()
        predictor.learn(policy)
        learns.append(time.thread_time_ns() - started)
    first, later, learn = np.array(firsts) / 1e6, np.array(updates) / 1e3, np.array(learns) / 1e3
    return [
        f"CPU time. {yardstick.told()}",
        f"first call, 8,000 characters: median {np.median(first):.2f} ms, p99 {np.quantile(first, 0.99):.2f} ms (≤ 2)",
        f"later calls: median {np.median(later):.0f} µs, p99 {np.quantile(later, 0.99):.0f} µs (≤ 50)",
        f"learning a session: median {np.median(learn):.0f} µs",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=TRACES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--folds", type=int, default=20, metavar="N", help="at most; large traces take 6 (20)")
    parser.add_argument("--quick", action="store_true", help="the serving model and the baseline alone")
    parser.add_argument("--speed", action="store_true", help="the speed alone; what else OUT holds stays")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    lines: list[str] = []
    if options.speed and options.json is not None and options.json.is_file():
        results = json.loads(options.json.read_text())
    for name in options.only[-1:] if options.speed else options.only:
        sessions = read_recorded(options.traces / f"{name}.jsonl.gz")
        if options.speed:
            continue
        found = study(name, sessions, quick=options.quick, most_folds=options.folds)
        results[name] = dataclasses.asdict(found)
        lines += verdicts(name, found)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + "\n".join(lines))
    measured = speed(fit_model(sessions), sessions)
    print("\n".join(measured))
    if options.json is not None:
        options.json.write_text(json.dumps(results | {"speed": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
