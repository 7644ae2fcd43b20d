"""Fitting a peak model to finished sessions. Needs scikit-learn; a serving process never imports this module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from sklearn.linear_model import RidgeCV

from sglang_basin.predictor.arithmetic import MIN_VARIANCE, Floats
from sglang_basin.predictor.calibration import Calibration, fit_scores
from sglang_basin.predictor.forest import Forest, ForestSettings, fit_forest
from sglang_basin.predictor.kept import History
from sglang_basin.predictor.line import Line, fit_line
from sglang_basin.predictor.mixture import Mixture
from sglang_basin.predictor.model import TREND_COLUMNS, OnlineSettings, PeakModel, row_weight
from sglang_basin.predictor.online import FIRST_CALLS, STAGES, Averages, stage
from sglang_basin.predictor.recorded import Recorded
from sglang_basin.predictor.text import BUCKETS, Task, TextScore

FITTED_CALLS = frozenset((*range(1, 11), *range(12, 22, 2), 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192))
"""Calls whose two sides become rows: all of the first ones, then ever fewer."""
MIN_SESSIONS = 10
_PENALTIES = tuple(float(value) for value in np.logspace(-1, 4, 11))


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    forest: ForestSettings = field(default_factory=ForestSettings)
    online: OnlineSettings = field(default_factory=OnlineSettings)
    folds: int = 5
    """Inner folds, by task, for the text score and the calibration."""
    unknown_share: float = 0.25
    """Sessions whose text and agent are left out in fitting, so that the model also works without them."""
    weight_sessions: float = 300.0
    """How firmly a deployment's own sessions meet the fit: it counts as so many of them at most."""
    seed: int = 1


@dataclass(frozen=True)
class Prepared:
    """Training sessions as rows, one for each side of some of their calls, and what it takes to make more of them."""

    values: Floats
    targets: Floats
    weights: Floats
    stages: npt.NDArray[np.int64]
    folds: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    """The number of the row's task."""
    log_peaks: Floats
    """Per session."""
    text: TextScore | None
    kins: Averages

    def known_of(self, session: Recorded) -> tuple[float, float, int]:
        """The kin's mean log peak, the text score and the text's length of a session not trained on."""
        score = self.text.score(session.task) if self.text is not None else 0.0
        characters = session.task.characters if session.task is not None else 0
        return self.kins.shrunk(session.kin, float(self.log_peaks.mean())), score, characters


def prepare(sessions: Sequence[Recorded], settings: TrainingSettings) -> Prepared:
    """Raises ValueError for fewer than 10 sessions."""
    if len(sessions) < MIN_SESSIONS:
        raise ValueError(f"fitting needs at least {MIN_SESSIONS} finished sessions, got {len(sessions)}")
    log_peaks = np.log([session.peak_tokens for session in sessions])
    folds = _folds(sessions, settings)
    kin = _kin_means(sessions, log_peaks)
    unknown = np.random.default_rng([settings.seed, 3]).random(len(sessions)) < settings.unknown_share
    scores, text = _text_scores(sessions, log_peaks - kin, folds)
    kin[unknown] = log_peaks.mean()
    scores[unknown] = 0.0
    kins = Averages(capacity=settings.online.kins, horizon=settings.online.horizon_sessions)
    for session, log_peak in zip(sessions, log_peaks, strict=True):
        kins.learn(session.kin, float(log_peak))
    return _rows(sessions, kin, scores, unknown, folds, log_peaks, text, kins)


def fit_model(sessions: Sequence[Recorded], settings: TrainingSettings | None = None) -> PeakModel:
    """Raises ValueError for fewer than 10 sessions. Same sessions and settings, same model."""
    settings = settings or TrainingSettings()
    rows = prepare(sessions, settings)
    held_means = np.zeros((len(rows.targets), 3))
    held_variance = np.zeros(len(rows.targets))
    for number in np.unique(rows.folds):
        held = rows.folds == number
        trend, line, forest = _fit(rows, ~held, settings)
        of_forest, held_variance[held] = forest.moments_of(rows.values[held], rows.stages[held])
        values = rows.values[held]
        held_means[held] = np.column_stack([trend.values_of(values), line.values_of(values), of_forest])
    weight = _online_weight(sessions) * min(1.0, settings.weight_sessions / len(sessions))
    firmness = weight / float(rows.weights.sum())
    apart = rows.targets[:, None] - held_means
    mixture = Mixture(firmness * (apart.T @ (rows.weights[:, None] * apart)))
    errors = (apart @ mixture.shares) / np.sqrt(held_variance + MIN_VARIANCE)
    trend, line, forest = _fit(rows, np.ones(len(errors), bool), settings)
    model = PeakModel(
        trend.scaled(weight),
        line.scaled(weight),
        forest.scaled(firmness),
        Calibration(fit_scores(rows.stages, errors, rows.weights, rows.groups), settings.online.calibration_step),
        rows.text,
        mixture=mixture,
        log_peak=float(rows.log_peaks.mean()),
        settings=settings.online,
    )
    model.kins = rows.kins
    for session, log_peak in zip(sessions, rows.log_peaks, strict=True):
        model.tasks.learn(session.task.fingerprint if session.task is not None else None, float(log_peak))
    return model


def _online_weight(sessions: Sequence[Recorded]) -> float:
    """What these sessions would have weighed, had they been learned one by one."""
    rows = (sum(1 for first in FIRST_CALLS if first <= len(session.calls)) for session in sessions)
    return sum(count * row_weight(count) for count in rows)


