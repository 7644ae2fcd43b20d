"""The logging thread: nothing is reordered, nobody waits for the disk, what is lost is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from sglang_basin.log_thread import LogThread


def test_what_is_put_is_written_in_order() -> None:
    written: list[int] = []
    log: LogThread[int] = LogThread(written.extend, name="t", most_waiting=1000, most_at_once=7)
    for number in range(500):
        log.put(number)
    log.close()
    assert written == list(range(500))
    assert (log.written, log.lost) == (500, 0)


def test_a_slow_disk_costs_what_the_queue_cannot_take_and_no_time() -> None:
    go_on, losses = threading.Event(), []

    def slow(items: Sequence[int]) -> None:
        assert go_on.wait(20)

    log: LogThread[int] = LogThread(
        slow, name="t", most_waiting=10, on_lost=lambda count, cause: losses.append((count, cause))
    )
    start_s = time.perf_counter()
    for number in range(100):
        log.put(number)
    assert time.perf_counter() - start_s < 10
    go_on.set()
    log.close()
    assert log.written + log.lost == 100
    assert 89 <= log.lost <= 90  # ten wait, and one may be under way
    assert set(losses) == {(1, "queue")}


def test_a_failing_disk_costs_its_lines_and_the_next_ones_are_tried() -> None:
    calls = 0

    def write(items: Sequence[int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(28, "No space left on device")

    log: LogThread[int] = LogThread(write, name="t", most_waiting=10)
    log.put(1)
    log.put(2)
    log.close()
    assert (log.written, log.lost, calls) == (1, 1, 2)
    assert log.last_failure is not None
    assert "No space left" in log.last_failure


def test_closing_gives_up_on_a_disk_that_hangs() -> None:
    go_on = threading.Event()
    log: LogThread[int] = LogThread(lambda items: go_on.wait(20), name="t", most_waiting=1)
    log.put(1)
    start_s = time.perf_counter()
    log.close(timeout_s=0.2)
    assert time.perf_counter() - start_s < 10
    go_on.set()
