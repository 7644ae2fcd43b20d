"""Hysteresis: one working set, two hit rates, depending on whether the deployment has collapsed before.

    .venv/bin/python benchmarks/sim_hysteresis.py [--quick] [--seeds 1,2,3]

*There and back*: stock under surges of +50 % and +100 %, after which hardly anybody arrives. The working set rises
through a multiple of the cache and falls through it again; hit rates on the way up (and of runs that never collapse)
beside those on the way down. Article (1P3D with a host tier, working set 1.6 to 1.7 times the cache): never-collapsed
runs hit 0.81 to 0.93, collapsed ones 0.26 to 0.37.

*Held*: an admission limit holds the working set at a multiple of the cache; in half of the runs it is off for half a
minute, which tips them over. How long each state lasts, and what that depends on: one thing is varied at a time.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    CODE,
    HOST,
    SURGE_FROM_S,
    SURGE_TO_S,
    Case,
    Figure,
    Finding,
    Table,
    Workload,
    case,
    holds,
    parse,
    publish,
    run_all,
    run_case,
    save_plot,
    spread,
)

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.reservation import CurrentContext
from sglang_basin.replay.plan import Plan
from sglang_basin.replay.trace import Scaling
from sglang_basin.simulator.simulation import ClientSettings, PolicyFactory

OPEN_FROM_S, OPEN_TO_S = 900.0, 930.0
MEASURED_FROM_S, END_S = 5400.0, 7200.0


class Limit(Door):
    """A limit on the sum of present contexts; if `opens`, off for a while, when everybody enters."""

    def __init__(self, limit_tokens: int, opens: bool) -> None:
        self._on = BudgetSettings(fixed_tokens=limit_tokens)
        self._off = BudgetSettings(fixed_tokens=10**12) if opens else self._on
        settings = DoorSettings(idle_timeout_s=600.0, hold_limit_s=1e9, shared_once=False)
        super().__init__(settings, law=CurrentContext(), budget=Budget(self._on, limit_tokens))

    def order(self, session_id: str, call_arrived_s: float) -> float:
        """As stock: calls in order of their arrival. Sessions in order would serve the oldest ones first, whose
        contexts then stay cached, and there is no hysteresis to be seen."""
        return call_arrived_s

    def observe(self, view: EngineView, now_s: float) -> None:
        self.budget.settings = self._off if OPEN_FROM_S <= now_s < OPEN_TO_S else self._on
        super().observe(view, now_s)


def run_limited(subject: dict[str, Any]) -> dict[str, Any]:
    one: Case = subject["case"]

    def factory(_plan: Plan) -> PolicyFactory:
        return lambda: Limit(subject["limit_tokens"], subject["opens"])

    return run_case(one, factory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stand:
    """A deployment and what is varied of it."""

    name: str
    cache_tokens: int
    rate_per_min: float
    """There and back: before the surge. Held: more than can be served."""
    workload: Workload = CODE
    changes: Mapping[str, str] = field(default_factory=dict)


THERE_AND_BACK = (
    Stand(name="with host tier", cache_tokens=2_304_000, rate_per_min=10.0, changes=HOST),
    Stand(name="device cache alone", cache_tokens=1_152_000, rate_per_min=5.5),
)
SURGES = (0.5, 1.0)
"""The smaller one passes the bins without a collapse with some seeds."""
BINS = (1.2, 1.4, 1.6, 1.8)
"""Lower ends of bins of working set over cache, 0.1 wide; the article's is 1.6."""
COLLAPSED_BELOW = 0.6
"""A run has collapsed once its hit rate was below this, and for the bins from ten minutes later on."""

LIMIT = 1.5
"""Held: times the cache, where both states are seen."""


def times(factor: int) -> dict[str, str]:
    """A deployment so many times as large: pool, decode instances, speed of prefill."""
    return {
        "prefill.pool_tokens": str(1_152_000 * factor),
        "decode.instances": str(3 * factor),
        "prefill.fixed_s": str(0.012 / factor),
        "prefill.per_token_s": str(2.7e-5 / factor),
        "prefill.attention_s": str(4.0e-10 / factor),
    }


