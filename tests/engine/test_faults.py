"""Faults on the client's side of a running stack: clients that leave, storms, doubles, garbage on the control port.

Each test injects one beside sessions that go on undisturbed (`bystanders`), and ends with the stack as it was: nobody
live, queued or held, no transfer under way, both KV pools whole. SGLang checks its pools itself whenever it is idle and
ends the engine at a leak. What was seen goes into the README's table (`fault_table`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import aiohttp
import pytest
import requests
import zmq
from bystanders import ask, bystanders
from calls import (
    FULL,
    SMALL,
    at_the_door,
    calls_inside,
    close,
    generate,
    in_bootstrap,
    in_transfer,
    live_sessions,
    load,
    new_session,
    pools_are_whole,
    prompt,
    reserved,
)
from fault_table import Seen
from faults import body, frozen, half, open_call, until_gone
from stack import LOGS, Stack

from sglang_basin.engine import messages
from sglang_basin.node import Ports, health
from sglang_basin.node.process import Child

pytestmark = pytest.mark.stack

LONG = 6_000
"""A prompt that prefill computes for a second or so."""


@pytest.mark.fault("client leaves at the door", "its socket is closed while its call is held on both sides")
@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_at_the_door(empty: Stack, seen: Seen, stream: bool) -> None:
    with bystanders(empty.url, empty.prefill_url) as others:
        blocker = new_session()
        assert generate(empty, blocker, prompt(FULL, 80)).ok
        with open_call(empty.url, body(new_session(), prompt(SMALL, 81), stream=stream)):
            empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 1, "held on prefill")
            empty.until(lambda: empty.metric("decode", "basin_held_calls") == 1, "held on decode")
        took_s = until_gone(empty, len(others), live=len(others) + 1)
        close(empty, blocker)
    seen.note("held on neither side any more; its place lapses after the grace", took_s)
    assert pools_are_whole(empty)


@pytest.mark.fault(
    "one leg is lost", "only prefill gets the call, which waits for decode there; then the client leaves"
)
def test_client_leaves_in_the_bootstrap_queue(empty: Stack, seen: Seen) -> None:
    with bystanders(empty.url, empty.prefill_url) as others:
        session = new_session()
        with open_call(empty.prefill_url, half(empty, body(session, prompt(SMALL, 82)))):
            empty.until(lambda: in_bootstrap(empty) >= 1, "bootstrapping")
        took_s = until_gone(empty, len(others), live=len(others) + 1)
        close(empty, session)
    seen.note("gone from prefill's bootstrap queue", took_s)
    assert pools_are_whole(empty)


@pytest.mark.fault(
    "one leg is late",
    "the client leaves while only prefill has the call; then decode gets it and sends where its KV goes",
)
def test_decodes_leg_comes_behind_the_end(empty: Stack, seen: Seen) -> None:
    session = new_session()
    call = half(empty, body(session, prompt(SMALL, 82)))
    with open_call(empty.prefill_url, call):
        empty.until(lambda: in_bootstrap(empty) >= 1, "bootstrapping")
    until_gone(empty, 0, live=1)
    start = time.monotonic()
    late = requests.post(empty.decode_url + "/generate", json=call, timeout=60)
    assert not late.ok
    close(empty, session)
    seen.note("the late leg is told so, and prefill forgets where its KV was to go", time.monotonic() - start)
    assert pools_are_whole(empty)


@pytest.mark.fault("client leaves in prefill", "its socket is closed while eight long prompts are computed")
def test_client_leaves_in_prefill(empty: Stack, seen: Seen) -> None:
    with bystanders(empty.url, empty.prefill_url) as others, contextlib.ExitStack() as stack:
        live = new_session()  # a session that has entered: its calls do not wait at the door, whatever they weigh
        assert generate(empty, live, prompt(SMALL, 83)).ok
        for key in range(8):  # its pool holds two at a time: however fast it computes, some wait for seconds
            stack.enter_context(open_call(empty.url, body(live, prompt(LONG, 184 + key))))
        empty.until(lambda: calls_inside(empty)[0] > len(others), "prefill computes")
        stack.close()
        took_s = until_gone(empty, len(others), live=len(others) + 1)
        close(empty, live)
    seen.note("what was computed stays in the cache, the rest is dropped", took_s)
    assert pools_are_whole(empty)


@pytest.mark.fault("client leaves in the transfer", "its socket is closed while decode is frozen and prefill sends KV")
def test_client_leaves_in_the_transfer(empty: Stack, seen: Seen) -> None:
    session = new_session()
    assert generate(empty, session, prompt(SMALL, 88)).ok
    with open_call(empty.url, body(session, prompt(2 * LONG, 89), tokens=64)):
        empty.until(lambda: reserved(empty) >= 1, "decode has reserved memory for the call")
        with frozen(empty, "decode-0"):
            empty.until(lambda: in_transfer(empty) >= 1, "sending")
    took_s = until_gone(empty, 0, live=1)
    close(empty, session)
    seen.note("decode goes on where it stood, drops the call and frees what it had reserved", took_s)
    assert pools_are_whole(empty)


@pytest.mark.fault("client leaves in decode", "its socket is closed while 6,000 tokens are being generated")
@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_in_decode(empty: Stack, seen: Seen, stream: bool) -> None:
    with bystanders(empty.url, empty.prefill_url) as others:
        session = new_session()
        with open_call(empty.url, body(session, prompt(SMALL, 90), tokens=6_000, stream=stream)):
            empty.until(lambda: load(empty.decode_url)["num_used_tokens"] > 1_000, "decoding, which the others do not")
        took_s = until_gone(empty, len(others), live=len(others) + 1)
        close(empty, session)
    seen.note("the generation is cut off", took_s)
    assert pools_are_whole(empty)


async def storm(url: str, calls: int, seconds: float) -> int:
    """Start so many calls of as many sessions at once and leave them all after `seconds`; returns how many ran then."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:

        async def call(number: int) -> None:
            payload = body(new_session(), prompt(40 + number % 50, 100 + number), tokens=400, stream=number % 2 == 0)
            async with client.post(url + "/generate", json=payload) as answer:
                await answer.read()

        tasks = [asyncio.create_task(call(number)) for number in range(calls)]
        await asyncio.sleep(seconds)
        running = [task for task in tasks if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(running)


@pytest.mark.fault("500 clients leave at once", "500 calls of 500 sessions, streaming and not, all cut off after 3 s")
def test_abort_storm(empty: Stack, seen: Seen) -> None:
    with bystanders(empty.url, empty.prefill_url) as others:
        left = asyncio.run(storm(empty.url, 500, 3.0))
        assert left > 250, "the storm was over before the clients left"
        start = time.monotonic()
        empty.until(
            lambda: max(calls_inside(empty)) <= len(others) and at_the_door(empty) == 0, "the storm is over", 60
        )
        took_s = time.monotonic() - start
    seen.note(f"{left} calls were under way, at the door and in every queue; none is left", took_s)
    assert pools_are_whole(empty)


@contextlib.contextmanager
def second_router(stack: Stack) -> Iterator[str]:
    """Another router in front of the same engines; its URL."""
    router = stack.node.plan.router
    with Ports("127.0.0.1") as ports:
        port, metrics_port = ports.find(), ports.find()
    words = list(router.command)
    words[words.index("--port") + 1] = str(port)
    words[words.index("--prometheus-port") + 1] = str(metrics_port)
    child = Child("router-2", words, environment=dict(os.environ), log=LOGS / "basin" / "router-2.log")
    child.start()
    try:
        url = f"http://127.0.0.1:{port}"
        stack.until(lambda: list(health.registered_workers(url).values()) == [True, True], "the second router routes")
        yield url
    finally:
        child.stop()


@pytest.mark.fault(
    "one session id on two routers", "calls of one session at the same time through both, live and queued"
)
def test_one_session_id_on_two_routers(empty: Stack, seen: Seen) -> None:
    def ask_both(other_url: str, session: str, ids: list[int]) -> list[Future[list[int]]]:
        return [pool.submit(ask, url, session, ids) for url in (empty.url, other_url)]

    with second_router(empty) as other_url, ThreadPoolExecutor() as pool, bystanders(empty.url, empty.prefill_url):
        session, blocker = new_session(), new_session()
        expected = ask(empty.url, session, prompt(SMALL, 91))
        for _ in range(3):
            assert [call.result(30) for call in ask_both(other_url, session, prompt(SMALL, 91))] == [expected] * 2
        empty.until(lambda: live_sessions(empty) == 3, "it is one session")
        close(empty, session)
        assert generate(empty, blocker, prompt(FULL, 92)).ok
        calls = ask_both(other_url, session, prompt(SMALL, 91))
        empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 2, "both calls wait")
        assert empty.metric("prefill", "basin_queued_sessions") == 1
        start = time.monotonic()
        close(empty, blocker)
        assert [call.result(30) for call in calls] == [expected] * 2
        seen.note(
            "one session to the door: one place, both calls enter together, same tokens", time.monotonic() - start
        )
        close(empty, session)
    assert pools_are_whole(empty)


