"""A run, or several arms side by side: text table, JSON, PNG and one self-contained HTML page."""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from sglang_basin.replay.goodput import Target
from sglang_basin.replay.quantities import format_duration
from sglang_basin.replay.records import RunRecord, RunResult
from sglang_basin.replay.summary import Series, Summary, summarize, time_series, timeline

_COLOURS = ("#c8553d", "#2a6f97", "#6a994e", "#8e6c8a", "#bc8a2c", "#4d4d4d")
"""By arm, in order. Told apart also with the common colour deficiencies and in grey print."""
_INK = "#22303c"
_SURGE = "#f3d9a4"


# ---- The table -----------------------------------------------------------------------------------------------------


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _per_hour(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _rate(value: float) -> str:
    return f"{value:.3f}"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.2f} s" if value < 100 else f"{value:,.0f} s"


def _outcomes(value: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in value.items()) or "none"


@dataclass(frozen=True)
class Row:
    """One row of the table: a field of `Summary`, its name and how its value is written."""

    field: str
    label: str
    show: Callable[[Any], str]

    def cell(self, summary: Summary) -> str:
        value = getattr(summary, self.field)
        return "-" if value is None else self.show(value)


ROWS = (
    Row("goodput_per_hour", "goodput, sessions/h", _per_hour),
    Row("offered_per_hour", "offered, sessions/h", _per_hour),
    Row("completed_share", "completed within target", _share),
    Row("hit_rate_before_surge", "hit rate before the surge", _rate),
    Row("hit_rate_last_third", "hit rate, last third", _rate),
    Row("first_call_wait_p50_s", "first-call wait p50", _seconds),
    Row("first_call_wait_p99_s", "first-call wait p99", _seconds),
    Row("ttft_p50_s", "TTFT p50", _seconds),
    Row("ttft_p99_s", "TTFT p99", _seconds),
    Row("tpot_p50_s", "decode step p50", _seconds),
    Row("steps_on_time_share", "decode steps on time", _share),
    Row("call_latency_p50_s", "call latency p50", _seconds),
    Row("stretch_p50", "total / unloaded time p50, finished", lambda value: f"{value:.2f}\N{MULTIPLICATION SIGN}"),
    Row("offered_sessions", "sessions offered", _count),
    Row("finished_sessions", "sessions finished", _count),
    Row("within_target_sessions", "sessions within target", _count),
    Row("arrived_after_surge", "sessions arrived after the surge", _count),
    Row("finished_after_surge", "… of which finished", _count),
    Row("session_outcomes", "session outcomes", _outcomes),
    Row("call_outcomes", "call outcomes", _outcomes),
)


def text_table(arms: Mapping[str, Summary]) -> str:
    """The arms side by side, for a terminal."""
    lines = [["", *arms], *([row.label, *(row.cell(summary) for summary in arms.values())] for row in ROWS)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(arms) + 1)]
    made = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    made.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*made, *notes(arms)])


def notes(arms: Mapping[str, Summary]) -> list[str]:
    """What a reader must know before trusting the table."""
    made = []
    for name, summary in arms.items():
        if summary.interrupted:
            made.append(
                f"{name}: stopped after {format_duration(summary.elapsed_s)} of "
                f"{format_duration(summary.duration_s)}; rates are over that time"
            )
        if summary.offered_sessions == 0:
            made.append(f"{name}: no session was offered")
        elif summary.goodput_per_hour is None:
            made.append(
                f"{name}: no goodput, since unloaded times are known for {summary.unloaded_sessions} of "
                f"{summary.offered_sessions} sessions; measure them with --measure-unloaded FILE on the idle server "
                "and pass --unloaded FILE"
            )
    return made


