"""Basin on the engines' HTTP servers: refused calls in every API's own words, `/basin/status`, the decision log."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
import requests
from calls import FULL, SMALL, close, generate, new_session, prompt
from stack import BUDGET_TOKENS, HOLD_LIMIT_S, LOGS, POOL_TOKENS, Stack

from sglang_basin import status
from sglang_basin.engine.decision_log import hashed

CHAT = [{"role": "user", "content": "Where does the water go?"}]
ENDPOINTS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def call_body(endpoint: str, session: str) -> dict[str, Any]:
    named = {"session_id": session, "model": "tiny"}
    return {
        "/generate": {"input_ids": prompt(SMALL, 70), "sampling_params": {"max_new_tokens": 2}, "session_id": session},
        "/v1/chat/completions": {**named, "messages": CHAT, "max_tokens": 2},
        "/v1/completions": {**named, "prompt": "Where does the water go?", "max_tokens": 2},
        "/v1/messages": {**named, "messages": CHAT, "max_tokens": 2},
        "/v1/responses": {**named, "input": "Where does the water go?", "max_output_tokens": 2, "store": False},
    }[endpoint]


def leg(stack: Stack, room: int) -> dict[str, Any]:
    """What the router adds to a call's body on its way to prefill."""
    prefill = stack.node.plan.of("prefill")[0]
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}


@contextmanager
def full(stack: Stack) -> Iterator[None]:
    """Nobody else may enter: a session over the budget is inside."""
    session = new_session()
    assert generate(stack, session, prompt(FULL, 71)).ok
    try:
        yield
    finally:
        close(stack, session)


def message_of(endpoint: str, body: dict[str, Any]) -> str:
    """The text that a client of this API shows for an error."""
    if endpoint == "/generate":
        return body["message"]
    if endpoint == "/v1/messages":
        assert body["type"] == "error"
        assert body["error"]["type"] == "overloaded_error"
    return body["error"]["message"]


@pytest.mark.stack
def test_a_refused_call_is_a_503_with_advice_on_every_endpoint_streaming_or_not(empty: Stack) -> None:
    cases = [(endpoint, stream) for endpoint in ENDPOINTS for stream in (False, True)]
    sessions = [new_session() for _ in cases]
    counted = 'sglang:http_responses_total{endpoint="/generate",method="POST",status_code="503"}'

    def directly(number: int) -> requests.Response:
        endpoint, stream = cases[number]
        body = {**call_body(endpoint, sessions[number]), **leg(empty, 4_000_000 + number), "stream": stream}
        return requests.post(empty.prefill_url + endpoint, json=body, timeout=60)

    with full(empty), concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(directly, range(len(cases))))
        for session in sessions:
            close(empty, session)
    for (endpoint, stream), answer in zip(cases, answers, strict=True):
        where = f"{endpoint} stream={stream}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code == 503, where
        assert 1 <= int(answer.headers["retry-after"]) <= 60, where
        assert answer.headers["x-should-retry"] == "true", where
        assert answer.headers["content-type"] == "application/json", where
        assert "could not be admitted in time" in message_of(endpoint, answer.json()), where
    assert empty.metric("prefill", "basin_http_refusals_total") >= len(cases)
    assert counted in requests.get(empty.prefill_url + "/metrics", timeout=20).text, "SGLang counts what the client got"


@pytest.mark.stack
def test_through_the_router_it_is_a_503_too_but_the_advice_is_only_in_the_text(empty: Stack) -> None:
    """The router answers for the engines in words of its own; that streams are refused before their 200 is ours."""
    cases = [(endpoint, stream) for endpoint in ENDPOINTS for stream in (False, True)]
    sessions = [new_session() for _ in cases]

    def routed(number: int) -> requests.Response:
        endpoint, stream = cases[number]
        body = {**call_body(endpoint, sessions[number]), "stream": stream}
        body["model"] = empty_model
        return requests.post(empty.url + endpoint, json=body, timeout=60)

    (model,) = requests.get(empty.url + "/v1/models", timeout=20).json()["data"]
    empty_model = model["id"]
    with full(empty), concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(routed, range(len(cases))))
        for session in sessions:
            close(empty, session)
    for (endpoint, stream), answer in zip(cases, answers, strict=True):
        where = f"{endpoint} stream={stream}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code == 503, where
        assert "Retry after" in answer.text, where


@pytest.mark.stack
def test_the_sdks_read_the_refusal_and_would_retry_when_advised(empty: Stack) -> None:
    url = empty.prefill_url
    extra = [{"session_id": new_session(), **leg(empty, 4_100_000 + number)} for number in range(2)]
    theirs = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    other = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def chat() -> Any:
        return theirs.chat.completions.create(model="tiny", messages=CHAT, stream=True, extra_body=extra[0])

    def message() -> Any:
        return other.messages.create(model="tiny", messages=CHAT, max_tokens=2, stream=True, extra_body=extra[1])

    with full(empty), concurrent.futures.ThreadPoolExecutor() as pool:
        failures = [job.exception(timeout=60) for job in (pool.submit(chat), pool.submit(message))]
        for one in extra:
            close(empty, one["session_id"])
    for client, failure in zip((theirs, other), failures, strict=True):
        assert isinstance(failure, openai.InternalServerError | anthropic.InternalServerError), failure
        assert failure.status_code == 503
        assert "could not be admitted in time" in str(failure)
        assert client._should_retry(failure.response)
        assert client._parse_retry_after_header(failure.response.headers) == 30.0