def _fit(rows: Prepared, chosen: npt.NDArray[np.bool_], settings: TrainingSettings) -> tuple[Line, Line, Forest]:
    values, targets, weights = rows.values[chosen], rows.targets[chosen], rows.weights[chosen]
    stages = rows.stages[chosen]
    return (
        fit_line(values, targets, weights, TREND_COLUMNS),
        fit_line(values, targets, weights),
        fit_forest(values, stages, targets, weights, STAGES, settings.forest),
    )


def _folds(sessions: Sequence[Recorded], settings: TrainingSettings) -> npt.NDArray[np.int64]:
    names = {name: index for index, name in enumerate(dict.fromkeys(session.group for session in sessions))}
    order = np.random.default_rng([settings.seed, 5]).permutation(len(names))
    return np.array([order[names[session.group]] % settings.folds for session in sessions], int)


def _kin_means(sessions: Sequence[Recorded], log_peaks: Floats) -> Floats:
    """Per session the mean log peak of the other sessions of its agent and model, held as `Averages` holds it."""
    of: dict[int | None, list[float]] = {}
    for session, log_peak in zip(sessions, log_peaks, strict=True):
        of.setdefault(session.kin, []).append(float(log_peak))
    middle = float(log_peaks.mean())
    sums = {key: (len(values), math.fsum(values)) for key, values in of.items()}
    means = np.empty(len(sessions))
    for index, session in enumerate(sessions):
        count, total = sums[session.kin] if session.kin is not None else (1, log_peaks[index])
        means[index] = (total - log_peaks[index] + Averages.HOLD * middle) / (count - 1 + Averages.HOLD)
    return means


def _rows(
    sessions: Sequence[Recorded],
    kin: Floats,
    scores: Floats,
    unknown: npt.NDArray[np.bool_],
    folds: npt.NDArray[np.int64],
    log_peaks: Floats,
    text: TextScore | None,
    kins: Averages,
) -> Prepared:
    """Every session seen at the arrival and at the end of some of its calls."""
    values: list[Floats] = []
    targets: list[float] = []
    weights: list[float] = []
    stages: list[int] = []
    row_folds: list[int] = []
    row_groups: list[int] = []
    numbers: dict[str, int] = {}
    for index, session in enumerate(sessions):
        history = History()
        characters = 0 if session.task is None or unknown[index] else session.task.characters
        known = (float(kin[index]), float(scores[index]), characters)
        start = len(values)
        for call, prompt, output, pause_s in session.steps():
            history.advance(call, prompt, pause_s)
            if call in FITTED_CALLS:
                values.append(history.row(*known))
            history.advance(call, prompt + output)
            if call in FITTED_CALLS:
                values.append(history.row(*known))
                stages += [stage(call)] * 2
        count = len(values) - start
        targets += [max(0.0, float(log_peaks[index]) - row[0]) for row in values[start:]]
        weights += [row_weight(count)] * count
        row_folds += [int(folds[index])] * count
        row_groups += [numbers.setdefault(session.group, len(numbers))] * count
    return Prepared(
        values=np.array(values),
        targets=np.array(targets),
        weights=np.array(weights),
        stages=np.array(stages),
        folds=np.array(row_folds),
        groups=np.array(row_groups),
        log_peaks=log_peaks,
        text=text,
        kins=kins,
    )


# ---- Text ----------------------------------------------------------------------------------------------------------


def _text_scores(sessions: Sequence[Recorded], target: Floats, folds: Any) -> tuple[Floats, TextScore | None]:
    """Each session's text score by a model that has not seen its task, and the model fitted on all."""
    scores = np.zeros(len(sessions))
    known = np.array([session.task is not None for session in sessions])
    tasks = [session.task for session in sessions if session.task is not None]
    if len(tasks) < 30:
        return scores, None
    wanted, fold = target[known], folds[known]
    held_scores = np.zeros(len(tasks))
    for number in np.unique(fold):
        rest = np.flatnonzero(fold != number)
        fitted = _fit_text([tasks[index] for index in rest], wanted[rest])
        for index in np.flatnonzero(fold == number):
            held_scores[index] = fitted.score(tasks[index])
    scores[known] = held_scores
    return scores, _fit_text(tasks, wanted)


def _fit_text(runs: Sequence[Task], reached: Floats) -> TextScore:
    """One row per task: its runs would otherwise vouch for each other when the penalty is chosen."""
    of: dict[int, list[float]] = {}
    for task, value in zip(runs, reached, strict=True):
        of.setdefault(task.fingerprint, []).append(float(value))
    tasks = list({task.fingerprint: task for task in runs}.values())
    target = np.array([math.fsum(of[task.fingerprint]) / len(of[task.fingerprint]) for task in tasks])
    counts = np.zeros(BUCKETS)
    for task in tasks:
        counts[[bucket for bucket, _ in task.terms]] += 1
    idf = np.log((1 + len(tasks)) / (1 + counts)) + 1
    data: list[float] = []
    columns: list[int] = []
    starts = [0]
    for task in tasks:
        values = np.array([(1.0 + math.log(count)) * idf[bucket] for bucket, count in task.terms])
        size = float(np.sqrt(values @ values)) or 1.0
        data += (values / size).tolist()
        columns += [bucket for bucket, _ in task.terms]
        starts.append(len(columns))
    matrix = csr_matrix((data, columns, starts), shape=(len(tasks), BUCKETS))
    ridge = RidgeCV(alphas=_PENALTIES).fit(matrix, target - target.mean())
    # The intercept is left out on purpose: a text without known words says nothing, its score is 0.
    return TextScore(idf.tolist(), ridge.coef_.tolist())
