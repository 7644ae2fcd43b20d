"""The peak model: from what is known of a session to the quantiles of its peak, and from its end to a better model.

    row = features of the calls so far, the task's text score, how long this agent's sessions usually get
    trend, line, forest    -> mean (a mixture, weighted as has been best) and spread of ln(peak / context)
    runs of the same task  -> pull the mean towards what they reached, the more the surer they are
    calibration(stage)     -> quantiles: mean + spread · score, never below the present context

Everything in it is numbers of fixed size. Not thread-safe; one caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_basin.predictor.arithmetic import guess
from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.forest import Forest
from sglang_basin.predictor.history import History
from sglang_basin.predictor.lessons import PARTS, Guess, Lessons
from sglang_basin.predictor.line import Line
from sglang_basin.predictor.online import STAGES, Averages, Calibration, Mixture, stage
from sglang_basin.predictor.text import Task, TextScore

TASK_VARIANCE = 0.15
"""Of log peaks among runs of one task, until the deployment has shown its own (Terminal-Bench: 0.14)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSettings:
    """How fast finished sessions change the model."""

    horizon_sessions: float = 400.0
    """After so many sessions, what was learned before weighs 1/e of what it did."""
    calibration_step: float = 0.05
    """How far one session can move a quantile, in spreads."""
    tasks: int = 20_000
    kins: int = 1_000
    """Fingerprints remembered at most."""

    def __post_init__(self) -> None:
        if not self.horizon_sessions >= 10:
            raise ValueError(f"horizon_sessions must be at least 10, got {self.horizon_sessions}")
        if not 0 <= self.calibration_step <= 1:
            raise ValueError(f"calibration_step must be between 0 and 1, got {self.calibration_step}")


class Subject(NamedTuple):
    """What is known of a session beside its calls; all of it may be missing."""

    kin: int | None = None
    task: int | None = None
    text_score: float = 0.0
    characters: int = 0


TREND_COLUMNS = tuple(NAMES.index(name) for name in ("log_context", "log_calls", "kin_over_context"))
"""What the trend looks at: with little to learn from, these say most and mislead least."""


class PeakModel:
    def __init__(
        self,
        trend: Line,
        line: Line,
        forest: Forest,
        calibration: Calibration,
        text: TextScore | None = None,
        *,
        mixture: Mixture,
        log_peak: float,
        settings: OnlineSettings | None = None,
    ) -> None:
        """`mixture`: of trend, line and forest. `log_peak`: the mean log peak of the sessions fitted on."""
        self.trend = trend
        self.mixture = mixture
        self.log_peak = log_peak
        self.settings = settings or OnlineSettings()
        self.line = line
        self.forest = forest
        self.calibration = calibration
        self.text = text
        forest.check(len(NAMES), STAGES - 1)
        self._arrays = (
            *(forest.questions, forest.thresholds, forest.of_leaves),
            *(trend.columns, trend.middle, trend.scale, trend.slopes),
            *(line.columns, line.middle, line.scale, line.slopes),
            *(mixture.shares, calibration.scores),
        )
        """All of these are changed in place, never replaced."""
        self.tasks = Averages(capacity=self.settings.tasks, horizon=self.settings.horizon_sessions)
        self.kins = Averages(capacity=self.settings.kins, horizon=self.settings.horizon_sessions)

    def subject(self, task: Task | None, kin: int | None, score: float | None = None) -> Subject:
        """`score` is what `self.text` makes of the task, where that is known already."""
        if task is None:
            return Subject(kin)
        if score is None:
            score = self.text.score(task) if self.text is not None else 0.0
        return Subject(kin, task.fingerprint, score, task.characters)

    def guess(self, history: History, subject: Subject) -> Guess:
        """Raises ArithmeticError where the model's numbers no longer make one."""
        kin, at_stage = self.kins.shrunk(subject.kin, self.log_peak), stage(history.calls)
        runs, reached = self.tasks.alone(subject.task)
        variance = self.tasks.within_variance(TASK_VARIANCE) if runs > 0 else TASK_VARIANCE
        row = np.empty(len(NAMES) + PARTS)
        log_context, mean, spread, *tokens = guess(
            history.sums,
            kin,
            subject.text_score,
            subject.characters,
            row,
            at_stage,
            runs,
            reached,
            variance,
            *self._arrays,
        )
        if not math.isfinite(mean + spread):  # compiled code divides by zero without a word
            raise ArithmeticError(f"a guess of {mean} with a spread of {spread}")
        return Guess(row, at_stage, log_context, mean, spread, tokens)

    def learn(self, lessons: Lessons, subject: Subject, peak_tokens: int) -> None:
        """A session has ended with this peak, after guesses of which these lessons are left."""
        log_peak = math.log(max(1, peak_tokens))
        if len(lessons):
            self._learn_rows(lessons, log_peak)
        self.tasks.learn(subject.task, log_peak)
        self.kins.learn(subject.kin, log_peak)

    def _learn_rows(self, lessons: Lessons, log_peak: float) -> None:
        errors, rows = lessons.errors(), lessons.rows()
        targets = np.maximum(0.0, log_peak - errors["log_context"].astype(np.float64))
        standard = (targets - errors["mean"]) / errors["spread"]
        for at_stage, error in zip(errors["stage"].tolist(), standard.tolist(), strict=True):
            self.calibration.learn(at_stage, error)
        places, values = rows["place"], rows["values"].astype(np.float64)
        stages, reached = errors["stage"][places].astype(np.intp), targets[places]
        # The rows kept stand for one of every stage.
        weight, forget = row_weight(len(errors)) * len(errors) / len(rows), 1.0 / self.settings.horizon_sessions
        for part in (self.trend, self.line):
            part.add(values, reached, weight, forget)
        self.forest.add(values, stages, reached, weight, forget)
        self.mixture.learn(reached[:, None] - rows["parts"], weight, forget)


def row_weight(rows: int) -> float:
    """Of each of a session's rows: long sessions count for more, but not in proportion to their rows."""
    return 1.0 / math.sqrt(rows)
