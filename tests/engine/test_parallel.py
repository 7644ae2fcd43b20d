"""Tensor parallelism, two ranks on each side over gloo: the gate sits on rank 0, and all ranks do what it decides.

Ranks that differed in what they run, or in what order, would compute batches of different shapes: the collectives would
hang, or the tokens come out wrong. So equal tokens under load and holds that end are the proof.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator

import pytest
import requests
from calls import at_rest, calls_inside, close, generate, new_session, pools_are_whole, prompt
from stack import BUDGET_TOKENS, Stack, running

from sglang_basin.config import BasinConfig

pytestmark = [pytest.mark.stack, pytest.mark.slow]

HOLD_LIMIT_S = 8.0
WAITING = 6


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Stack]:
    config = BasinConfig(
        admission="current",
        budget_tokens=BUDGET_TOKENS,
        pausing="off",
        idle_timeout_s=15.0,
        hold_limit_s=HOLD_LIMIT_S,
        ticket_grace_s=2.0,
    )
    with running("tp", config, arguments=("--tp-size", "2")) as stack:
        yield stack


def tokens(response: requests.Response) -> list[int]:
    assert response.ok, response.text
    return response.json()["output_ids"]


def alone(stack: Stack, ids: list[int]) -> list[int]:
    """The answer's tokens of a session with one call, with nobody beside it."""
    session = new_session()
    answer = tokens(generate(stack, session, ids, tokens=8))
    close(stack, session)
    return answer


def test_ranks_hold_admit_and_refuse_alike(two_ranks: Stack) -> None:
    stack = two_ranks
    prompts = [prompt(150 + 20 * number, 200 + number) for number in range(WAITING)]
    expected = [alone(stack, ids) for ids in prompts]

    blocker = new_session()
    assert generate(stack, blocker, prompt(BUDGET_TOKENS + 100, 210)).ok
    sessions = [new_session() for _ in prompts]
    with concurrent.futures.ThreadPoolExecutor(WAITING + 2) as pool:
        waiting = [
            pool.submit(generate, stack, session, ids, tokens=8) for session, ids in zip(sessions, prompts, strict=True)
        ]
        stack.until(lambda: stack.metric("prefill", "basin_held_calls") == WAITING, "held on prefill")
        stack.until(lambda: stack.metric("decode", "basin_held_calls") == WAITING, "held on decode")
        assert calls_inside(stack) == (0, 0)
        close(stack, blocker)  # all enter in one turn and run in the same batches
        assert [tokens(call.result(timeout=60)) for call in waiting] == expected
    for session in sessions:
        close(stack, session)

    assert generate(stack, blocker, prompt(BUDGET_TOKENS + 100, 210)).ok
    start = time.monotonic()
    refused = generate(stack, new_session(), prompts[0])
    assert refused.status_code == 503
    assert HOLD_LIMIT_S - 1 < time.monotonic() - start < HOLD_LIMIT_S + 10
    close(stack, blocker)
    assert [alone(stack, ids) for ids in prompts] == expected
    stack.until(lambda: at_rest(stack), "the stack is at rest", 60)
    assert pools_are_whole(stack)
    for side in ("prefill", "decode"):
        assert stack.metric(side, "basin_faults_total") == 0