BASE = Stand(name="1P3D, device cache alone, code", cache_tokens=1_152_000, rate_per_min=12.0)
HELD = (
    BASE,
    dataclasses.replace(BASE, name="host tier", cache_tokens=2_304_000, rate_per_min=18.0, changes=HOST),
    dataclasses.replace(BASE, name="4 times as large", cache_tokens=4_608_000, rate_per_min=48.0, changes=times(4)),
    dataclasses.replace(
        BASE, name="tool runs of at most 5 s", workload=dataclasses.replace(CODE, scaling=Scaling(tool_cap_s=5.0))
    ),
    dataclasses.replace(BASE, name="nothing shared", workload=dataclasses.replace(CODE, shared_prefix_tokens=0)),
    dataclasses.replace(BASE, name="chunks of 2,048 tokens", changes={"prefill.chunk_tokens": "2048"}),
    dataclasses.replace(BASE, name="half the prefill speed", changes={"prefill.per_token_s": "5.4e-5"}),
)
HELD_LIMITS = {"nothing shared": 1.0}
"""Where all of a context is the session's own, both states are seen at a smaller multiple."""


def there_and_back(stand: Stand, extra: float, seed: int) -> Case:
    """From the surge's end on a few sessions an hour arrive, and the backlog is worked off."""
    rate = stand.rate_per_min
    return case(
        stand.workload,
        policy="stock",
        changes=stand.changes,
        seed=seed,
        counted_s=18_000.0,
        tail_s=0.0,
        steps_per_min=[(0.0, rate), (SURGE_FROM_S, (1 + extra) * rate), (SURGE_TO_S, 0.02 * rate)],
    )


def held(stand: Stand, collapsed: bool, seed: int) -> dict[str, Any]:
    one = case(
        stand.workload,
        changes=stand.changes,
        rate_per_min=stand.rate_per_min,
        seed=seed,
        counted_s=END_S,
        tail_s=0.0,
        client=ClientSettings(call_timeout_s=1e6),
    )
    limit_tokens = round(HELD_LIMITS.get(stand.name, LIMIT) * stand.cache_tokens)
    return {"case": one, "limit_tokens": limit_tokens, "opens": collapsed}


def samples(result: dict[str, Any], cache_tokens: int) -> list[tuple[float, float, float]]:
    """(seconds, working set over cache, hit rate of the last minute) where something was prefilled."""
    series = result["series"]
    return [
        (at_s, tokens / cache_tokens, rate)
        for at_s, tokens, rate in zip(series["at_s"], series["working_set_tokens"], series["hit_rate"], strict=True)
        if rate is not None
    ]


@dataclasses.dataclass(frozen=True)
class Split:
    """Hit rates in one bin of working set, of runs that have not collapsed yet and of runs that have."""

    before: list[float]
    after: list[float]


def split(told: Sequence[tuple[float, float, float]], low: float) -> Split:
    fell_s = next((at_s for at_s, _, rate in told if at_s > 300.0 and rate < COLLAPSED_BELOW), math.inf)
    inside = [(at_s, rate) for at_s, level, rate in told if low <= level < low + 0.1 and at_s > 300.0]
    return Split([rate for at_s, rate in inside if at_s < fell_s], [r for at_s, r in inside if at_s > fell_s + 600.0])


def stays_s(told: Sequence[tuple[float, float, float]], from_s: float) -> tuple[list[float], list[float]]:
    """How long the deployment stayed in the high and in the low state, each time; the last stay was cut off."""
    high: list[float] = []
    low: list[float] = []
    since_s, state = from_s, None
    for at_s, _, rate in told:
        if at_s < from_s:
            continue
        now = (
            state
            if state is not None and COLLAPSED_BELOW - 0.1 < rate < COLLAPSED_BELOW + 0.1
            else rate > COLLAPSED_BELOW
        )
        if state is None:
            state = now
        elif now != state:
            (high if state else low).append(at_s - since_s)
            since_s, state = at_s, now
    if told and state is not None:
        (high if state else low).append(told[-1][0] - since_s)
    return high, low


