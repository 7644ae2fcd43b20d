"""Faults of the engines themselves: killed and started again, frozen, cut off from each other, clocks that jump.

On a stack of its own, one prefill and two decode instances. The control channel of the first decode instance goes
through a proxy that the tests cut. Sessions are pinned to a decode instance by the router, as in service, so that
those on the healthy one must not notice a thing. Rows of the README's table come from here too (`fault_table`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import libfaketime
import psutil
import pytest
import requests
from bystanders import ask, bystanders, decode_of, post
from calls import close, inside, load, new_session, prompt
from control_proxy import ControlProxy, control_proxy
from fault_table import Seen
from faults import frozen, kill
from stack import ENGINE_ARGUMENTS, LOGS, MODEL, Stack

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node, NodeOptions, Ports, make_plan
from sglang_basin.platforms.tiny_model import build

pytestmark = [pytest.mark.stack, pytest.mark.slow]

BUDGET_TOKENS = 2_000
IDLE_S = 8.0
OFFSET = 1000
FAKETIME = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"


@dataclass(frozen=True)
class Drill:
    """The stack, the way into its control channel, and the file that says how far its engines' wall clock is off."""

    stack: Stack
    proxy: ControlProxy
    clock: Path


QUEUES = "61"
"""SGLang's queues to send KV from. It takes one by a decode's port, modulo their number: with its own 4, two decodes
share one every fourth time, and a frozen decode then holds up what goes to the other."""


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    clock = tmp_path_factory.mktemp("drill") / "clock"
    clock.write_text("+0", encoding="utf-8")
    config = BasinConfig(
        admission="current",
        budget_tokens=BUDGET_TOKENS,
        pausing="off",
        idle_timeout_s=IDLE_S,
        idle_floor_s=IDLE_S,
        ticket_grace_s=4.0,
    )
    options = NodeOptions(
        model_path=str(build(MODEL)),
        decode=2,
        config=config,
        engine_arguments=ENGINE_ARGUMENTS,
        environment={
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(clock),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "SGLANG_DISAGGREGATION_QUEUE_SIZE": QUEUES,
            "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": QUEUES,
        },
        port=0,
        log_dir=LOGS / "drill",
    )
    with contextlib.ExitStack() as cleanup:
        ports = cleanup.enter_context(Ports(options.host))
        plan = make_plan(options, ports, sorted(os.sched_getaffinity(0)))
        bootstrap_port = plan.of("prefill")[0].bootstrap_port
        assert bootstrap_port is not None
        proxy, detour = _proxy(cleanup, bootstrap_port)
        first, second = plan.of("decode")
        first = dataclasses.replace(first, command=(*first.command, "--basin-control-port-offset", str(detour)))
        plan = dataclasses.replace(plan, engines=(*plan.of("prefill"), first, second))
        cleanup.callback(_clear_shared_memory)
        yield Drill(Stack(cleanup.enter_context(Node(plan, ready_timeout_s=280))), proxy, clock)


def _clear_shared_memory() -> None:
    """libfaketime leaves two files for every process, also for one that ends in peace."""
    for file in Path("/dev/shm").glob("*faketime*"):
        if not psutil.pid_exists(int(file.name.rsplit("_", 1)[1])):
            file.unlink()


def _proxy(cleanup: contextlib.ExitStack, bootstrap_port: int) -> tuple[ControlProxy, int]:
    """A proxy to prefill's control port on the next free port, and that port's offset from the bootstrap port."""
    for detour in range(OFFSET + 1, OFFSET + 100):
        with contextlib.suppress(OSError):
            return cleanup.enter_context(control_proxy(bootstrap_port + detour, bootstrap_port + OFFSET)), detour
    raise AssertionError("no free port for the proxy")


def pinned(drill: Drill, decode: int, count: int) -> list[str]:
    """Names of `count` new sessions that the router pins to this decode instance; they have ended."""
    stack = drill.stack
    wanted = stack.node.plan.of("decode")[decode].url
    found: list[str] = []
    for _ in range(200):
        session = new_session()
        if decode_of(stack.url, session) == wanted:
            found.append(session)
        close(stack, session)
        if len(found) == count:
            return found
    raise AssertionError(f"the router pins none of 200 sessions to {wanted}")


