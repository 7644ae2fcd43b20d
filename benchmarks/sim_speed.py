"""What the simulator costs: two hours of 1P3D, and how the cost grows with the load.

    .venv/bin/python benchmarks/sim_speed.py [--quick] [--seeds 1]

Each measurement runs alone in a process of its own, whatever `--jobs` says; on a machine that does other work the CPU
seconds still count other work's cache misses. *Operations* are Python function calls per model call, counted by the
profiler: they are the same on every machine, and tell whether a dearer call does more or waits longer for memory.
"""

from __future__ import annotations

import cProfile
import dataclasses
import multiprocessing
import pstats
import time
from typing import Any

import yardstick
from sim_rooms import CODE, Figure, Finding, Table, Workload, holds, parse, publish, surge

from sglang_basin.replay.trace import Scaling
from sglang_basin.simulator import Simulation, policy_factory
from sglang_basin.simulator.simulation import TICK_S
from sglang_basin.simulator.study import StudySettings, run_study

POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "stock": ("stock", {}),
    "basin, trained predictor (default)": ("basin", {}),
    "basin, seen peaks": ("basin", {"predictor": "seen"}),
}
LOADS = (1, 10, 100)
SHORT_S = 900.0
"""Of the loads; no surge."""


def larger(factor: int) -> dict[str, str]:
    """1P3D so many times as large, one prefill instance that is as much faster."""
    return {
        "prefill.pool_tokens": str(1_152_000 * factor),
        "prefill.fixed_s": str(0.012 / factor),
        "prefill.per_token_s": str(2.7e-5 / factor),
        "prefill.attention_s": str(4.0e-10 / factor),
        "decode.instances": str(3 * factor),
    }


def settings(
    workload: Workload, policy: str, options: dict[str, str], factor: int, short: bool, *, surges: bool = True
) -> StudySettings:
    return StudySettings(
        **(workload.settings() | {"scaling": Scaling()}),
        profile="h200-1p3d",
        policy=policy,
        policy_options=options,
        profile_changes=larger(factor) if short else {},
        rate_per_s=5.5 * factor / 60,
        duration_s=SHORT_S if short else 7200.0,
        surge=surge(1.0) if surges and not short else None,
    )


def cost(one: StudySettings) -> dict[str, Any]:
    study = run_study(one)
    return study.cost() | {"calls": len(study.log.call_session)}


def operations(one: StudySettings) -> dict[str, Any]:
    profile = cProfile.Profile()
    study = profile.runcall(run_study, one)
    counted: Any = pstats.Stats(profile)
    inside = sum(calls for (path, _, _), (_, calls, *_) in counted.stats.items() if _is_of_a_run(path))
    return {"per_call": inside / len(study.log.call_session)}


def _is_of_a_run(path: str) -> bool:
    """Not of reading the trace and making the plan, which a long run pays once."""
    return path == "~" or "/simulator/" in path or "/policy/" in path


def in_turns(one: StudySettings, copies: int) -> dict[str, Any]:
    """So many deployments of one load each, with other arrivals, that take turns every few events.

    A call then does exactly the operations of a small deployment, over as much memory as a large one has.
    """
    runs = []
    for number in range(copies):
        single = dataclasses.replace(one, seed=number + 1)
        plan, hardware = single.plan(), single.hardware()
        factory = policy_factory(single.policy, single.policy_options, plan, hardware)
        run = Simulation(plan, hardware, factory)
        run._push(run._arrival(0))
        run._push(((TICK_S, run.on_tick, None),))
        runs.append(run)
    started_s = time.process_time()
    left = runs
    while left:
        left = [run for run in left if _some_events(run)]
    spent_s = time.process_time() - started_s
    return {"cpu_us_per_call": 1e6 * spent_s / sum(run.log.calls for run in runs)}


def _some_events(run: Simulation, events: int = 10) -> bool:
    """The loop of `Simulation.run`, for a while; False once the run is over."""
    queue = run._queue
    for _ in range(events):
        if not queue or -queue[-1][0] > run.end_s:
            return False
        minus_s, _, handler, subject = queue.pop()
        run.now_s = -minus_s
        run._push(handler(run.now_s, subject))
    return True