@pytest.mark.fault(
    "garbage and slow peers", "control port: 20,000 alien messages, 50 silent connections, half a greeting"
)
def test_garbage_and_slow_peers(empty: Stack, seen: Seen) -> None:
    prefill = empty.node.plan.of("prefill")[0]
    assert prefill.bootstrap_port is not None
    address = ("127.0.0.1", prefill.bootstrap_port + 1000)
    before = empty.metric("prefill", "basin_control_dropped_total", cause="garbage")
    alien = [messages.encode(messages.Left(1, 5)), messages.encode(messages.Running([1, 2])), b"\xff" * 100, b"{}"]
    with bystanders(empty.url, empty.prefill_url) as others, contextlib.ExitStack() as cleanup:
        for number in range(50):
            silent = cleanup.enter_context(socket.create_connection(address))
            if number % 2:
                silent.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")  # ZMTP's greeting, and then nothing
        context = cleanup.enter_context(zmq.Context())
        rogue = cleanup.enter_context(context.socket(zmq.DEALER))
        rogue.setsockopt(zmq.LINGER, 0)
        rogue.setsockopt(zmq.SNDTIMEO, 20_000)
        rogue.connect(f"tcp://{address[0]}:{address[1]}")
        start = time.monotonic()
        for number in range(20_000):
            rogue.send(alien[number % len(alien)])
        empty.until(
            lambda: empty.metric("prefill", "basin_control_dropped_total", cause="garbage") == before + 10_000,
            "counted",
        )
        took_s = time.monotonic() - start
    slowest_s = max(other.slowest_s for other in others)
    assert slowest_s < 20
    seen.note(f"garbage is counted and dropped; the slowest call beside it took {slowest_s:.1f} s", took_s)
    assert pools_are_whole(empty)
