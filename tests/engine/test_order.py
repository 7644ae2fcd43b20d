"""A session's fixed priority in SGLang's own queues: the call of an earlier session goes before that of a later one,
though the latter was there first, wherever the two meet. All sessions here are live, so that the door holds nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from calls import close, generate, new_session, prompt
from stack import MAX_RUNNING, Stack

pytestmark = pytest.mark.stack


class Order:
    """Two live sessions, the earlier and the later one, and who of them was answered when."""

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
    order.send_unnamed(320, tokens=200)
    for number in range(1, MAX_RUNNING):
        order.send_unnamed(320 + number, tokens=400)
    empty.until(lambda: empty.metric("decode", "sglang:num_running_reqs") == MAX_RUNNING, "decode is full")
    order.later_first(30, lambda n: empty.metric("decode", "sglang:num_queue_reqs") == n)
    assert order.settle() == ["earlier", "later"]
