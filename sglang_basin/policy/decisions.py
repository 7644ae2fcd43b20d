"""What the door answers about a call, with the numbers that led to it.

A decision feeds the log, the metric and the simulator's report alike, so it carries its reason instead of leaving
it to be guessed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Reason(Enum):
    """Why a call passed, waits or was turned away. The value is the metric's label."""

    NO_IDENTITY = "no_identity"
    """The call names no session: it passes and is counted, since nothing can be reserved for it."""
    ADMISSION_OFF = "admission_off"
    LIVE_SESSION = "live_session"
    """A further call of a live session; such calls never queue at the door."""
    CHILD = "child"
    """A live session has started this one and waits for it."""
    BELOW_BUDGET = "below_budget"
    """Admission is off: the reservations do not exceed the budget."""
    FITS = "fits"
    NOBODY_LIVE = "nobody_live"
    """The head enters even over budget: with no live session nothing would ever make room for it."""
    PAUSED = "paused"
    """A further call of a session that went back to the door, since the live ones had outgrown the cache."""
    WAITED_LONGEST = "waited_longest"
    """Of the paused sessions the one that has waited longest, and too long: it goes on over the budget."""
    NO_HEADROOM = "no_headroom"
    BEHIND_QUEUE = "behind_queue"
    """It would fit, but sessions that came earlier wait; passing them would starve the large ones."""
    HELD_TOO_LONG = "held_too_long"
    SHED = "shed"
    """Capacity is truly short and this session has the lowest priority of those that wait."""
    QUEUE_FULL = "queue_full"
    CLIENT_LEFT = "client_left"
    """The client left one leg of the call; the other one needs no answer either."""
    SESSION_ENDED = "session_ended"
    """The client ended the session while this call of it still waited."""
    ENTERED = "entered"
    """On decode: prefill's door has let the session in."""
    NO_ANSWER = "no_answer"
    """On decode: prefill's door was asked in vain, and the call goes on as in stock SGLang."""


class Admit(NamedTuple):
    """The call goes on to SGLang now. `waited_s` is its time at the door."""

    call_id: str
    reason: Reason
    waited_s: float = 0.0


class Queue(NamedTuple):
    """The call waits at the door: its session needs `need_tokens`, `free_tokens` of the budget are free."""

    call_id: str
    reason: Reason
    need_tokens: int
    free_tokens: int
    ahead: int
    """Sessions that wait before this one, at most: some of them may have given up meanwhile."""


class Refuse(NamedTuple):
    """The call is answered 503 now; the client may come back after `retry_after_s`."""

    call_id: str
    reason: Reason
    waited_s: float
    retry_after_s: float


Decision = Admit | Queue | Refuse
Outcome = Admit | Refuse
"""How a wait at the door ends."""
