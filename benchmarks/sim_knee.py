"""The cache's knee: hit rate over working set while the load is raised in steps, under stock.

    .venv/bin/python benchmarks/sim_knee.py [--quick] [--seeds 1,2,3]

Article: the hit rate collapses once the working set exceeds about 1.9 times the cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
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
    parse,
    publish,
    run_all,
    save_plot,
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


BIN = 0.1
"""Width of the bins of working set over cache."""
FALLEN = 0.05
"""The hit rate has left its high stretch when it is this much below it."""


@dataclasses.dataclass(frozen=True)
class Knee:
    """Multiples of the cache; each is the lower end of a bin, from which on all bins' median hit rates are so low."""

    falls: float
    """Below the high stretch by more than `FALLEN`."""
    half: float
    """Below half way from the high stretch to the bottom."""


def samples(result: Mapping[str, Any], pool_tokens: int, shared_tokens: int) -> list[tuple[float, float]]:
    """(working set over cache, hit rate of the last minute), the start left out; a shared prefix counts once more for
    each live session than the cache holds it, and `shared_tokens` of it are taken off again."""
    series = result["series"]
    return [
        ((tokens - shared_tokens * max(0.0, live - 1)) / pool_tokens, rate)
        for at_s, rate, tokens, live in zip(
            series["at_s"], series["hit_rate"], series["working_set_tokens"], series["live_sessions"], strict=True
        )
        if rate is not None and at_s >= 300
    ]


def find_knee(found: Sequence[tuple[float, float]]) -> Knee | None:
    """Of samples of one or more runs; None if hits never fall for good. Bins of under three samples do not count."""
    bins: dict[int, list[float]] = {}
    for load, rate in found:
        bins.setdefault(int(load / BIN), []).append(rate)
    medians = {number: statistics.median(rates) for number, rates in sorted(bins.items()) if len(rates) >= 3}
    if not medians:
        return None
    high, low = max(medians.values()), min(medians.values())

    def from_where(below: float) -> int | None:
        start = None
        for number, rate in medians.items():
            start = (number if start is None else start) if rate < below else None
        return start

    falls, half = from_where(high - FALLEN), from_where((high + low) / 2)
    if falls is None or half is None or low > 0.8 * high:
        return None
    return Knee(falls * BIN, half * BIN)


def main() -> None:
    options = parse(__doc__, (1, 2, 3, 4, 5))
    ramps = RAMPS[:1] if options.quick else RAMPS
    keys = [(ramp, seed) for ramp in ramps for seed in options.seeds]
    cases = [ramp.case(seed) for ramp, seed in keys]
    results = run_all(cases, options.jobs)
    plot = Plot(figsize=(4 * len(ramps) + 1, 3.6), layout="constrained")
    rows: list[list[str]] = []
    knees: dict[str, Knee | None] = {}
    for place, ramp in enumerate(ramps, start=1):
        axes = plot.add_subplot(1, len(ramps), place)
        mine = [(one, result) for (ran, _), one, result in zip(keys, cases, results, strict=True) if ran is ramp]
        pool = mine[0][0].settings.hardware().prefill.pool_tokens
        shared = max(planned.session.shared_prefix_tokens for planned in mine[0][0].plan().sessions)
        found = [samples(result, pool, 0) for _, result in mine]
        for points in found:
            axes.plot([load for load, _ in points], [rate for _, rate in points], ".", markersize=2)
        knee = knees[ramp.name] = find_knee(list(itertools.chain(*found)))
        distinct = find_knee([point for _, result in mine for point in samples(result, pool, shared)])
        if knee is not None:
            axes.axvline(knee.falls, color="tab:red", linewidth=0.8)
        axes.set_xlim(0, 4)
        axes.set_title(ramp.name, fontsize=9)
        axes.set_xlabel("working set over cache")
        axes.set_ylabel("hit rate, one minute")
        rows.append([ramp.name, f"{shared:,}", *_cells(knee), *_cells(distinct)])
    first, last = knees[ramps[0].name], knees[ramps[-1].name]
    figures = [
        Figure(
            what="working set over cache above which hits fall (1P1D)",
            article="1.9",
            ours="never" if first is None else f"{first.falls:.1f} (half of them lost at {first.half:.1f})",
            holds=holds(first is not None and 1.6 <= first.falls <= 2.2, first is not None),
            cause="what lies above 1 is mostly the shared prefix, of which the cache holds one copy while each "
            "session's context counts it; where nothing is shared (terminal) hits fall at "
            + ("no load tried" if last is None else f"{last.falls:.1f}"),
        )
    ]
    publish(
        Finding(
            name="knee",
            rank=3,
            title="The cache's knee",
            method="Stock; every ten minutes one step more load. Samples of all seeds, in bins of 0.1 times the "
            "cache; *hits fall* where the median of a bin, and of all bins above it, is more than 0.05 below the best.",
            figures=figures,
            tables=[
                Table(
                    title="Multiples of the cache; *distinct*: the shared prefix counted once",
                    columns=["ramp", "shared tokens", "hits fall", "half lost", "fall, distinct", "half, distinct"],
                    rows=rows,
                )
            ],
            plots=[save_plot(plot, options, "knee")],
            numbers={name: dataclasses.asdict(knee) if knee else None for name, knee in knees.items()},
        ),
        options,
        [ramp.workload for ramp in ramps],
        len(cases),
    )


def _cells(knee: Knee | None) -> list[str]:
    return ["-", "-"] if knee is None else [f"{knee.falls:.1f}", f"{knee.half:.1f}"]


if __name__ == "__main__":
    main()
