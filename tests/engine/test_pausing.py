"""Sessions inside that outgrow the cache together: one is paused on a running stack, and comes back unharmed."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
from calls import at_rest, calls_inside, close, doors, gates, generate, new_session, prompt
from stack import BUDGET_TOKENS, Stack, running

from sglang_basin.config import BasinConfig
from sglang_basin.status import DoorFigures, Status

pytestmark = [pytest.mark.stack, pytest.mark.slow]

HOLD_LIMIT_S = 6.0
MOST = BUDGET_TOKENS - 150
"""A prompt that fits beside nobody without being over the budget itself."""


@pytest.fixture(scope="module")
def pausing() -> Iterator[Stack]:
    config = BasinConfig(
        admission="current",
        budget_tokens=BUDGET_TOKENS,
        adaptive_band=0.0,
        order="arrival",
        idle_timeout_s=30.0,
        idle_floor_s=30.0,
        hold_limit_s=HOLD_LIMIT_S,
    )
    with running("pausing", config) as stack:
        yield stack


def door(stack: Stack) -> DoorFigures:
    (one,) = doors(stack)
    return one


def decode(stack: Stack) -> Status:
    (one,) = gates(stack.decode_url)
    return one


def test_a_paused_session_waits_on_both_sides_and_goes_on_with_the_same_tokens(pausing: Stack) -> None:
    stack, small, large, alone = pausing, new_session(), new_session(), new_session()
    first, then = prompt(300, 401), prompt(420, 401)
    expected = [generate(stack, alone, ids).json()["output_ids"] for ids in (first, then)]
    close(stack, alone)

    assert generate(stack, small, first).json()["output_ids"] == expected[0]
    assert generate(stack, large, prompt(MOST, 402)).ok
    stack.until(lambda: door(stack).paused_sessions == 1, "the smaller session is paused")
    assert door(stack).live_sessions == 1
    stack.until(lambda: decode(stack).entered_sessions == 1, "decode has heard of it")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(generate, stack, small, then)
        stack.until(lambda: decode(stack).held_calls == door(stack).held_calls == 1, "its call waits")
        assert calls_inside(stack) == (0, 0)
        assert generate(stack, large, prompt(MOST, 402)).ok  # who is inside goes on
        close(stack, large)
        assert waiting.result(timeout=60).json()["output_ids"] == expected[1]

    stack.until(lambda: door(stack).paused_sessions == 0, "nobody is paused any more")
    assert generate(stack, large, prompt(MOST, 403)).ok
    stack.until(lambda: door(stack).paused_sessions == 1, "the smaller session is paused again")
    refused = generate(stack, small, prompt(440, 401))
    assert refused.status_code == 503
    close(stack, large)
    assert generate(stack, small, prompt(440, 401)).ok
    close(stack, small)
    stack.until(lambda: at_rest(stack), "the stack is at rest", 60)
    assert door(stack).paused_sessions == 0
