"""Identity on the real stack, at every endpoint: headers straight at an engine, body fields through the router."""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any

import pytest
import requests
from calls import FULL, close, generate, live_sessions, new_session, prompt
from stack import IDLE_TIMEOUT_S, Stack

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
    empty.until(lambda: live_sessions(empty) == 1, "the session is live")
    close(empty, session)


@pytest.mark.parametrize("path", BODIES)
def test_body_fields_name_and_end_the_session_through_the_router(empty: Stack, path: str) -> None:
    user_id = f"user_0_account__session_{new_session()}"
    ends = {"basin_session_end": "true"}
    sources: dict[str, dict[str, Any]] = {
        "body.session_id": {"session_id": new_session()},
        "body.prompt_cache_key": {"prompt_cache_key": new_session()},
        "body.metadata.user_id": {"metadata": {"user_id": user_id}},
    }
    for fields in sources.values():
        if path != "/v1/messages":  # the router keeps nothing of `metadata` there but `user_id`
            fields["metadata"] = {**fields.get("metadata", {}), **ends}
        else:
            fields.update(ends)
    if path == "/v1/responses":
        del sources["body.session_id"]  # the router refuses fields there that OpenAI does not have
    for source, fields in sources.items():
        before = {side: empty.metric(side, "basin_identity_total", source=source) for side in ("prefill", "decode")}
        post(empty, empty.url, path, **fields)
        for side, count in before.items():
            assert empty.metric(side, "basin_identity_total", source=source) == count + 1
        empty.until(lambda: live_sessions(empty) == 0, "the session has ended", IDLE_TIMEOUT_S / 2)


def test_a_sub_agent_is_live_beside_its_parent(empty: Stack) -> None:
    session = new_session()
    parent = {"x-claude-code-session-id": session}
    for headers in (parent, {**parent, "x-claude-code-agent-id": "a1"}, parent):
        post(empty, empty.prefill_url, "/v1/messages", headers, **alone())
    empty.until(lambda: live_sessions(empty) == 2, "both are live")
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
    assert live_sessions(empty) == 0


# ---- Clients that send nothing -------------------------------------------------------------------------------------

SYSTEM = "You are an agent that works on a computer. Look before you act, and say what you have seen. " * 2
TOOLS = BODIES["/v1/chat/completions"]["tools"]


class Agent:
    """A chat client that says nothing about sessions, but for the end of its last call so that tests are short."""

    def __init__(self, stack: Stack, task: str, *, tools: bool = True) -> None:
        self._stack = stack
        self._tools = {"tools": TOOLS} if tools else {}
        self._model = requests.get(stack.url + "/v1/models", timeout=20).json()["data"][0]["id"]
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task},
        ]

    def call(self, *, last: bool = False) -> None:
        """One call; the model's answer and a tool's result, or a question of the user's, are added to the history."""
        body = {"model": self._model, "messages": self._messages, "max_tokens": 5, "temperature": 0, **self._tools}
        if last:
            body["metadata"] = {"basin_session_end": "true"}
        response = requests.post(self._stack.url + "/v1/chat/completions", json=body, timeout=60)
        assert response.ok, response.text
        answer = response.json()["choices"][0]["message"]["content"]
        turn = len(self._messages)
        if turn % 4 == 2:
            call = {"id": f"call_{turn}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            self._messages += [
                {"role": "assistant", "content": answer, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"Seen: {turn}"},
            ]
        else:
            self._messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]


def inferred(stack: Stack) -> float:
    return stack.metric("prefill", "basin_identity_total", source="prompt")


def test_a_client_that_sends_nothing_is_one_session_over_many_turns(empty: Stack) -> None:
    before = inferred(empty)
    agent = Agent(empty, "task 1")
    for _ in range(4):
        agent.call()
        empty.until(lambda: live_sessions(empty) == 1, "one session is live", 5)
    agent.call(last=True)
    assert inferred(empty) == before + 5
    empty.until(lambda: live_sessions(empty) == 0, "it has ended", 5)


def test_clients_side_by_side_with_one_system_prompt_are_as_many_sessions(empty: Stack) -> None:
    """Two of them even start with the very same prompt at the same time."""
    agents = [Agent(empty, task) for task in ("task 1", "task 12", "task 1")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for _ in range(3):
            list(pool.map(Agent.call, agents))
            empty.until(lambda: live_sessions(empty) == 3, "three sessions are live", 5)
        list(pool.map(lambda agent: agent.call(last=True), agents))
    empty.until(lambda: live_sessions(empty) == 0, "all have ended", 5)


def test_a_call_without_tools_is_a_session_once_a_second_one_follows(empty: Stack) -> None:
    before = inferred(empty)
    agent, single = Agent(empty, "task 4", tools=False), Agent(empty, "task 5", tools=False)
    agent.call()
    single.call()
    assert inferred(empty) == before
    agent.call()
    assert inferred(empty) == before + 1
    empty.until(lambda: live_sessions(empty) == 1, "it is live", 5)
    agent.call(last=True)


def test_a_client_that_sends_nothing_waits_at_the_door_like_others(empty: Stack) -> None:
    first = new_session()
    assert generate(empty, first, prompt(FULL, 70)).ok
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(Agent(empty, "task 3").call, last=True)
        empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 1, "held on prefill")
        empty.until(lambda: empty.metric("decode", "basin_held_calls") == 1, "held on decode")
        close(empty, first)
        waiting.result(timeout=20)