def text_timeline(name: str, result: RunResult) -> str:
    """One run over time, for a terminal."""
    head = ("from", "hit rate", "live", "waiting", "working set", "first-call wait p50", "TTFT p50")
    lines = [head]
    for moment in timeline(result):
        surge = result.run.surge
        inside = surge is not None and moment.from_s < surge[2] and moment.to_s > surge[1]
        lines.append(
            (
                format_duration(moment.from_s) + (" surge" if inside else ""),
                "-" if moment.hit_rate is None else _rate(moment.hit_rate),
                f"{moment.live_sessions:.0f}",
                f"{moment.waiting_sessions:.0f}",
                f"{moment.working_set_tokens:,.0f}",
                "-" if moment.first_call_wait_p50_s is None else _seconds(moment.first_call_wait_p50_s),
                "-" if moment.ttft_p50_s is None else _seconds(moment.ttft_p50_s),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = [
        line[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    return "\n".join([f"{name} over time", *rows])


def document(
    arms: Mapping[str, Summary], results: Mapping[str, RunResult] | None = None, **more: Any
) -> dict[str, Any]:
    """The JSON report: `arms.<name>.<field of Summary>`, with `results` also `arms.<name>.timeline`, and `more`."""
    made = {name: summary.as_dict() for name, summary in arms.items()}
    for name, result in (results or {}).items():
        made[name]["timeline"] = [asdict(moment) for moment in timeline(result)]
    return {**more, "arms": made}


def write_json(
    path: Path, arms: Mapping[str, Summary], results: Mapping[str, RunResult] | None = None, **more: Any
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(arms, results, **more), indent=2, ensure_ascii=False) + "\n", "utf-8")


# ---- The plots -----------------------------------------------------------------------------------------------------

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "basin",
}


def _plain(value: float, _position: int = 0) -> str:
    return f"{value:g}"


def _thousands(value: float, _position: int = 0) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _key(*entries: tuple[str, dict[str, Any]]) -> list[Line2D]:
    """Legend entries in neutral ink: colours mean arms, shapes mean what the entry says."""
    return [Line2D([], [], color="#6b7785", label=label, **style) for label, style in entries]


def _plot_hit_rate(axes: Axes, series: Series, colour: str) -> None:
    shown = ~_nan(series.hit_rate)
    axes.plot(series.bin_s[shown], series.hit_rate[shown], color=colour, linewidth=2)


def _nan(values: Any) -> Any:
    return values != values


def _plot_live(axes: Axes, series: Series, colour: str) -> None:
    axes.plot(series.grid_s, series.live_sessions, color=colour, linewidth=2)
    axes.plot(series.grid_s, series.waiting_sessions, color=colour, linewidth=1.3, linestyle=(0, (3, 2)))


def _plot_working_set(axes: Axes, series: Series, colour: str) -> None:
    axes.plot(series.grid_s, series.working_set_tokens, color=colour, linewidth=2)


def _plot_first_wait(axes: Axes, series: Series, colour: str) -> None:
    for answered in (True, False):
        waits = [wait for wait in series.first_waits if wait.answered == answered]
        axes.plot(
            [wait.arrival_s for wait in waits],
            [max(wait.wait_s, 0.01) for wait in waits],
            linestyle="none",
            marker="o" if answered else "^",
            markersize=4.5 if answered else 5,
            markeredgecolor=colour,
            markeredgewidth=1.1,
            markerfacecolor=colour if answered else "white",
            alpha=0.75,
        )


def _plot_ttft(axes: Axes, series: Series, colour: str) -> None:
    shown = ~_nan(series.ttft_p50_s)
    at_s = series.bin_s[shown]
    median, high = series.ttft_p50_s[shown].clip(min=0.001), series.ttft_p90_s[shown].clip(min=0.001)
    axes.plot(at_s, median, color=colour, linewidth=2)
    axes.fill_between(at_s, median, high, color=colour, alpha=0.16, linewidth=0)


def _plot_finished(axes: Axes, series: Series, colour: str) -> None:
    axes.plot(series.grid_s, series.finished_sessions, color=colour, linewidth=2)


def _shade_surge(axes: Axes, run: RunRecord) -> None:
    if run.surge is not None:
        _extra, from_s, to_s = run.surge
        axes.axvspan(from_s, to_s, color=_SURGE, alpha=0.55, linewidth=0, zorder=0)
    if run.tail_s:
        axes.axvline(run.duration_s, color="#9aa5b1", linewidth=1, linestyle=":")


def _surge_text(run: RunRecord) -> str:
    if run.surge is None:
        return "no surge"
    extra, from_s, to_s = run.surge
    return f"surge {extra:+.0%} from {format_duration(from_s)} to {format_duration(to_s)}"


def describe(run: RunRecord) -> str:
    """The offered load in one line."""
    pace = "even pace" if run.process == "fixed" else "Poisson"
    tail = f" and {format_duration(run.tail_s)} uncounted" if run.tail_s else ""
    return (
        f"{run.trace}, {run.rate_per_s * 60:g} sessions/min ({pace}), {_surge_text(run)}, "
        f"{format_duration(run.duration_s)}{tail}, seed {run.seed}"
    )


def draw(arms: Mapping[str, RunResult], *, title: str | None = None, cache_tokens: int | None = None) -> Figure:
    """The six plots. `cache_tokens` draws the prefix cache's size into the working-set plot."""
    first = next(iter(arms.values()))
    with rc_context(_STYLE):
        figure = Figure(figsize=(13, 11.2), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1, rect=(0, 0, 1, 0.925))  # type: ignore[union-attr,call-arg]
        panels = figure.subplots(3, 2, sharex=True).ravel()
        hits, live, working, waits, ttft, finished = panels
        for colour, result in zip(_cycle(len(arms)), arms.values(), strict=True):
            series = time_series(result)
            _plot_hit_rate(hits, series, colour)
            _plot_live(live, series, colour)
            _plot_working_set(working, series, colour)
            _plot_first_wait(waits, series, colour)
            _plot_ttft(ttft, series, colour)
            _plot_finished(finished, series, colour)
        _finish_panels(panels, arms, cache_tokens)
        figure.text(0.012, 0.982, title or "Replay", fontsize=16, fontweight="bold", va="top")
        figure.text(0.012, 0.955, describe(first.run), fontsize=10.5, color="#52606d", va="top")
        handles = [
            Line2D([], [], color=colour, linewidth=3, label=name)
            for colour, name in zip(_cycle(len(arms)), arms, strict=True)
        ]
        figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=12, bbox_to_anchor=(0.995, 0.99))
    return figure


def _label_time(axes: Axes, end_s: float) -> None:
    """Minutes, or seconds for a run of less than three minutes."""
    unit_s, unit = (60.0, "minutes") if end_s >= 180 else (1.0, "seconds")
    ticks = MaxNLocator(nbins=10, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end_s / unit_s)
    axes.set_xticks([tick * unit_s for tick in ticks if 0 <= tick * unit_s <= end_s])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value / unit_s:g}"))
    axes.set_xlabel(f"{unit} since the start")


