"""The predictor's inner loops, compiled by numba: an admission waits for them, and a simulated run makes thousands.

    advance, write_row     a session's calls -> sums -> a row of features (`features`)
    leaves_of, moments     a row -> a leaf of each tree -> what the leaves hold (`forest`)
    value                  a row -> a straight line's value (`line`)
    follow                 a change of a session -> whether its last guess still holds (`predictor`)
    guess                  all of it, mixed -> mean, spread and quantiles (`model`), and what to learn from (`KEPT`)
    learn                  a session's end -> scores, lines, leaves and shares of the mixture (`model`)

All types are given, so that everything is compiled when this module is loaded, never while a call waits. The machine
code is kept on disk, beside this file or, where that cannot be written, in the user's cache; numba makes it anew when
this file has changed. It does not notice changes elsewhere: whatever these functions use is in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, exp, inf, log, log1p, nan, pi, sqrt
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba.types import UniTuple, b1, f8, i8, u1, u2, void

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Questions = npt.NDArray[np.uint8]
Function = TypeVar("Function", bound=Callable[..., Any])

COLUMNS = 31
"""Features of a session: `features.NAMES`."""
PARTS = 3
"""Of a guess: the means of trend, line and forest."""
LAST_CALLS = (1, 2, 3, 5, 8, 12, 18, 27, 40, 64, 96, 2**31 - 1)
"""Of each stage of a session, before the next one of `online.FIRST_CALLS`; nobody counts as far as the last one's."""
STAGES = len(LAST_CALLS)
KEPT_ROWS = 4
"""Of the guesses that a session was given, as many are learned from in full."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""`policy.prediction.SHARES`."""

KEPT = np.dtype(
    [(name, "<i8") for name in ("output_sum", "result_sum")]
    + [
        (name, "<f8")
        for name in (
            "growth_recent",
            "output_recent",
            "result_recent",
            "log_output_sum",
            "log_output_squares",
            "log_output_recent",
            "log_result_sum",
            "log_result_squares",
            "log_result_recent",
            "log_pause_sum",
            "log_pause_last",
            "log_pause_max",
            "log_pause_recent",
        )
    ]
    + [
        (name, "<i4")
        for name in (
            "calls",
            "context",
            "first",
            "prompt",
            "growth_max",
            "outputs",
            "output_max",
            "small_outputs",
            "large_outputs",
            "results",
            "result_last",
            "small_results",
            "large_results",
            "shrinks",
        )
    ]
    + [("guessed_tokens", "<u4"), ("last_call", "<i4")]
    + [("text_score", "<f8"), ("kin", "<u8"), ("task", "<u8"), ("characters", "<u4"), ("told", "u1")]
    + [("output_counted", "?"), ("noted", "u1"), ("stage", "u1", STAGES), ("place", "u1", KEPT_ROWS)]
    + [("log_context", "<f4", STAGES), ("mean", "<u2", STAGES), ("spread", "<u2", STAGES)]
    + [("row", "<u2", (KEPT_ROWS, COLUMNS + PARTS))]
)
"""What is kept of one session: its calls so far; up to which call and around which context the last guess holds (no
tokens: there is none); what was told of it (`kept.Subject`); and its lessons, as many however long it gets: the first
guess of each of `noted` stages. How far off it was is learned for every stage (the calibration): `mean` and `spread` of
ln(peak / context), and `log_context`. What it was made of teaches the other parts, for which a few of a session's rows
do: they all share one target, the session's peak, and differ less than sessions do. They are chosen uniformly over the
stages (reservoir sampling; Vitter, "Random sampling with a reservoir", 1985) and stand for all of them: `row` has the
features and the means of trend, line and forest, `place` says to which of the noted stages each belongs. `<u2` are
floats of half precision: three digits of what a session's rows say, more than they are worth."""

NOTHING = np.zeros(1, KEPT)
NOTHING["output_counted"] = True
NOTHING["last_call"] = -1
"""Of a session that has not called yet: no output is missing, no stage has begun."""

