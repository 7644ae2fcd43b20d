import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.replay.arrivals import ArrivalError, ArrivalProfile, Surge, arrival_times
from sglang_basin.replay.quantities import (
    QuantityError,
    duration_s,
    format_duration,
    positive_int,
    rate_per_s,
    scale_factor,
    surge_extra,
    token_range,
)

PROCESSES = st.sampled_from(["poisson", "fixed"])


@st.composite
def profiles(draw, process=PROCESSES):
    duration = draw(st.floats(1, 2000))
    surge = None
    if draw(st.booleans()):
        from_s = draw(st.floats(0, duration * 0.8))
        to_s = draw(st.floats(from_s + duration * 0.05, duration))
        surge = Surge(draw(st.floats(-1, 5)), from_s, to_s)
    return ArrivalProfile(
        rate_per_s=draw(st.floats(0.01, 1)),
        duration_s=duration,
        surge=surge,
        tail_s=draw(st.floats(0, 100)),
        process=draw(process),
    )


@given(profiles(), st.integers(0, 2**40))
def test_arrivals_are_ordered_inside_the_run_and_depend_on_the_seed_alone(profile, seed):
    times = arrival_times(profile, seed)
    assert times == sorted(times)
    assert all(0 <= time_s < profile.end_s for time_s in times)
    assert times == arrival_times(profile, seed)


@given(profiles(process=st.just("fixed")), st.floats(0, 1), st.floats(0, 1))
def test_even_pace_puts_the_expected_number_into_every_window(profile, one, other):
    from_s, to_s = sorted((one * profile.end_s, other * profile.end_s))
    times = arrival_times(profile, seed=0)
    inside = sum(from_s <= time_s < to_s for time_s in times)
    assert abs(inside - (profile.expected(to_s) - profile.expected(from_s))) <= 1 + 1e-6


@given(profiles(), st.floats(0, 1))
def test_time_of_inverts_expected(profile, share):
    expected = share * profile.expected(profile.end_s)
    time_s = profile.time_of(expected)
    if time_s < math.inf:
        assert profile.expected(time_s) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_poisson_counts_have_the_rate_of_each_stretch():
    profile = ArrivalProfile(rate_per_s=1.0, duration_s=6000, surge=Surge(2.0, 2000, 4000))
    times = arrival_times(profile, seed=7)
    counts = [sum(start <= time_s < start + 2000 for time_s in times) for start in (0, 2000, 4000)]
    for count, expected in zip(counts, (2000, 6000, 2000), strict=True):
        assert abs(count - expected) < 5 * math.sqrt(expected)


def test_before_the_surge_arrivals_are_those_of_a_run_without_one():
    quiet = ArrivalProfile(rate_per_s=0.5, duration_s=400)
    surge = ArrivalProfile(rate_per_s=0.5, duration_s=400, surge=Surge(2.5, 100, 200))
    before = [time_s for time_s in arrival_times(surge, 3) if time_s < 100]
    assert before == [time_s for time_s in arrival_times(quiet, 3) if time_s < 100]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: ArrivalProfile(rate_per_s=-1, duration_s=10), "rate"),
        (lambda: ArrivalProfile(rate_per_s=1, duration_s=0), "duration"),
        (lambda: ArrivalProfile(rate_per_s=1, duration_s=10, tail_s=-1), "tail"),
        (lambda: ArrivalProfile(rate_per_s=1, duration_s=100, surge=Surge(1, 50, 150)), "ends after the run"),
        (lambda: Surge(1, 20, 10), "from < to"),
        (lambda: Surge(-2, 0, 10), "leaves no rate"),
        (lambda: ArrivalProfile(rate_per_s=1, duration_s=10, process="bursty"), "process"),
    ],
)
def test_senseless_profiles_are_refused_by_name(wrong, named):
    with pytest.raises(ArrivalError, match=named):
        wrong()


def test_quantities_read_what_people_write():
    assert duration_s("90") == duration_s("90s") == duration_s("1.5m") == 90
    assert duration_s("500ms") == 0.5
    assert duration_s("1h") == 3600
    assert rate_per_s("12/min") == pytest.approx(0.2)
    assert rate_per_s("720/h") == pytest.approx(0.2)
    assert rate_per_s("0.2/s") == 0.2
    assert surge_extra("+250%") == 2.5
    assert surge_extra("-40%") == pytest.approx(-0.4)
    assert scale_factor("1/20") == scale_factor("0.05") == 0.05
    assert token_range("16:512") == (16, 512)
    assert positive_int("3") == 3
    assert [format_duration(seconds) for seconds in (0, 45, 90, 420, 3661)] == ["0s", "45s", "1m30s", "7m", "1h1m1s"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (duration_s, "-3s"),
        (duration_s, "7 parsecs"),
        (duration_s, ""),
        (rate_per_s, "-11/min"),
        (rate_per_s, "0/min"),
        (rate_per_s, "11"),
        (rate_per_s, "11/fortnight"),
        (surge_extra, "250"),
        (surge_extra, "-150%"),
        (scale_factor, "0"),
        (scale_factor, "1/0"),
        (scale_factor, "-1"),
        (scale_factor, "nan"),
        (token_range, "512:16"),
        (token_range, "16"),
        (positive_int, "0"),
        (positive_int, "1.5"),
    ],
)
def test_unreadable_quantities_are_quoted(parse, text):
    with pytest.raises(QuantityError, match=r"write|whole number|cannot fall") as caught:
        parse(text)
    assert repr(text) in str(caught.value)
