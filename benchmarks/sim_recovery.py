"""From which pre-load a collapsed deployment recovers: +300 % for ten minutes, then a fraction of the overload rate.

    .venv/bin/python benchmarks/sim_recovery.py [--quick] [--seeds 1,2,3]

The reference rate is the least one that overloads the deployment without any surge. Before the surge half of it
arrives, within the surge four times that, after it a fraction of the reference. Article: device cache alone recovers at
0.1 and is stuck at 0.2; with a host tier it recovers at 0.2 and is stuck at 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    BASIN,
    CODE,
    HOST,
    SURGE_FROM_S,
    SURGE_TO_S,
    Case,
    Figure,
    Finding,
    Table,
    case,
    holds,
    parse,
    publish,
    run_all,
    save_plot,
    spread,
)

FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5)
DEPLOYMENTS: dict[str, dict[str, str]] = {"device cache alone": {}, "with host tier": HOST}
RATES = {"device cache alone": (7.0, 8.0, 9.0, 10.0), "with host tier": (12.0, 14.0, 16.0, 18.0)}
"""Where the overload rate is looked for, sessions a minute."""
END_S = 21_600.0
"""Six hours: a collapsed deployment finishes little more than one session a minute, so a backlog takes hours."""
ARTICLE = {"device cache alone": ("0.1", "0.2"), "with host tier": ("0.2", "0.5")}


def steady(name: str, rate: float, seed: int) -> Case:
    return case(
        CODE, policy="stock", changes=DEPLOYMENTS[name], rate_per_min=rate, seed=seed, counted_s=6300.0, tail_s=0.0
    )


def shocked(name: str, policy: str, reference: float, fraction: float, seed: int) -> Case:
    steps = [(0.0, 0.5 * reference), (SURGE_FROM_S, 2.0 * reference), (SURGE_TO_S, fraction * reference)]
    return case(
        CODE,
        policy=policy,
        options=BASIN if policy == "basin" else {},
        changes=DEPLOYMENTS[name],
        seed=seed,
        counted_s=END_S,
        tail_s=0.0,
        steps_per_min=steps,
    )


def is_back(result: dict[str, Any]) -> bool:
    """In the last half hour the backlog is gone: no more than three first calls wait, at a hit rate of at least 0.8 of
    that before the surge. With few arrivals, rates of leaving and coming say little."""
    series = result["series"]
    last = [i for i, at_s in enumerate(series["at_s"]) if at_s >= END_S - 600]
    waiting = max(series["waiting_sessions"][i] for i in last)
    rates = [series["hit_rate"][i] for i in last if series["hit_rate"][i] is not None]
    return waiting <= 3 and (not rates or sum(rates) / len(rates) > 0.75)


def main() -> None:
    options = parse(__doc__, (1, 2))
    names = list(DEPLOYMENTS)[:1] if options.quick else list(DEPLOYMENTS)
    fractions = FRACTIONS[1::2] if options.quick else FRACTIONS
    asked = [(name, rate) for name in names for rate in RATES[name]]
    seed = options.seeds[0]
    found = run_all([steady(name, rate, seed) for name, rate in asked], options.jobs)
    references: dict[str, float] = {}
    for (name, rate), result in zip(asked, found, strict=True):
        if result["end"]["stuck"]:
            references[name] = min(rate, references.get(name, rate))
    missing = [name for name in names if name not in references]
    if missing:
        raise SystemExit(f"no rate of {RATES} overloads: {', '.join(missing)}; raise RATES")
    keys = [
        (name, policy, fraction, seed)
        for name in names
        for policy in ("stock", "basin")
        for fraction in fractions
        for seed in options.seeds
    ]
    cases = [shocked(name, policy, references[name], fraction, seed) for name, policy, fraction, seed in keys]
    results = dict(zip(keys, run_all(cases, options.jobs), strict=True))

    def back(name: str, policy: str, fraction: float) -> int:
        return sum(is_back(results[name, policy, fraction, seed]) for seed in options.seeds)

    seeds, figures, rows = len(options.seeds), [], []
    for name in names:
        rows += [
            [name, policy, *[f"{back(name, policy, fraction)} of {seeds}" for fraction in fractions]]
            for policy in ("stock", "basin")
        ]
        recovers = [fraction for fraction in fractions if back(name, "stock", fraction) == seeds]
        sticks = [fraction for fraction in fractions if back(name, "stock", fraction) == 0]
        low, high = ARTICLE[name]
        figures.append(
            Figure(
                what=f"{name}, stock: recovers at, stuck at (of the overload rate)",
                article=f"{low}, {high}",
                ours=f"{max(recovers) if recovers else 'none tried'}, {min(sticks) if sticks else 'none tried'}",
                holds=holds(
                    bool(recovers and sticks) and max(recovers) >= float(low) and min(sticks) <= float(high),
                    bool(recovers or sticks),
                ),
                cause=f"overload rate here: {references[name]:g} sessions/min; all seeds must agree. "
                + _backlog([results[name, "stock", min(fractions), seed] for seed in options.seeds]),
            )
        )
        worst = min(back(name, "basin", fraction) for fraction in fractions)
        figures.append(
            Figure(
                what=f"{name}, Basin: recovers at every fraction up to {max(fractions)}",
                article="-",
                ours="yes" if worst == seeds else f"at one fraction only {worst} of {seeds} seeds",
                holds=holds(worst == seeds, False),
            )
        )
    plot = Plot(figsize=(4.5 * len(names), 3.2), layout="constrained")
    for place, name in enumerate(names, start=1):
        axes = plot.add_subplot(1, len(names), place)
        for policy, style in (("stock", "-"), ("basin", ":")):
            for number, fraction in enumerate(fractions):
                series = results[name, policy, fraction, options.seeds[0]]["series"]
                axes.plot(
                    [at_s / 60 for at_s in series["at_s"]],
                    series["live_sessions"],
                    style,
                    color=f"C{number}",
                    linewidth=0.9,
                    label=f"{fraction}" if policy == "stock" else None,
                )
        axes.axvspan(15, 25, color="0.92")
        axes.set_yscale("symlog", linthresh=10)
        axes.set_title(f"{name} (dotted: Basin)", fontsize=9)
        axes.set_xlabel("minutes")
        axes.set_ylabel("live sessions")
        axes.legend(fontsize=7, title="after the surge", title_fontsize=7)
    publish(
        Finding(
            name="recovery",
            rank=6,
            title="Recovery threshold after +300 %",
            method="1P3D, code. *Back*: in the last ten minutes of six hours at most three first calls wait, at a hit "
            "rate above 0.75.",
            figures=figures,
            tables=[
                Table(
                    title="Seeds that are back, by fraction of the overload rate that arrives after the surge",
                    columns=["deployment", "policy", *map(str, fractions)],
                    rows=rows,
                )
            ],
            plots=[save_plot(plot, options, "recovery")],
            numbers={"overload_per_min": references},
        ),
        options,
        [CODE],
        len(cases) + len(asked),
    )


def _backlog(results: Sequence[dict[str, Any]]) -> str:
    """What a collapsed deployment has to work off, and how fast it does."""
    live, rates = [], []
    for result in results:
        series = result["series"]
        at = [next(i for i, at_s in enumerate(series["at_s"]) if at_s >= from_s) for from_s in (1500.0, 1800.0, 3600.0)]
        live.append(series["live_sessions"][at[0]])
        rates.append((series["finished_sessions"][at[2]] - series["finished_sessions"][at[1]]) / 30)
    return (
        f"The surge leaves {spread(live)} sessions live, of which the collapsed deployment finishes "
        f"{spread(rates, '.1f')} a minute; until they are few it stays collapsed"
    )


if __name__ == "__main__":
    main()
