"""Calls to a running stack, and what it looks like with nobody in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import requests
from stack import BUDGET_TOKENS, Stack

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


def at_rest(stack: Stack) -> bool:
    gauges = ("live_sessions", "queued_sessions", "held_calls", "working_set_tokens", "reserved_tokens", "rooms")
    queues = (
        "num_queue_reqs",
        "num_running_reqs",
        "num_prefill_bootstrap_queue_reqs",
        "num_prefill_inflight_queue_reqs",
    )
    decode_queues = (
        "num_queue_reqs",
        "num_running_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
    )
    return (
        all(stack.metric("prefill", f"basin_{name}") == 0 for name in gauges)
        and all(stack.metric("prefill", f"sglang:{name}") == 0 for name in queues)
        and all(stack.metric("decode", f"sglang:{name}") == 0 for name in decode_queues)
        and stack.metric("decode", "basin_held_calls") == 0
    )
