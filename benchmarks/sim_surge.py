"""A surge in minutes 15 to 25 on 1P1D H100: which ones the stock engine survives, and what the door changes.

    .venv/bin/python benchmarks/sim_surge.py [--quick] [--seeds 1,2,3]

Article: after +33 % it recovers within 20 minutes; after +100 % never: TTFT about 60 s, hit rate 0.27, and 17 sessions
an hour within target against 138 without the surge.
"""

from __future__ import annotations

import dataclasses
import statistics

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    BASIN,
    CODE_SMALL,
    COUNTED_S,
    TAIL_S,
    Case,
    Figure,
    Finding,
    Table,
    between,
    case,
    holds,
    known,
    parse,
    publish,
    recovered_after_s,
    run_all,
    save_plot,
    spread,
)

RATE_PER_MIN = 3.3
SURGES = {"none": None, "+33 %": 0.33, "+100 %": 1.0}
ARMS = {"stock": "stock", "Basin": "basin"}
END_S = COUNTED_S + TAIL_S
NEAR = "the tipping point is so near that chance decides; "


def even_pace(extra: float | None, seed: int) -> Case:
    """Stock, with sessions that come one after the other at an even pace: chance only draws which ones."""
    one = case(CODE_SMALL, profile="h100-1p1d", policy="stock", rate_per_min=RATE_PER_MIN, extra=extra, seed=seed)
    return dataclasses.replace(one, settings=dataclasses.replace(one.settings, process="fixed"))


