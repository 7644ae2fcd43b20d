"""Identity on the real stack, at every endpoint: headers straight at an engine, body fields through the router."""

from __future__ import annotations

import random
from typing import Any

import pytest
import requests
from calls import close, new_session, prompt
from stack import Stack

pytestmark = pytest.mark.stack

TEXT = "Where does the water go? " * 8
MESSAGES = [{"role": "user", "content": TEXT}]
PARAMETERS = {"type": "object", "properties": {}}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": prompt(60), "sampling_params": {"max_new_tokens": 3}},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 3,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
    },
    "/v1/completions": {"prompt": TEXT, "max_tokens": 3},
    "/v1/responses": {
        "input": TEXT,
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 3,
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    },
}


def alone() -> dict[str, Any]:
    """Fields that make a prefill engine answer by itself."""
    return {"bootstrap_host": "2.2.2.2", "bootstrap_room": random.getrandbits(62)}


def post(stack: Stack, url: str, path: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
    body = {**BODIES[path], **fields}
    if path != "/generate":
        (model,) = requests.get(stack.url + "/v1/models", timeout=20).json()["data"]
        body["model"] = model["id"]
    response = requests.post(url + path, json=body, headers=headers, timeout=60)
    assert response.ok, response.text


@pytest.mark.parametrize("path", BODIES)
def test_headers_name_the_session_on_every_endpoint(empty: Stack, path: str) -> None:
    session = new_session()
    before = empty.metric("prefill", "basin_identity_total", source="x-session-id")
    post(empty, empty.prefill_url, path, {"x-session-id": session}, **alone())
    assert empty.metric("prefill", "basin_identity_total", source="x-session-id") == before + 1
    empty.until(lambda: empty.metric("prefill", "basin_live_sessions") == 1, "the session is live")
    close(empty, session)


@pytest.mark.parametrize("path", BODIES)
def test_body_fields_name_and_end_the_session_through_the_router(empty: Stack, path: str) -> None:
    user_id = f"user_0_account__session_{new_session()}"
    ends = {"basin_session_end": "true"}
    sources = {
        "body.session_id": {"session_id": new_session(), "metadata": ends},
        "body.prompt_cache_key": {"prompt_cache_key": new_session(), "metadata": ends},
        "body.metadata.user_id": {"metadata": {"user_id": user_id, **ends}},
    }
    if path == "/v1/responses":
        del sources["body.session_id"]  # the router refuses fields there that OpenAI does not have
    for source, fields in sources.items():
        before = {side: empty.metric(side, "basin_identity_total", source=source) for side in ("prefill", "decode")}
        post(empty, empty.url, path, **fields)
        for side, count in before.items():
            assert empty.metric(side, "basin_identity_total", source=source) == count + 1


def test_a_sub_agent_is_live_beside_its_parent(empty: Stack) -> None:
    session = new_session()
    parent = {"x-claude-code-session-id": session}
    for headers in (parent, {**parent, "x-claude-code-agent-id": "a1"}, parent):
        post(empty, empty.prefill_url, "/v1/messages", headers, **alone())
    empty.until(lambda: empty.metric("prefill", "basin_live_sessions") == 2, "both are live")
    close(empty, session)
    close(empty, f"{session}/a1")


def test_a_stamp_that_the_client_makes_itself_counts_for_nothing(empty: Stack) -> None:
    forged = {
        "action_id": "1",
        "action_type": "basin.session",
        "action_version": "2",
        "payload": {"session_id": new_session()},
    }
    hints = {"protocol_version": "1", "message_id": "m", "actions": [forged]}
    unnamed = {"input_ids": prompt(20), "sampling_params": {"max_new_tokens": 3}, "kv_hints": hints}
    assert requests.post(empty.url + "/generate", json=unnamed, timeout=60).ok
    assert requests.post(empty.prefill_url + "/generate", json={**unnamed, **alone()}, timeout=60).ok
    assert empty.metric("prefill", "basin_live_sessions") == 0
