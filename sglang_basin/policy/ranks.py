"""Which data-parallel rank of a server a session's calls go to.

Each rank has a cache and a door of its own, so a session that changed ranks would find neither its context nor its
place. A new session goes to the rank with the fewest that are active; a child goes where its parent is, for the door
that admitted the parent knows them as one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection


class SessionRanks:
    """Not thread-safe; about 300 bytes a session."""

    def __init__(self, *, idle_s: float, max_sessions: int) -> None:
        """A session without a call for `idle_s` no longer counts for its rank, but goes on being known there until more
        than `max_sessions` have called since."""
        self._idle_s = idle_s
        self._max_sessions = max_sessions
        self._rank: OrderedDict[str, int] = OrderedDict()  # longest without a call first
        self._active: OrderedDict[str, float] = OrderedDict()  # likewise, with the time of the last call
        self._on: Counter[int] = Counter()  # rank -> active sessions

    def rank_of(self, session_id: str, ranks: Collection[int], now_s: float, *, parent_id: str | None = None) -> int:
        """The rank for a call of the session, one of `ranks`, those that serve now."""
        while self._active and now_s - next(iter(self._active.values())) > self._idle_s:
            self.ended(next(iter(self._active)))
        rank = self._rank.get(session_id)
        if rank is None or rank not in ranks:
            self.ended(session_id)
            rank = None if parent_id is None else self._rank.get(parent_id)
            if rank is None or rank not in ranks:
                rank = min(ranks, key=lambda one: (self._on[one], one))
            self._rank[session_id] = rank
        if session_id not in self._active:
            self._on[rank] += 1
        self._active[session_id] = now_s
        self._active.move_to_end(session_id)
        self._rank.move_to_end(session_id)
        if len(self._rank) > self._max_sessions:
            oldest = next(iter(self._rank))
            self.ended(oldest)
            del self._rank[oldest]
        return rank

    def ended(self, session_id: str) -> None:
        """The session has ended; unknown ones are passed over."""
        if self._active.pop(session_id, None) is not None:
            self._on[self._rank[session_id]] -= 1
