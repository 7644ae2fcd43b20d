"""Several ranks in one server, over gloo: each data-parallel rank has a door of its own, and within one all
tensor-parallel ranks do what its gate decides.

Tensor-parallel ranks that differed in what they run, or in what order, would compute batches of different shapes: the
collectives would hang, or the tokens come out wrong. So stock's tokens under load and holds that end are the proof.
"""

from __future__ import annotations

import concurrent.futures
import io
import json
import time
from collections.abc import Iterator

import pytest
import requests
from calls import at_rest, calls_inside, close, gates, generate, new_session, pools_are_whole, prompt
from rich.console import Console
from stack import BUDGET_TOKENS, LOGS, Stack, running

from sglang_basin import status, top
from sglang_basin.config import BasinConfig
from sglang_basin.policy.decisions import Reason

pytestmark = [pytest.mark.stack, pytest.mark.slow]

HOLD_LIMIT_S = 8.0
WAITING = 6
PROMPTS = [prompt(150 + 20 * number, 200 + number) for number in range(WAITING)]
FULL = BUDGET_TOKENS + 100
TENSOR_PARALLEL = ("--tp-size", "2")


def config(name: str) -> BasinConfig:
    return BasinConfig(
        admission="current",
        budget_tokens=BUDGET_TOKENS,
        pausing="off",
        adaptive_band=0.0,
        idle_timeout_s=30.0,
        hold_limit_s=HOLD_LIMIT_S,
        ticket_grace_s=6.0,
        decision_log=str(LOGS / name / "decisions.jsonl"),
        session_log=str(LOGS / name / "sessions.jsonl"),
        record=str(LOGS / name / "record.jsonl"),
    )


def tokens(response: requests.Response) -> list[int]:
    assert response.ok, response.text
    return response.json()["output_ids"]


def alone(stack: Stack, ids: list[int]) -> list[int]:
    """The answer's tokens of a session with one call, with nobody beside it."""
    session = new_session()
    answer = tokens(generate(stack, session, ids, tokens=8))
    close(stack, session)
    return answer


# ---- Tensor parallelism --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Stock's greedy answers to `PROMPTS`, with two tensor-parallel ranks on each side too."""
    with running("tp-stock", None, arguments=TENSOR_PARALLEL) as stack:
        return [tokens(generate(stack, None, ids, tokens=8)) for ids in PROMPTS]


@pytest.fixture(scope="module")
def two_ranks(expected: list[list[int]]) -> Iterator[Stack]:
    with running("tp", config("tp"), arguments=TENSOR_PARALLEL) as stack:
        yield stack


