"""The idle time-out learned from tool times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.policy.idle import FACTOR, LEAST_PAUSES, QUANTILE, IdleTimeout, MeanPause


def seen(pauses_s: list[float], longest_s: float = 600.0, shortest_s: float | None = 60.0) -> IdleTimeout:
    idle = IdleTimeout(longest_s, shortest_s)
    for pause_s in pauses_s:
        idle.resumed(pause_s)
    return idle


def test_it_is_the_longest_until_enough_pauses_were_seen() -> None:
    assert seen([1.0] * (LEAST_PAUSES - 1)).timeout_s == 600.0
    assert seen([1.0] * LEAST_PAUSES).timeout_s == 60.0


def test_without_a_floor_it_stays_what_the_user_set() -> None:
    assert seen([1.0] * LEAST_PAUSES, shortest_s=None).timeout_s == 600.0


def test_it_is_a_multiple_of_the_high_quantile() -> None:
    assert seen([50.0] * LEAST_PAUSES).timeout_s == FACTOR * 50.0


def test_sessions_given_up_too_early_make_it_longer() -> None:
    idle = seen([30.0] * LEAST_PAUSES)
    assert idle.timeout_s == FACTOR * 30.0
    for number in range(10):
        idle.given_up(f"s{number}", 1_000.0)
        idle.returned(f"s{number}", 1_150.0)
    assert idle.timeout_s == FACTOR * 150.0


def test_bounds_in_the_wrong_order_are_an_error_that_names_the_option() -> None:
    with pytest.raises(ValueError, match="idle_floor_s"):
        IdleTimeout(10.0, 20.0)


@given(st.lists(st.floats(0, 1e5), max_size=400), st.floats(1, 100), st.floats(100, 1_000))
@settings(max_examples=50, deadline=None)
def test_it_stays_within_its_bounds(pauses_s: list[float], shortest_s: float, longest_s: float) -> None:
    assert shortest_s <= seen(pauses_s, longest_s, shortest_s).timeout_s <= longest_s


@given(st.lists(st.floats(0, 1_000), min_size=5, max_size=60), st.floats(0, 300))
def test_it_follows_the_quantile_of_the_pauses_remembered(pauses_s: list[float], shortest_s: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_basin.policy.idle.LEAST_PAUSES", 5)
        patch.setattr("sglang_basin.policy.idle.MEMORY_PAUSES", 20)
        timeout_s = seen(pauses_s, shortest_s=shortest_s).timeout_s
    recent_s = sorted(pauses_s[-20:])
    high_s = recent_s[int(QUANTILE * (len(recent_s) - 1))]
    assert timeout_s == min(600.0, max(shortest_s, FACTOR * high_s))


def test_the_mean_pause_follows_the_latest_ones() -> None:
    pauses = MeanPause()
    assert pauses.mean_s is None
    pauses.note(4.0)
    pauses.note(2.0)
    assert pauses.mean_s == 3.0
    for _ in range(2_000):
        pauses.note(10.0)
    assert pauses.mean_s is not None
    assert 9.9 < pauses.mean_s <= 10.0
