"""The cache's knee: hit rate over working set while the load is raised in steps, under stock.

    .venv/bin/python benchmarks/sim_knee.py [--quick] [--seeds 1,2,3]

Article: the hit rate collapses once the working set exceeds about 1.9 times the cache.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    CODE,
    CODE_SMALL,
    TERMINAL,
    Figure,
    Finding,
    Table,
    Workload,
    case,
    holds,
    known,
    parse,
    publish,
    run_all,
    save_plot,
    spread,
)

STEP_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp:
    """Every ten minutes `step_per_min` more."""

    name: str
    workload: Workload
    profile: str
    first_per_min: float
    step_per_min: float
    steps: int = 11

    def case(self, seed: int) -> Any:
        return case(
            self.workload,
            profile=self.profile,
            policy="stock",
            seed=seed,
            counted_s=self.steps * STEP_S,
            tail_s=0.0,
            steps_per_min=[(n * STEP_S, self.first_per_min + n * self.step_per_min) for n in range(self.steps)],
        )


RAMPS = (
    Ramp(name="1P1D, code-25k", workload=CODE_SMALL, profile="h100-1p1d", first_per_min=2.0, step_per_min=0.4),
    Ramp(name="1P3D, code", workload=CODE, profile="h200-1p3d", first_per_min=3.0, step_per_min=0.7),
    Ramp(name="1P3D, terminal", workload=TERMINAL, profile="h200-1p3d", first_per_min=1.5, step_per_min=0.3),
)


@dataclasses.dataclass(frozen=True)
class Knee:
    """Where a run's hit rate falls below half way between its high stretch and its end, for good."""

    working_set: float
    """Over the cache, each session's whole context counted."""
    distinct: float
    """The same with the shared prefix counted once."""
    healthy: float
    """The most working set over cache until then, with the hit rate within 0.02 of its high stretch."""


def find_knee(result: dict[str, Any], pool_tokens: int, shared_tokens: int) -> Knee | None:
    """None if the run did not collapse."""
    series = result["series"]
    rows = [
        (rate, tokens, live)
        for at_s, rate, tokens, live in zip(
            series["at_s"], series["hit_rate"], series["working_set_tokens"], series["live_sessions"], strict=True
        )
        if rate is not None and at_s >= 300
    ]
    rates = [rate for rate, _, _ in rows]
    high, low = statistics.median(rates[:20]), statistics.fmean(rates[-10:])
    if low > 0.8 * high:
        return None
    half = (high + low) / 2
    at = max(i for i, rate in enumerate(rates) if rate > half) + 1
    at = min(at, len(rows) - 1)
    _, tokens, live = rows[at]
    shared = shared_tokens * max(0.0, live - 1)
    healthy = max(tokens for rate, tokens, _ in rows[:at] if rate >= high - 0.02)
    return Knee(tokens / pool_tokens, (tokens - shared) / pool_tokens, healthy / pool_tokens)


def main() -> None:
    options = parse(__doc__, (1, 2, 3, 4, 5))
    ramps = RAMPS[:1] if options.quick else RAMPS
    keys = [(ramp, seed) for ramp in ramps for seed in options.seeds]
    cases = [ramp.case(seed) for ramp, seed in keys]
    results = run_all(cases, options.jobs)
    plot = Plot(figsize=(4 * len(ramps) + 1, 3.6), layout="constrained")
    rows: list[list[str]] = []
    knees: dict[str, list[Knee]] = {}
    for place, ramp in enumerate(ramps, start=1):
        axes = plot.add_subplot(1, len(ramps), place)
        mine = [(one, result) for (ran, _), one, result in zip(keys, cases, results, strict=True) if ran is ramp]
        pool = mine[0][0].settings.hardware().prefill.pool_tokens
        shared = max(planned.session.shared_prefix_tokens for planned in mine[0][0].plan().sessions)
        found = [find_knee(result, pool, shared) for _, result in mine]
        knees[ramp.name] = [knee for knee in found if knee is not None]
        for _, result in mine:
            series = result["series"]
            load = [tokens / pool for tokens in series["working_set_tokens"]]
            axes.plot(load, [float("nan") if rate is None else rate for rate in series["hit_rate"]], ".", markersize=2)
        for knee in knees[ramp.name]:
            axes.axvline(knee.working_set, color="tab:red", linewidth=0.6)
        axes.set_xlim(0, 4)
        axes.set_title(ramp.name, fontsize=9)
        axes.set_xlabel("working set over cache")
        axes.set_ylabel("hit rate, one minute")
        if knees[ramp.name]:
            rows.append(
                [
                    ramp.name,
                    spread([knee.healthy for knee in knees[ramp.name]], ".2f"),
                    spread([knee.working_set for knee in knees[ramp.name]], ".2f"),
                    spread([knee.distinct for knee in knees[ramp.name]], ".2f"),
                    f"{len(knees[ramp.name])} of {len(found)}",
                    spread(known(result["end"]["hit_rate"] for _, result in mine), ".2f"),
                ]
            )
    first = [knee.working_set for knee in knees[ramps[0].name]]
    figures = []
    if first:
        middle = statistics.fmean(first)
        figures.append(
            Figure(
                what="working set over cache at which hits collapse (1P1D)",
                article="1.9",
                ours=spread(first, ".2f"),
                holds=holds(1.5 <= middle <= 2.3),
                cause="the part above 1 has two causes: what all sessions share is one copy in the cache, and sessions "
                "that end leave room that the working set no longer counts; with nothing shared (terminal) it is lower",
            )
        )
    publish(
        Finding(
            name="knee",
            rank=3,
            title="The cache's knee",
            method="Stock; every ten minutes one step more load. The knee is where the hit rate of a minute falls "
            "below half way between its high stretch and its end, and stays there.",
            figures=figures,
            tables=[
                Table(
                    title="Working set over cache",
                    columns=[
                        "ramp",
                        "highest healthy",
                        "knee",
                        "knee, shared prefix counted once",
                        "collapsed",
                        "hit rate at the end",
                    ],
                    rows=rows,
                )
            ],
            plots=[save_plot(plot, options, "knee")],
            numbers={name: [dataclasses.asdict(knee) for knee in found] for name, found in knees.items()},
        ),
        options,
        [ramp.workload for ramp in ramps],
        len(cases),
    )


if __name__ == "__main__":
    main()
