import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.kept import History

COLUMN = {name: place for place, name in enumerate(NAMES)}


def row(history):
    return dict(zip(NAMES, history.row(9.0, 0.5, 100), strict=True))


def test_results_and_outputs_are_told_apart():
    history = History()
    history.advance(1, 1000)
    history.advance(1, 1200)  # wrote 200
    history.advance(2, 1500)  # the tool answered with 300
    history.advance(2, 1600)
    got = row(history)
    assert got["log_context"] == pytest.approx(math.log(1600))
    assert got["log_first"] == pytest.approx(math.log(1000))
    assert got["log_output_per_call"] == pytest.approx(math.log1p(150))
    assert got["log_result_last"] == pytest.approx(math.log1p(300))
    assert got["log_growth_max"] == pytest.approx(math.log1p(500))
    assert got["kin_over_context"] == pytest.approx(9.0 - math.log(1600))


def test_pauses_and_trends():
    history = History()
    prompt = 1000
    for call, (output, pause_s) in enumerate(((20, 0.0), (20, 0.5), (20, 2.0), (2000, 40.0)), 1):
        history.advance(call, prompt, pause_s)
        history.advance(call, prompt + output, pause_s)
        prompt += output + 300
    got = row(history)
    assert got["log_pause_last"] == got["log_pause_max"] == pytest.approx(math.log1p(400))
    assert got["mean_log_pause"] == pytest.approx((math.log1p(5) + math.log1p(20) + math.log1p(400)) / 3)
    assert math.log1p(5) < got["log_pause_recent"] < got["log_pause_last"]
    assert got["share_small_outputs"] == 0.75
    assert got["share_large_outputs"] == 0.25
    assert got["output_trend"] > 0.2
    assert got["result_trend"] == pytest.approx(0.0)
    assert got["spread_log_output"] > 1


def test_same_numbers_again_change_nothing():
    history = History()
    assert history.advance(1, 1000)
    assert not history.advance(1, 1000)
    before = history.row(9.0, 0.0, 0)
    assert not history.advance(1, 1000)
    assert np.array_equal(history.row(9.0, 0.0, 0), before)


def test_a_compaction_is_counted():
    history = History()
    for call, context in ((1, 1000), (2, 50_000), (3, 10_000)):
        history.advance(call, context)
    assert row(history)["shrinks"] == 1


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 3), st.integers(0, 10**17)), st.one_of(st.integers(-5, 20), st.integers(0, 10**18))
        ),
        max_size=60,
    )
)
def test_whatever_is_taken_in_the_row_is_finite(steps):
    history, calls = History(), 0
    for more, context in steps:
        calls += more
        history.advance(calls, context)
    got = history.row(9.0, 0.0, 0)
    assert len(got) == len(NAMES)
    assert all(math.isfinite(value) for value in got)


def test_history_uses_no_more_than_the_past():
    """Two sessions alike up to a call have the same row there, whatever comes later."""
    rng = random.Random(3)
    one, other = History(), History()
    context = 500
    for call in range(1, 30):
        context += rng.randint(1, 900)
        one.advance(call, context)
        other.advance(call, context)
        assert np.array_equal(one.row(9.0, 0.0, 0), other.row(9.0, 0.0, 0))
    before = one.row(9.0, 0.0, 0)
    other.advance(30, context * 7)
    assert np.array_equal(one.row(9.0, 0.0, 0), before)