_KEPT = numba.typeof(NOTHING)
_VECTOR, _TABLE, _CUBE = f8[::1], f8[:, ::1], f8[:, :, ::1]
_COUNTS, _COUNT_TABLE, _QUESTIONS = i8[::1], i8[:, ::1], u1[:, :, ::1]


def _compiled(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    """Compile for these types, numba's. A `_KEPT` is an array of records, of which another argument gives the place."""

    def compile_it(function: Function) -> Function:
        try:
            made: Function = numba.njit(result(*arguments), cache=True)(function)
        except RuntimeError:  # no folder to keep it in
            made = numba.njit(result(*arguments))(function)
        return made

    return compile_it


# ---- A session's calls ---------------------------------------------------------------------------------------------

MOST = 2**31 - 1
"""Calls and tokens beyond that count as so many: no sum below can overflow."""

RECENT = 0.3
"""How much the latest value counts in a recent mean."""
SMALL_RESULT_TOKENS = 100
LARGE_RESULT_TOKENS = 1500
SMALL_OUTPUT_TOKENS = 60
LARGE_OUTPUT_TOKENS = 500
SHRINK_SHARE = 0.8
"""A prompt below this share of the context before it counts as a compaction."""


@_compiled(void, _KEPT, i8, i8, f8)
def _take_result(kept: Any, at: int, prompt: int, pause_s: float) -> None:
    of = kept[at]
    grown, result = prompt - of.prompt, max(0, prompt - of.context)
    of.growth_max = max(of.growth_max, grown)
    logged = log1p(result)
    pause = log1p(10.0 * pause_s) if pause_s > 0 else 0.0
    recent = RECENT if of.results else 1.0
    of.growth_recent += recent * (grown - of.growth_recent)
    of.result_recent += recent * (result - of.result_recent)
    of.log_result_recent += recent * (logged - of.log_result_recent)
    of.log_pause_recent += recent * (pause - of.log_pause_recent)
    of.shrinks += prompt < SHRINK_SHARE * of.context
    of.results += 1
    of.result_last = result
    of.result_sum += result
    of.log_result_sum += logged
    of.log_result_squares += logged * logged
    of.small_results += result < SMALL_RESULT_TOKENS
    of.large_results += result > LARGE_RESULT_TOKENS
    of.log_pause_sum += pause
    of.log_pause_last = pause
    of.log_pause_max = max(of.log_pause_max, pause)


@_compiled(void, _KEPT, i8, i8)
def _take_output(kept: Any, at: int, output: int) -> None:
    of = kept[at]
    logged = log1p(output)
    recent = RECENT if of.outputs else 1.0
    of.output_recent += recent * (output - of.output_recent)
    of.log_output_recent += recent * (logged - of.log_output_recent)
    of.outputs += 1
    of.output_sum += output
    of.output_max = max(of.output_max, output)
    of.log_output_sum += logged
    of.log_output_squares += logged * logged
    of.small_outputs += output < SMALL_OUTPUT_TOKENS
    of.large_outputs += output > LARGE_OUTPUT_TOKENS


@_compiled(b1, _KEPT, i8, i8, i8, f8)
def advance(kept: Any, at: int, calls: int, context_tokens: int, pause_s: float) -> bool:
    """`kept.History.advance`."""
    of = kept[at]
    calls, context = min(calls, MOST), min(max(1, context_tokens), MOST)
    if calls == of.calls and context == of.context:
        return False
    if calls > of.calls:
        if of.calls > 0:
            _take_result(kept, at, context, pause_s)
        else:
            of.first = context
        of.calls, of.prompt = calls, context
        of.output_counted = False
    elif not of.output_counted:
        of.output_counted = True
        _take_output(kept, at, max(0, context - of.prompt))
    of.context = context
    return True


@_compiled(void, _KEPT, i8, f8, f8, i8, _VECTOR)
def write_row(kept: Any, at: int, kin_log_peak: float, text_score: float, text_characters: int, row: Floats) -> None:
    """The features, in the order of `features.NAMES`, into `row`."""
    of = kept[at]
    log_context, log_first = log(max(1, of.context)), log(max(1, of.first))
    results, outputs = max(1, of.results), max(1, of.outputs)
    mean_log_result, mean_log_output = of.log_result_sum / results, of.log_output_sum / outputs
    row[0] = log_context
    row[1] = log_first
    row[2] = log(max(1, of.calls))
    row[3] = log_context - log_first
    row[4] = log1p(max(0, of.context - of.first) / results)
    row[5] = log1p(max(0.0, of.growth_recent))
    row[6] = log1p(of.growth_max)
    row[7] = log1p(of.output_sum / outputs)
    row[8] = log1p(of.output_recent)
    row[9] = log1p(of.output_max)
    row[10] = log1p(of.result_sum / results)
    row[11] = log1p(of.result_recent)
    row[12] = log1p(of.result_last)
    row[13] = mean_log_output
    row[14] = mean_log_result
    row[15] = sqrt(max(0.0, of.log_result_squares / results - mean_log_result * mean_log_result))
    row[16] = of.small_results / results
    row[17] = of.large_results / results
    row[18] = of.shrinks
    row[19] = sqrt(max(0.0, of.log_output_squares / outputs - mean_log_output * mean_log_output))
    row[20] = of.small_outputs / outputs
    row[21] = of.large_outputs / outputs
    row[22] = of.log_output_recent - mean_log_output
    row[23] = of.log_result_recent - mean_log_result
    row[24] = of.log_pause_last
    row[25] = of.log_pause_sum / results
    row[26] = of.log_pause_recent
    row[27] = of.log_pause_max
    row[28] = kin_log_peak - log_context
    row[29] = text_score
    row[30] = log1p(text_characters)


# ---- Trees ---------------------------------------------------------------------------------------------------------
#
# `questions`, `thresholds`: (stages, trees, leaves), as in `forest.Forest`; a leaf's number counts through all of them.


@_compiled(void, _VECTOR, i8, _QUESTIONS, _CUBE, _COUNTS)
def _walk(row: Floats, stage: int, questions: Questions, thresholds: Floats, leaves: Ints) -> None:
    """The leaf of each tree that the row falls into. All trees together, a level at a time: no step waits for the
    memory that another one reads."""
    trees, size = questions.shape[1:]
    leaves[:] = 1  # nodes, up to the last level
    level = 1
    while level < size:
        for tree in range(trees):
            node = leaves[tree]
            leaves[tree] = 2 * node + (row[questions[stage, tree, node]] > thresholds[stage, tree, node])
        level *= 2
    for tree in range(trees):
        leaves[tree] += (stage * trees + tree) * size - size


@_compiled(_COUNT_TABLE, _TABLE, _COUNTS, _QUESTIONS, _CUBE)
def leaves_of(rows: Floats, stages: Ints, questions: Questions, thresholds: Floats) -> Ints:
    """(rows, trees): the leaf of each tree that each row falls into."""
    leaves = np.empty((len(rows), questions.shape[1]), np.int64)
    for number in range(len(rows)):
        _walk(rows[number], stages[number], questions, thresholds, leaves[number])
    return leaves


@_compiled(UniTuple(f8, 2), _VECTOR, i8, _QUESTIONS, _CUBE, _TABLE)
def moments(
    row: Floats, stage: int, questions: Questions, thresholds: Floats, of_leaves: Floats
) -> tuple[float, float]:
    """Mean and variance (≥ 0) of the target. `of_leaves`: (leaves, 2), mean and mean square in each."""
    leaves = np.empty(questions.shape[1], np.int64)
    _walk(row, stage, questions, thresholds, leaves)
    mean = square = 0.0
    for leaf in leaves:
        mean += of_leaves[leaf, 0]
        square += of_leaves[leaf, 1]
    mean, square = mean / len(leaves), square / len(leaves)
    return mean, max(0.0, square - mean * mean)


@_compiled(void, _COUNT_TABLE, _VECTOR, f8, _TABLE, _TABLE)
def add_to_leaves(leaves: Ints, targets: Floats, weight: float, sums: Floats, of_leaves: Floats) -> None:
    """Each row, with its target, to its leaves. `sums`: (3, leaves), of weight, target and target²."""
    for number in range(len(leaves)):
        target = targets[number]
        for leaf in leaves[number]:
            sums[0, leaf] += weight
            sums[1, leaf] += weight * target
            sums[2, leaf] += weight * (target * target)
    for number in range(len(leaves)):
        for leaf in leaves[number]:  # some more than once
            of_leaves[leaf, 0] = sums[1, leaf] / sums[0, leaf]
            of_leaves[leaf, 1] = sums[2, leaf] / sums[0, leaf]


# ---- Lines ---------------------------------------------------------------------------------------------------------
#
# `columns`, `middle`, `scale`: one number for each column, as in `line.Line`; `slopes` has the constant at its end.
# `lines`: (3, columns + 1), all three.

CUT = 4.0
"""Of a standardised value."""


@_compiled(f8, _VECTOR, _COUNTS, _TABLE)
def value(row: Floats, columns: Ints, lines: Floats) -> float:
    """Of the line, for one row."""
    total: float = lines[2, -1]
    for place in range(len(columns)):
        standard = (row[columns[place]] - lines[0, place]) / lines[1, place]
        total += lines[2, place] * min(max(standard, -CUT), CUT)
    return total


PENALTY = 0.03
"""On each standardised coefficient, per unit of the rows' weight: the fit of n rows has a ridge penalty of 0.03 · n."""
CONSTANT_PENALTY = 1e-9


@_compiled(b1, _TABLE, _VECTOR, _TABLE)
def solve_line(gram: Floats, moment: Floats, lines: Floats) -> bool:
    """The slopes of least squares with the penalty, by elimination; False where the sums are not those of any rows.

    `gram`: (columns + 1, columns + 1), symmetric, of which the upper half is read. With the penalty it is positive
    definite, so that no row need change its place (Golub and Van Loan, "Matrix Computations", 4.2).
    """
    size = len(moment)
    upper, slopes = gram.copy(), lines[2]
    slopes[:] = moment
    for place in range(size):
        upper[place, place] += gram[-1, -1] * (PENALTY if place < size - 1 else CONSTANT_PENALTY)
    for place in range(size):
        pivot = upper[place, place]
        if not pivot > 0.0:
            return False
        for below in range(place + 1, size):
            factor = upper[place, below] / pivot
            slopes[below] -= factor * slopes[place]
            for column in range(below, size):
                upper[below, column] -= factor * upper[place, column]
    for place in range(size - 1, -1, -1):
        total = slopes[place]
        for column in range(place + 1, size):
            total -= upper[place, column] * slopes[column]
        slopes[place] = total / upper[place, place]
    return True


@_compiled(b1, _TABLE, _VECTOR, f8, f8, _COUNTS, _TABLE, _TABLE, _VECTOR)
def add_to_line(
    rows: Floats,
    targets: Floats,
    weight: float,
    keep: float,
    columns: Ints,
    lines: Floats,
    gram: Floats,
    moment: Floats,
) -> bool:
    """Each row, with its target, to the sums `gram` and `moment`, of which `keep` stays; then `solve_line`. The rows
    may have more columns than the line looks at."""
    gram *= keep
    moment *= keep
    standard = np.ones(len(moment))
    for number in range(len(rows)):
        for place in range(len(columns)):
            apart = (rows[number, columns[place]] - lines[0, place]) / lines[1, place]
            standard[place] = min(max(apart, -CUT), CUT)
        for place in range(len(moment)):
            weighted = weight * standard[place]
            moment[place] += weighted * targets[number]
            for other in range(len(moment)):
                gram[place, other] += weighted * standard[other]
    return solve_line(gram, moment, lines)


# ---- A guess -------------------------------------------------------------------------------------------------------

MIN_VARIANCE = 1e-4
MAX_LOG_GROWTH = 12.0
MOST_BELIEVED = 1e4
"""No log of anything is as large: compiled code divides by zero without a word."""


@_compiled(UniTuple(f8, 2), f8, f8)
def above_zero(mean: float, variance: float) -> tuple[float, float]:
    """Mean and variance of a normal variable of which is known that it is above 0 (the truncated normal).

    The runs of a task that are over say where they ended; of a run that got past that, only how far beyond is open.
    """
    spread = sqrt(variance)
    cut = -mean / spread
    if cut > 6:  # the tail is exponential there
        return spread / cut, (spread / cut) ** 2
    hazard = exp(-0.5 * cut * cut) / (sqrt(pi / 2) * erfc(cut / sqrt(2.0)))
    return mean + spread * hazard, max(0.0, variance * (1.0 + cut * hazard - hazard * hazard))


# ---- A session's guesses -------------------------------------------------------------------------------------------

STALE_FACTOR = 1.1
"""A guess holds until the context has changed by this factor. No door takes it for less than the context."""

ANOTHER, HOLDS, AGAIN = -3, -2, -1


@_compiled(b1, f8, f8)
def believable(mean: float, spread: float) -> bool:
    """Whether they are numbers, and such as a half-precision one can hold."""
    return abs(mean) + spread < MOST_BELIEVED


@_compiled(i8, _KEPT, i8, i8, i8, f8)
def follow(kept: Any, at: int, calls: int, context_tokens: int, pause_s: float) -> int:
    """Take in the session's present numbers and say whether its last guess holds: `HOLDS`; `AGAIN`, guess anew; from 0
    on, guess anew for a stage that begins, after so many noted ones. `ANOTHER`: a session of the same name, for which
    nothing was changed. After `AGAIN` and new stages no guess holds until there is another one."""
    of = kept[at]
    calls, tokens = min(calls, MOST), min(max(1, context_tokens), MOST)
    if calls < of.calls:
        return ANOTHER
    changed = advance(kept, at, calls, tokens, pause_s)
    if of.guessed_tokens > 0 and not changed:
        return HOLDS
    if calls > of.last_call:
        of.guessed_tokens = 0
        noted: int = of.noted
        return noted
    if of.guessed_tokens < STALE_FACTOR * tokens and tokens < STALE_FACTOR * of.guessed_tokens:
        return HOLDS
    of.guessed_tokens = 0
    return AGAIN


@_compiled(u2, f8)
def half(number: float) -> Any:
    """The bits of the nearest number of half precision (IEEE 754, ties to even); too large ones become infinite."""
    bits = np.float64(number).view(np.int64)
    sign, size = (bits >> 48) & 0x8000, bits & 0x7FFF_FFFF_FFFF_FFFF
    exponent = (size >> 52) - 1023
    if size > 0x7FF0_0000_0000_0000:
        return sign | 0x7E00
    if exponent > 15:
        return sign | 0x7C00
    if exponent < -25:
        return sign
    mantissa = (size & 0x000F_FFFF_FFFF_FFFF) | 0x0010_0000_0000_0000
    drop = 42 if exponent >= -14 else 28 - exponent  # the smallest numbers have fewer digits
    made = ((exponent + 14) << 10 if exponent >= -14 else 0) + (mantissa >> drop)
    rest, middle = mantissa & ((1 << drop) - 1), 1 << (drop - 1)
    if rest > middle or (rest == middle and made & 1):
        made += 1  # a carry out of the mantissa is the next exponent, as it should be
    return sign | made


@_compiled(void, _KEPT, i8, i8, i8, f8, f8, _VECTOR)
def note(kept: Any, at: int, stage: int, row_place: int, mean: float, spread: float, row: Floats) -> None:
    """The first guess of a stage is one to learn from, and of its row if there is such a place."""
    of = kept[at]
    noted = of.noted
    if noted >= STAGES:
        return
    of.stage[noted] = stage
    of.log_context[noted] = row[0]
    of.mean[noted] = half(mean)
    of.spread[noted] = half(spread)
    of.noted = noted + 1
    if row_place < KEPT_ROWS:
        of.place[row_place] = noted
        for column in range(COLUMNS + PARTS):
            of.row[row_place, column] = half(row[column])


@_compiled(
    UniTuple(f8, 5),
    *(_KEPT, i8, f8),
    *(i8, i8, _VECTOR, f8, f8, f8),
    *(_QUESTIONS, _CUBE, _TABLE),
    *(_COUNTS, _TABLE, _COUNTS, _TABLE),
    *(_VECTOR, _TABLE),
)
def guess(
    kept: Any,
    at: int,
    kin_log_peak: float,
    calls: int,
    row_place: int,
    row: Floats,
    runs: float,
    reached: float,
    task_variance: float,
    questions: Questions,
    thresholds: Floats,
    of_leaves: Floats,
    trend_columns: Ints,
    trend: Floats,
    line_columns: Ints,
    line: Floats,
    shares: Floats,
    scores: Floats,
) -> tuple[float, ...]:
    """What `model.PeakModel` says of a session at this call: five quantiles of the peak, in tokens. Into `row` go the
    features and, after them, the means of trend, line and forest, and mean and spread of ln(peak / context).

    The guess holds up to the last call of the stage. With `row_place` at least 0 it is the first one of its stage, and
    its row is kept at that place, if there is one. Where mean and spread are not `believable` there is none: all are
    NaN. `runs` of the same task (0 for a stranger's) got to the log peak `reached` on average, around which such runs
    have the variance `task_variance`. `shares` are those of trend, line and forest; `scores`: (stages, quantiles).
    """
    of, stage = kept[at], 0
    while stage < STAGES - 1 and calls > LAST_CALLS[stage]:
        stage += 1
    write_row(kept, at, kin_log_peak, of.text_score, of.characters, row)
    log_context = row[0]
    of_forest, variance = moments(row, stage, questions, thresholds, of_leaves)
    of_trend, of_line = value(row, trend_columns, trend), value(row, line_columns, line)
    row[COLUMNS], row[COLUMNS + 1], row[COLUMNS + 2] = of_trend, of_line, of_forest
    mean = shares[0] * of_trend + shares[1] * of_line + shares[2] * of_forest
    variance += MIN_VARIANCE
    if runs > 0:
        further, of_task = above_zero(reached - log_context, task_variance * (1.0 + 1.0 / runs))
        mean += variance / (variance + of_task) * (further - mean)
        variance = min(variance, of_task) + MIN_VARIANCE
    spread, context = sqrt(variance), exp(log_context)
    row[-2], row[-1] = mean, spread
    if not believable(mean, spread):
        context = nan
    else:
        of.guessed_tokens, of.last_call = max(1, of.context), LAST_CALLS[stage]
        if row_place >= 0:
            note(kept, at, stage, row_place, mean, spread, row)
    return (
        context * exp(min(max(0.0, mean + spread * scores[stage, 0]), MAX_LOG_GROWTH)),
        context * exp(min(max(0.0, mean + spread * scores[stage, 1]), MAX_LOG_GROWTH)),
        context * exp(min(max(0.0, mean + spread * scores[stage, 2]), MAX_LOG_GROWTH)),
        context * exp(min(max(0.0, mean + spread * scores[stage, 3]), MAX_LOG_GROWTH)),
        context * exp(min(max(0.0, mean + spread * scores[stage, 4]), MAX_LOG_GROWTH)),
    )


# ---- What a finished session teaches -------------------------------------------------------------------------------


@_compiled(f8, u2)
def whole(bits: int) -> float:
    """The number of half precision that has these bits."""
    exponent, mantissa = (bits >> 10) & 0x1F, bits & 0x3FF
    if exponent == 0x1F:
        size = nan if mantissa else inf
    elif exponent:
        size = (1024 + mantissa) * 2.0 ** (exponent - 25)
    else:
        size = mantissa * 2.0**-24
    return -size if bits >> 15 else size


@_compiled(void, _TABLE, i8, f8, f8)
def move_scores(scores: Floats, stage: int, error: float, step: float) -> None:
    """`calibration.Calibration.learn`."""
    row = scores[stage]
    for place, share in enumerate(QUANTILES):
        row[place] += step * (share - (error <= row[place]))
    row.sort()


@_compiled(void, _TABLE, _TABLE, _VECTOR)
def choose_shares(products: Floats, choices: Floats, shares: Floats) -> None:
    """The choice of least squared error; of equal ones the first. `choices`: (choices, parts)."""
    parts, least = len(shares), inf
    for number in range(len(choices)):
        loss = 0.0
        for one in range(parts):
            for other in range(parts):
                loss += choices[number, one] * products[one, other] * choices[number, other]
        if loss < least:
            least = loss
            shares[:] = choices[number]


@_compiled(void, _TABLE, f8, f8, _TABLE, _TABLE, _VECTOR)
def add_to_mixture(
    errors: Floats, weight: float, keep: float, products: Floats, choices: Floats, shares: Floats
) -> None:
    """The products of each row of errors to `products`, of which `keep` stays; then `choose_shares`."""
    products *= keep
    for number in range(len(errors)):
        for one in range(len(shares)):
            for other in range(len(shares)):
                products[one, other] += weight * errors[number, one] * errors[number, other]
    choose_shares(products, choices, shares)


@_compiled(
    b1,
    *(_KEPT, i8, f8, f8, f8, f8, f8),
    _TABLE,
    *(_COUNTS, _TABLE, _TABLE, _VECTOR),
    *(_COUNTS, _TABLE, _TABLE, _VECTOR),
    *(_QUESTIONS, _CUBE, _TABLE, _TABLE),
    *(_TABLE, _TABLE, _VECTOR),
)
def learn(
    kept: Any,
    at: int,
    log_peak: float,
    row_weight: float,
    keep: float,
    unit: float,
    step: float,
    scores: Floats,
    trend_columns: Ints,
    trend: Floats,
    trend_gram: Floats,
    trend_moment: Floats,
    line_columns: Ints,
    line: Floats,
    line_gram: Floats,
    line_moment: Floats,
    questions: Questions,
    thresholds: Floats,
    sums: Floats,
    of_leaves: Floats,
    products: Floats,
    choices: Floats,
    shares: Floats,
) -> bool:
    """The session kept there, whose lessons are those of `KEPT`, ended with this log peak. False where a line's sums
    have gone wrong: then it says nothing any more, and what follows it in this list was not taught.

    `row_weight`: of the row of each noted stage, which those kept stand for together; `keep`: how much what was learned
    before counts from now on. In the forest's sums a row weighs `unit` times as much (`forest.Forest.unit`). `step`:
    how far the scores move.
    """
    of = kept[at]
    noted = of.noted
    targets = np.empty(noted)
    for number in range(noted):
        targets[number] = max(0.0, log_peak - of.log_context[number])
        error = (targets[number] - whole(of.mean[number])) / whole(of.spread[number])
        move_scores(scores, of.stage[number], error, step)
    many = min(noted, KEPT_ROWS)
    if not many:
        return True
    rows, errors = np.empty((many, COLUMNS)), np.empty((many, PARTS))
    stages, reached = np.empty(many, np.int64), np.empty(many)
    for number in range(many):
        place = of.place[number]
        stages[number], reached[number] = of.stage[place], targets[place]
        for column in range(COLUMNS):
            rows[number, column] = whole(of.row[number, column])
        for part in range(PARTS):
            errors[number, part] = reached[number] - whole(of.row[number, COLUMNS + part])
    weight = row_weight * noted / many
    if not add_to_line(rows, reached, weight, keep, trend_columns, trend, trend_gram, trend_moment):
        return False
    if not add_to_line(rows, reached, weight, keep, line_columns, line, line_gram, line_moment):
        return False
    leaves = leaves_of(rows, stages, questions, thresholds)
    add_to_leaves(leaves, reached, weight * unit, sums, of_leaves)
    add_to_mixture(errors, weight, keep, products, choices, shares)
    return True