def at_peace(drill: Drill) -> bool:
    """Whether no engine holds a call and no session is live or waits."""
    stack = drill.stack
    urls = [engine.url for engine in stack.node.plan.engines]
    held = [requests.get(url + "/metrics", timeout=20).text for url in urls]
    gauges = ("basin_live_sessions", "basin_queued_sessions", "basin_held_calls", "basin_rooms")
    return all(inside(url) == 0 for url in urls) and not any(
        line.startswith(gauges) and not line.endswith(" 0.0") for text in held for line in text.splitlines()
    )


@pytest.fixture
def calm(drill: Drill) -> Iterator[Drill]:
    """The drill stack with nobody in it before and, checked, after the test; every KV pool whole."""
    drill.stack.until(lambda: at_peace(drill), "the stack at rest before the test", 60)
    yield drill
    drill.stack.until(lambda: at_peace(drill), "the stack at rest after the test", 60)
    for engine in drill.stack.node.plan.engines:
        assert requests.post(engine.url + "/flush_cache", timeout=20).ok
        assert load(engine.url)["num_used_tokens"] == 0


@contextlib.contextmanager
def calling(drill: Drill, session: str, ids: list[int], tokens: int) -> Iterator[Future[requests.Response]]:
    """A call under way during the block. It must come to its end, whatever that is, within a minute."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(post, drill.stack.url, session, ids, tokens=tokens)


@pytest.mark.fault("decode killed and started again", "SIGKILL while one of its sessions is generating")
def test_decode_killed(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    (victim,) = pinned(calm, 0, 1)
    expected = ask(stack.url, victim, prompt(100, 1))
    with bystanders(stack.url, stack.prefill_url, names=pinned(calm, 1, 2)) as others:
        with calling(calm, victim, prompt(120, 2), tokens=3_000) as call:
            stack.until(lambda: load(stack.decode_url)["num_running_reqs"] == 1, "the victim generates")
            killed_s = time.monotonic()
            kill(stack, "decode-0")
            assert call.result(timeout=30).status_code >= 500
            answered_s = time.monotonic() - killed_s
        stack.until(lambda: inside(stack.prefill_url) <= len(others), "prefill is rid of the call", whole=False)
    stack.node.start_again("decode-0")
    start = time.monotonic()
    stack.until(lambda: routed(calm, victim, prompt(100, 1)) == expected, "the victim's session is served again", 60)
    seen.note(
        f"its calls end with an error after {answered_s:.1f} s; sessions on the other instance are undisturbed",
        time.monotonic() - start,
    )
    close(stack, victim)


def routed(drill: Drill, session: str, ids: list[int]) -> list[int] | None:
    """The answer's tokens, None while the router or an engine answers with an error."""
    answer = post(drill.stack.url, session, ids)
    return answer.json()["output_ids"] if answer.ok else None


