"""How well a session's peak could be predicted at all: a flexible model given everything, and the tasks' own noise.

Used by `predictor_study.py`. Three questions, each for the sessions that reach call 4, 9 or 16:

- *Everything*: scikit-learn's extremely randomised trees, grown for that call alone, see every prompt, output and pause
  so far, all summary features, the task text as TF-IDF (its first principal components) and its surface, agent and
  model. Out of fold by task; and again without each group of features, and with each group alone beside the sizes.
- *In sample*: the same trees asked about the very sessions they were grown on: not a prediction, but an upper bound.
- *Task*: where tasks were run several times, how much of the remaining growth the task decides (the share of variance
  between tasks, one-way random effects), how well the other runs' peaks rank a run's peak, and the same with the
  present context beside it: what a predictor would reach that knew all about a task but what this run will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression

from sglang_basin.predictor.evaluate import folds_of, interval, rank_correlation
from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.kept import History
from sglang_basin.predictor.recorded import Recorded

TEXT_COMPONENTS = 12
GROUPS = ("sizes", "outputs", "results", "pauses", "call by call", "task text", "agent and model")
_SIZES = ("log_context", "log_first", "log_calls", "log_grown_ratio", "shrinks", "log_growth")


@dataclass(frozen=True)
class Everything:
    """The sessions that reach a call, in numbers."""

    sessions: list[Recorded]
    log_context: np.ndarray
    log_peak: np.ndarray
    columns: dict[str, np.ndarray]
    """By group: (sessions, columns)."""
    texts: list[str]


def everything(sessions: Sequence[Recorded], call: int) -> Everything:
    reached = [session for session in sessions if len(session.calls) >= call]
    rows, series = [], []
    for session in reached:
        history = History()
        steps = list(session.steps())[:call]
        for number, prompt, output, pause_s in steps:
            history.advance(number, prompt, pause_s)
            if number < call:
                history.advance(number, prompt + output)
        rows.append(history.row(0.0, 0.0, 0))
        series.append(_series(steps))
    values = np.array(rows)
    kins = sorted({session.kin or 0 for session in reached})
    of_group = {group: [place for place, name in enumerate(NAMES) if _group(name) == group] for group in GROUPS}
    columns = {group: values[:, places] for group, places in of_group.items() if places}
    columns["call by call"] = np.array(series)
    columns["agent and model"] = np.array([[float((one.kin or 0) == kin) for kin in kins] for one in reached])
    texts = [session.text or "" for session in reached]
    if any(texts):
        columns["task text"] = np.array([_surface(text) for text in texts])
    log_peak = np.log([session.peak_tokens for session in reached])
    return Everything(reached, values[:, 0], log_peak, columns, texts)


def _group(name: str) -> str | None:
    if name in ("kin_over_context", "text_score", "log_text_characters"):
        return None  # made anew below, without what the serving model knows
    for part, group in (("pause", "pauses"), ("output", "outputs"), ("result", "results")):
        if part in name:
            return group
    return "sizes"


def _series(steps: Sequence[tuple[int, int, int, float]]) -> list[float]:
    """Every call's prompt, and up to the last one its output and the pause after it, in logarithms."""
    row: list[float] = []
    for place, (_, prompt, output, _) in enumerate(steps):
        row.append(math.log(prompt))
        if place + 1 < len(steps):
            _, next_prompt, _, pause_s = steps[place + 1]
            row += [math.log1p(output), math.log1p(max(0, next_prompt - prompt - output)), math.log1p(10 * pause_s)]
    return row


def _surface(text: str) -> list[float]:
    return [
        math.log1p(len(text)),
        math.log1p(text.count("\n")),
        float(text.count("```")),
        float(text.count("?")),
        float("Traceback" in text),
        sum(letter.isdigit() for letter in text) / max(1, len(text)),
    ]


def _matrix(known: Everything, groups: Sequence[str], fit: np.ndarray) -> np.ndarray:
    """The columns of these groups; the words' components are found on the rows to fit on."""
    parts = [known.columns[group] for group in groups if group in known.columns]
    if "task text" in groups and any(known.texts):
        words = TfidfVectorizer(sublinear_tf=True, max_features=5000, min_df=2, token_pattern=r"\w+")
        fitted = words.fit_transform([known.texts[place] for place in np.flatnonzero(fit)])
        if (kept := min(TEXT_COMPONENTS, min(fitted.shape) - 1)) > 0:
            components = TruncatedSVD(kept, random_state=1).fit(fitted)
            parts.append(components.transform(words.transform(known.texts)))
    return np.hstack(parts)


def _trees() -> ExtraTreesRegressor:
    return ExtraTreesRegressor(150, min_samples_leaf=4, max_features=0.4, random_state=1)


