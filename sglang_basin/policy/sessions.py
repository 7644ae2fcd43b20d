"""Sessions and their calls, as the door knows them.

A call is *held* at the door, then *prefilling* on this instance, then *decoding* elsewhere, then gone. The first two
stages are seen exactly. Decoding ends with a report from the decode instance; should that report be lost, the
session's idle time-out cleans up, so a dead decode cannot occupy the budget for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sglang_basin.policy.prediction import Prediction


class Stage(Enum):
    HELD = "held"
    PREFILLING = "prefilling"
    DECODING = "decoding"


HELD, PREFILLING, DECODING = Stage
"""By themselves, since looking up a member of an enumeration is slow and each call does it several times."""


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


NO_CALLS: dict[str, Call] = {}
"""Shared by all sessions between two calls, in place of an empty table of their own; never written to."""


@dataclass(slots=True)
class Session:
    """One agent session: everything a policy may look at."""

    session_id: str
    arrived_s: float
    context_tokens: int
    """The current context: the latest prompt, and its output once that is known."""
    last_active_s: float
    parent_id: str | None = None
    """The session that started this one and waits for it."""
    prompt_id: int | None = None
    """Its first prompt, as long as its context begins with it; the same for the same prompt. None if nobody said."""
    live: bool = False
    """It has entered; False while it waits at the door."""
    paused: bool = False
    """It had entered and was sent back to the door."""
    waits_since_s: float | None = None
    """Paused, and when the first call that it has made since then came; None if it has made none."""
    leaving: bool = False
    """Live, and to be paused as soon as none of its calls is under way; it reserves nothing until then."""
    priority: float = 0.0
    """Fixed at arrival; lowest goes first everywhere."""
    prediction: Prediction | None = None
    """Of its peak context, as of its latest call."""
    first_predicted_tokens: float | None = None
    """The median of the prediction of its first call, to be compared with the peak in the end."""
    calls_seen: int = 0
    pause_s: float = 0.0
    """Between the end of its last call and the arrival of its latest one; 0 for calls side by side."""
    first_tokens: int = 0
    """The first call's prompt."""
    peak_tokens: int = 0
    """The longest context so far."""
    found_tokens: int | None = None
    """What its first call found cached; None until that call has been prefilled, or if nobody said."""
    shared_tokens: int = 0
    """How much of that is taken to be shared with others."""
    credited_tokens: int = 0
    """What it does not reserve at the moment because others have it cached."""
    front_tokens: int = 0
    """How much of that is the front that all share; what it shares with sessions that began alike is not."""
    repeats: bool = False
    """An earlier session began with the same prompt."""
    law_tokens: float = 0.0
    law_variance: float = 0.0
    """What the law reserves for it as it is now, whether it has entered or not."""
    reserved_tokens: float = 0.0
    reserved_variance: float = 0.0
    """If it is live: what is reserved for it, without what it is credited with."""
    ticket: int = 0
    """Its number in the queue, counted up by one from session to session."""
    calls: dict[str, Call] = field(default_factory=lambda: NO_CALLS)
    """Calls not yet finished, by call id; `NO_CALLS` itself while there are none."""

    def busy(self) -> bool:
        """Whether a call is held or prefilling, the stages whose end this instance sees itself."""
        return any(call.stage is not DECODING for call in self.calls.values())

    def context_with(self, prompt_tokens: int) -> int:
        """The context once a call with this prompt has arrived; of calls in flight side by side the longest counts."""
        return max(self.context_tokens, prompt_tokens) if self.calls else prompt_tokens

    def predicted_peak(self, share: float) -> float:
        """The predicted peak's quantile, in tokens; never below the present context."""
        if self.prediction is None:
            return float(self.context_tokens)
        peak_tokens = self.prediction.at(share)
        return peak_tokens if peak_tokens > self.context_tokens else float(self.context_tokens)

    def growth_per_call(self) -> float | None:
        """Tokens that the context has grown per call so far; None until the second call."""
        if self.calls_seen < 2:
            return None
        return max(0.0, (self.context_tokens - self.first_tokens) / (self.calls_seen - 1))
