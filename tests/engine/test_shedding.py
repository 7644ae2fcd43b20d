"""A session that is dropped while more arrive than ever leave, on a running stack: both its legs are freed."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator

import pytest
from calls import at_rest, calls_inside, close, doors, gates, generate, new_session, pools_are_whole, prompt
from stack import BUDGET_TOKENS, Stack, running

from sglang_basin.config import BasinConfig

pytestmark = pytest.mark.stack

WINDOW_S, HEAD_WAIT_S = 15.0, 2.0


@pytest.fixture(scope="module")
def shedding() -> Iterator[Stack]:
    config = BasinConfig(
        budget_tokens=BUDGET_TOKENS,
        pausing="off",
        order="arrival",
        idle_timeout_s=60.0,
        idle_floor_s=60.0,
        hold_limit_s=55.0,
        shed_wait_s=HEAD_WAIT_S,
        shed_window_s=WINDOW_S,
    )
    with running("shedding", config) as stack:
        yield stack


def waiting(stack: Stack) -> tuple[int, int]:
    """Sessions that wait on prefill, and their calls that wait on decode."""
    return doors(stack)[0].queued_sessions, gates(stack.decode_url)[0].held_calls


def test_the_last_one_is_dropped_on_both_sides_and_the_first_one_goes_on(shedding: Stack) -> None:
    stack, (opening, inside, head, last) = shedding, (new_session() for _ in range(4))
    assert generate(stack, opening, prompt(20, 501)).ok  # arrivals are counted from here on
    close(stack, opening)
    time.sleep(WINDOW_S)
    assert generate(stack, inside, prompt(BUDGET_TOKENS + 100, 502)).ok
    with concurrent.futures.ThreadPoolExecutor() as pool:
        began_s = time.monotonic()
        first = pool.submit(generate, stack, head, prompt(300, 503))
        stack.until(lambda: waiting(stack) == (1, 1), "the head waits on both sides")
        dropped = pool.submit(generate, stack, last, prompt(300, 504)).result(timeout=50)
        assert time.monotonic() - began_s >= HEAD_WAIT_S
        assert dropped.status_code == 503
        assert "this new session was dropped" in dropped.text
        close(stack, inside)
        assert first.result(timeout=50).ok, "who comes first is not dropped"
    assert stack.metric("prefill", "basin_decisions_total", decision="refuse", reason="shed") == 1
    assert waiting(stack) == calls_inside(stack) == (0, 0)
    close(stack, head)
    stack.until(lambda: at_rest(stack), "the stack is at rest", 60)
    assert pools_are_whole(stack)
