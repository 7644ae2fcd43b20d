"""Which reservation law, quantile, budget band and order are the default: goodput over twelve scenarios.

    .venv/bin/python benchmarks/sim_law.py [--quick] [--seeds 1,2,3]

Each setting's goodput in a scenario is taken relative to the best setting there; settings are ranked by the geometric
mean over all scenarios. The first seed ranks all settings, the others are for the best ones, the references and their
variants. Predictions are blurred as the article measured them, never those of an oracle.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    ARTICLE,
    BASIN,
    GRID,
    MEASURED_ERROR,
    ONLINE,
    WORKLOADS,
    Figure,
    Finding,
    Scenario,
    Table,
    geometric_mean,
    holds,
    parse,
    publish,
    run_all,
    save_plot,
)

FINALISTS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    options: dict[str, str]


def setting(name: str, **options: str) -> Setting:
    return Setting(name, MEASURED_ERROR | R_OF_ARTICLE | options)


R_OF_ARTICLE = {"order_tokens_per_s": "30"}
"""Laws and budgets are compared at the article's r; other values are tried on the best of them."""

DEFAULT = Setting("default: peak, band 0.8, r = 10", BASIN)
PEAK = Setting("peak, band 0.1 (article)", ARTICLE)

LAWS: dict[str, dict[str, str]] = {
    "current": {"law": "current"},
    "partial 0.25": {"law": "partial", "alpha": "0.25"},
    "partial 0.5": {"law": "partial", "alpha": "0.5"},
    "partial 0.75": {"law": "partial", "alpha": "0.75"},
    "peak": {"law": "peak"},
    "multiplex 0.05": {"law": "multiplex"},
}


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [DEFAULT, PEAK, setting("current, band 0", law="current", band="0")]
    made = [DEFAULT, PEAK]
    for name, law in LAWS.items():
        made.append(setting(f"{name}, band 0", band="0", **law))
        made.append(setting(f"{name}, band 0.3", band="0.3", **law))
    for name in ("partial 0.5", "partial 0.75", "peak"):
        law = LAWS[name]
        made.append(setting(f"{name}, band 0.5", band="0.5", **law))
        made.append(setting(f"{name}, band 0.8", band="0.8", **law))
        made.append(setting(f"{name}, band 0.3, shared in full", band="0.3", shared_once="false", **law))
    made.append(setting("partial 0.5 of the 0.75 quantile, band 0", law="partial", alpha="0.5", law_share="0.75"))
    return made


def variants(best: Setting) -> list[Setting]:
    """The winner with other orders and predictors."""

    def other(name: str, **options: str) -> Setting:
        return Setting(f"{best.name}; {name}", best.options | options)

    return [
        other("order by arrival", order="arrival"),
        *[
            other(f"r = {r}", order_tokens_per_s=r)
            for r in ("10", "30", "100")
            if best.options["order_tokens_per_s"] != r
        ],
        Setting(f"{best.name}; learns online", best.options | ONLINE),
    ]


class Grid:
    """Results by (setting, scenario, seed), run as they are asked for."""

    def __init__(self, scenarios: Sequence[Scenario], jobs: int) -> None:
        self.scenarios = scenarios
        self.jobs = jobs
        self.results: dict[tuple[str, str, int], dict] = {}

    def run(self, chosen: Sequence[Setting], seeds: Sequence[int]) -> None:
        asked = [(one, scenario, seed) for one in chosen for scenario in self.scenarios for seed in seeds]
        cases = [scenario.case("basin", one.options, seed) for one, scenario, seed in asked]
        for (one, scenario, seed), result in zip(asked, run_all(cases, self.jobs), strict=True):
            self.results[one.name, scenario.name, seed] = result

    def within(self, name: str, scenario: str, seeds: Sequence[int]) -> float:
        """Share of the offered sessions that were served within target, mean over seeds."""
        return statistics.fmean(self.results[name, scenario, seed]["summary"]["completed_share"] for seed in seeds)

    def relative(self, names: Sequence[str], seeds: Sequence[int]) -> dict[str, dict[str, float]]:
        """Per setting and scenario, relative to the best setting there."""
        made: dict[str, dict[str, float]] = {name: {} for name in names}
        for scenario in self.scenarios:
            shares = {name: self.within(name, scenario.name, seeds) for name in names}
            best = max(max(shares.values()), 1e-9)
            for name, share in shares.items():
                made[name][scenario.name] = share / best
        return made

    def ranked(self, names: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, float, float]]:
        """(setting, geometric mean, worst scenario), best first."""
        relative = self.relative(names, seeds)
        scored = [(name, geometric_mean(list(row.values())), min(row.values())) for name, row in relative.items()]
        return sorted(scored, key=lambda row: -row[1])

    def stuck(self, name: str, seeds: Sequence[int]) -> list[str]:
        return [
            s.name for s in self.scenarios if any(self.results[name, s.name, seed]["end"]["stuck"] for seed in seeds)
        ]


