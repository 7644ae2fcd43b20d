"""Reservation laws: how many tokens of the budget a session counts for.

A law sees what the door sees of a session now; it never sees output lengths, peaks or end times that lie ahead.
"""

from __future__ import annotations

from typing import Protocol

from sglang_basin.policy.sessions import Session


class ReservationLaw(Protocol):
    """Maps a session to the tokens that it reserves. Must be pure: same session state, same answer."""

    name: str

    def tokens(self, session: Session) -> int:
        """Tokens reserved for `session`, at least 0."""


class CurrentContext:
    """Reserve the context that a session has now. The working set is then exactly the sum of reservations."""

    name = "current"

    def tokens(self, session: Session) -> int:
        return session.context_tokens