def test_ranks_hold_admit_and_refuse_alike(two_ranks: Stack, expected: list[list[int]]) -> None:
    stack = two_ranks
    assert [alone(stack, ids) for ids in PROMPTS] == expected

    blocker = new_session()
    assert generate(stack, blocker, prompt(FULL, 210)).ok
    sessions = [new_session() for _ in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(WAITING + 2) as pool:
        waiting = [
            pool.submit(generate, stack, session, ids, tokens=8) for session, ids in zip(sessions, PROMPTS, strict=True)
        ]
        stack.until(lambda: stack.metric("prefill", "basin_held_calls") == WAITING, "held on prefill")
        stack.until(lambda: stack.metric("decode", "basin_held_calls") == WAITING, "held on decode")
        assert calls_inside(stack) == (0, 0)
        close(stack, blocker)  # all enter in one turn and run in the same batches
        assert [tokens(call.result(timeout=60)) for call in waiting] == expected
    for session in sessions:
        close(stack, session)

    assert generate(stack, blocker, prompt(FULL, 210)).ok
    start = time.monotonic()
    refused = generate(stack, new_session(), PROMPTS[0])
    assert refused.status_code == 503
    assert HOLD_LIMIT_S - 1 < time.monotonic() - start < HOLD_LIMIT_S + 10
    close(stack, blocker)
    assert [alone(stack, ids) for ids in PROMPTS] == expected
    assert_clean(stack)


# ---- Data parallelism ----------------------------------------------------------------------------------------------


REPLICAS = ("--dp-size", "2")


@pytest.fixture(scope="module", params=[2, 1], ids=["replicas", "one-decode"])
def two_doors(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Two data-parallel ranks on prefill, and two or one on decode."""
    name = f"dp-{request.param}"
    for file in (LOGS / name).glob("*.jsonl*"):
        file.unlink()
    decode = REPLICAS if request.param == 2 else ()
    with running(name, config(name), prefill_arguments=REPLICAS, decode_arguments=decode) as stack:
        yield stack


def ranks(stack: Stack) -> list[status.Status]:
    """Prefill's ranks, as /basin/status tells of them."""
    time.sleep(0.6)  # an answer of the last half second is given again
    return gates(stack.prefill_url)


def rank_of(stack: Stack, session: str) -> int:
    """The rank whose door knows the session; no other does."""
    (found,) = [
        state.dp_rank
        for state in ranks(stack)
        if state.door is not None and any(one.session_id == session for one in state.door.sessions)
    ]
    return found


def held(stack: Stack) -> list[int]:
    return [state.held_calls for state in ranks(stack)]


def names(stack: Stack, *, each: int) -> dict[int, list[str]]:
    """Names of sessions that have ended, so many for each rank: that is where their next calls go."""
    found: dict[int, list[str]] = {0: [], 1: []}
    for _ in range(20 * each):
        session = new_session()
        assert generate(stack, session, prompt(40, 219)).ok
        found[rank_of(stack, session)].append(session)
        close(stack, session)
        if min(map(len, found.values())) >= each:
            return found
    raise AssertionError(f"new sessions go to one rank: {found}")


def enter_each(stack: Stack, ids: list[int]) -> dict[int, str]:
    """A session on each rank, by rank."""
    sessions = {rank: of_rank[0] for rank, of_rank in names(stack, each=1).items()}
    for rank, session in sessions.items():
        assert generate(stack, session, ids).ok
        assert rank_of(stack, session) == rank
    return sessions


def assert_clean(stack: Stack) -> None:
    stack.until(lambda: at_rest(stack), "the stack is at rest", 60)
    assert pools_are_whole(stack)
    for side in ("prefill", "decode"):
        assert stack.metric(side, "basin_faults_total") == 0
        assert stack.metric(side, "basin_gate_up") >= 1
    assert stack.metric("decode", "basin_decisions_total", reason=Reason.NO_ANSWER.value) == 0


def test_sessions_stay_on_their_ranks(two_doors: Stack) -> None:
    stack = two_doors
    sessions = [new_session() for _ in range(4)]
    contexts = [prompt(200, 220 + number) for number in range(4)]
    seen = []
    for turn in range(4):
        for number, session in enumerate(sessions):
            response = generate(stack, session, contexts[number], tokens=8)
            output = tokens(response)
            if turn:
                cached = response.json()["meta_info"]["cached_tokens"]
                assert cached >= len(contexts[number]) - 64, f"turn {turn} of session {number} on another rank"
            contexts[number] = [*contexts[number], *output, *prompt(20, 230 + turn)]
        if turn in (0, 3):
            seen.append([rank_of(stack, session) for session in sessions])
    assert seen[0] == seen[1]
    assert set(seen[0]) == {0, 1}
    for session in sessions:
        close(stack, session)

    unnamed = [prompt(300, 240 + number) for number in range(4)]
    for turn in range(3):
        for number, context in enumerate(unnamed):
            response = generate(stack, None, context, tokens=8)
            cached = response.json()["meta_info"]["cached_tokens"]
            assert turn == 0 or cached >= len(context) - 64, f"turn {turn} of conversation {number} on another rank"
            unnamed[number] = [*context, *tokens(response), *prompt(20, 250 + turn)]
    inferred = [one.session_id for state in ranks(stack) if state.door for one in state.door.sessions]
    assert len(inferred) == 4
    for session in inferred:
        close(stack, session)
    assert_clean(stack)


def test_calls_of_nobody_go_where_sglang_sends_them(two_doors: Stack) -> None:
    """Too short to tell anything by: no door judges them, no gate asks, and decode learns the rank in SGLang's way."""
    stack = two_doors
    answers = [tokens(generate(stack, None, prompt(20, 255), tokens=8)) for _ in range(8)]
    assert answers == answers[:1] * 8
    assert_clean(stack)


def test_each_door_holds_refuses_and_keeps_places_by_itself(two_doors: Stack) -> None:
    stack = two_doors
    small = prompt(300, 260)
    answer = alone(stack, small)
    on = {rank: of_rank[0] for rank, of_rank in names(stack, each=1).items()}
    blockers = enter_each(stack, prompt(FULL, 261))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = {rank: pool.submit(generate, stack, session, small, tokens=8) for rank, session in on.items()}
        stack.until(lambda: held(stack) == [1, 1], "a call waits at each door")
        stack.until(lambda: stack.metric("decode", "basin_held_calls") == 2, "and on decode")
        assert calls_inside(stack) == (0, 0)
        assert [rank_of(stack, on[rank]) for rank in (0, 1)] == [0, 1]
        close(stack, blockers[1])
        assert tokens(waiting[1].result(timeout=30)) == answer
        assert held(stack) == [1, 0]
        refused = waiting[0].result(timeout=HOLD_LIMIT_S + 20)
        assert refused.status_code == 503
        assert 0 < int(refused.headers.get("Retry-After", 1)) <= 60
        first, second = ranks(stack)
        assert first.door is not None
        assert second.door is not None
        assert (first.door.tickets, second.door.tickets) == (1, 0)

        again = pool.submit(generate, stack, on[0], small, tokens=8)  # it comes back to its place, on its rank
        stack.until(lambda: held(stack) == [1, 0], "it waits again")
        close(stack, blockers[0])
        assert tokens(again.result(timeout=30)) == answer
    for session in on.values():
        close(stack, session)
    assert_clean(stack)


def test_a_client_that_leaves_is_forgotten_at_either_door(two_doors: Stack) -> None:
    stack = two_doors
    on = names(stack, each=1)
    blockers = enter_each(stack, prompt(FULL, 262))
    body = {"input_ids": prompt(300, 263), "sampling_params": {"max_new_tokens": 4}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for of_rank in on.values():
            call = {**body, "session_id": of_rank[0]}
            pool.submit(requests.post, stack.url + "/generate", json=call, timeout=4)
        stack.until(lambda: held(stack) == [1, 1], "a call waits at each door")
        stack.until(lambda: held(stack) == [0, 0], "both clients have left", 20)
    for session in blockers.values():
        close(stack, session)
    assert_clean(stack)


def test_status_metrics_and_files_are_each_ranks_own(two_doors: Stack) -> None:
    stack = two_doors
    sessions = enter_each(stack, prompt(400, 270))
    states = ranks(stack)
    assert [(state.dp_rank, state.dp_ranks, state.gate) for state in states] == [(0, 2, "on"), (1, 2, "on")]
    addresses = {state.control.address for state in states if state.control is not None}
    assert len(addresses) == 2
    assert [state.door.budget_tokens for state in states if state.door is not None] == [BUDGET_TOKENS] * 2
    for rank in ("0", "1"):
        assert stack.metric("prefill", "basin_budget_tokens", dp_rank=rank) == BUDGET_TOKENS
        stack.until(
            lambda rank=rank: stack.metric("prefill", "basin_live_sessions", dp_rank=rank) == 1, f"on rank {rank}"
        )
    shown = io.StringIO()
    assert top.main(["--once", stack.prefill_url], Console(file=shown, width=120)) == 0
    for rank in (0, 1):
        assert f"data-parallel rank {rank} of 2" in shown.getvalue()
    for session in sessions.values():
        close(stack, session)
    assert_clean(stack)

    log = stack.node.plan.engines[0].log
    assert log is not None
    folder = log.parent
    for name in ("decisions.jsonl", "record.jsonl", "sessions.jsonl"):
        files = [folder / name, folder / f"{name}.dp1"]
        stack.until(
            lambda files=files: all(file.exists() and file.stat().st_size for file in files), f"both {name}", 20
        )
    told = [
        {json.loads(line).get("session") for line in (folder / name).read_text(encoding="utf-8").splitlines()} - {None}
        for name in ("decisions.jsonl", "decisions.jsonl.dp1")
    ]
    assert all(told)
    assert not told[0] & told[1], "a session was judged by both doors"
