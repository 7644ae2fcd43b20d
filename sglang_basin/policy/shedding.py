"""Shedding: when capacity is truly short, waiting longer helps nobody.

The article's rule (DESIGN section 2): when the long-run arrival rate exceeds the measured peak completion rate *and*
the head of the queue has waited too long, drop the lowest-priority queued session. A surge alone does not trigger it:
the arrival rate is taken over a long window, and a queue that moves is left alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SheddingSettings:
    enabled: bool = True
    head_wait_s: float = 120.0
    """How long the head may wait before anybody is dropped."""
    arrival_window_s: float = 1800.0
    """The long run over which arrivals are counted."""
    completion_window_s: float = 300.0
    """The peak completion rate is the best such window seen in the last `memory_s`."""
    memory_s: float = 86_400.0


class Rates:
    """Long-run arrival rate and peak completion rate of sessions, per second. Memory is bounded by the windows."""

    def __init__(self, settings: SheddingSettings) -> None:
        self._settings = settings
        self._arrivals: deque[float] = deque()
        self._completions: deque[float] = deque()
        self._peaks: deque[tuple[float, int]] = deque()  # completions of past windows, descending
        self._started_s: float | None = None

    def arrived(self, now_s: float) -> None:
        if self._started_s is None:
            self._started_s = now_s
        arrivals, before_s = self._arrivals, now_s - self._settings.arrival_window_s
        arrivals.append(now_s)
        if arrivals[0] < before_s:
            _forget(arrivals, before_s)

    def completed(self, now_s: float) -> None:
        self._completions.append(now_s)
        _forget(self._completions, now_s - self._settings.completion_window_s)
        count = len(self._completions)
        while self._peaks and self._peaks[-1][1] <= count:
            self._peaks.pop()
        self._peaks.append((now_s, count))
        while self._peaks[0][0] < now_s - self._settings.memory_s:
            self._peaks.popleft()

    def arrivals_per_s(self, now_s: float) -> float | None:
        """None until a whole window has been seen: a surge at the start is not the long run."""
        window_s = self._settings.arrival_window_s
        if self._started_s is None or now_s - self._started_s < window_s:
            return None
        _forget(self._arrivals, now_s - window_s)
        return len(self._arrivals) / window_s

    def peak_completions_per_s(self) -> float:
        return self._peaks[0][1] / self._settings.completion_window_s if self._peaks else 0.0

    def excess_per_s(self, now_s: float) -> float:
        """By how much the long-run arrival rate exceeds the peak completion rate; at most 0 when it does not."""
        arrivals = self.arrivals_per_s(now_s)
        return 0.0 if arrivals is None else arrivals - self.peak_completions_per_s()


def _forget(times: deque[float], before_s: float) -> None:
    while times and times[0] < before_s:
        times.popleft()
