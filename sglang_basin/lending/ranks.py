"""What rank 0's gate has to tell lending on all ranks: sent among the requests of one broadcast, taken out on arrival.

So every rank hears it in the same turn and in the same order, and ranks need not agree on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_basin.engine import messages


@dataclass(frozen=True, slots=True)
class Kept:
    """On prefill, right before the call of `room`: the sender keeps so many tokens of its session."""

    room: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ForRanks:
    """A message to lending on this instance's ranks."""

    peer: Any
    """The gate on the other side, as this side's control channel knows it."""
    message: Kept | messages.Lease | messages.Borrow | messages.Return


def take_out(requests: list[Any] | None) -> tuple[list[ForRanks], list[Any]]:
    """The messages among a turn's requests, and the requests without them."""
    found = [request for request in requests or () if isinstance(request, ForRanks)]
    rest = [request for request in requests or () if not isinstance(request, ForRanks)] if found else requests or []
    return found, rest
