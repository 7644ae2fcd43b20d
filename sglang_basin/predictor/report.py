"""What `fit_predictor` reports: scores out of fold, by unseen and by repeated tasks, a learning curve, and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_basin.predictor.baseline import Baseline
from sglang_basin.predictor.evaluate import CALLS, ContextAlone, Method, Predicted, Score, cross_validate, score
from sglang_basin.predictor.fitted import Frozen
from sglang_basin.predictor.recorded import Recorded
from sglang_basin.predictor.training import TrainingSettings, fit_model

LEARNING_SHARES = (0.25, 0.5, 1.0)
MIN_REPEATED_SHARE = 0.2
"""Part of the sessions whose task comes more than once, below which repeated tasks are not reported."""


@dataclass(frozen=True)
class Part:
    """One cross-validation: a method's scores by call."""

    method: str
    split: str
    """"unseen tasks" or "repeated tasks"."""
    train_share: float
    scores: list[Score]
    predicted: Predicted


def model_method(settings: TrainingSettings | None = None) -> Method:
    return lambda sessions: Frozen(fit_model(sessions, settings))


def methods(settings: TrainingSettings | None = None) -> dict[str, Method]:
    return {"basin": model_method(settings), "baseline": Baseline, "context alone": ContextAlone}


def repeats(sessions: Sequence[Recorded]) -> bool:
    """Whether enough tasks come more than once to say how their runs are predicted."""
    counts: dict[str, int] = {}
    for session in sessions:
        counts[session.group] = counts.get(session.group, 0) + 1
    again = sum(count for count in counts.values() if count > 1)
    return again >= MIN_REPEATED_SHARE * len(sessions)


def cross_validations(
    sessions: Sequence[Recorded],
    *,
    settings: TrainingSettings | None = None,
    folds: int = 8,
    seed: int = 1,
    learning_curve: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Part]:
    """All parts of the report, minutes of work for thousands of sessions."""
    parts: list[Part] = []
    splits = {"unseen tasks": True} | ({"repeated tasks": False} if repeats(sessions) else {})
    for split, grouped in splits.items():
        for name, method in methods(settings).items():
            progress(f"{split}: {name}")
            predicted = cross_validate(sessions, method, folds=folds, grouped=grouped, seed=seed)
            parts.append(Part(name, split, 1.0, score(predicted), predicted))
    for share in LEARNING_SHARES[:-1] if learning_curve else ():
        progress(f"learning curve: {share:.0%} of the sessions")
        predicted = cross_validate(sessions, model_method(settings), folds=folds, seed=seed, train_share=share)
        parts.append(Part("basin", "unseen tasks", share, score(predicted), predicted))
    return parts


def as_json(parts: Sequence[Part]) -> list[dict[str, object]]:
    return [
        {
            "method": part.method,
            "split": part.split,
            "train_share": part.train_share,
            "scores": [dataclasses.asdict(one) for one in part.scores],
        }
        for part in parts
    ]


HEADINGS = "call  sessions   rank  context  log error  P50 cover  P90 cover  P50/peak  P90/peak"


def table(scores: Sequence[Score]) -> str:
    """One line per call; `P50/peak` is what reserving the medians would take over what the true peaks take."""
    lines = [HEADINGS]
    for one in scores:
        lines.append(
            f"{one.call:4d}  {one.sessions:8d}  {one.rank:5.2f}  {one.context_rank:7.2f}  {one.log_error:9.2f}"
            f"  {one.p50_coverage:9.2f}  {one.p90_coverage:9.2f}  {one.reserved_p50:8.2f}  {one.reserved_p90:8.2f}"
        )
    return "\n".join(lines)


def text_report(parts: Sequence[Part]) -> str:
    blocks: list[str] = []
    for part in parts:
        share = "" if part.train_share == 1 else f", fitted on {part.train_share:.0%} of the sessions"
        blocks.append(f"{part.method}, {part.split}{share}\n{table(part.scores)}")
    return "\n\n".join(blocks)


def draw(parts: Sequence[Part], folder: Path) -> list[Path]:
    """PNG files in `folder`, which is made: rank and coverage by call, learning curve, predicted against true."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    whole = [part for part in parts if part.train_share == 1 and part.split == "unseen tasks"]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for part in whole:
        calls = [one.call for one in part.scores]
        left.plot(calls, [one.rank for one in part.scores], marker="o", label=part.method)
        right.plot(calls, [one.p90_coverage for one in part.scores], marker="o", label=part.method)
    left.set(xscale="log", xlabel="call", ylabel="rank correlation with the true peak", title="Unseen tasks")
    right.axhspan(0.85, 0.95, alpha=0.15, color="gray")
    right.set(xscale="log", xlabel="call", ylabel="peaks below the predicted P90", ylim=(0.4, 1.02))
    left.legend()
    _ticks(left, right)
    made.append(folder / "by_call.png")
    figure.tight_layout()
    figure.savefig(made[-1], dpi=120)
    pyplot.close(figure)

    curve = [part for part in parts if part.method == "basin" and part.split == "unseen tasks"]
    if len(curve) > 1:
        figure, axes = pyplot.subplots(figsize=(6, 4.2))
        for call in (1, 4, 9, 16):
            points = sorted((part.train_share, one.rank) for part in curve for one in part.scores if one.call == call)
            axes.plot([share for share, _ in points], [rank for _, rank in points], marker="o", label=f"call {call}")
        axes.set(
            xlabel="part of the training sessions", ylabel="rank correlation", title="Learning curve, unseen tasks"
        )
        axes.legend()
        made.append(folder / "learning_curve.png")
        figure.tight_layout()
        figure.savefig(made[-1], dpi=120)
        pyplot.close(figure)

    basin = next((part for part in whole if part.method == "basin"), None)
    if basin is not None:
        made.append(folder / "predicted.png")
        _draw_predicted(basin.predicted, made[-1])
    return made


def _draw_predicted(predicted: Predicted, path: Path) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.2), sharex=True, sharey=True)
    for axes, call in zip(panels, (1, 4, 16), strict=True):
        here = predicted.call == call
        axes.scatter(predicted.tokens[here, 2], predicted.peak[here], s=8, alpha=0.5)
        if here.any():
            ends = [predicted.peak[here].min(), predicted.peak[here].max()]
            axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="predicted median, tokens", title=f"At call {call}")
    panels[0].set_ylabel("true peak, tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _ticks(*panels: object) -> None:
    for axes in panels:
        axes.set_xticks(CALLS, [str(call) for call in CALLS])  # type: ignore[attr-defined]


def counts_by_name(files: Mapping[str, Sequence[Recorded]]) -> dict[str, int]:
    return {name: len(sessions) for name, sessions in files.items()}
