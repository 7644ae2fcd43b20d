import numpy as np
import pytest
from made_sessions import made

from sglang_basin.predictor.evaluate import ContextAlone, Predicted, cross_validate, gains, interval


def predicted(median, context, peak, group):
    rows = len(median)
    tokens = np.tile(np.array(median, float)[:, None], (1, 5))
    return Predicted(np.full(rows, 4), np.array(context, float), np.array(peak, float), tokens, np.array(group, str))


def test_a_perfect_prediction_gains_what_the_context_lacks():
    rng = np.random.default_rng(1)
    peak = rng.permutation(200)
    context = rng.permutation(200)
    (one,) = gains(predicted(peak, context, peak, range(200)), (4,))
    assert one.gain == pytest.approx(1.0, abs=0.15)
    assert one.low < one.gain < one.high
    (none,) = gains(predicted(context, context, peak, range(200)), (4,))
    assert (none.gain, none.low, none.high) == (0.0, 0.0, 0.0)


def test_few_sessions_are_not_judged():
    assert gains(predicted([1, 2], [1, 2], [1, 2], "ab"), (4, 9)) == []


def test_runs_of_one_task_are_drawn_together():
    """A hundred sessions that are ten tasks ten times over tell no more than ten."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=10).repeat(10)

    def width(groups):
        _, low, high = interval(np.array(groups), lambda rows: float(values[rows].mean()))
        return high - low

    assert width(np.arange(10).repeat(10)) > 2 * width(np.arange(100))


def test_predictions_carry_their_task():
    sessions = made(40)
    made_of = cross_validate(sessions, ContextAlone, folds=4, calls=(1,))
    assert sorted(made_of.group) == sorted(session.group for session in sessions)
