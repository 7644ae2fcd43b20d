"""Basin on the engines' HTTP servers: refused calls in every API's own words, `/basin/status`, the decision log."""

from __future__ import annotations

import concurrent.futures
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
import requests
from calls import FULL, SMALL, at_rest, close, generate, new_session, prompt
from rich.console import Console
from stack import BUDGET_TOKENS, HOLD_LIMIT_S, LOGS, POOL_TOKENS, Stack

from sglang_basin import status, top
from sglang_basin.engine.decision_log import hashed

CHAT = [{"role": "user", "content": "Where does the water go?"}]
ENDPOINTS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def call_body(endpoint: str, session: str, model: str) -> dict[str, Any]:
    named = {"session_id": session, "model": model}
    return {
        "/generate": {"input_ids": prompt(SMALL, 70), "sampling_params": {"max_new_tokens": 2}, "session_id": session},
        "/v1/chat/completions": {**named, "messages": CHAT, "max_tokens": 2},
        "/v1/completions": {**named, "prompt": "Where does the water go?", "max_tokens": 2},
        "/v1/messages": {**named, "messages": CHAT, "max_tokens": 2},
        "/v1/responses": {
            "prompt_cache_key": session,  # the router lets no session_id through on this one
            "model": model,
            "input": "Where does the water go?",
            "max_output_tokens": 2,
            "store": False,
        },
    }[endpoint]


def model_of(stack: Stack) -> str:
    return requests.get(stack.url + "/v1/models", timeout=20).json()["data"][0]["id"]


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


CASES = [(endpoint, stream) for endpoint in ENDPOINTS for stream in (False, True)]


@dataclass(frozen=True)
class Refused:
    """Calls that were all refused at once: answers by `CASES`, from prefill itself and from the router; and what the
    SDKs raised."""

    direct: list[requests.Response]
    routed: list[requests.Response]
    openai: BaseException | None
    anthropic: BaseException | None


@pytest.fixture(scope="module")
def refused(basin: Stack) -> Refused:
    basin.until(lambda: at_rest(basin), "the stack at rest before the calls", 60)
    model = model_of(basin)
    sessions = [new_session() for _ in range(2 * len(CASES) + 2)]

    def call(number: int) -> requests.Response:
        endpoint, stream = CASES[number % len(CASES)]
        body = {**call_body(endpoint, sessions[number], model), "stream": stream}
        directly = number < len(CASES)
        url = basin.prefill_url if directly else basin.url
        return requests.post(
            url + endpoint, json={**body, **leg(basin, 4_000_000 + number)} if directly else body, timeout=60
        )

    def extra(number: int) -> dict[str, Any]:
        return {"session_id": sessions[number], **leg(basin, 4_000_000 + number)}

    def chat() -> Any:
        client = openai.OpenAI(base_url=basin.prefill_url + "/v1", api_key="none", max_retries=0)
        return client.chat.completions.create(model=model, messages=CHAT, stream=True, extra_body=extra(-1))

    def message() -> Any:
        client = anthropic.Anthropic(base_url=basin.prefill_url, api_key="none", max_retries=0)
        return client.messages.create(model=model, messages=CHAT, max_tokens=2, stream=True, extra_body=extra(-2))

    with concurrent.futures.ThreadPoolExecutor(len(sessions)) as pool, full(basin):
        sdks = [pool.submit(chat), pool.submit(message)]
        answers = list(pool.map(call, range(2 * len(CASES))))
        raised = [job.exception(timeout=60) for job in sdks]
        for session in sessions:
            close(basin, session)
    return Refused(answers[: len(CASES)], answers[len(CASES) :], *raised)


@pytest.mark.stack
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number][0]}-{CASES[number][1]}")
def test_a_refused_call_is_a_503_with_advice_on_every_endpoint_streaming_or_not(refused: Refused, number: int) -> None:
    endpoint, answer = CASES[number][0], refused.direct[number]
    assert answer.status_code == 503, answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-should-retry"] == "true"
    assert answer.headers["content-type"] == "application/json"
    message = message_of(endpoint, answer.json())
    assert "could not be admitted in time" in message
    assert f"Retry after {answer.headers['retry-after']} s" in message


@pytest.mark.stack
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number][0]}-{CASES[number][1]}")
def test_the_router_answers_503_in_words_of_its_own_with_the_advice_in_the_text(refused: Refused, number: int) -> None:
    answer = refused.routed[number]
    assert answer.status_code == 503, answer.text
    assert "Retry after" in answer.text


@pytest.mark.stack
def test_the_sdks_read_the_refusal_and_would_retry_when_advised(refused: Refused) -> None:
    for client, failure in (
        (openai.OpenAI(api_key="none"), refused.openai),
        (anthropic.Anthropic(api_key="none"), refused.anthropic),
    ):
        assert isinstance(failure, openai.InternalServerError | anthropic.InternalServerError), failure
        assert failure.status_code == 503
        assert "could not be admitted in time" in str(failure)
        assert client._should_retry(failure.response)
        advice_s = client._parse_retry_after_header(failure.response.headers)
        assert advice_s is not None
        assert 1 <= advice_s <= 60


@pytest.mark.stack
def test_sglang_counts_what_the_client_got(refused: Refused, basin: Stack) -> None:
    """The middleware sits inside SGLang's own: its count by status says 503 where it used to say 200."""
    counted = basin.metric("prefill", "sglang:http_responses_total", endpoint="/generate", status_code="503")
    assert counted >= 2
    assert basin.metric("prefill", "basin_http_refusals_total") >= len(CASES) + 2


@pytest.mark.stack
def test_status_tells_who_is_inside_who_waits_and_how_the_engine_does(empty: Stack) -> None:
    waiting = new_session()

    def state(url: str) -> status.Status:
        answer = requests.get(url + status.PATH, timeout=20)
        assert len(answer.content) < status.MAX_BYTES
        (one,) = status.decode_report(answer.content).states
        return one

    def prefill_has_answered(decode: status.Status) -> bool:
        return decode.held_calls == 1 and decode.control is not None and decode.control.unanswered == 0

    with concurrent.futures.ThreadPoolExecutor() as pool, full(empty):
        held = pool.submit(generate, empty, waiting, prompt(SMALL, 72), ends=True)
        empty.until(lambda: prefill_has_answered(state(empty.decode_url)), "held on decode, with prefill's word for it")
        prefill, decode = state(empty.prefill_url), state(empty.decode_url)
        server_info = requests.get(empty.prefill_url + "/server_info", timeout=20).json()
        screen = io.StringIO()
        console = Console(file=screen, width=120)
        assert top.main(["--once", empty.prefill_url, empty.decode_url], console) == 0, screen.getvalue()
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
    assert all("basin" not in state for state in server_info["internal_states"]), "names are in the status alone"
    assert "1 live, 1 waiting" in screen.getvalue()
    assert waiting[:20] in screen.getvalue()


@pytest.mark.stack
def test_the_router_and_stock_sglang_have_no_status(empty: Stack, stock: Stack) -> None:
    for url in (empty.url, stock.prefill_url, stock.decode_url):
        assert requests.get(url + status.PATH, timeout=20).status_code == 404


@pytest.mark.stack
def test_the_decision_log_tells_a_sessions_way_through_the_door(empty: Stack) -> None:
    waiting = new_session()
    with concurrent.futures.ThreadPoolExecutor() as pool, full(empty):
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
            return [SimpleNamespace(internal_state={"basin": {"dp_rank": rank}}) for rank in (1, 0)]

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
    assert found["admin"].json()["states"] == [{"dp_rank": 0}, {"dp_rank": 1}]
