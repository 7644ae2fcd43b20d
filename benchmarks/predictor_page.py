"""Makes `benchmarks/PREDICTOR.md` and its plot of what `predictor_study.py` found.

    .venv/bin/python benchmarks/predictor_page.py [--check]

Reads `benchmarks/results/predictor_study.json`; with --check it writes nothing and the exit code is 1 where the page
is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from predictor_study import FIRST_CALL_RANK, GAIN, GAIN_CALLS, P90_RANGE, TRACES
from scipy.stats import beta

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "predictor_study.json"
PAGE = FOLDER / "PREDICTOR.md"
PLOT = FOLDER / "results" / "predictor_study.png"
LEARNING = ("learning curve 25%", "learning curve 50%", "basin")

HEAD = """# Predicting peaks: what was measured, and what cannot be had

Made by `predictor_page.py` of `results/predictor_study.json`, which `predictor_study.py --traces DIR` writes. All
ranks are Spearman's between a prediction and the true peak among the sessions that reach a call, out of fold with all
runs of a task in one fold, so that every task is an unseen one. *Gain* is that rank less the rank of the present
context alone; the target is a gain of +0.10 at calls 4, 9 and 16. Intervals are 95 %, by drawing whole tasks with
replacement. Made with `--folds 10`; for swe_bench, where the target is reached, without the alternatives.
What prediction error costs in goodput is in [README.md](README.md) (`predictor_ablation.py`).
"""


def page(found: Mapping[str, Any]) -> str:
    traces = [name for name in TRACES if name in found]
    parts = [HEAD, _gains(found, traces), _plot_line(), _ceilings(found, traces), _features(found, traces)]
    parts += [_tasks(found, traces), _reading(found, traces), _coverage(found, traces), _methods(found, traces)]
    parts.append(_speed(found))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _plot_line() -> str:
    return f"![gains by trace and call, learning curve](results/{PLOT.name})"


def _gain(found: Mapping[str, Any], name: str, label: str, call: int) -> Mapping[str, float] | None:
    rows = found[name]["gains"].get(label, [])
    return next((row for row in rows if row["call"] == call), None)


def _score(found: Mapping[str, Any], name: str, label: str, call: int) -> Mapping[str, float]:
    return next(row for row in found[name]["scores"][label] if row["call"] == call)


def _told(gain: Mapping[str, float] | Sequence[float] | None) -> str:
    if gain is None:
        return "-"
    middle, low, high = (gain["gain"], gain["low"], gain["high"]) if isinstance(gain, Mapping) else gain
    return f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"


def _gains(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    rows = []
    for name in traces:
        for call in GAIN_CALLS:
            score, gain = _score(found, name, "basin", call), _gain(found, name, "basin", call)
            assert gain is not None
            holds = "yes" if gain["gain"] >= GAIN else "within the interval" if gain["high"] >= GAIN else "no"
            rows.append(
                [
                    name,
                    call,
                    score["sessions"],
                    f"{score['context_rank']:.2f}",
                    f"{score['rank']:.2f}",
                    _told(gain),
                    f"{_score(found, name, 'baseline', call)['rank']:.2f}",
                    holds,
                ]
            )
    head = ["trace", "call", "sessions", "context alone", "Basin", "gain", "the article's ridge", "+0.10"]
    return "## The gain over the present context\n\n" + _table(head, rows)


def _ceilings(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    rows = []
    for name in traces:
        for one in found[name]["features"]:
            curve = [_gain(found, name, label, one["call"]) for label in LEARNING]
            rows.append(
                [
                    name,
                    one["call"],
                    *(f"{gain['gain']:+.2f}" if gain else "-" for gain in curve),
                    _told(one["everything"]),
                    f"{one['in sample']:+.2f}",
                ]
            )
    head = ["trace", "call", "a quarter", "half", "all sessions", "a flexible model given everything", "in sample"]
    return (
        "## Would more sessions or a richer model help?\n\n"
        "The gain of Basin's model fitted on a quarter, on half and on all of the other folds' sessions; then of trees "
        "grown for the very call, which see every prompt, output and pause so far, the task's text, agent and model "
        "(`predictor_ceiling.py`); and of the same trees asked about the sessions that they were grown on.\n\n"
        + _table(head, rows)
    )


def _features(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    groups = list(dict.fromkeys(g for name in traces for one in found[name]["features"] for g in one["without"]))
    rows = []
    for name in traces:
        for one in found[name]["features"]:
            cells = [
                f"{one['without'][group]:+.2f} / {one['with'][group]:+.2f}" if group in one["without"] else "-"
                for group in groups
            ]
            rows.append([name, one["call"], f"{one['everything'][0]:+.2f}", f"{one['sizes alone']:+.2f}", *cells])
    return (
        "## Which features tell\n\n"
        "Gains of the flexible model: with everything, with the context's sizes alone, and for each group of features "
        "*without it / with it beside the sizes*.\n\n"
        + _table(["trace", "call", "everything", "sizes alone", *groups], rows)
    )


def _tasks(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    rows = []
    for name in traces:
        for one in found[name]["tasks"]:
            rows.append(
                [
                    name,
                    one["call"],
                    f"{one['sessions']} of {one['tasks']}",
                    _told_plain(one["share of variance between tasks"]),
                    _told_plain(one["rank by the other runs' peaks"]),
                    _told(one["gain of other runs and context"]),
                    _told(one["gain of everything, other runs known"]),
                ]
            )
    head = [
        "trace",
        "call",
        "runs of tasks",
        "share of variance between tasks",
        "rank by the other runs' peaks",
        "gain of these and the context",
        "gain of everything, other runs known",
    ]
    return (
        "## What the task decides\n\n"
        "Among tasks that were run more than once: how much of the variance of the remaining growth (in logarithms) "
        "lies between tasks; how well the mean peak of a task's other runs ranks a run; and what that and the context "
        "together gain over the context.\n\n" + _table(head, rows)
    )


def _told_plain(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} ({values[1]:.2f} to {values[2]:.2f})"


def _reading(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    lines = ["## What follows", ""]
    for name in traces:
        lines.append(f"- **{name}**: {' '.join(_reading_of(found, name))}")
    return "\n".join(lines)


def _reading_of(found: Mapping[str, Any], name: str) -> Iterator[str]:
    gains = [_gain(found, name, "basin", call) for call in GAIN_CALLS]
    reached = [call for call, gain in zip(GAIN_CALLS, gains, strict=True) if gain and gain["gain"] >= GAIN]
    features, tasks = found[name]["features"], found[name]["tasks"]
    yield f"The target is reached at {_calls(reached)}." if reached else "The target is reached at no call."
    if len(reached) == len(GAIN_CALLS):
        if all(quarter := [_gain(found, name, LEARNING[0], call) for call in GAIN_CALLS]):
            least = ", ".join(f"{one['gain']:+.2f}" for one in quarter if one)
            yield f"A quarter of the sessions gives {least}: it takes this many of them."
        return
    missed = [call for call in GAIN_CALLS if call not in reached]
    quarter = [_gain(found, name, LEARNING[0], call) for call in missed]
    more = [_of(gains, call)["gain"] - one["gain"] for call, one in zip(missed, quarter, strict=True) if one]
    if more:
        doubled = sum(more) / len(more) / 2
        says = "more sessions of this kind would still help" if doubled > 0.02 else "more of them would hardly help"
        yield f"Where it is missed, each doubling of the sessions from a quarter on brought {doubled:+.2f}: {says}."
    short = [one for one in features if one["call"] in missed and one["everything"][0] < GAIN]
    if short:
        text = "task text" in short[0]["without"]
        best, where = max(one["everything"][0] for one in short), _calls([one["call"] for one in short])
        yield (
            f"A flexible model that is given everything gains at best {best:+.2f} at {where}, "
            f"so what is missing is not in the calls so far{' nor in the text' if text else ''}."
        )
    enough = [one["call"] for one in features if one["call"] in missed and one["everything"][0] >= GAIN]
    if enough:
        yield f"At {_calls(enough)} a flexible model that is given everything does reach it."
    widths = [gain["high"] - gain["low"] for gain in gains if gain]
    yield f"With so many sessions a gain is known to ±{max(widths) / 2:.2f}."
    if tasks:
        shares = [one["share of variance between tasks"][0] for one in tasks]
        ranked = [one["gain of other runs and context"][0] for one in tasks]
        known = [one["call"] for one in tasks]
        yield (
            f"From {_calls(known)} on the task decides {_each(shares, '.0%')} of how much a session still grows, and "
            f"who knows its other runs gains {_each(ranked, '+.2f')}."
        )
        if min(shares) >= 0.5:
            yield "What an unseen one will take is not told by the texts and runs of the others: the rest is its own."
        elif alike := [call for call, share in zip(known, shares, strict=True) if share < 0.1]:
            yield f"At {_calls(alike)} two runs of one task differ about as much as two tasks do."


def _each(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def _of(gains: Sequence[Mapping[str, float] | None], call: int) -> Mapping[str, float]:
    gain = gains[GAIN_CALLS.index(call)]
    assert gain is not None
    return gain


def _calls(calls: Sequence[int]) -> str:
    return "call " + " and ".join(map(str, calls)) if len(calls) < 3 else f"calls {', '.join(map(str, calls))}"


def _coverage(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    rows = []
    outside: list[str] = []
    for name in traces:
        for one in found[name]["scores"]["basin"]:
            count, inside = one["sessions"], round(one["p90_coverage"] * one["sessions"])
            low, high = binomial_interval(inside, count)
            held = P90_RANGE[0] <= one["p90_coverage"] <= P90_RANGE[1]
            if not held:
                fits = (
                    "which is no more than chance" if low <= P90_RANGE[1] and high >= P90_RANGE[0] else "beyond chance"
                )
                outside.append(f"{name} at call {one['call']} ({inside} of {count}), {fits}")
            rows.append(
                [
                    name,
                    one["call"],
                    count,
                    f"{one['p90_coverage']:.2f} ({low:.2f} to {high:.2f})",
                    f"{one['p50_coverage']:.2f}",
                    f"{one['log_error']:.2f}",
                    f"{one['reserved_p90']:.2f}",
                ]
            )
    says = f"Outside {P90_RANGE[0]} to {P90_RANGE[1]}: {'; '.join(outside)}." if outside else "Held at every call."
    head = ["trace", "call", "sessions", "P90 coverage", "P50 coverage", "log error", "P90s over peaks, totals"]
    return (
        f"## Calibration\n\nPart of the sessions whose peak is at most the predicted quantile; the interval is the "
        f"binomial one of so many sessions. {says}\n\n" + _table(head, rows)
    )


def binomial_interval(inside: int, count: int) -> tuple[float, float]:
    """95 %, exact (Clopper and Pearson, 1934)."""
    low = float(beta.ppf(0.025, inside, count - inside + 1)) if inside else 0.0
    high = float(beta.ppf(0.975, inside + 1, count - inside)) if inside < count else 1.0
    return low, high


def _methods(found: Mapping[str, Any], traces: Sequence[str]) -> str:
    labels: list[str] = []
    for name in traces:
        labels += [label for label in found[name]["gains"] if label not in labels and "learning" not in label]
    rows = []
    for label in labels:
        cells = []
        for name in traces:
            gains = [_gain(found, name, label, call) for call in GAIN_CALLS]
            cells.append(" / ".join(f"{gain['gain']:+.2f}" if gain else "-" for gain in gains))
        rows.append([label, *cells])
    again = [
        f"{name} {_score(found, name, 'basin, repeated tasks', 1)['rank']:.2f}"
        for name in traces
        if "basin, repeated tasks" in found[name]["scores"]
    ]
    return (
        "## Methods compared\n\nGains at calls 4 / 9 / 16.\n\n"
        + _table(["method", *traces], rows)
        + f"\n\nWith repeated tasks the first call's rank is {', '.join(again)} (the article's: {FIRST_CALL_RANK})."
    )


def _speed(found: Mapping[str, Any]) -> str:
    return "## Speed\n\n" + "\n".join(f"- {line}" for line in found["speed"])


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def draw(found: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = [name for name in TRACES if name in found]
    figure, axes = pyplot.subplots(1, len(traces), figsize=(3.1 * len(traces), 3.2), sharey=True, layout="constrained")
    for place, (axis, name) in enumerate(zip(axes, traces, strict=True)):
        lines: dict[str, list[tuple[float, ...]]] = {
            "Basin, unseen tasks": [tuple(_gain_values(found, name, call)) for call in GAIN_CALLS],
            "given everything": [tuple(one["everything"]) for one in found[name]["features"]],
            "other runs known": [tuple(one["gain of other runs and context"]) for one in found[name]["tasks"]],
        }
        for shift, (label, values) in enumerate(lines.items()):
            if values:
                places = [index + 0.12 * (shift - 1) for index in range(len(values))]
                middles = [value[0] for value in values]
                errors = [[v[0] - v[1] for v in values], [v[2] - v[0] for v in values]]
                axis.errorbar(places, middles, yerr=errors, fmt="o", markersize=4, linewidth=1, label=label)
        axis.axhline(GAIN, color="grey", linestyle="--", linewidth=0.8)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_xticks(range(len(GAIN_CALLS)), [f"call {call}" for call in GAIN_CALLS])
        axis.set_title(name, fontsize=9)
        if place == 0:
            axis.set_ylabel("gain in rank over the context")
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(PLOT, dpi=90)
    pyplot.close(figure)


def _gain_values(found: Mapping[str, Any], name: str, call: int) -> tuple[float, float, float]:
    gain = _gain(found, name, "basin", call)
    assert gain is not None
    return gain["gain"], gain["low"], gain["high"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    made = page(found)
    if options.check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made)
    PAGE.write_text(made, encoding="utf-8")
    draw(found)
    print(f"written: {PAGE}, {PLOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
