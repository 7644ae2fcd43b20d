"""Calls to a running stack, and what it looks like with nobody in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import requests
from stack import BUDGET_TOKENS, Stack

from sglang_basin.status import DoorFigures, Status, decode_report

FULL = BUDGET_TOKENS + 100
"""A prompt that is over the budget by itself: nobody enters beside it."""
SMALL = 300


def prompt(tokens: int, key: int = 0) -> list[int]:
    return [3 + (7 * i + 31 * key + i * i * (key + 1)) % 2000 for i in range(tokens)]


def new_session() -> str:
    return f"t-{uuid.uuid4().hex}"


def generate(
    stack: Stack, session: str | None, ids: list[int], *, tokens: int = 4, ends: bool = False, **extra: Any
) -> requests.Response:
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **extra,
    }
    if session is not None:
        body["session_id"] = session
    if ends:
        body["metadata"] = {"basin_session_end": "true"}
    return requests.post(stack.url + "/generate", json=body, timeout=60, stream=extra.get("stream", False))


def close(stack: Stack, session: str) -> None:
    assert requests.post(stack.prefill_url + "/close_session", json={"session_id": session}, timeout=20).ok


def chunks(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


def loads(url: str) -> list[dict[str, Any]]:
    """What SGLang says of one engine's queues and pool, of each data-parallel rank. Unlike the gauges on /metrics it is
    of this very moment."""
    return requests.get(url + "/v1/loads", timeout=20).json()["loads"]


def load(url: str) -> dict[str, Any]:
    """The same of an engine with one rank."""
    (only,) = loads(url)
    return only


def in_bootstrap(stack: Stack) -> int:
    return load(stack.prefill_url)["disaggregation"]["prefill_bootstrap_queue_reqs"]


def in_transfer(stack: Stack) -> int:
    """Calls that prefill has computed and not yet handed over."""
    return load(stack.prefill_url)["disaggregation"]["prefill_inflight_queue_reqs"]


def reserved(stack: Stack) -> int:
    """Calls that decode has reserved memory for and whose KV is yet to come."""
    return load(stack.decode_url)["disaggregation"]["decode_transfer_queue_reqs"]


def inside(url: str) -> int:
    """Calls that run or wait anywhere in one engine's SGLang."""
    return sum(
        now["num_running_reqs"] + now["num_waiting_reqs"] + now["disaggregation"]["prefill_inflight_queue_reqs"]
        for now in loads(url)
    )


def calls_inside(stack: Stack) -> tuple[int, int]:
    """Calls that run or wait anywhere in SGLang, on prefill and on decode."""
    return inside(stack.prefill_url), inside(stack.decode_url)


def gates(url: str) -> list[Status]:
    """What Basin says of one engine, of each of its data-parallel ranks, at this very moment or half a second ago; its
    metrics are up to a second old."""
    return decode_report(requests.get(url + "/basin/status", timeout=20).content).states


def doors(stack: Stack) -> list[DoorFigures]:
    figures = [state.door for state in gates(stack.prefill_url) if state.door is not None]
    assert figures
    return figures


def live_sessions(stack: Stack) -> int:
    return sum(door.live_sessions for door in doors(stack))


def at_the_door(stack: Stack) -> int:
    """Sessions and calls that wait on either side."""
    waiting = sum(door.queued_sessions + door.held_calls for door in doors(stack))
    return waiting + sum(state.held_calls for state in gates(stack.decode_url))


def at_rest(stack: Stack) -> bool:
    """Whether the engines hold no call, no transfer and no session."""
    return (
        all(door.live_sessions == door.working_set_tokens == door.reserved_tokens == 0 for door in doors(stack))
        and at_the_door(stack) == 0
        and calls_inside(stack) == (0, 0)
        and stack.metric("prefill", "basin_rooms") == 0
    )


def pools_are_whole(stack: Stack) -> bool:
    """Whether every token of both KV pools is free once the caches are flushed, which SGLang does only when idle."""

    def whole(url: str) -> bool:
        flushed = requests.post(url + "/flush_cache", timeout=20).ok
        return flushed and all(now["num_used_tokens"] == 0 for now in loads(url))

    stack.until(lambda: whole(stack.prefill_url) and whole(stack.decode_url), "both KV pools are whole", 20)
    return True
