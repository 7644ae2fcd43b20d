"""The front that sessions share: how long it is, told from what their first calls found cached.

A system prompt with its tools stands in the cache once, whoever uses it, while each session's context counts it. What
a session's *first* call finds cached was left there by others, so it is shared, with one exception: a session that
comes back after it was taken for ended finds its own context. Of the two only the shared front has the same length
again and again. It is therefore taken to be the longest length at which a quarter of the recent first calls agree
(`SharedFront`), and a session is never credited with more than that.

But for one case: sessions that began with the very same prompt (rollouts of one task, one job started again and again)
share all of it, while they live. Once the others have ended, what a first call finds of it is held by nobody else: it
is this session's own, however often it is found. So a first prompt that was seen before says nothing about the front,
and is shared exactly among those who live (`FirstPrompts`).
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque

WINDOW = 64
"""First calls remembered."""
MIN_SEEN = 4
"""Nothing counts as shared before so many first calls."""
QUORUM = 0.25
"""The part of the remembered first calls that must agree on a length. With four agents that take turns, each with a
front of its own, the longest of them is still seen."""
SLACK_SHARE, SLACK_TOKENS = 0.02, 64
"""Lengths agree if they differ by no more: a page, or what prompts happen to have in common beyond the front."""


MAX_PROMPTS = 1024
"""First prompts remembered: more tasks than a cache holds the contexts of."""


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
        shorter = bisect.bisect_left(self._sorted, self.tokens)
        whole = len(self._sorted) - shorter  # so many found all of it
        self.expected_tokens = (sum(self._sorted[:shorter]) + whole * self.tokens) // len(self._sorted)

    def _agreed(self) -> int:
        found = self._sorted
        quorum = max(2, math.ceil(QUORUM * len(found)))
        for start in range(len(found) - quorum, -1, -1):
            length = found[start]
            if found[start + quorum - 1] <= length + max(SLACK_TOKENS, SLACK_SHARE * length):
                return length
        return 0


class FirstPrompts:
    """The first prompts of sessions that entered lately, and the live ones among them. Bounded memory; O(1) but for
    sessions that began alike. Of these the prompt is the first one's own, and the others share it."""

    def __init__(self) -> None:
        self._began: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # prompt -> live sessions, first one first

    def __len__(self) -> int:
        return len(self._began)

    def enter(self, prompt_id: int, session_id: str) -> bool:
        """A session with this first prompt is live from now on. Says whether the prompt was seen before."""
        known = prompt_id in self._began
        self._began[prompt_id] = (*self._began.get(prompt_id, ()), session_id)
        self._began.move_to_end(prompt_id)
        for _ in range(2):  # two for each that comes, since those that are shared stay
            oldest = next(iter(self._began))
            if len(self._began) > MAX_PROMPTS and len(self._began[oldest]) < 2:
                del self._began[oldest]
            elif len(self._began) > MAX_PROMPTS:
                self._began.move_to_end(oldest)
        return known

    def leave(self, prompt_id: int, session_id: str) -> str | None:
        """The session has ended, or holds its first prompt no longer. Says whose own the prompt is from now on, if it
        was this session's and others share it."""
        sharers = self._began.get(prompt_id, ())
        if session_id not in sharers:
            return None
        left = self._began[prompt_id] = tuple(sharer for sharer in sharers if sharer != session_id)
        return left[0] if left and sharers[0] == session_id else None

    def is_shared(self, prompt_id: int, session_id: str) -> bool:
        """Whether the prompt is another live session's own."""
        sharers = self._began.get(prompt_id, ())
        return bool(sharers) and sharers[0] != session_id
