"""Sessions and their calls, as the door knows them.

A call is *held* at the door, then *prefilling* on this instance, then *decoding* elsewhere, then gone. The first two
stages are seen exactly. Decoding ends with a report from the decode instance; should that report be lost, the
session's idle time-out cleans up, so a dead decode cannot occupy the budget for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    HELD = "held"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(slots=True)
class Call:
    """One model call of a session."""

    call_id: str
    session_id: str
    prompt_tokens: int
    arrived_s: float
    stage: Stage
    ends_session: bool = False
    """The client said that this is the session's last call."""
    here: bool = True
    """Its prefill leg has arrived; False while only the decode instance has asked about it."""

    @property
    def admitted_stage(self) -> Stage:
        """The stage that entering puts it into."""
        return Stage.PREFILLING if self.here else Stage.DECODING


@dataclass(slots=True)
class Session:
    """One agent session: everything a policy may look at."""

    session_id: str
    arrived_s: float
    context_tokens: int
    """The current context: the latest prompt, and its output once that is known."""
    last_active_s: float
    live: bool = False
    """It has entered; False while it waits at the door."""
    reserved_tokens: int = 0
    ticket: int = 0
    """Its number in the queue, counted up by one from session to session."""
    calls: dict[str, Call] = field(default_factory=dict)
    """Calls not yet finished, by call id."""

    def busy(self) -> bool:
        """Whether a call is held or prefilling, the stages whose end this instance sees itself."""
        return any(call.stage is not Stage.DECODING for call in self.calls.values())

    def observe_prompt(self, prompt_tokens: int) -> None:
        """Take a new call's prompt as the context; with calls in flight side by side, the longest counts."""
        if self.calls:
            self.context_tokens = max(self.context_tokens, prompt_tokens)
        else:
            self.context_tokens = prompt_tokens
