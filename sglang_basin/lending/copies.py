"""Where sessions' kept copies are, as decode instances report them to one prefill instance. Pure: time is an argument.

A report says how much of a session's context a decode kept when its call left. When the decode drops some of that, it
says so within a second or two (`holdings`); what it has not said comes out when it is asked for a lease, whose answer
corrects the entry.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """A decode instance keeps the first `tokens` of a session's context."""

    holder: bytes
    """As the control channel knows the decode instance."""
    tokens: int


class Copies:
    """The latest copy of each session on each decode."""

    def __init__(self, max_sessions: int) -> None:
        """Of more sessions, those heard of longest ago are forgotten."""
        self._max_sessions = max_sessions
        self._by_session: OrderedDict[str, dict[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_session)

    def note(self, session_id: str, holder: bytes, tokens: int) -> None:
        """`holder` keeps so many tokens of the session now; 0 takes the entry away."""
        if tokens <= 0:
            self._drop(session_id, holder)
            return
        self._by_session.setdefault(session_id, {})[holder] = tokens
        self._by_session.move_to_end(session_id)
        if len(self._by_session) > self._max_sessions:
            self._by_session.popitem(last=False)

    def shorten(self, session_id: str, holder: bytes, tokens: int) -> None:
        """`holder` keeps no more than so many tokens of the session."""
        if tokens < self._by_session.get(session_id, {}).get(holder, 0):
            self.note(session_id, holder, tokens)

    def longest(self, session_id: str, holders: frozenset[bytes]) -> Copy | None:
        """The session's longest copy among those of these decodes."""
        kept = self._by_session.get(session_id, {})
        found = [Copy(holder, tokens) for holder, tokens in kept.items() if holder in holders]
        return max(found, key=lambda copy: copy.tokens, default=None)

    def ended(self, session_id: str) -> None:
        """Nobody will ask for this session's context again."""
        self._by_session.pop(session_id, None)

    def gone(self, holder: bytes) -> None:
        """This decode instance cannot be reached any more."""
        for session_id in [session_id for session_id, kept in self._by_session.items() if holder in kept]:
            self._drop(session_id, holder)

    def _drop(self, session_id: str, holder: bytes) -> None:
        kept = self._by_session.get(session_id)
        if kept is not None:
            kept.pop(holder, None)
            if not kept:
                del self._by_session[session_id]