def alone(function: Any, *subject: Any) -> dict[str, Any]:
    """In a fresh process, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: dict[str, Any] = pool.apply(function, subject)
    return found


def within(found: dict[str, Any]) -> bool:
    return found["cpu_s"] <= 1.5 and found["times_real_time"] >= 5000 and found["peak_memory_mib"] < 300


def main() -> None:
    options = parse(__doc__, (1,))
    machine = yardstick.told()
    factors = LOADS[:2] if options.quick else LOADS
    two_hours = {
        f"{'+100 %' if surges else 'no surge'}: {name}": alone(cost, settings(CODE, *policy, 1, False, surges=surges))
        for surges in (False, True)
        for name, policy in POLICIES.items()
    }
    grown: dict[str, dict[int, dict[str, Any]]] = {}
    for name in ("stock", "basin, seen peaks"):
        for factor in factors:
            one = settings(CODE, *POLICIES[name], factor, True)
            grown.setdefault(name, {})[factor] = alone(cost, one) | alone(operations, one)
    turns = {}
    for name in grown:
        one = settings(CODE, *POLICIES[name], 1, True)
        turns[name] = [alone(in_turns, one, copies)["cpu_us_per_call"] for copies in (factors[0], factors[-1])]
    figures = [
        Figure(
            what=f"two hours of 1P3D at 5.5 sessions/min, {name}",
            article="at most 1.5 s on one core, 5,000 times real time, 300 MB (our own target)",
            ours=f"{found['cpu_s']:.2f} s CPU, {found['times_real_time']:,} times real time, "
            f"{found['peak_memory_mib']:.0f} MiB, {found['calls']:,} calls",
            holds=holds(within(found), found["cpu_s"] <= 2.5),
            cause="" if within(found) else f"{found['calls']:,} calls of {found['cpu_us_per_call']} us. {machine}",
        )
        for name, found in two_hours.items()
    ]
    for name, by_factor in grown.items():
        first, last = by_factor[factors[0]], by_factor[factors[-1]]
        dearer = last["cpu_us_per_call"] / first["cpu_us_per_call"]
        more = last["per_call"] / first["per_call"]
        figures.append(
            Figure(
                what=f"cost of a call at {factors[-1]} times the load over that at 1: {name}",
                article="1 (linear; our own target)",
                ours=f"{dearer:.2f}; operations {more:.2f}",
                holds=holds(dearer < 1.2, more < 1.1),
                cause=""
                if dearer < 1.2
                else f"a call does {'as many' if more < 1.1 else 'more'} operations ({last['per_call']:.0f} against "
                f"{first['per_call']:.0f}), each of which takes longer once there is more memory to touch: so do "
                f"{factors[-1]} separate deployments of 1 time the load that take turns every ten events, of which a "
                f"call costs {turns[name][1] / turns[name][0]:.2f} times that of one alone",
            )
        )
    publish(
        Finding(
            name="speed",
            rank=11,
            title="What the simulator costs",
            method="One process at a time. The loads: 15 minutes without a surge, the deployment as many times as "
            f"large. *Operations*: function calls of simulator and policy, counted by the profiler. {machine}",
            figures=figures,
            tables=[
                Table(
                    title="By load",
                    columns=["policy", "load", "calls", "CPU, s", "us a call", "operations a call", "memory, MiB"],
                    rows=[
                        [
                            name,
                            f"{factor} x",
                            f"{found['calls']:,}",
                            f"{found['cpu_s']:.2f}",
                            f"{found['cpu_us_per_call']:.1f}",
                            f"{found['per_call']:.0f}",
                            f"{found['peak_memory_mib']:.0f}",
                        ]
                        for name, by_factor in grown.items()
                        for factor, found in by_factor.items()
                    ],
                )
            ],
            numbers={"two_hours": two_hours, "by_load": grown, "in_turns_us": turns},
        ),
        options,
        [CODE],
        len(two_hours) + 2 * sum(len(by_factor) for by_factor in grown.values()),
    )


if __name__ == "__main__":
    main()
