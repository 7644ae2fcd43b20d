"""Which reservation law, budget band and order are the default, chosen and judged with the predictors that serve.

    .venv/bin/python benchmarks/sim_law.py [--quick] [--seeds 1,2]

*Choice*: all settings with the trained predictor (on tasks that it has not seen) on six scenarios of the grid, the best
of them with more seeds (`--seeds`). *Judgement*: the default and the article's design on fresh seeds, on the whole grid
and on loads that nothing was chosen on, with the trained predictor and with the one that starts with nothing and learns
from sessions that end. Each setting's goodput in a scenario is taken relative to the
best setting there; settings are ranked by the geometric mean over the scenarios.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    ARTICLE,
    BASIN,
    CHOICE_SEEDS,
    FRESH_SEEDS,
    GRID,
    HELD_OUT,
    ONLINE,
    TRAINED,
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

FINALISTS = 2
"""Of the choice, with more seeds, beside the default and the article's design."""
CHOICE = tuple(
    scenario
    for scenario in GRID
    if scenario.name
    in (
        "terminal, host tier",
        "code, GPU, +300 %",
        "terminal, GPU",
        "terminal, lending",
        "code-25k, 1P1D",
        "decode-first",
    )
)
"""The scenarios of the choice: those on which settings differ most. The other six of the grid are held out, too."""
PREDICTORS = {"trained": TRAINED, "learns online": ONLINE}


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    options: dict[str, str]


def setting(name: str, **options: str) -> Setting:
    """The default but for `options`."""
    return Setting(name, BASIN | options)


CHOSEN = Setting("default", BASIN)
REFERENCE = Setting("article's design", ARTICLE)

LAWS: dict[str, dict[str, str]] = {
    "band 0.3": {"band": "0.3"},
    "nobody is paused": {"pausing": "false"},
    "partial 0.25": {"law": "partial", "alpha": "0.25"},
    "partial 0.5": {"law": "partial", "alpha": "0.5"},
    "partial 0.75": {"law": "partial"},
    "partial 0.75, band 0.3": {"law": "partial", "band": "0.3"},
    "partial 0.75, band 0.3, nobody is paused": {"law": "partial", "band": "0.3", "pausing": "false"},
    "the whole peak": {"law": "peak"},
    "the whole peak, band 0.5": {"law": "peak", "band": "0.5"},
    "the whole peak, band 0.5, nobody is paused": {"law": "peak", "band": "0.5", "pausing": "false"},
    "multiplex 0.05": {"law": "multiplex"},
    "multiplex 0.05, band 0.3": {"law": "multiplex", "band": "0.3"},
    "what is shared counts in full": {"shared_once": "false"},
    "fixed order inside": {"updates_order": "false"},
    "order by arrival": {"order": "arrival"},
    "r = 3": {"order_tokens_per_s": "3"},
    "r = 30": {"order_tokens_per_s": "30"},
}
"""What each setting changes of the default."""


def settings(quick: bool) -> list[Setting]:
    varied = list(LAWS.items())[:1] if quick else LAWS.items()
    return [CHOSEN, REFERENCE, *[setting(name, **changes) for name, changes in varied]]