def _whole_decades(axes: Axes) -> None:
    """A logarithmic axis from one power of ten to another, with room for the legend at the top."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    positive = drawn[drawn > 0] if (drawn > 0).any() else np.array([0.1, 1.0])
    low, high = math.log10(positive.min()), math.log10(positive.max())
    axes.set_ylim(10 ** math.floor(low - 0.05), 10 ** math.ceil(high + 0.25))
    axes.yaxis.set_major_locator(LogLocator(numticks=10))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _cycle(number: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(number)]


def _finish_panels(panels: Sequence[Axes], arms: Mapping[str, RunResult], cache_tokens: int | None) -> None:
    hits, live, working, waits, ttft, finished = panels
    first = next(iter(arms.values()))
    hits.set(title="Token hit rate", ylabel="cached / prompt tokens", ylim=(-0.02, 1.04))
    hits.yaxis.set_major_formatter(PercentFormatter(1.0))
    live.set(title="Live sessions", ylabel="sessions")
    live.legend(
        handles=_key(("live", {"linewidth": 2}), ("without a first token yet", {"linestyle": (0, (3, 2))})),
        loc="upper left",
    )
    working.set(title="Working set: current context of the sessions being served", ylabel="tokens")
    working.yaxis.set_major_formatter(FuncFormatter(_thousands))
    if cache_tokens:
        working.axhline(cache_tokens, color=_INK, linewidth=1.2, linestyle="--")
        working.annotate(
            f"prefix cache, {cache_tokens:,} tokens",
            (0.995, cache_tokens),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
        )
    waits.set(title="First-call wait, by arrival", ylabel="seconds", yscale="log")
    waits.legend(
        handles=_key(
            ("first token came", {"marker": "o", "linestyle": "none"}),
            ("ended without one", {"marker": "^", "linestyle": "none", "markerfacecolor": "white"}),
        ),
        loc="upper left",
    )
    ttft.set(title="Time to first token, all calls", ylabel="seconds", yscale="log")
    ttft.legend(
        handles=_key(("median", {"linewidth": 2}), ("to 90th percentile", {"linewidth": 7, "alpha": 0.25})),
        loc="upper left",
    )
    finished.set(title="Sessions finished so far", ylabel="sessions")
    offered = sorted(session.arrival_at_s for session in first.sessions)
    finished.plot(offered, range(1, len(offered) + 1), color="#6b7785", linewidth=1.2, linestyle=":")
    finished.legend(handles=_key(("arrived", {"linestyle": ":"}), ("finished", {"linewidth": 2})), loc="upper left")
    end_s = max((result.elapsed_s for result in arms.values()), default=1.0)
    for axes in panels:
        _shade_surge(axes, first.run)
        axes.set_xlim(0, max(end_s, 1e-3))
        if axes.get_yscale() == "log":
            _whole_decades(axes)
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes is hits else 0)
    if first.run.surge is not None:
        _, from_s, to_s = first.run.surge
        hits.annotate(
            "surge",
            ((from_s + to_s) / 2, 0.03),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=9,
            color="#8a6414",
        )
    if first.run.tail_s:
        hits.annotate(
            "arrivals count until here",
            (first.run.duration_s, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#6b7785",
        )
    for axes in panels[-2:]:
        _label_time(axes, end_s)


def write_png(
    path: Path, arms: Mapping[str, RunResult], *, title: str | None = None, cache_tokens: int | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        draw(arms, title=title, cache_tokens=cache_tokens).savefig(path, dpi=110)


def _svg(arms: Mapping[str, RunResult], cache_tokens: int | None, title: str) -> str:
    buffer = io.StringIO()
    with rc_context(_STYLE):
        draw(arms, title=title, cache_tokens=cache_tokens).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


# ---- The page ------------------------------------------------------------------------------------------------------

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ margin: 0; background: #f4f6f8; color: #22303c;
    font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }}
  main {{ max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }}
  h1 {{ font-size: 26px; margin: 0 0 4px; }}
  h2 {{ font-size: 17px; margin: 36px 0 10px; }}
  p.load {{ margin: 0 0 24px; color: #52606d; }}
  .card {{ background: #fff; border: 1px solid #e1e6eb; border-radius: 10px; padding: 18px 22px; }}
  .key {{ display: grid; gap: 14px; margin-bottom: 18px;
    grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }}
  .key .card {{ border-top: 4px solid var(--arm); }}
  .key h3 {{ margin: 0 0 8px; font-size: 16px; color: var(--arm); }}
  .key dl {{ display: grid; grid-template-columns: 1fr auto; margin: 0; row-gap: 3px; }}
  .key dt {{ color: #52606d; }}
  .key dd {{ margin: 0; font-weight: 650; font-variant-numeric: tabular-nums; text-align: right; }}
  .key dd.large {{ font-size: 22px; line-height: 1.15; }}
  .scroll {{ overflow-x: auto; }}
  table {{ border-collapse: collapse; width: 100%; }}
  th, td {{ padding: 6px 12px; text-align: right; border-bottom: 1px solid #edf0f3;
    font-variant-numeric: tabular-nums; }}
  th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
  thead th {{ border-bottom: 2px solid #cbd2d9; }}
  svg {{ display: block; width: 100%; height: auto; }}
  dl.terms dt {{ font-weight: 650; margin-top: 8px; }}
  dl.terms dd {{ margin: 0; color: #3e4c59; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px; }}
  .note {{ color: #8a4b14; margin: 10px 0 0; }}
</style>
</head>
<body><main>
<h1>{title}</h1>
<p class="load">{load}</p>
<section class="key">{cards}</section>
<section class="card">{plots}</section>
<h2>All numbers</h2>
<section class="card scroll">{table}{notes}</section>
<h2>What they mean</h2>
<section class="card"><dl class="terms">{terms}</dl></section>
<h2>Settings</h2>
<section class="card">{settings}</section>
</main></body>
</html>
"""

