"""How good predictions of peaks are: rank, error, coverage and cost of reserving them, call by call, out of fold.

A method is a function from finished sessions to a `Fitted`, which gives the quantiles of a session's peak at some of
its calls. At call k it may use the prompts of calls 1 to k and the outputs before call k; never what comes later.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.recorded import Recorded

CALLS = (1, 2, 4, 9, 16, 32, 64)
"""The calls at which predictions are judged, among the sessions that get there."""

MIN_SESSIONS = 8
"""Fewer than this many sessions at a call are not judged."""

_P50, _P90 = SHARES.index(0.5), SHARES.index(0.9)


class Fitted(Protocol):
    def quantiles(self, session: Recorded, calls: Sequence[int]) -> list[Sequence[float]]:
        """Tokens at `SHARES` for each of these calls (from 1, ascending, at most the session's number of calls)."""


Method = Callable[[Sequence[Recorded]], Fitted]


@dataclass(frozen=True)
class Predicted:
    """Predictions out of fold, one row per session and call."""

    call: npt.NDArray[np.int64]
    context: npt.NDArray[np.float64]
    peak: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    """(rows, SHARES)"""
    group: npt.NDArray[np.str_]
    """The session's task."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of the predictions at one call."""

    call: int
    sessions: int
    rank: float
    """Spearman's correlation of the predicted median with the true peak."""
    context_rank: float
    """The same for the present context alone."""
    log_error: float
    """Median |ln(predicted median / peak)|."""
    p50_coverage: float
    p90_coverage: float
    reserved_p50: float
    """Total of predicted medians over the total of true peaks."""
    reserved_p90: float


def ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """From 0, ties by their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[place], dtype=np.float64)


def rank_correlation(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Spearman's; 0 where one of both is constant."""
    a, b = ranks(one), ranks(other)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else 0.0


def judged_calls(session: Recorded, calls: Sequence[int] = CALLS) -> list[int]:
    return [call for call in calls if call <= len(session.calls)]


def predict(fitted: Fitted, sessions: Sequence[Recorded], calls: Sequence[int] = CALLS) -> Predicted:
    at: list[int] = []
    context: list[int] = []
    peak: list[int] = []
    tokens: list[Sequence[float]] = []
    group: list[str] = []
    for session in sessions:
        judged = judged_calls(session, calls)
        at += judged
        context += [session.calls[call - 1][0] for call in judged]
        peak += [session.peak_tokens] * len(judged)
        tokens += fitted.quantiles(session, judged)
        group += [session.group] * len(judged)
    shape = (len(at), len(SHARES))
    return Predicted(
        np.array(at, int),
        np.array(context, float),
        np.array(peak, float),
        np.array(tokens, float).reshape(shape),
        np.array(group, str),
    )


def folds_of(sessions: Sequence[Recorded], *, folds: int, grouped: bool, seed: int) -> npt.NDArray[np.int64]:
    """A fold per session: all sessions of a task in the same (`grouped`: unseen tasks), or spread over all folds."""
    rng = np.random.default_rng(seed)
    if not grouped:
        # Sessions of one task go round the folds, so that each is predicted with its task's other runs known.
        order = sorted(range(len(sessions)), key=lambda index: (sessions[index].group, rng.random()))
        fold = np.empty(len(sessions), int)
        fold[order] = (np.arange(len(sessions)) + rng.integers(folds)) % folds
        return fold
    names = sorted({session.group for session in sessions})
    place = dict(zip(names, rng.permutation(len(names)) % folds, strict=True))
    return np.array([place[session.group] for session in sessions], int)


def cross_validate(
    sessions: Sequence[Recorded],
    method: Method,
    *,
    folds: int = 8,
    grouped: bool = True,
    seed: int = 1,
    calls: Sequence[int] = CALLS,
    train_share: float = 1.0,
) -> Predicted:
    """Every session predicted by a model that has not seen it, nor its task where `grouped`.

    `train_share` fits on a random part of the other folds, for learning curves.
    """
    fold = folds_of(sessions, folds=folds, grouped=grouped, seed=seed)
    rng = np.random.default_rng([seed, 7])
    parts: list[Predicted] = []
    for number in range(folds):
        held = np.flatnonzero(fold == number)
        if not len(held):
            continue
        rest = np.flatnonzero(fold != number)
        if train_share < 1:
            rest = np.sort(rng.permutation(rest)[: max(10, round(train_share * len(rest)))])
        fitted = method([sessions[index] for index in rest])
        parts.append(predict(fitted, [sessions[index] for index in held], calls))
    return joined(parts)


def joined(parts: Sequence[Predicted]) -> Predicted:
    return Predicted(
        np.concatenate([part.call for part in parts]),
        np.concatenate([part.context for part in parts]),
        np.concatenate([part.peak for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.group for part in parts]),
    )


def score(predicted: Predicted, calls: Sequence[int] = CALLS) -> list[Score]:
    """One score per call that enough sessions reach."""
    made: list[Score] = []
    for call in calls:
        here = predicted.call == call
        if here.sum() < MIN_SESSIONS:
            continue
        tokens, peak, context = predicted.tokens[here], predicted.peak[here], predicted.context[here]
        median, high = tokens[:, _P50], tokens[:, _P90]
        made.append(
            Score(
                call=call,
                sessions=int(here.sum()),
                rank=rank_correlation(median, peak),
                context_rank=rank_correlation(context, peak),
                log_error=float(np.median(np.abs(np.log(median / peak)))),
                p50_coverage=float((peak <= median).mean()),
                p90_coverage=float((peak <= high).mean()),
                reserved_p50=float(median.sum() / peak.sum()),
                reserved_p90=float(high.sum() / peak.sum()),
            )
        )
    return made


def mean_scores(runs: Sequence[Sequence[Score]]) -> list[Score]:
    """Scores of several seeds averaged, call by call; all runs must have judged the same calls."""
    numbers = [name for name in Score.__dataclass_fields__ if name not in ("call", "sessions")]
    return [
        Score(
            call=row[0].call,
            sessions=row[0].sessions,
            **{name: float(np.mean([getattr(one, name) for one in row])) for name in numbers},
        )
        for row in zip(*runs, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much better the predicted medians rank the peaks at one call than the present context does."""

    call: int
    gain: float
    low: float
    high: float
    """95 % interval, by drawing whole tasks with replacement."""


def gains(predicted: Predicted, calls: Sequence[int], *, draws: int = 1000, seed: int = 1) -> list[Gain]:
    """One per call that enough sessions reach."""
    made: list[Gain] = []
    for call in calls:
        here = predicted.call == call
        if here.sum() < MIN_SESSIONS:
            continue
        median, context, peak = predicted.tokens[here, _P50], predicted.context[here], predicted.peak[here]
        found = interval(
            predicted.group[here],
            lambda rows, median=median, context=context, peak=peak: (  # type: ignore[misc]
                rank_correlation(median[rows], peak[rows]) - rank_correlation(context[rows], peak[rows])
            ),
            draws=draws,
            seed=seed,
        )
        made.append(Gain(call=call, gain=found[0], low=found[1], high=found[2]))
    return made


def interval(
    groups: npt.NDArray[Any], statistic: Callable[[npt.NDArray[np.int64]], float], *, draws: int = 1000, seed: int = 1
) -> tuple[float, float, float]:
    """(of all rows, 2.5 %, 97.5 %) of a statistic of row numbers, by drawing whole groups with replacement."""
    members = [np.flatnonzero(groups == name) for name in np.unique(groups)]
    rng = np.random.default_rng(seed)
    drawn = [
        statistic(np.concatenate([members[place] for place in rng.integers(len(members), size=len(members))]))
        for _ in range(draws)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return statistic(np.arange(len(groups))), float(low), float(high)


class ContextAlone:
    """The present context times the usual growth from there: what any method has to beat in rank."""

    def __init__(self, sessions: Sequence[Recorded]) -> None:
        self._growth: dict[int, list[float]] = {}
        for call in CALLS:
            reached = [session for session in sessions if len(session.calls) >= call]
            growth = [session.peak_tokens / session.calls[call - 1][0] for session in reached]
            self._growth[call] = np.quantile(growth or [1.0], SHARES).tolist()

    def quantiles(self, session: Recorded, calls: Sequence[int]) -> list[Sequence[float]]:
        known = sorted(self._growth)
        return [
            [
                session.calls[call - 1][0] * max(1.0, growth)
                for growth in self._growth[known[max(0, bisect.bisect_right(known, call) - 1)]]
            ]
            for call in calls
        ]