class Runs:
    """Results by (setting, predictor, scenario, seed), run as they are asked for."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.results: dict[tuple[str, str, str, int], dict[str, Any]] = {}

    def run(
        self, chosen: Sequence[Setting], scenarios: Sequence[Scenario], seeds: Sequence[int], predictor: str
    ) -> None:
        asked = [(one, scenario, seed) for one in chosen for scenario in scenarios for seed in seeds]
        cases = [scenario.case("basin", one.options | PREDICTORS[predictor], seed) for one, scenario, seed in asked]
        for (one, scenario, seed), result in zip(asked, run_all(cases, self.jobs), strict=True):
            self.results[one.name, predictor, scenario.name, seed] = result

    def within(self, name: str, predictor: str, scenario: Scenario, seeds: Sequence[int]) -> float:
        """Share of the offered sessions that were served within target, mean over seeds."""
        return statistics.fmean(
            self.results[name, predictor, scenario.name, seed]["summary"]["completed_share"] for seed in seeds
        )

    def ranked(
        self, names: Sequence[str], predictor: str, scenarios: Sequence[Scenario], seeds: Sequence[int]
    ) -> list[tuple[str, float, float]]:
        """(setting, geometric mean, worst scenario), relative to the best setting of each scenario, best first."""
        relative: dict[str, list[float]] = {name: [] for name in names}
        for scenario in scenarios:
            shares = {name: self.within(name, predictor, scenario, seeds) for name in names}
            best = max(max(shares.values()), 1e-9)
            for name, share in shares.items():
                relative[name].append(share / best)
        scored = [(name, geometric_mean(row), min(row)) for name, row in relative.items()]
        return sorted(scored, key=lambda row: -row[1])

    def stuck(self, name: str, predictor: str, scenarios: Sequence[Scenario], seeds: Sequence[int]) -> list[str]:
        return [
            s.name
            for s in scenarios
            if any(self.results[name, predictor, s.name, seed]["end"]["stuck"] for seed in seeds)
        ]


def main() -> None:
    options = parse(__doc__, CHOICE_SEEDS)
    grid, held_out, choice = (GRID[:3], HELD_OUT[:1], CHOICE[:2]) if options.quick else (GRID, HELD_OUT, CHOICE)
    seeds, first = options.seeds, options.seeds[:1]
    fresh = FRESH_SEEDS[:1] if options.quick else FRESH_SEEDS
    tried = settings(options.quick)
    names = [one.name for one in tried]
    runs = Runs(options.jobs)
    runs.run(tried, choice, first, "trained")
    early = runs.ranked(names, "trained", choice, first)
    by_name = {one.name: one for one in tried}
    wanted = [*[by_name[name] for name, _, _ in early[:FINALISTS]], CHOSEN, REFERENCE]
    finalists = list({one.name: one for one in wanted}.values())
    final_names = [one.name for one in finalists]
    runs.run(finalists, choice, seeds, "trained")
    chosen = runs.ranked(final_names, "trained", choice, seeds)
    places = {"the grid": grid, "loads held out": held_out}
    judged = {}
    arms = [CHOSEN, REFERENCE]
    for predictor in PREDICTORS:
        runs.run(arms, [*grid, *held_out], fresh, predictor)
        for place, scenarios in places.items():
            judged[place, predictor] = runs.ranked([one.name for one in arms], predictor, scenarios, fresh)
    score = {key: {name: mean for name, mean, _ in ranked} for key, ranked in judged.items()}

    def over_article(key: tuple[str, str]) -> float:
        return score[key][CHOSEN.name] / score[key][REFERENCE.name]

    everything = [*grid, *held_out]
    stuck = [
        f"{name} ({predictor})"
        for predictor in PREDICTORS
        for name in runs.stuck(CHOSEN.name, predictor, everything, fresh)
    ]
    best_chosen = {name: mean for name, mean, _ in chosen}
    figures = [
        Figure(
            what=f"default against the article's full design on {place}, fresh seeds, predictor: {predictor}",
            article="-",
            ours=f"{over_article((place, predictor)):.3f}",
            holds=holds(over_article((place, predictor)) > 1, False),
        )
        for place, predictor in judged
    ]
    figures += [
        Figure(
            what="default against the best setting of the choice",
            article="-",
            ours=f"{best_chosen[CHOSEN.name] / chosen[0][1]:.3f} ({chosen[0][0]})",
            holds=holds(best_chosen[CHOSEN.name] > 0.99 * chosen[0][1], False),
        ),
        Figure(
            what="scenarios where the default is stuck",
            article="-",
            ours=", ".join(stuck) or "none",
            holds=holds(not stuck, False),
        ),
    ]
    tables = [
        Table(
            title=f"Choice: the best, seeds {told(seeds)}, trained predictor",
            columns=RANKED,
            rows=[
                [name, f"{mean:.3f}", f"{worst:.2f}", ", ".join(runs.stuck(name, "trained", choice, seeds)) or "-"]
                for name, mean, worst in chosen
            ],
        ),
        Table(
            title=f"Judgement: fresh seeds {told(fresh)}",
            columns=["on", "predictor", *RANKED],
            rows=[
                [
                    place,
                    predictor,
                    name,
                    f"{mean:.3f}",
                    f"{worst:.2f}",
                    ", ".join(runs.stuck(name, predictor, places[place], fresh)) or "-",
                ]
                for (place, predictor), ranked in judged.items()
                for name, mean, worst in ranked
            ],
        ),
        Table(
            title=f"Choice: all settings, seed {first[0]}, trained predictor (the default but for what is named)",
            columns=RANKED,
            rows=[
                [name, f"{mean:.3f}", f"{worst:.2f}", ", ".join(runs.stuck(name, "trained", choice, first)) or "-"]
                for name, mean, worst in early
            ],
        ),
        Table(
            title="Share of offered sessions within target, fresh seeds: trained predictor / learns online",
            columns=["scenario", *[one.name for one in arms]],
            rows=[
                [
                    f"{s.name}: {s.says}",
                    *[
                        " / ".join(f"{runs.within(one.name, predictor, s, fresh):.2f}" for predictor in PREDICTORS)
                        for one in arms
                    ],
                ]
                for s in everything
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
            method="Share of offered sessions within target, relative to the best setting of the scenario; geometric "
            "mean over the scenarios. Chosen on six scenarios of the grid, judged on fresh seeds of all twelve and on "
            f"{len(HELD_OUT)} loads that nothing was chosen on. *trained*: the predictor that comes with Basin, fitted "
            "on the other half of the tasks; *learns online*: starts with nothing.",
            figures=figures,
            tables=tables,
            plots=[save_plot(plot, options, "law")],
            numbers={"early": early, "chosen": chosen, "judged": {" / ".join(k): v for k, v in judged.items()}},
        ),
        options,
        WORKLOADS,
        len(runs.results),
    )


RANKED = ["setting", "geometric mean", "worst scenario", "stuck in"]


def told(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


if __name__ == "__main__":
    main()
