"""A session's fixed priority, at the door and in SGLang's own queues: the call of an earlier session goes before that
of a later one, though the latter was there first or would fit sooner, wherever the two meet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import getrandbits

import pytest
import requests
from calls import at_the_door, close, generate, in_bootstrap, new_session, prompt
from faults import body, frozen
from stack import BUDGET_TOKENS, MAX_RUNNING, Stack

pytestmark = pytest.mark.stack


def test_at_the_door(empty: Stack) -> None:
    """The later session fits beside the one inside, the earlier one does not."""
    inside, leaving, earlier, later = (new_session() for _ in range(4))
    assert generate(empty, inside, prompt(BUDGET_TOKENS - 500, 330)).ok
    assert generate(empty, leaving, prompt(600, 331)).ok  # over the budget: from here on the door judges
    with ThreadPoolExecutor() as pool:
        large = pool.submit(generate, empty, earlier, prompt(1_150, 332))
        empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 1, "the large session waits")
        close(empty, leaving)
        small = pool.submit(generate, empty, later, prompt(100, 333))
        empty.until(lambda: empty.metric("prefill", "basin_held_calls") == 2, "the small one waits behind it")
        time.sleep(1)
        assert not large.done()
        assert not small.done()
        close(empty, inside)
        assert large.result(30).ok
        assert small.result(30).ok
    assert at_the_door(empty) == 0
    for session in (earlier, later):
        close(empty, session)


class Order:
    """Two live sessions, the earlier and the later one, and who of them was answered when. The door holds neither."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.sessions = {name: new_session() for name in ("earlier", "later", "blocker")}
        self.finished: list[str] = []
        self._threads: list[threading.Thread] = []
        for number, session in enumerate(self.sessions.values()):
            assert generate(stack, session, prompt(40, 290 + number)).ok

    def send(self, name: str, prompt_tokens: int, key: int, tokens: int = 1) -> None:
        def call() -> None:
            assert generate(self.stack, self.sessions[name], prompt(prompt_tokens, key), tokens=tokens).ok
            self.finished.append(name)

        self._start(call)

    def send_unnamed(self, key: int, tokens: int) -> None:
        self._start(lambda: generate(self.stack, None, prompt(20, key), tokens=tokens))

    def keep_prefill_busy(self, key: int) -> None:
        """A call that decode has no part in."""
        alone = {"bootstrap_host": "2.2.2.2", "bootstrap_room": getrandbits(62)}
        payload = body(self.sessions["blocker"], prompt(8_000, key), **alone)
        self._start(lambda: requests.post(self.stack.prefill_url + "/generate", json=payload, timeout=60))

    def _start(self, call: Callable[[], object]) -> None:
        self._threads.append(threading.Thread(target=call))
        self._threads[-1].start()

    def settle(self) -> list[str]:
        for thread in self._threads:
            thread.join(60)
        for session in self.sessions.values():
            close(self.stack, session)
        return [name for name in self.finished if name != "blocker"]

    def later_first(self, prompt_tokens: int, waits: Callable[[int], bool]) -> None:
        """The later session's call, then, once `waits(1)`, the earlier one's; returns when both wait."""
        self.send("later", prompt_tokens, 301)
        self.stack.until(lambda: waits(1), "the later session's call waits")
        self.send("earlier", prompt_tokens, 302)
        self.stack.until(lambda: waits(2), "the earlier session's call waits too")
        assert self.finished == [], "the two have met in the queue"


def test_in_prefills_bootstrap_queue(empty: Stack) -> None:
    """Decode is stopped, so that both calls wait for it; both become ready while prefill computes something else."""
    order = Order(empty)
    with frozen(empty, "decode-0"):
        order.later_first(6_000, lambda n: in_bootstrap(empty) == n)
        order.keep_prefill_busy(303)
        time.sleep(0.3)
    assert order.settle() == ["earlier", "later"]


def test_in_prefills_waiting_queue(empty: Stack) -> None:
    order = Order(empty)
    order.send("blocker", 8_000, 300)
    time.sleep(0.3)
    order.send("later", 3_000, 301)
    time.sleep(0.1)
    order.send("earlier", 3_000, 302)
    assert order.settle() == ["earlier", "later"]


def test_in_decodes_preallocation_queue(empty: Stack) -> None:
    """Decode's pool has room for one of the three calls at a time."""
    order = Order(empty)
    order.send("blocker", 9_000, 310, tokens=300)
    empty.until(lambda: empty.metric("decode", "sglang:num_running_reqs") == 1, "the blocker runs")
    order.later_first(9_000, lambda n: empty.metric("decode", "sglang:num_decode_prealloc_queue_reqs") == n)
    assert order.settle() == ["earlier", "later"]


def test_in_decodes_waiting_queue(empty: Stack) -> None:
    """Decode runs as many calls as it may, and one of them ends before the others."""
    order = Order(empty)
    order.send_unnamed(320, tokens=300)
    for number in range(1, MAX_RUNNING):
        order.send_unnamed(320 + number, tokens=500)
    empty.until(lambda: empty.metric("decode", "sglang:num_running_reqs") == MAX_RUNNING, "decode is full")
    order.later_first(30, lambda n: empty.metric("decode", "sglang:num_queue_reqs") == n)
    assert order.settle() == ["earlier", "later"]
