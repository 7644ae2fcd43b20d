"""Priorities as SGLang's queues sort them: whole milliseconds, lowest first, on one time scale for all instances.

A session's fixed priority is a point in time (`policy.priority`) of this process's monotonic clock. Several prefill
instances send calls to one decode instance, so it is put on the scale of the wall clock, read once: later jumps of the
wall clock change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class PriorityClock:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._epoch_s = time.time() - clock()

    def stamp(self, order_s: float) -> int:
        """The priority, in ms, of a call that goes by `order_s` of this process's clock."""
        return max(0, round((self._epoch_s + order_s) * 1000))


def sort_bootstrap_queue(original: Callable[..., Any], self: Any) -> Any:
    """Around `PrefillBootstrapQueue.pop_bootstrapped`: the queue that SGLang leaves unsorted goes by priority too, so
    that metadata buffers, when short, go to the earlier session."""
    if len(self.queue) > 1:
        self.queue.sort(key=lambda req: req.priority)  # stable, and the same on all ranks
    return original(self)


def count_queue_as_one(original: Callable[..., Any], self: Any, gauge: Any, data: Any) -> Any:
    """Around `SchedulerMetricsCollector._log_gauge_queue_count`: no series per priority. SGLang would keep one for
    every value it ever saw, and ours are points in time."""
    data.by_priority = None
    return original(self, gauge, data)
