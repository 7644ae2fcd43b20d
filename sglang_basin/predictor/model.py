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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.arithmetic import COLUMNS, PARTS, guess, learn
from sglang_basin.predictor.calibration import Calibration
from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.forest import Forest
from sglang_basin.predictor.kept import History, Records, Subject
from sglang_basin.predictor.line import Line, must_be_solved
from sglang_basin.predictor.mixture import Mixture
from sglang_basin.predictor.online import STAGES, Averages, stage
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


class Guess(NamedTuple):
    """What the model says of a session, and what that was made of."""

    row: npt.NDArray[np.float64]
    """The features, and after them the means of trend, line and forest."""
    stage: int
    mean: float
    spread: float
    """Of ln(peak / context)."""
    tokens: tuple[float, ...]
    """The peak at each of `policy.prediction.SHARES`."""


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
            *(trend.columns, trend.lines, line.columns, line.lines),
            *(mixture.shares, calibration.scores),
        )
        """All of these are changed in place, never replaced."""
        self._taught: tuple[Any, ...] = (
            calibration.scores,
            *(trend.columns, trend.lines, trend.gram, trend.moment),
            *(line.columns, line.lines, line.gram, line.moment),
            *(forest.questions, forest.thresholds, forest.sums, forest.of_leaves),
            *(mixture.products, mixture.choices, mixture.shares),
        )
        self._row = np.empty(COLUMNS + PARTS + 2)
        self.tasks = Averages(capacity=self.settings.tasks, horizon=self.settings.horizon_sessions)
        self.kins = Averages(capacity=self.settings.kins, horizon=self.settings.horizon_sessions)

    def subject(self, task: Task | None, kin: int | None, score: float | None = None) -> Subject:
        """`score` is what `self.text` makes of the task, where that is known already."""
        if task is None:
            return Subject(kin)
        if score is None:
            score = self.text.score(task) if self.text is not None else 0.0
        return Subject(kin, task.fingerprint, score, task.characters)

    def guess(
        self, kept: Records, at: int, calls: int, kin: int | None, task: int | None, row_place: int = -1
    ) -> tuple[float, ...]:
        """Of the session kept there, at this call: the peak at each of `policy.prediction.SHARES`, in tokens. With
        `row_place` at least 0 it is the first guess of a stage, and one to learn from (`arithmetic.guess`). Raises
        ArithmeticError where the model's numbers no longer make one."""
        runs, reached = self.tasks.alone(task)
        made: tuple[float, ...] = guess(
            kept,
            at,
            self.kins.shrunk(kin, self.log_peak),
            calls,
            row_place,
            self._row,
            runs,
            reached,
            self.tasks.within_variance(TASK_VARIANCE) if runs > 0 else TASK_VARIANCE,
            *self._arrays,
        )
        if not made[0] > 0:
            raise ArithmeticError("a guess of {} with a spread of {}".format(*self._row[-2:]))
        return made

    def explain(self, history: History, subject: Subject) -> Guess:
        """A guess with what it was made of. Raises ArithmeticError."""
        history.tell(subject)
        tokens = self.guess(history.kept, 0, history.calls, subject.kin, subject.task)
        row, (mean, spread) = self._row[:-2].copy(), self._row[-2:].tolist()
        return Guess(row, stage(history.calls), mean, spread, tokens)

    def learn(self, kept: Records, at: int, kin: int | None, task: int | None, peak_tokens: int) -> None:
        """The session kept there has ended with this peak. Raises ArithmeticError where the model's numbers have gone
        wrong."""
        log_peak, noted = math.log(max(1, peak_tokens)), kept["noted"].item(at)
        if noted:
            forget = 1.0 / self.settings.horizon_sessions
            self.forest.forget(forget)
            weight, unit, step = row_weight(noted), self.forest.unit, self.calibration.step
            must_be_solved(learn(kept, at, log_peak, weight, 1.0 - forget, unit, step, *self._taught))
        self.tasks.learn(task, log_peak)
        self.kins.learn(kin, log_peak)


def row_weight(rows: int) -> float:
    """Of each of a session's rows: long sessions count for more, but not in proportion to their rows."""
    return 1.0 / math.sqrt(rows)
