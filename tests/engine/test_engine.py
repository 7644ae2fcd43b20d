"""Basin in the real engine: one prefill, one decode, the router, over Mooncake TCP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time

import pytest
import requests
import zmq
from calls import (
    FULL,
    SMALL,
    calls_inside,
    chunks,
    close,
    generate,
    live_sessions,
    new_session,
    pools_are_whole,
    prompt,
)
from stack import FINAL_GRACE_S, HOLD_LIMIT_S, Stack

pytestmark = pytest.mark.stack


def test_a_call_goes_through_both_legs_and_the_next_one_hits_the_cache(empty: Stack) -> None:
    session = new_session()
    first = generate(empty, session, prompt(200, 1)).json()
    again = generate(empty, session, prompt(200, 1) + first["output_ids"] + prompt(20, 2), ends=True).json()
    assert len(first["output_ids"]) == 4
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] >= 192
    assert again["meta_info"]["prompt_tokens"] == 224


def test_answers_stream(empty: Stack) -> None:
    session = new_session()
    response = generate(empty, session, prompt(100, 3), tokens=12, ends=True, stream=True)
    received = list(chunks(response))
    assert len(received) >= 6
    assert received[-1]["meta_info"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_with_a_session_header_sent_to_the_engines_by_the_body(empty: Stack, stream: bool) -> None:
    session = new_session()
    (model,) = requests.get(empty.url + "/v1/models", timeout=20).json()["data"]
    body = {
        "model": model["id"],
        "messages": [{"role": "user", "content": "Where does the water go?"}],
        "max_tokens": 6,
        "session_id": session,
        "metadata": {"basin_session_end": "true"},
        "stream": stream,
    }
    before = empty.metric("prefill", "basin_identity_total", source="body.session_id")
    response = requests.post(empty.url + "/v1/chat/completions", json=body, timeout=60, stream=stream)
    assert response.ok, response.text
    if stream:
        assert sum(bool(chunk["choices"]) for chunk in chunks(response)) >= 2
    else:
        assert response.json()["usage"]["completion_tokens"] == 6
    assert empty.metric("prefill", "basin_identity_total", source="body.session_id") == before + 1


def test_a_session_over_budget_is_held_on_both_sides_until_another_one_ends(empty: Stack) -> None:
    first, second = new_session(), new_session()
    assert generate(empty, first, prompt(FULL, 4)).ok
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(generate, empty, second, prompt(SMALL, 5), ends=True)
        empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 1, "held on prefill")
        empty.until(lambda: empty.metric("decode", "basin_held_calls") == 1, "held on decode")
        assert calls_inside(empty) == (0, 0)
        # calls of the live session go on meanwhile, and so do those too short to be anybody's, and health checks
        assert generate(empty, first, prompt(FULL + 30, 4)).ok
        assert generate(empty, None, prompt(20, 6)).ok
        for url in (empty.prefill_url, empty.decode_url):
            assert requests.get(url + "/health_generate", timeout=20).ok
        assert not waiting.done()
        close(empty, first)
        assert waiting.result(timeout=20).ok


def test_waiting_sessions_enter_in_order_of_arrival(empty: Stack) -> None:
    first = new_session()
    assert generate(empty, first, prompt(FULL, 7)).ok
    finished: list[int] = []

    def wait(number: int) -> None:
        assert generate(empty, new_session(), prompt(1_200, 8 + number), ends=True).ok
        finished.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        empty.until(lambda n=number: empty.metric("prefill", "basin_held_calls") == n + 1, "one more waits")
    close(empty, first)
    for thread in threads:
        thread.join(30)
    assert finished == [0, 1, 2]


def test_a_client_that_leaves_while_its_call_is_held_leaves_nothing_behind(empty: Stack) -> None:
    first = new_session()
    assert generate(empty, first, prompt(FULL, 20)).ok
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(
            empty.url + "/generate",
            json={"input_ids": prompt(SMALL, 21), "session_id": new_session(), "sampling_params": {}},
            timeout=1.5,
        )
    empty.until(lambda: empty.metric("prefill", "basin_queued_sessions") == 0, "the abandoned session is gone", 10)
    close(empty, first)
    assert pools_are_whole(empty)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_held_too_long_is_refused_on_both_legs(empty: Stack, stream: bool) -> None:
    first = new_session()
    assert generate(empty, first, prompt(FULL, 30)).ok
    start = time.monotonic()
    refused = generate(empty, new_session(), prompt(SMALL, 31), stream=stream)
    text = refused.text
    waited_s = time.monotonic() - start
    assert "at capacity" in text
    assert "Retry after" in text
    if not stream:
        assert refused.status_code == 503
    assert HOLD_LIMIT_S - 1 < waited_s < HOLD_LIMIT_S + 20
    close(empty, first)


@pytest.mark.parametrize(("offered", "stops"), [(True, True), (True, False), (False, True)])
def test_a_session_ends_soon_after_its_final_answer(empty: Stack, offered: bool, stops: bool) -> None:
    """Final is an answer that the model ended by itself, without calling one of the tools it was offered."""
    (model,) = requests.get(empty.url + "/v1/models", timeout=20).json()["data"]
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
    body = {
        "model": model["id"],
        "messages": [{"role": "user", "content": "Are we there yet?"}],
        "max_tokens": 64 if stops else 3,
        "session_id": (session := new_session()),
        "stop_token_ids": list(range(0, 2048, 2)) if stops else None,
        "ignore_eos": not stops,
        "tools": [tool] if offered else None,
    }
    answer = requests.post(empty.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.ok, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == ("stop" if stops else "length")
    empty.until(lambda: live_sessions(empty) == 1, "the session is live", 5)
    time.sleep(FINAL_GRACE_S + 1.5)
    ended = live_sessions(empty) == 0
    close(empty, session)
    assert ended == (offered and stops)


def test_an_idle_session_gives_its_place_up(empty: Stack) -> None:
    assert generate(empty, new_session(), prompt(FULL, 40)).ok
    start = time.monotonic()
    retried = generate(empty, late := new_session(), prompt(SMALL, 41))
    if retried.status_code == 503:  # the hold limit is shorter than the idle time-out: a client would come again
        retried = generate(empty, late, prompt(SMALL, 41))
    assert retried.ok
    assert time.monotonic() - start > 10
    close(empty, late)


@pytest.mark.parametrize(
    "header",
    ["", "a" * 5_000, "tab\there", "ünïcode-ø".encode().decode("latin-1"), "\x01\x02"],
)
def test_a_malformed_session_header_is_ignored_and_counted(empty: Stack, header: str) -> None:
    body = {"input_ids": prompt(20, 50), "sampling_params": {"max_new_tokens": 1}, "bootstrap_host": "2.2.2.2"}
    response = requests.post(
        empty.prefill_url + "/generate",
        json=body,
        headers={"x-basin-session-id": header.encode("latin-1")},
        timeout=20,
    )
    assert response.status_code in (200, 400)  # the HTTP server itself refuses control characters
    empty.node.check()
    assert generate(empty, None, prompt(30, 51)).ok


def test_a_ten_megabyte_header_is_refused_by_the_server_which_lives(empty: Stack) -> None:
    with contextlib.suppress(requests.exceptions.ConnectionError):  # it may hang up on such a client
        response = requests.post(
            empty.prefill_url + "/generate",
            json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}},
            headers={"x-basin-session-id": "a" * 10_000_000},
            timeout=30,
        )
        assert 400 <= response.status_code < 500
    assert generate(empty, None, prompt(30, 52)).ok


def test_garbage_on_the_control_channel_is_counted_and_the_engine_lives(empty: Stack) -> None:
    prefill = empty.node.plan.of("prefill")[0]
    before = empty.metric("prefill", "basin_control_dropped_total", cause="garbage")
    context = zmq.Context()
    with context.socket(zmq.DEALER) as rogue:
        rogue.setsockopt(zmq.LINGER, 2000)
        rogue.connect(f"tcp://127.0.0.1:{prefill.bootstrap_port + 1000}")
        for junk in (b"", b"\xff" * 1000, b'{"ask": 1}', bytes(range(256))):
            rogue.send(junk)
        empty.until(
            lambda: empty.metric("prefill", "basin_control_dropped_total", cause="garbage") == before + 4, "counted"
        )
    context.term()
    assert generate(empty, None, prompt(30, 53)).ok


def test_with_basin_the_tokens_are_stocks(empty: Stack, stock: Stack) -> None:
    """Greedy tokens of a session of three growing prompts, streamed and not, equal those of stock SGLang."""

    def answers(stack: Stack) -> list[list[int]]:
        session, ids, out = new_session(), prompt(300, 60), []
        for turn in range(3):
            response = generate(stack, session, ids, tokens=16, ends=turn == 2, stream=turn == 1)
            final = list(chunks(response))[-1] if turn == 1 else response.json()
            assert len(final["output_ids"]) == 16 or turn == 1
            tokens = final["output_ids"] if turn != 1 else generate(stack, session, ids, tokens=16).json()["output_ids"]
            out.append(tokens)
            ids = ids + tokens + prompt(40, 61 + turn)
        return out

    assert answers(empty) == answers(stock)


def test_stock_has_no_trace_of_basin(stock: Stack) -> None:
    assert "basin_" not in requests.get(stock.prefill_url + "/metrics", timeout=20).text
    log = (stock.node.plan.of("prefill")[0].log).read_text()
    assert "Basin" not in log
