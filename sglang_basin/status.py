"""What `GET /basin/status` says: one engine's view of admission, as JSON. `top` shows it.

This module is the schema alone: the engine fills it in (`engine.status`), clients decode it. Fields may be added; a
reader of this version passes over those that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PATH = "/basin/status"

TOP_SESSIONS = 20
"""Sessions that are listed, those with the largest reservations; the others are only counted."""

MAX_PEERS = 64
MAX_BYTES = 256 * 1024
"""A whole answer stays far below this: what is longer is not ours."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class SessionFigures(msgspec.Struct, kw_only=True):
    """One session. `predicted_peak_tokens` is the median of its present prediction."""

    session_id: str
    state: Literal["live", "waiting", "away", "paused"]
    """`away`: it waits, but its client has left; it keeps its place until the grace is over."""
    context_tokens: int
    reserved_tokens: int
    """What it counts for in the budget; of a waiting one, what it would count for."""
    predicted_peak_tokens: int | None
    calls_seen: int
    calls_open: int
    priority_s: float
    """Lowest first, on the door's own clock: `arrived_s` of two sessions compare with it."""
    arrived_s: float
    idle_s: float
    """Since its last activity."""


class DoorFigures(msgspec.Struct, kw_only=True):
    """The door on prefill."""

    rule: str
    """In words: the law that reservations follow, or that admission is off."""
    armed: bool
    """Whether new sessions are judged now; below the budget all enter."""
    live_sessions: Count
    queued_sessions: Count
    """They have not entered yet."""
    paused_sessions: Count = 0
    """They had entered and went back to the door, since the contexts inside had outgrown the cache."""
    held_calls: Count
    tickets: Count
    """Waiting sessions whose client has left: they keep their place for a while."""
    head_wait_s: float
    """How long the first in the queue has waited; 0 while nobody waits."""
    working_set_tokens: int
    """The contexts of the live sessions, added up."""
    distinct_tokens: int
    """The same with what they share counted once: what a cache must hold."""
    reserved_tokens: int
    budget_tokens: int
    reference_tokens: int
    sessions: list[SessionFigures]


class CacheFigures(msgspec.Struct, kw_only=True):
    """This engine's KV memory, and on prefill how often it saves work."""

    pool_tokens: int
    used_ratio: float
    """Part of the pool that holds KV of running calls or of the prefix cache."""
    host_tokens: int = 0
    lent_tokens: int = 0
    """Decode memory that counts into the capacity of prefill's cache."""
    hit_ratio: float | None = None
    """Cached over prompt tokens of the calls prefilled in the last minute; None while there were none."""
    high_hit_ratio: float | None = None
    """What `hit_ratio` is in this deployment while all is well."""


class PeerFigures(msgspec.Struct, kw_only=True):
    """The other end of a control connection."""

    name: str
    heard_ago_s: float | None
    """None: not a word so far."""


class ControlFigures(msgspec.Struct, kw_only=True):
    """The channel between prefill's door and decode's gates."""

    address: str | None
    """Where prefill listens; None on decode, which connects to the addresses of `peers`."""
    peers: list[PeerFigures]
    """At most `MAX_PEERS`, the longest silent first."""
    unanswered: Count
    """Questions that wait for the other side's answer."""
    dropped: dict[str, int]
    """Messages not delivered or not read since the start, by cause."""


class LenderFigures(msgspec.Struct, kw_only=True):
    """A decode rank that lends to this prefill, by its transfer session."""

    name: str
    transport: str
    """"peer" or "mooncake"."""
    why: str


class Status(msgspec.Struct, kw_only=True):
    """One scheduler's: a server has one, or one a data-parallel rank."""

    role: Literal["prefill", "decode", "unified"]
    dp_rank: Count = 0
    dp_ranks: Count = 1
    gate: Literal["on", "failed", "absent"]
    """`failed`: after a fault all calls go on as in stock SGLang until a restart."""
    uptime_s: float
    door: DoorFigures | None
    held_calls: Count
    entered_sessions: Count
    """Sessions that have entered: on decode, those whose calls it no longer asks about."""
    cache: CacheFigures | None
    control: ControlFigures | None
    decisions: dict[str, int]
    """Calls at the gate since the start, by "decision/reason"."""
    faults: dict[str, int]
    lenders: list[LenderFigures] = []
    """On prefill with lending: at most `MAX_PEERS` decode ranks and how lent KV is read from each."""


class Report(msgspec.Struct, kw_only=True):
    """The whole answer."""

    basin: str
    sglang: str
    states: list[Status]


decode_report = msgspec.json.Decoder(Report).decode
encode_report = msgspec.json.Encoder().encode