def main() -> None:
    options = parse(__doc__, (1, 2, 3, 4, 5))
    keys = [(arm, extra, seed) for arm in ARMS for extra in SURGES for seed in options.seeds]
    cases = [
        case(
            CODE_SMALL,
            profile="h100-1p1d",
            policy=ARMS[arm],
            options=BASIN if arm == "Basin" else {},
            rate_per_min=RATE_PER_MIN,
            extra=SURGES[extra],
            seed=seed,
        )
        for arm, extra, seed in keys
    ]
    results = dict(zip(keys, run_all(cases, options.jobs), strict=True))

    def each(arm: str, extra: str) -> list[dict]:
        return [results[arm, extra, seed] for seed in options.seeds]

    def goodput(arm: str, extra: str) -> list[float]:
        return [result["summary"]["goodput_per_hour"] for result in each(arm, extra)]

    even_keys = [(extra, seed) for extra in SURGES if extra != "none" for seed in options.seeds]
    even = dict(
        zip(even_keys, run_all([even_pace(SURGES[e], seed) for e, seed in even_keys], options.jobs), strict=True)
    )
    seeds = len(options.seeds)
    stuck = [result for result in each("stock", "+100 %") if result["end"]["stuck"]]
    escaped_small = [r for r in each("stock", "+33 %") if not r["end"]["stuck"]]
    back_s = known(recovered_after_s(result) for result in escaped_small)
    basin_stuck = sum(result["end"]["stuck"] for result in each("Basin", "+100 %"))
    basin_back_s = known(recovered_after_s(result) for result in each("Basin", "+100 %"))
    healthy = each("stock", "none")
    base_hits = known(between(result, "hit_rate", 300, END_S) for result in healthy)
    base_ttft_s = [result["summary"]["ttft_p50_s"] for result in healthy]
    late_ttft_s = [result["summary"]["ttft_p99_s"] for result in stuck]
    lost_hits = known(result["end"]["hit_rate"] for result in stuck)

    def stuck_evenly(extra: str) -> int:
        return sum(even[extra, seed]["end"]["stuck"] for seed in options.seeds)

    figures = [
        Figure(
            what="base load, hit rate",
            article="0.95",
            ours=spread(base_hits, ".2f"),
            holds=holds(statistics.fmean(base_hits) > 0.93),
        ),
        Figure(
            what="base load, TTFT median",
            article="0.2 s",
            ours=f"{spread(base_ttft_s, '.2f')} s",
            holds=holds(statistics.fmean(base_ttft_s) < 0.3),
        ),
        Figure(
            what="stock after +33 %",
            article="recovers within 20 min",
            ours=f"recovers with {len(escaped_small)} of {seeds} seeds"
            + (f", within {max(back_s) / 60:.0f} min" if back_s else "")
            + f"; at an even pace with {seeds - stuck_evenly('+33 %')}",
            holds=holds(len(escaped_small) == seeds, bool(escaped_small)),
            cause="" if len(escaped_small) == seeds else NEAR + _arrivals(each("stock", "+33 %")),
        ),
        Figure(
            what="stock after +100 %",
            article="never recovers",
            ours=f"stuck with {len(stuck)} of {seeds} seeds; at an even pace with {stuck_evenly('+100 %')}",
            holds=holds(len(stuck) == seeds, bool(stuck)),
            cause="" if len(stuck) == seeds else NEAR + _arrivals(each("stock", "+100 %")),
        ),
    ]
    if stuck:
        stuck_goodput = [result["summary"]["goodput_per_hour"] for result in stuck]
        figures += [
            Figure(
                what="stuck, hit rate of the last half hour",
                article="0.27",
                ours=spread(lost_hits, ".2f"),
                holds=holds(abs(statistics.fmean(lost_hits) - 0.27) < 0.1),
                cause="it consists of what all sessions share, here 8.3K of a mean prompt of 25K tokens",
            ),
            Figure(
                what="stuck, TTFT of all calls, 99th percentile",
                article="~60 s",
                ours=f"{spread(late_ttft_s)} s",
                holds=holds(30 < statistics.fmean(late_ttft_s) < 120),
            ),
            Figure(
                what="goodput, stuck against no surge",
                article="17 against 138 sessions/h",
                ours=f"{spread(stuck_goodput)} against {spread(goodput('stock', 'none'))} sessions/h",
                holds=holds(max(stuck_goodput) < 0.5 * min(goodput("stock", "none"))),
                cause="ours counts all sessions of the 90 minutes, also those that were done before the surge",
            ),
        ]
    figures.append(
        Figure(
            what="Basin after +100 %",
            article="recovers",
            ours=f"stuck with {basin_stuck} of {seeds}; goodput {spread(goodput('Basin', '+100 %'))} sessions/h"
            + (f"; back within {max(basin_back_s) / 60:.0f} min" if basin_back_s else ""),
            holds=holds(not basin_stuck, False),
        )
    )
    rows = [
        [
            arm,
            extra,
            spread(goodput(arm, extra)),
            spread([r["summary"]["offered_per_hour"] for r in each(arm, extra)]),
            spread(known(r["end"]["hit_rate"] for r in each(arm, extra)), ".2f"),
            spread([r["summary"]["first_call_wait_p50_s"] for r in each(arm, extra)], ".1f"),
            f"{sum(r['end']['stuck'] for r in each(arm, extra))} of {seeds}",
        ]
        for arm in ARMS
        for extra in SURGES
    ]
    for extra in dict.fromkeys(extra for extra, _ in even):
        mine = [even[extra, seed] for seed in options.seeds]
        rows.append(
            [
                "stock, even pace",
                extra,
                spread([r["summary"]["goodput_per_hour"] for r in mine]),
                spread([r["summary"]["offered_per_hour"] for r in mine]),
                spread(known(r["end"]["hit_rate"] for r in mine), ".2f"),
                spread([r["summary"]["first_call_wait_p50_s"] for r in mine], ".1f"),
                f"{sum(r['end']['stuck'] for r in mine)} of {seeds}",
            ]
        )
    columns = ["policy", "surge", "goodput/h", "offered/h", "hit rate at the end", "first wait p50, s", "stuck"]
    plot = Plot(figsize=(9, 5.4), layout="constrained")
    for place, (name, title) in enumerate(
        (("hit_rate", "hit rate, one minute"), ("live_sessions", "live sessions")), start=1
    ):
        axes = plot.add_subplot(2, 1, place)
        for arm, colour in (("stock", "tab:red"), ("Basin", "tab:blue")):
            for extra, style in (("+33 %", ":"), ("+100 %", "-")):
                for number, result in enumerate(each(arm, extra)):
                    series = result["series"]
                    axes.plot(
                        [at_s / 60 for at_s in series["at_s"]],
                        [float("nan") if value is None else value for value in series[name]],
                        style,
                        color=colour,
                        linewidth=0.8,
                        label=f"{arm}, {extra}" if not number else None,
                    )
        axes.axvspan(15, 25, color="0.9")
        axes.set_ylabel(title)
        if name == "live_sessions":
            axes.set_yscale("symlog", linthresh=10)
            axes.set_xlabel("minutes")
        else:
            axes.legend(ncols=4, fontsize=8, loc="lower left")
    publish(
        Finding(
            name="surge",
            rank=1,
            title="A surge of ten minutes",
            method=f"1P1D H100 at {RATE_PER_MIN} sessions/min, surge in minutes 15 to 25, 105 minutes in all. "
            "*Stuck*: in the last half hour, sessions leave at less than 3/4 of the rate at which they come.",
            figures=figures,
            tables=[Table(title="All arms", columns=columns, rows=rows)],
            plots=[save_plot(plot, options, "surge")],
            numbers={"stuck_seeds": [r["settings"]["seed"] for r in stuck]},
        ),
        options,
        [CODE_SMALL],
        len(cases) + len(even),
    )


def _arrivals(results: list[dict]) -> str:
    """Per seed: sessions that came within the surge, and whether the run is stuck at the end."""
    told = []
    for result in results:
        summary = result["summary"]
        came = round(summary["offered_sessions"] - summary["arrived_after_surge"])
        told.append(f"{came}{' stuck' if result['end']['stuck'] else ''}")
    return "sessions before the surge's end, by seed: " + ", ".join(told)


if __name__ == "__main__":
    main()