def main() -> None:
    options = parse(__doc__)
    seeds = options.seeds
    stands = THERE_AND_BACK[1:] if options.quick else THERE_AND_BACK
    kept = HELD[:1] if options.quick else HELD
    asked = [(stand, extra, seed) for stand in stands for extra in SURGES for seed in seeds]
    moved: dict[str, list[list[tuple[float, float, float]]]] = {}
    for (stand, _, _), result in zip(
        asked, run_all([there_and_back(*one) for one in asked], options.jobs), strict=True
    ):
        moved.setdefault(stand.name, []).append(samples(result, stand.cache_tokens))
    keys = [(stand, collapsed, seed) for stand in kept for collapsed in (False, True) for seed in seeds]
    results = {
        (stand.name, collapsed, seed): result
        for (stand, collapsed, seed), result in zip(
            keys, run_all([held(*key) for key in keys], options.jobs, run_limited), strict=True
        )
    }

    figures, rows = [], []
    numbers: dict[str, Any] = {}
    for stand in stands:
        for low in BINS:
            parts = [split(told, low) for told in moved[stand.name]]
            before = [rate for part in parts for rate in part.before]
            after = [rate for part in parts for rate in part.after]
            numbers[f"{stand.name} x {low}"] = {"before": before, "after": after}
            rows.append([stand.name, f"{low} to {low + 0.1:.1f}", told_rates(before), told_rates(after)])
        there, back = (numbers[f"{stand.name} x 1.6"][name] for name in ("before", "after"))
        apart = bool(there and back) and statistics.median(there) - statistics.median(back) > 0.4
        figures.append(
            Figure(
                what=f"hit rate at 1.6 to 1.7 times the cache, {stand.name}: never collapsed against collapsed",
                article="0.81 to 0.93 against 0.26 to 0.37",
                ours=f"{told_rates(there)} against {told_rates(back)}",
                holds=holds(apart, bool(back)),
                cause="" if apart else "too few samples in the bin: see the table",
            )
        )
    held_rows = []
    held_at: dict[str, tuple[float, float]] = {}
    for stand in kept:
        limit = HELD_LIMITS.get(stand.name, LIMIT)
        high: list[float] = []
        low_stays: list[float] = []
        rates: dict[bool, list[float]] = {}
        levels: dict[bool, list[float]] = {}
        for collapsed in (False, True):
            for seed in seeds:
                told = samples(results[stand.name, collapsed, seed], stand.cache_tokens)
                stays = stays_s(told, OPEN_TO_S if not collapsed else OPEN_TO_S + 1800.0)
                high += stays[0]
                low_stays += stays[1]
                late = [(level, rate) for at_s, level, rate in told if at_s >= MEASURED_FROM_S]
                levels.setdefault(collapsed, []).append(statistics.fmean(level for level, _ in late) if late else 0.0)
                rates.setdefault(collapsed, []).append(statistics.fmean(rate for _, rate in late) if late else 0.0)
        held_at[stand.name] = (statistics.fmean(levels[False]), statistics.fmean(levels[True]))
        numbers[f"held: {stand.name}"] = {
            "high_s": high,
            "low_s": low_stays,
            "hits": rates[False],
            "after": rates[True],
        }
        held_rows.append(
            [
                stand.name,
                f"{limit}",
                spread(levels[False], ".2f"),
                spread(levels[True], ".2f"),
                spread(rates[False], ".2f"),
                spread(rates[True], ".2f"),
                f"{sum(low_stays) / max(1.0, sum(high) + sum(low_stays)):.0%}",
                stay(high),
                stay(low_stays),
            ]
        )
    alike = [name for name, (never, after) in held_at.items() if abs(never - after) < 0.05]
    remembered = {name: _kept(numbers[f"held: {name}"]) for name in alike}
    figures.append(
        Figure(
            what="held at one working set by a limit: what a collapse still costs more than an hour later, hit rate",
            article="0.5",
            ours=", ".join(f"{difference:.2f} ({name})" for name, difference in remembered.items()) or "not held",
            holds=holds(bool(remembered) and max(remembered.values()) > 0.4, False),
            cause="a deployment whose working set is held goes back and forth between the states within minutes, and "
            "one that is four times as large returns to the high one and stays there (table: how long each state "
            "lasts); the article's two hit rates are those of a working set that moves, above. Elsewhere in the table "
            "the limit does not hold it: sessions that have entered go on growing",
        )
    )
    plot = Plot(figsize=(4 * (len(stands) + 1) + 1, 3.4), layout="constrained")
    for place, stand in enumerate(stands, start=1):
        axes = plot.add_subplot(1, len(stands) + 1, place)
        for number, told in enumerate(moved[stand.name]):
            axes.plot(
                [level for _, level, _ in told], [rate for _, _, rate in told], ".-", ms=2, lw=0.5, color=f"C{number}"
            )
        axes.axvspan(1.6, 1.7, color="0.85")
        axes.set_title(f"there and back: {stand.name}", fontsize=8)
        axes.set_xlabel("working set over cache")
        axes.set_ylabel("hit rate")
    axes = plot.add_subplot(1, len(stands) + 1, len(stands) + 1)
    for stand in kept[:1] + tuple(one for one in kept if one.name == "4 times as large"):
        for collapsed in (False, True):
            told = samples(results[stand.name, collapsed, seeds[0]], stand.cache_tokens)
            axes.plot(
                [at_s / 60 for at_s, _, _ in told],
                [rate for _, _, rate in told],
                "--" if collapsed else "-",
                linewidth=0.9,
                label=f"{stand.name}{', collapsed' if collapsed else ''}",
            )
    axes.set_title(f"held at {LIMIT} times the cache", fontsize=8)
    axes.set_xlabel("minutes")
    axes.legend(fontsize=6)
    publish(
        Finding(
            name="hysteresis",
            rank=5,
            title="Hysteresis",
            method="1P3D, code. *There and back*: stock, +50 % and +100 % in minutes 15 to 25, hardly any arrivals "
            "afterwards; samples of half a minute, *collapsed* from ten minutes after the hit rate first fell below "
            f"{COLLAPSED_BELOW}. *Held*: more arrivals than can be served, patient clients, calls in stock's order, a "
            "limit on the sum of present contexts, which in the *collapsed* runs is off for half a minute; hit rate of "
            "minutes 90 to 120, and how long the deployment stays in either state.",
            figures=figures,
            tables=[
                Table(
                    title=f"There and back: hit rate by working set over cache, seeds {', '.join(map(str, seeds))}",
                    columns=["deployment", "working set", "not collapsed", "collapsed"],
                    rows=rows,
                ),
                Table(
                    title="Held: what the states' lives depend on, one thing varied at a time",
                    columns=[
                        "varied",
                        "limit",
                        "held at",
                        "after a collapse",
                        "hits",
                        "hits after a collapse",
                        "time in low state",
                        "stays high, min",
                        "stays low, min",
                    ],
                    rows=held_rows,
                ),
            ],
            plots=[save_plot(plot, options, "hysteresis")],
            numbers=numbers,
        ),
        options,
        [CODE],
        len(asked) + len(keys),
    )


def _kept(found: dict[str, list[float]]) -> float:
    return statistics.fmean(found["hits"]) - statistics.fmean(found["after"])


def told_rates(rates: Sequence[float]) -> str:
    if not rates:
        return "no sample"
    low, middle, high = min(rates), statistics.median(rates), max(rates)
    return f"{middle:.2f} ({low:.2f} to {high:.2f}, {len(rates)} samples)"


def stay(seconds: Sequence[float]) -> str:
    return f"{statistics.fmean(seconds) / 60:.0f} ({len(seconds)})" if seconds else "never"


if __name__ == "__main__":
    main()