_CARD_FIELDS = (
    "goodput_per_hour",
    "offered_per_hour",
    "completed_share",
    "hit_rate_last_third",
    "first_call_wait_p50_s",
    "ttft_p50_s",
)


def _terms(target: Target) -> list[tuple[str, str]]:
    return [
        (
            "Goodput",
            f"Sessions an hour that finished in at most {target.stretch:g} times their unloaded time and at least "
            f"{target.steps_share:.0%} of whose decode steps took at most {target.tpot_s * 1000:g} ms. Rejected, "
            "dropped, failed and unfinished sessions were offered and do not count.",
        ),
        (
            "Unloaded time",
            "What the session takes alone on the idle server, tool waits included: measured, or from a cost model "
            "fitted to measured calls.",
        ),
        (
            "Hit rate",
            "Cached over prompt tokens, as the server counted them, over the calls whose first token came in the "
            "window.",
        ),
        (
            "First-call wait",
            "From a session's arrival to the first token of its first call. A session that ended without one counts "
            "with the time it waited, so medians are lower bounds while many still wait.",
        ),
        (
            "Working set",
            "The current contexts of all live sessions that have had a first token, those running a tool included. "
            "What the prefix cache would have to hold.",
        ),
    ]


def _card(name: str, colour: str, summary: Summary) -> str:
    rows = {row.field: row for row in ROWS}
    items = []
    for index, field in enumerate(_CARD_FIELDS):
        large = ' class="large"' if index == 0 else ""
        items.append(f"<dt>{html.escape(rows[field].label)}</dt><dd{large}>{rows[field].cell(summary)}</dd>")
    return f'<div class="card" style="--arm: {colour}"><h3>{html.escape(name)}</h3><dl>{"".join(items)}</dl></div>'


