"""The plan of a run: which session arrives when. Pure; two runs of one plan offer the very same work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_basin.replay.arrivals import ArrivalProfile, arrival_times
from sglang_basin.replay.trace import Session

Order = Literal["shuffle", "recorded"]


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A drawn session. `uid` is its identity on the wire, unique even when the trace's session is drawn twice."""

    uid: str
    arrival_s: float
    session: Session
    counted: bool
    """False for sessions of the profile's tail: they keep the load on and are not judged."""


@dataclass(frozen=True)
class Plan:
    """Sessions in arrival order. `trace_name` and `seed` also key the prompts' token ids."""

    trace_name: str
    seed: int
    profile: ArrivalProfile
    sessions: tuple[PlannedSession, ...]

    @property
    def call_count(self) -> int:
        return sum(len(planned.session.calls) for planned in self.sessions)


def draw(sessions: Sequence[Session], order: Order, seed: int) -> Iterator[Session]:
    """Sessions without end: the recorded order over and over, or a fresh shuffle each time the deck is used up."""
    deck = list(sessions)
    shuffler = random.Random(f"{seed}/order")
    while True:
        if order == "shuffle":
            shuffler.shuffle(deck)
        yield from deck


def build_plan(
    sessions: Sequence[Session],
    profile: ArrivalProfile,
    seed: int,
    *,
    trace_name: str = "trace",
    order: Order = "shuffle",
    max_sessions: int | None = None,
) -> Plan:
    """Draw one session for each arrival of the profile. Raises ValueError on an empty trace or an unknown order."""
    if not sessions:
        raise ValueError("cannot plan a run from a trace without sessions")
    if order not in ("shuffle", "recorded"):
        raise ValueError(f"order must be shuffle or recorded, got {order!r}")
    times = itertools.islice(arrival_times(profile, seed), max_sessions)
    planned = tuple(
        PlannedSession(f"replay-{seed}-{index:05d}", time_s, session, time_s < profile.duration_s)
        for index, (time_s, session) in enumerate(zip(times, draw(sessions, order, seed), strict=False))
    )
    return Plan(trace_name, seed, profile, planned)