def out_of_fold(known: Everything, groups: Sequence[str], *, folds: int, grouped: bool = True) -> np.ndarray:
    """Predicted log peaks, each by trees that have not seen the session's task (or, not `grouped`, the session)."""
    growth = known.log_peak - known.log_context
    fold = folds_of(known.sessions, folds=folds, grouped=grouped, seed=1)
    made = np.empty(len(growth))
    for number in range(folds):
        fit = fold != number
        matrix = _matrix(known, groups, fit)
        made[~fit] = _trees().fit(matrix[fit], growth[fit]).predict(matrix[~fit])
    return made + known.log_context


def in_sample(known: Everything) -> np.ndarray:
    everyone = np.ones(len(known.log_peak), bool)
    matrix = _matrix(known, GROUPS, everyone)
    growth = known.log_peak - known.log_context
    return np.asarray(_trees().fit(matrix, growth).predict(matrix) + known.log_context)


def feature_study(sessions: Sequence[Recorded], call: int, *, folds: int) -> dict[str, Any]:
    """Gains in rank over the present context: of everything (with its interval), without and with each group."""
    known = everything(sessions, call)
    context = rank_correlation(known.log_context, known.log_peak)

    def gain(made: np.ndarray) -> float:
        return rank_correlation(made, known.log_peak) - context

    present = [group for group in GROUPS if group in known.columns]
    whole = out_of_fold(known, present, folds=folds)
    names = np.array([session.group for session in known.sessions])
    others = [group for group in present if group != "sizes"]
    return {
        "call": call,
        "sessions": len(known.sessions),
        "context": context,
        "everything": interval(names, _gain_of(known, whole)),
        "in sample": gain(in_sample(known)),
        "without": {
            group: gain(out_of_fold(known, [one for one in present if one != group], folds=folds)) for group in others
        },
        "sizes alone": gain(out_of_fold(known, ["sizes"], folds=folds)),
        "with": {group: gain(out_of_fold(known, ["sizes", group], folds=folds)) for group in others},
    }


def _gain_of(known: Everything, made: np.ndarray) -> Callable[[np.ndarray], float]:
    def gain(rows: np.ndarray) -> float:
        peak = known.log_peak[rows]
        return rank_correlation(made[rows], peak) - rank_correlation(known.log_context[rows], peak)

    return gain


def task_study(sessions: Sequence[Recorded], call: int, *, folds: int) -> dict[str, Any] | None:
    """What knowing the task is worth, on the tasks that came more than once; None where hardly any did."""
    known = everything(sessions, call)
    names = np.array([session.group for session in known.sessions])
    _, place, counts = np.unique(names, return_inverse=True, return_counts=True)
    again = counts[place] > 1
    if again.sum() < 30:
        return None
    names, log_context, log_peak = names[again], known.log_context[again], known.log_peak[again]
    growth = log_peak - log_context
    others = np.array([_mean_of_others(log_peak, names, row) for row in range(len(names))])
    other_growth = np.array([_mean_of_others(growth, names, row) for row in range(len(names))])
    both = np.column_stack([log_context, others, other_growth])
    # Fitted on these very rows: three numbers for a hundred runs flatter it little, and only upwards.
    with_context = LinearRegression().fit(both, log_peak).predict(both)

    def of(made: np.ndarray) -> Callable[[np.ndarray], float]:
        return lambda rows: rank_correlation(made[rows], log_peak[rows])

    def gain(made: np.ndarray) -> Callable[[np.ndarray], float]:
        return lambda rows: of(made)(rows) - of(log_context)(rows)

    known_runs = out_of_fold(known, [group for group in GROUPS if group in known.columns], folds=folds, grouped=False)
    return {
        "call": call,
        "sessions": len(names),
        "tasks": len(set(names)),
        "context": of(log_context)(np.arange(len(names))),
        "share of variance between tasks": interval(names, lambda rows: variance_share(growth[rows], names[rows])),
        "rank by the other runs' peaks": interval(names, of(others)),
        "gain of other runs and context": interval(names, gain(with_context)),
        "gain of everything, other runs known": interval(names, gain(known_runs[again])),
    }


def _mean_of_others(values: np.ndarray, names: np.ndarray, row: int) -> float:
    same = names == names[row]
    same[row] = False
    return float(values[same].mean())


def variance_share(values: np.ndarray, names: np.ndarray) -> float:
    """Part of the variance that lies between groups: the intraclass correlation of one-way random effects (Fisher),
    which is what a predictor that knows no more than the group can explain at best; below 0 is noise around 0."""
    _, place, counts = np.unique(names, return_inverse=True, return_counts=True)
    groups, total = len(counts), len(values)
    if groups < 2 or total <= groups:
        return 0.0
    means = np.bincount(place, values) / counts
    between = float((counts * (means - values.mean()) ** 2).sum()) / (groups - 1)
    within = float(((values - means[place]) ** 2).sum()) / (total - groups)
    size = (total - float((counts**2).sum()) / total) / (groups - 1)
    whole = between + (size - 1) * within
    return (between - within) / whole if whole > 0 else 0.0
