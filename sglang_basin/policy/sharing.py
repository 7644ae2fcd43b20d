"""The front that sessions share: how long it is, told from what their first calls found cached.

A system prompt with its tools stands in the cache once, whoever uses it, while each session's context counts it. What
a session's *first* call finds cached was left there by others, so it is shared, with one exception: a session that
comes back after it was taken for ended finds its own context. Of the two only the shared front has the same length
again and again. It is therefore taken to be the longest length at which a quarter of the recent first calls agree,
and a session is never credited with more than that.
"""

from __future__ import annotations

import bisect
from collections import deque

WINDOW = 64
"""First calls remembered."""
MIN_SEEN = 4
"""Nothing counts as shared before so many first calls."""
QUORUM = 0.25
"""The part of the remembered first calls that must agree on a length. With four agents that take turns, each with a
front of its own, the longest of them is still seen."""
SLACK_SHARE, SLACK_TOKENS = 0.02, 64
"""Lengths agree if they differ by no more: a page, or what prompts happen to have in common beyond the front."""


class SharedFront:
    """Learns from first calls, one window long. Bounded memory; `learn` looks at the window once."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.tokens = 0
        """The length of the front; 0 while none is known."""
        self.expected_tokens = 0
        """What a session whose first call has not run yet will find of it, on average: not all need share it."""

    def learn(self, found_tokens: int) -> None:
        """A session's first call found so many tokens of its prompt cached."""
        bisect.insort(self._sorted, found_tokens)
        self._recent.append(found_tokens)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self.tokens = self._agreed() if len(self._recent) >= MIN_SEEN else 0
        self.expected_tokens = sum(min(found, self.tokens) for found in self._sorted) // len(self._sorted)

    def _agreed(self) -> int:
        found = self._sorted
        quorum = max(2, QUORUM * len(found))
        end = len(found)
        for start in range(len(found) - 1, -1, -1):
            length = found[start]
            while found[end - 1] > length + max(SLACK_TOKENS, SLACK_SHARE * length):
                end -= 1
            if end - start >= quorum:
                return length
        return 0
