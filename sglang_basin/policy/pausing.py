"""Pausing: sessions that have entered go back to the door when their contexts outgrow the cache.

Admission decides on what is predicted of a session, and the first predictions are poor: now and then the sessions
inside grow beyond the cache together, and from then on each evicts the others. So above `above_share` of the budget
sessions are paused, down to `down_to_share`: first those that run a tool, then those whose call is under way (they
leave when it is over, and count as gone until then), each time the shortest first, since that is what costs least to
compute again. The next call of a paused session waits until the session fits below `resume_share`; the shortest goes
first here, too, and one that does not fit holds up no shorter one. So that none waits for ever, the one that has
waited longest, over `patience_s`, goes on over the budget: one at a time. An early rescue costs the others more than it
gives: a long context takes the room of many short ones.

Source: ThunderAgent and the watermarked port of it in NVIDIA Dynamo (see `policy.rivals.thunder`), whose shares these
are; there a call waits up to half an hour and then goes on, however many others do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sglang_basin.policy.sessions import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseSettings:
    """Shares are parts of the budget's reference."""

    above_share: float = 0.95
    down_to_share: float = 0.80
    resume_share: float = 0.85
    patience_s: float = 1800.0
    """Of a paused session that has a call waiting, or whose client comes again and again."""
    every_s: float = 1.0
    """How often the door looks whom to pause and whom to resume: both look at many sessions."""

    def __post_init__(self) -> None:
        if not 0 < self.down_to_share <= self.resume_share <= self.above_share:
            raise ValueError(
                "pausing: must have 0 < down_to_share <= resume_share <= above_share, got "
                f"{self.down_to_share}, {self.resume_share}, {self.above_share}"
            )


class PausedSessions:
    """Sessions that were sent back to the door. *Resting* ones run a tool; of the others a call waits here."""

    def __init__(self) -> None:
        self.resting: OrderedDict[str, Session] = OrderedDict()  # least recently active first
        self.waiting: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self.resting) + len(self.waiting)

    def __iter__(self) -> Iterator[Session]:
        yield from self.resting.values()
        yield from self.waiting.values()

    def get(self, session_id: str) -> Session | None:
        return self.resting.get(session_id) or self.waiting.get(session_id)

    def rest(self, session: Session, now_s: float) -> None:
        """It is paused, or its client took back the call that waited."""
        self.waiting.pop(session.session_id, None)
        session.paused, session.last_active_s = True, now_s
        self.resting[session.session_id] = session
        self.resting.move_to_end(session.session_id)

    def wait(self, session: Session, now_s: float) -> None:
        """A call of it came."""
        if session.waits_since_s is None:
            session.waits_since_s = now_s
        self.resting.pop(session.session_id, None)
        self.waiting[session.session_id] = session

    def release(self, session: Session) -> None:
        """It goes on, or has ended."""
        session.paused, session.waits_since_s = False, None
        self.resting.pop(session.session_id, None)
        self.waiting.pop(session.session_id, None)

    def overdue(self, since_s: float) -> Session | None:
        """Of those with a call the one that has waited longest, if it does since that time or longer."""
        longest = min(self.waiting.values(), key=_waits_since_s, default=None)
        return longest if longest is not None and _waits_since_s(longest) <= since_s else None

    def by_length(self) -> list[Session]:
        """Those with a call, in the order in which they go on."""
        return sorted(self.waiting.values(), key=lambda session: session.context_tokens)


def victims(live: Iterable[Session]) -> list[Session]:
    """In the order in which they are paused: those that run a tool before the others, the shortest first."""
    return sorted(live, key=lambda session: (bool(session.calls), session.context_tokens))


def _waits_since_s(session: Session) -> float:
    return 0.0 if session.waits_since_s is None else session.waits_since_s