def _html_table(arms: Mapping[str, Summary]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in arms)
    body = "".join(
        f"<tr><td>{html.escape(row.label)}</td>"
        + "".join(f"<td>{html.escape(row.cell(summary))}</td>" for summary in arms.values())
        + "</tr>"
        for row in ROWS
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _settings(arms: Mapping[str, RunResult], more: Mapping[str, Any]) -> str:
    shown = {name: result.run.settings for name, result in arms.items() if result.run.settings}
    text = json.dumps({**more, **shown}, indent=2, ensure_ascii=False, default=str)
    return f"<pre>{html.escape(text)}</pre>"


def write_page(
    path: Path,
    arms: Mapping[str, RunResult],
    *,
    title: str = "Replay of recorded agent sessions",
    unloaded_s: Mapping[str, float] | None = None,
    target: Target | None = None,
    cache_tokens: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """One page with everything in it, no other file needed. Raises ValueError without any arm."""
    if not arms:
        raise ValueError("a page needs at least one arm")
    target = target or Target()
    summaries = {name: summarize(result, unloaded_s=unloaded_s, target=target) for name, result in arms.items()}
    first = next(iter(arms.values()))
    colours = _cycle(len(arms))
    page = _PAGE.format(
        title=html.escape(title),
        load=html.escape(describe(first.run)),
        cards="".join(
            _card(name, colour, summary) for colour, (name, summary) in zip(colours, summaries.items(), strict=True)
        ),
        plots=_svg(arms, cache_tokens, "Over time"),
        table=_html_table(summaries),
        notes="".join(f'<p class="note">{html.escape(note)}</p>' for note in notes(summaries)),
        terms="".join(f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in _terms(target)),
        settings=_settings(arms, settings or {}),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
