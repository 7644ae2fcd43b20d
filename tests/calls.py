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


def load(url: str) -> dict[str, Any]:
    """What SGLang says of one engine's queues and pool. Unlike the gauges on /metrics it is of this very moment."""
    return requests.get(url + "/v1/loads", timeout=20).json()["loads"][0]


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
    now = load(url)
    sending = now["disaggregation"]["prefill_inflight_queue_reqs"]
    return now["num_running_reqs"] + now["num_waiting_reqs"] + sending


def calls_inside(stack: Stack) -> tuple[int, int]:
    """Calls that run or wait anywhere in SGLang, on prefill and on decode."""
    return inside(stack.prefill_url), inside(stack.decode_url)


def gate(url: str) -> Status:
    """What Basin says of one engine at this very moment; its metrics are up to a second old."""
    (state,) = decode_report(requests.get(url + "/basin/status", timeout=20).content).states
    return state


def door(stack: Stack) -> DoorFigures:
    figures = gate(stack.prefill_url).door
    assert figures is not None
    return figures


def live_sessions(stack: Stack) -> int:
    return door(stack).live_sessions


def at_the_door(stack: Stack) -> int:
    """Sessions and calls that wait on either side."""
    here = door(stack)
    return here.queued_sessions + here.held_calls + gate(stack.decode_url).held_calls


def at_rest(stack: Stack) -> bool:
    """Whether the engines hold no call, no transfer and no session."""
    here = door(stack)
    return (
        here.live_sessions == here.working_set_tokens == here.reserved_tokens == 0
        and at_the_door(stack) == 0
        and calls_inside(stack) == (0, 0)
        and stack.metric("prefill", "basin_rooms") == 0
    )


def pools_are_whole(stack: Stack) -> bool:
    """Whether every token of both KV pools is free once the caches are flushed, which SGLang does only when idle."""

    def whole(url: str) -> bool:
        return requests.post(url + "/flush_cache", timeout=20).ok and load(url)["num_used_tokens"] == 0

    stack.until(lambda: whole(stack.prefill_url) and whole(stack.decode_url), "both KV pools are whole", 20)
    return True