RANKED = ["setting", "geometric mean", "worst scenario", "stuck in"]


def ranked_rows(grid: Grid, ranked: Sequence[tuple[str, float, float]], seeds: Sequence[int]) -> list[list[str]]:
    return [
        [name, f"{mean:.3f}", f"{worst:.2f}", ", ".join(grid.stuck(name, seeds)) or "-"] for name, mean, worst in ranked
    ]


def main() -> None:
    options = parse(__doc__)
    scenarios = GRID[:3] if options.quick else GRID
    seeds, first = options.seeds, options.seeds[:1]
    grid = Grid(scenarios, options.jobs)
    tried = settings(options.quick)
    grid.run(tried, first)
    early = grid.ranked([one.name for one in tried], first)
    by_name = {one.name: one for one in tried}
    best = [by_name[name] for name, _, _ in early]
    wanted = [*best[:FINALISTS], DEFAULT, PEAK]
    finalists = list({one.name: one for one in wanted}.values())
    others = [] if options.quick else variants(best[0])
    grid.run(others, first)
    grid.run(finalists, seeds)
    names = [one.name for one in finalists]
    final = grid.ranked(names, seeds)
    score = {name: (mean, worst) for name, mean, worst in final}
    varied = grid.ranked([one.name for one in [*best[:1], *others]], first)

    top = final[0][0]
    figures = [
        Figure(
            what="default against the article's full design, geometric mean of goodput",
            article="-",
            ours=f"{score[DEFAULT.name][0] / score[PEAK.name][0]:.3f}",
            holds=holds(score[DEFAULT.name][0] > score[PEAK.name][0], False),
        ),
        Figure(
            what="default against the best setting ",
            article="-",
            ours=f"{score[DEFAULT.name][0] / score[top][0]:.3f} ({top})",
            holds=holds(score[DEFAULT.name][0] > 0.99 * score[top][0], False),
        ),
        Figure(
            what="scenarios where the default is stuck",
            article="-",
            ours=", ".join(grid.stuck(DEFAULT.name, seeds)) or "none",
            holds=holds(not grid.stuck(DEFAULT.name, seeds), False),
        ),
    ]
    tables = [
        Table(
            title=f"Finalists, seeds {', '.join(map(str, seeds))}",
            columns=RANKED,
            rows=ranked_rows(grid, final, seeds),
        ),
        Table(
            title=f"The best ones with other orders and predictors, seed {first[0]}",
            columns=RANKED,
            rows=ranked_rows(grid, varied, first),
        ),
        Table(title=f"All settings, seed {first[0]}", columns=RANKED, rows=ranked_rows(grid, early, first)),
        Table(
            title="Share of offered sessions within target, finalists by scenario",
            columns=["scenario", *[one.name for one in finalists]],
            rows=[
                [f"{s.name}: {s.says}", *[f"{grid.within(one.name, s.name, seeds):.2f}" for one in finalists]]
                for s in scenarios
            ],
        ),
    ]
    plot = Plot(figsize=(9, 0.24 * len(early) + 1), layout="constrained")
    axes = plot.add_subplot()
    for row, (_, mean, worst) in enumerate(reversed(early)):
        axes.plot([worst, mean], [row, row], color="0.8", zorder=1)
        axes.plot([mean], [row], "o", color="tab:blue")
        axes.plot([worst], [row], "|", color="0.4")
    axes.set_yticks(range(len(early)), [name for name, _, _ in reversed(early)], fontsize=8)
    axes.set_xlabel("goodput relative to the best setting: geometric mean (dot) and worst scenario (bar)")
    publish(
        Finding(
            name="law",
            rank=10,
            title="Reservation law, budget and order: the default",
            method="Twelve scenarios (below). Share of offered sessions within target, relative to the best "
            "setting of the scenario; geometric mean over the scenarios. *Shared in full*: what "
            "sessions share counts once a session in the budget, instead of once.",
            figures=figures,
            tables=tables,
            plots=[save_plot(plot, options, "law")],
            numbers={"relative": grid.relative(names, seeds), "early": early, "varied": varied},
        ),
        options,
        WORKLOADS,
        len(grid.results),
    )


if __name__ == "__main__":
    main()
