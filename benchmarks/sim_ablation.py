"""What each part of the door is worth: admission law, order, lending, adaptive budget, prediction error.

    .venv/bin/python benchmarks/sim_ablation.py [--quick] [--seeds 4,5,6]

Starts from the default, on the two loads of the grid that lend and on two that do not, and takes one part away or
replaces it at a time. Goodput relative to the default, geometric mean over the loads.
"""

from __future__ import annotations

import dataclasses
import statistics

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    BASIN,
    BASIN_ONLINE,
    BLURRED,
    CODE,
    GRID,
    LEND,
    TERMINAL,
    Figure,
    Finding,
    Scenario,
    Table,
    geometric_mean,
    holds,
    known,
    parse,
    publish,
    run_all,
    save_plot,
)

LOADS = tuple(
    scenario
    for scenario in GRID
    if scenario.changes == LEND or scenario.name in ("terminal, host tier", "code, GPU, +300 %")
)
THUNDER = {"acting_half_life_s": "30.0", "counts_host": "true"}
"""Of the strongest rival, as it is best on most scenarios (`sim_scenarios.py`)."""
NEVER = {"pause_threshold": "10", "resume_hysteresis": "9.15", "pause_target": "10"}
"""It pauses nobody, and lets new sessions in as before: up to 0.85 of the capacity."""


@dataclasses.dataclass(frozen=True)
class Variant:
    part: str
    name: str
    options: dict[str, str]
    lends: bool = True
    policy: str = "basin"


def variant(part: str, name: str, lends: bool = True, **options: str) -> Variant:
    return Variant(part, name, BASIN | options, lends)


DEFAULT = variant("-", "default")
VARIANTS = (
    DEFAULT,
    variant("admission", "none", enabled="false"),
    variant("admission", "three quarters of the way to the peak", law="partial"),
    variant("admission", "the whole peak", law="peak"),
    variant("pausing", "none", pausing="false"),
    variant("pausing and admission", "three quarters of the way, nobody is paused", law="partial", pausing="false"),
    variant("pausing and admission", "none", enabled="false", pausing="false"),
    variant("order", "by arrival of sessions", order="arrival"),
    variant("order", "fixed inside", updates_order="false"),
    Variant("admission and order", "none, by arrival of calls (stock that lends)", {}, policy="stock"),
    variant("lending", "none", lends=False),
    Variant("lending, admission and order", "none (stock)", {}, lends=False, policy="stock"),
    variant("budget", "within 0.3 of its reference", band="0.3"),
    variant("prediction", "oracle", predictor="oracle", rank_correlation="1"),
    variant("prediction", "blurred as the article's", **BLURRED),
    Variant("prediction", "learns online", dict(BASIN_ONLINE)),
    variant("prediction", "none (present context)", predictor="none"),
    Variant("all", "thunder-watermarked", THUNDER, policy="thunder-watermarked"),
    Variant("all", "thunder-watermarked that pauses nobody", THUNDER | NEVER, policy="thunder-watermarked"),
    variant("the door", "counts what is shared in full", shared_once="false"),
)


def main() -> None:
    options = parse(__doc__, (4, 5, 6))
    loads = LOADS[:1] if options.quick else LOADS
    chosen = VARIANTS[:3] if options.quick else VARIANTS
    keys = [(one.part, one.name, load.name, seed) for one in chosen for load in loads for seed in options.seeds]
    cases = [
        (dataclasses.replace(load, changes={}) if load.changes == LEND and not one.lends else load).case(
            one.policy, one.options, seed
        )
        for one in chosen
        for load in loads
        for seed in options.seeds
    ]
    results = dict(zip(keys, run_all(cases, options.jobs), strict=True))

    def mine(one: Variant, load: Scenario) -> list[dict]:
        return [results[one.part, one.name, load.name, seed] for seed in options.seeds]

    def mean(one: Variant, load: Scenario) -> float:
        return statistics.fmean(result["summary"]["completed_share"] for result in mine(one, load))

    rows, scored = [], []
    for one in chosen:
        relative = geometric_mean([mean(one, load) / max(mean(DEFAULT, load), 1e-9) for load in loads])
        scored.append((one, relative))
        stuck = [load.name for load in loads if any(result["end"]["stuck"] for result in mine(one, load))]
        hits = known(result["summary"]["hit_rate_last_third"] for load in loads for result in mine(one, load))
        rows.append(
            [
                one.part,
                one.name,
                f"{relative:.3f}",
                *[f"{mean(one, load):.2f}" for load in loads],
                f"{statistics.fmean(hits):.2f}" if hits else "-",
                ", ".join(stuck) or "-",
            ]
        )
    better = [(one, relative) for one, relative in scored if relative > 1.01 and "oracle" not in one.name]
    figures = [
        Figure(
            what="a part whose removal or replacement (oracle aside) gains more than 1 %",
            article="-",
            ours=", ".join(f"{one.part}: {one.name} (x{relative:.2f})" for one, relative in better) or "none",
            holds=holds(not better, False),
            cause="on these four loads: once sessions are paused it matters little how they are let in"
            if better
            else "",
        )
    ]
    plot = Plot(figsize=(8, 0.27 * len(scored) + 0.9), layout="constrained")
    axes = plot.add_subplot()
    labels = [f"{one.part}: {one.name}" for one, _ in reversed(scored)]
    axes.barh(labels, [relative for _, relative in reversed(scored)], color="tab:blue")
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("goodput over the default's, geometric mean over the loads")
    publish(
        Finding(
            name="ablation",
            rank=9,
            title="Ablation",
            method="1P3D, an hour of offered sessions; one part of the default replaced at a time. Columns of loads: "
            "share of offered sessions within target. The two rows of the strongest rival say what its pausing is "
            "worth to it.",
            figures=figures,
            tables=[
                Table(
                    title="One part replaced at a time",
                    columns=[
                        "part",
                        "replaced by",
                        "over default",
                        *[load.says for load in loads],
                        "hit rate",
                        "stuck in",
                    ],
                    rows=rows,
                )
            ],
            plots=[save_plot(plot, options, "ablation")],
            numbers={f"{one.part}: {one.name}": round(relative, 4) for one, relative in scored},
        ),
        options,
        [CODE, TERMINAL],
        len(cases),
    )


if __name__ == "__main__":
    main()
