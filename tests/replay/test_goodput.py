from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.replay.goodput import ServedSession, Target, count_steps, goodput, within_target

GOOD = ServedSession(finished=True, total_s=40.0, unloaded_s=10.0, steps=100, steps_on_time=95)

served = st.builds(
    ServedSession,
    finished=st.booleans(),
    total_s=st.floats(0, 1000),
    unloaded_s=st.floats(0.1, 100),
    steps=st.just(200),
    steps_on_time=st.integers(0, 200),
)


def test_a_session_counts_up_to_each_limit_and_not_beyond():
    target = Target()
    assert within_target(GOOD, target)
    assert not within_target(replace(GOOD, total_s=40.1), target)
    assert not within_target(replace(GOOD, steps_on_time=94), target)
    assert not within_target(replace(GOOD, finished=False), target)
    assert within_target(replace(GOOD, steps=0, steps_on_time=0), target)


def test_steps_of_a_chunk_share_its_time():
    assert count_steps([(1, 0.05), (4, 0.2), (4, 0.21), (1, 0.051)], tpot_s=0.05) == (10, 5)


def test_rates_are_per_hour_of_the_offered_span():
    judged = goodput([GOOD, replace(GOOD, finished=False)], 600, Target())
    assert (judged.per_hour, judged.offered_per_hour, judged.completed_share) == (6, 12, 0.5)
    assert goodput([], 600, Target()).completed_share is None


@given(st.lists(served, max_size=20))
def test_goodput_lies_between_nothing_and_the_offer(sessions):
    judged = goodput(sessions, 60, Target())
    assert 0 <= judged.within <= sum(session.finished for session in sessions) <= judged.offered
    assert judged.per_hour <= judged.offered_per_hour


@given(st.lists(served, max_size=20), st.floats(1, 8), st.floats(1, 8))
def test_a_looser_target_never_lowers_goodput(sessions, one, other):
    tight, loose = sorted((one, other))
    assert goodput(sessions, 60, Target(stretch=tight)).within <= goodput(sessions, 60, Target(stretch=loose)).within


@given(st.lists(served, max_size=20), served)
def test_a_failed_session_more_never_raises_the_share(sessions, failed):
    before = goodput([GOOD, *sessions], 60, Target())
    after = goodput([GOOD, *sessions, replace(failed, finished=False)], 60, Target())
    assert after.within == before.within
    assert after.completed_share < before.completed_share


@pytest.mark.parametrize("wrong", [{"stretch": 0.5}, {"tpot_s": 0.0}, {"steps_share": 1.5}])
def test_senseless_targets_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Target(**wrong)
    with pytest.raises(ValueError, match="span_s"):
        goodput([GOOD], 0, Target())