@pytest.mark.fault(
    "prefill killed and started again", "SIGKILL with calls generating, at the door and remembered by decode"
)
def test_prefill_killed(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    remembered, generating = pinned(calm, 0, 2)
    expected = ask(stack.url, remembered, prompt(1_100, 3))
    waiting = new_session()
    with calling(calm, generating, prompt(1_100, 4), tokens=600) as call:
        stack.until(lambda: load(stack.decode_url)["num_running_reqs"] == 1, "a session generates")
        with calling(calm, waiting, prompt(1_200, 5), tokens=4) as held:
            stack.until(lambda: stack.metric("prefill", "basin_held_calls") == 1, "another one waits at the door")
            killed_s = time.monotonic()
            kill(stack, "prefill-0")
            assert held.result(timeout=40).status_code >= 500
            answered_s = time.monotonic() - killed_s
        call.result(timeout=60)  # an answer or an error: the router gives up on both legs when one is lost
    stack.node.start_again("prefill-0")
    start = time.monotonic()
    stack.until(lambda: routed(calm, remembered, prompt(1_100, 3)) == expected, "sessions are served again", 60)
    took_s = time.monotonic() - start
    close(stack, remembered)

    # The new door is full. Decode remembers a session that this door has never seen: both legs must wait.
    blocker = new_session()
    assert post(stack.url, blocker, prompt(BUDGET_TOKENS + 100, 6)).ok
    with calling(calm, generating, prompt(1_100, 4), tokens=4) as again:
        stack.until(lambda: stack.metric("prefill", "basin_held_calls") == 1, "the door holds it")
        time.sleep(1)
        assert inside(stack.decode_url) == 0, "decode reserved memory for a call that waits at the door"
        close(stack, blocker)
        assert again.result(timeout=30).ok
    close(stack, generating)
    seen.note(
        f"held calls end with an error after {answered_s:.1f} s; decode forgets what the lost door had let in", took_s
    )


@pytest.mark.fault("decode frozen", "SIGSTOP for 6 s while it generates and gets KV")
def test_decode_frozen(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    (victim,) = pinned(calm, 0, 1)
    expected = ask(stack.url, victim, prompt(100, 7))
    with bystanders(stack.url, stack.prefill_url, names=pinned(calm, 1, 2)) as others:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            with frozen(stack, "decode-0"):
                calls = [pool.submit(ask, stack.url, victim, prompt(100, 7)) for _ in range(3)]
                time.sleep(6)
                assert not any(call.done() for call in calls)
            start = time.monotonic()
            assert [call.result(timeout=30) for call in calls] == [expected] * 3
            took_s = time.monotonic() - start
        slowest_s = max(other.slowest_s for other in others)
    assert slowest_s < 4, "a frozen decode instance held up sessions of another one"
    seen.note(f"its calls go on; the slowest call on the other instance took {slowest_s:.1f} s", took_s)
    close(stack, victim)


@pytest.mark.fault("prefill frozen", "SIGSTOP for 6 s with a call at the door")
def test_prefill_frozen(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    blocker, session = new_session(), new_session()
    assert post(stack.url, blocker, prompt(BUDGET_TOKENS + 100, 8)).ok
    with calling(calm, session, prompt(200, 9), tokens=4) as call:
        stack.until(lambda: stack.metric("prefill", "basin_held_calls") == 1, "a call waits at the door")
        with frozen(stack, "prefill-0"):
            time.sleep(6)
        start = time.monotonic()
        time.sleep(0.5)
        assert not call.done(), "decode let a call go on that prefill holds"
        close(stack, blocker)
        assert call.result(timeout=30).ok
        took_s = time.monotonic() - start
    seen.note("calls wait as long, and are then served in their order", took_s)
    close(stack, session)


@pytest.mark.fault(
    "control channel cut and healed", "a proxy between decode and prefill's control port resets it for 5 s"
)
def test_control_channel_cut(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    live, new = pinned(calm, 0, 2)
    expected = ask(stack.url, live, prompt(100, 10))
    with bystanders(stack.url, stack.prefill_url, names=pinned(calm, 1, 1)):
        calm.proxy.cut()
        start = time.monotonic()
        assert ask(stack.url, live, prompt(100, 10)) == expected
        live_s = time.monotonic() - start
        assert live_s < 5, "a live session's call waited for the door"
        with calling(calm, new, prompt(100, 11), tokens=4) as call:
            time.sleep(5)
            calm.proxy.heal()
            start = time.monotonic()
            assert call.result(timeout=30).ok
            took_s = time.monotonic() - start
    seen.note(f"calls of live sessions took {live_s:.1f} s meanwhile; a new session's first call waits", took_s)
    for session in (live, new):
        close(stack, session)


@pytest.mark.fault("control channel cut for good", "the same proxy, not healed until the call is answered")
def test_control_channel_stays_cut(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    (session,) = pinned(calm, 0, 1)
    time.sleep(2)  # until decode has heard that it has ended
    calm.proxy.cut()
    try:
        start = time.monotonic()
        assert post(stack.url, session, prompt(100, 12)).ok
        took_s = time.monotonic() - start
    finally:
        calm.proxy.heal()
    seen.note("decode's patience ends, and the call goes on as in stock SGLang", took_s)
    close(stack, session)


@pytest.mark.fault("wall clock jumps", "libfaketime: an hour forward, then two hours back, with a call at the door")
def test_wall_clock_jumps(calm: Drill, seen: Seen) -> None:
    stack = calm.stack
    blocker, session = new_session(), new_session()
    live, waiting = prompt(BUDGET_TOKENS + 100, 13), prompt(200, 14)
    expected = ask(stack.url, blocker, live)
    with calling(calm, session, waiting, tokens=4) as call:
        stack.until(lambda: stack.metric("prefill", "basin_held_calls") == 1, "a call waits at the door")
        start = time.monotonic()
        for offset in ("+3600", "-3600", "+0"):
            calm.clock.write_text(offset, encoding="utf-8")
            time.sleep(1.5)  # libfaketime looks at the file once a second
            assert ask(stack.url, blocker, live) == expected
            assert not call.done()
        took_s = time.monotonic() - start
        close(stack, blocker)
        assert call.result(timeout=30).ok
    close(stack, session)
    seen.note("nobody is refused or ended; calls of live sessions go on with the same tokens", took_s)
