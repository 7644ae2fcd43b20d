"""The pure parts: when a pull pays, and when a peer is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.lending.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from sglang_basin.lending.worth import FRESH_S, TRIES, Inflow, Line, Link, worth


def line(fixed_s: float, slope_s: float, sizes: list[float]) -> Line:
    fitted = Line()
    for size in sizes:
        fitted.note(size, fixed_s + slope_s * size)
    return fitted


@given(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.lists(st.integers(1, 10_000), min_size=2, unique=True))
def test_a_line_finds_what_made_the_measurements(fixed_s: float, slope_s: float, sizes: list[int]) -> None:
    fitted = line(fixed_s, slope_s, [float(size) for size in sizes * 3])
    assert fitted.slope_s == pytest.approx(slope_s, rel=0.02, abs=1e-7)
    for size in sizes:
        assert fitted.seconds(size) == pytest.approx(fixed_s + slope_s * size, rel=0.02, abs=1e-5)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 10)), max_size=30))
def test_a_line_never_promises_negative_time(measured: list[tuple[int, float]]) -> None:
    fitted = Line()
    for size, seconds in measured:
        fitted.note(size, seconds)
    assert fitted.slope_s >= 0
    assert fitted.fixed_s >= 0


def test_one_size_of_measurement_says_what_a_unit_takes_overall() -> None:
    assert line(0.5, 0.0, [100.0] * 5).slope_s == pytest.approx(0.005)


def test_old_measurements_fade() -> None:
    fitted = line(0.0, 1e-3, [100.0, 200.0] * 50)
    for size in [100.0, 200.0] * 300:
        fitted.note(size, 1e-5 * size)
    assert fitted.slope_s == pytest.approx(1e-5, rel=0.01)


def test_a_pull_is_tried_while_nothing_is_known_and_then_compared() -> None:
    computing = line(0.01, 1e-4, [100.0, 1000.0])
    fast, slow = Link(), Link()
    assert worth(1000, 10**6, fast, computing, 0.0).pull
    fast.note(10**5, 3.0, 0.0)  # the first read opens the connection
    slow.note(10**5, 3.0, 0.0)
    for read_bytes in (10**5, 10**6, 10**5, 10**6)[: TRIES - 1]:
        assert worth(1000, 10**6, slow, computing, 1.0).pull, "too few reads to judge by"
        fast.note(read_bytes, 0.001 + read_bytes * 1e-9, 0.0)
        slow.note(read_bytes, 0.001 + read_bytes * 1e-6, 0.0)
    assert worth(1000, 10**6, fast, Line(), 1.0).pull
    paid = worth(1000, 10**6, fast, computing, 1.0)
    assert paid.pull
    assert paid.compute_s == pytest.approx(0.1)
    assert paid.pull_s == pytest.approx(0.002)
    assert str(paid) == "reading takes 2.0 ms, computing 100.0 ms"
    assert not worth(1000, 10**6, slow, computing, 1.0).pull
    assert not worth(3, 10**4, fast, computing, 1.0).pull, "the fixed cost of a read outweighs three tokens"
    assert worth(1000, 10**6, slow, computing, FRESH_S + 1.0).pull, "a link is tried again now and then"


def test_small_reads_say_nothing_about_large_ones() -> None:
    """Seen on a busy machine: one read of two tokens took 12 ms, and no session got its 700 tokens back after it."""
    computing, link = line(0.01, 1e-4, [100.0, 1000.0]), Link()
    for read_bytes in (2048, 2048, 3072, 2048, 2048, 3072):
        link.note(read_bytes, 0.012 + 1e-6 * read_bytes, 0.0)
    assert not worth(2, 2048, link, computing, 1.0).pull
    assert worth(700, 700 * 1024, link, computing, 1.0).pull


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_breaker_opens_on_a_failure_and_closes_on_a_success(outcomes: list[bool]) -> None:
    breaker, now_s, in_a_row = Breaker(), 0.0, 0
    for success in outcomes:
        waited_s = 0.0
        while not breaker.allows(now_s):
            now_s += FIRST_PAUSE_S / 4
            waited_s += FIRST_PAUSE_S / 4
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, in_a_row - 1)) if in_a_row else 0.0
        assert waited_s == pytest.approx(longest_s, abs=FIRST_PAUSE_S / 2)
        breaker.begin()
        if success:
            breaker.succeeded()
            in_a_row = 0
            assert breaker.allows(now_s)
        else:
            breaker.failed(now_s)
            in_a_row += 1
            assert not breaker.allows(now_s)


def test_one_probe_at_a_time() -> None:
    breaker = Breaker()
    breaker.begin()
    breaker.failed(0.0)
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.begin()
    assert not breaker.allows(FIRST_PAUSE_S + 100)
    breaker.succeeded()
    assert breaker.allows(FIRST_PAUSE_S + 100)


@given(
    st.floats(1e2, 1e7),
    st.floats(0, 0.01),
    st.integers(1, 8),
    st.lists(st.integers(100, 10_000), min_size=TRIES + 1, max_size=40),
)
def test_reads_side_by_side_share_the_link_and_its_rate_is_found(
    rate: float, fixed_s: float, at_once: int, sizes: list[int]
) -> None:
    """`at_once` reads begin together and end one after the other, as the link brings them."""
    inflow, now_s = Inflow(), 0.0
    for first in range(0, len(sizes), at_once):
        began_s, now_s = now_s, now_s + fixed_s
        for size in sizes[first : first + at_once]:
            now_s += size / rate
            inflow.note(size, began_s, now_s)
        now_s += 1.0  # nothing is read
    found = inflow.tokens_per_s
    assert found is not None
    overall = sum(sizes) / (sum(sizes) / rate + fixed_s * len(sizes))
    assert 0.3 * overall <= found
    if fixed_s == 0.0:
        assert found == pytest.approx(rate, rel=0.01)


def test_how_fast_kv_comes_in_is_unknown_at_first() -> None:
    inflow = Inflow()
    for number in range(TRIES):
        assert inflow.tokens_per_s is None
        inflow.note(1000, float(number), number + 0.5)
    assert inflow.tokens_per_s == pytest.approx(2000)
