"""How long a session may be idle before it counts as ended, learned from the tools of the deployment.

No coding client announces the end of a session. A long time-out keeps finished sessions' reservations from those that
wait; a short one ends sessions whose tool just takes its time, and they must queue again. So the time-out is a multiple
of a high quantile of the pauses between calls that were seen, within bounds that the user sets. A session that comes
back after it was given up shows a pause that was longer than the time-out: it counts like any other.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque

QUANTILE = 0.999
FACTOR = 2.0
"""The time-out is so many times the quantile of pauses: on recorded coding sessions 62 to 256 s, which ends none to 2 %
of them too early (`benchmarks/idle_timeout.py`); interactive sessions, whose users pause, keep to the longest."""
LEAST_PAUSES = 500
"""Before so many pauses were seen the time-out is the longest one."""
MEMORY_PAUSES = 5_000
MEMORY_GIVEN_UP = 10_000

MEAN_OF_PAUSES = 200
"""So many of the latest pauses carry nearly all of their mean's weight."""


class MeanPause:
    """How long sessions pause between two calls, on average of the latest ones."""

    def __init__(self) -> None:
        self._pauses = 0
        self._mean_s = 0.0

    @property
    def mean_s(self) -> float | None:
        """None until a session has paused."""
        return self._mean_s if self._pauses else None

    def note(self, pause_s: float) -> None:
        self._pauses = min(self._pauses + 1, MEAN_OF_PAUSES)
        self._mean_s += (pause_s - self._mean_s) / self._pauses


class IdleTimeout:
    """The present time-out, in seconds, and what it is learned from."""

    def __init__(self, longest_s: float, shortest_s: float | None) -> None:
        """`shortest_s` None keeps to `longest_s`. Raises ValueError when the two are in the wrong order."""
        if shortest_s is not None and shortest_s > longest_s:
            raise ValueError(f"idle_floor_s: must be at most idle_timeout_s ({longest_s:g}), got {shortest_s:g}")
        self.timeout_s = longest_s
        self._longest_s = longest_s
        self._shortest_s = shortest_s
        self._recent: deque[float] = deque()
        self._long: list[float] = []  # those of them that would make the time-out longer than the shortest, ascending
        self._given_up: OrderedDict[str, float] = OrderedDict()  # session id -> last active

    def resumed(self, pause_s: float) -> None:
        """A live session called again after `pause_s` without a call."""
        if self._shortest_s is None:
            return
        recent, long = self._recent, self._long
        recent.append(pause_s)
        if FACTOR * pause_s > self._shortest_s:
            bisect.insort(long, pause_s)
        if len(recent) > MEMORY_PAUSES and FACTOR * (oldest_s := recent.popleft()) > self._shortest_s:
            del long[bisect.bisect_left(long, oldest_s)]
        if len(recent) >= LEAST_PAUSES:
            above = len(recent) - int(QUANTILE * (len(recent) - 1))  # the quantile and what is longer
            self.timeout_s = self._shortest_s
            if above <= len(long):
                self.timeout_s = min(self._longest_s, FACTOR * long[-above])

    def given_up(self, session_id: str, last_active_s: float) -> None:
        """The session was ended for being idle since `last_active_s`."""
        if self._shortest_s is not None:
            self._given_up[session_id] = last_active_s
            if len(self._given_up) > MEMORY_GIVEN_UP:
                self._given_up.popitem(last=False)

    def returned(self, session_id: str, now_s: float) -> None:
        """A call begins a session of this name; if the name was given up, that was too early."""
        if (last_active_s := self._given_up.pop(session_id, None)) is not None:
            self.resumed(now_s - last_active_s)