@pytest.mark.stack
def test_status_tells_who_is_inside_who_waits_and_how_the_engine_does(empty: Stack) -> None:
    waiting = new_session()

    def state(url: str) -> status.Status:
        answer = requests.get(url + status.PATH, timeout=20)
        assert len(answer.content) < status.MAX_BYTES
        (one,) = status.decode_report(answer.content).states
        return one

    with full(empty), concurrent.futures.ThreadPoolExecutor() as pool:
        held = pool.submit(generate, empty, waiting, prompt(SMALL, 72), ends=True)
        empty.until(lambda: state(empty.decode_url).held_calls == 1, "held on decode")
        prefill, decode = state(empty.prefill_url), state(empty.decode_url)
        server_info = requests.get(empty.prefill_url + "/server_info", timeout=20).json()
        shown = subprocess.run(
            [sys.executable, "-m", "sglang_basin.top", "--once", empty.prefill_url, empty.decode_url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert held.result(timeout=30).ok, "it enters when the other one ends"

    door = prefill.door
    assert door is not None
    assert (prefill.role, prefill.gate, prefill.faults) == ("prefill", "on", {})
    assert (door.live_sessions, door.queued_sessions, door.held_calls) == (1, 1, 1)
    assert door.budget_tokens == BUDGET_TOKENS
    assert door.working_set_tokens >= FULL
    assert [(one.state, one.calls_open) for one in door.sessions] == [("live", 0), ("waiting", 1)]
    assert door.sessions[1].session_id == waiting
    assert prefill.cache is not None
    assert prefill.cache.pool_tokens == POOL_TOKENS
    assert prefill.cache.hit_ratio is not None
    assert prefill.control is not None
    assert len(prefill.control.peers) >= 1
    assert prefill.decisions["admit/nobody_live"] >= 1
    assert prefill.decisions["queue/no_headroom"] >= 1

    assert (decode.role, decode.gate, decode.door) == ("decode", "on", None)
    assert decode.control is not None
    assert [peer.name for peer in decode.control.peers] == [prefill.control.address]
    assert decode.control.unanswered == 0, "prefill said that the call waits"

    assert all("basin" not in state for state in server_info["internal_states"]), "names are in the status alone"
    assert shown.returncode == 0, shown.stdout
    assert "1 live, 1 waiting" in shown.stdout
    assert waiting[:20] in shown.stdout


@pytest.mark.stack
def test_the_router_and_stock_sglang_have_no_status(empty: Stack, stock: Stack) -> None:
    for url in (empty.url, stock.prefill_url, stock.decode_url):
        assert requests.get(url + status.PATH, timeout=20).status_code == 404


@pytest.mark.stack
def test_the_decision_log_tells_a_sessions_way_through_the_door(empty: Stack) -> None:
    waiting = new_session()
    with full(empty), concurrent.futures.ThreadPoolExecutor() as pool:
        held = pool.submit(generate, empty, waiting, prompt(SMALL, 73))
        empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 1, "held on prefill")
    assert held.result(timeout=30).ok
    assert generate(empty, waiting, prompt(SMALL, 73) + prompt(20, 74), ends=True).ok

    def lines() -> list[dict[str, Any]]:
        text = (LOGS / "basin" / "decisions.jsonl").read_text()
        assert waiting not in text
        read = [json.loads(line) for line in text.splitlines()[1:]]
        return [line for line in read if line["session"] == hashed(waiting)]

    empty.until(lambda: len(lines()) == 3, "three decisions are written", 10)
    queued, entered, further = lines()
    assert [queued["decision"], entered["decision"], further["decision"]] == ["queue", "admit", "admit"]
    assert queued["reason"] == "no_headroom"
    assert queued["need_tokens"] == SMALL
    assert queued["free_tokens"] < 0
    assert queued["budget_tokens"] == BUDGET_TOKENS
    assert queued["call"] == entered["call"] != further["call"]
    assert 0 < entered["waited_s"] < HOLD_LIMIT_S
    assert queued["priority_ms"] == entered["priority_ms"] == further["priority_ms"] > 1_600_000_000_000
    assert further["reason"] == "live_session"


def test_the_status_wants_the_servers_key() -> None:
    """SGLang's own middleware guards the route, which lists session names: the admin key where there is one."""
    from fastapi import FastAPI
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import add_api_key_middleware
    from starlette.testclient import TestClient

    from sglang_basin.engine.http_app import extend_app

    class Tokenizer:
        def auto_create_handle_loop(self) -> None:
            pass

        async def get_internal_state_communicator(self, question: Any) -> list[Any]:
            assert question.rid == "basin.status"
            return [SimpleNamespace(internal_state={"basin": {"role": "prefill"}})]

    app, http_server.app = http_server.app, FastAPI()
    try:
        extend_app(None, Tokenizer())
        add_api_key_middleware(http_server.app, api_key="user", admin_api_key="admin")
        client = TestClient(http_server.app)
        found = {key: client.get(status.PATH, headers={"Authorization": f"Bearer {key}"}) for key in ("user", "admin")}
    finally:
        http_server.app = app
    assert client.get(status.PATH).status_code == 401
    assert found["user"].status_code == 401
    assert found["admin"].json()["states"] == [{"role": "prefill"}]
