"""What moves through the simulated deployment: sessions, and the attempt at a call that each has in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from sglang_basin.replay.plan import PlannedSession
from sglang_basin.simulator.cache import Chain

if TYPE_CHECKING:
    from sglang_basin.simulator.decode import DecodeInstance
    from sglang_basin.simulator.gate import Gate
    from sglang_basin.simulator.prefill import PrefillInstance

Event = tuple[float, Callable[[float, Any], "Events"], Any]
"""(when, handler, what it is given). A handler returns the events that follow from it."""
Events = Iterable[Event]
NONE: tuple[Event, ...] = ()


class Stage(IntEnum):
    """Where an attempt is. Plain numbers: they are compared for every event."""

    HELD = 0  # at the policy's door
    ASKING = 1  # waits for decode memory
    QUEUED = 2  # in prefill's waiting queue
    PREFILLING = 3
    SENDING = 4  # prefilled, KV on its way or waiting to be on its way
    READY = 5  # on decode, waits for a place in the batch
    DECODING = 6
    RETRACTED = 7
    OVER = 8


# As module constants, because an attribute of an enum costs more than the comparison.
HELD, ASKING, QUEUED, PREFILLING, SENDING, READY, DECODING, RETRACTED, OVER = map(int, Stage)


class SimSession:
    """A planned session while it runs."""

    __slots__ = (
        "answered",
        "attempt",
        "call_index",
        "calls",
        "context_tokens",
        "decode",
        "decode_chain",
        "due_s",
        "entered",
        "first_token_s",
        "gate",
        "in_flight",
        "number",
        "pinned_until_s",
        "planned",
        "prefill",
        "prefill_chain",
        "prefilled_index",
        "shared_tokens",
        "steps",
        "steps_on_time",
        "uid",
    )

    def __init__(
        self,
        number: int,
        planned: PlannedSession,
        gate: Gate,
        prefill: PrefillInstance,
        decode: DecodeInstance,
        page_tokens: int,
    ) -> None:
        self.number = number
        self.planned = planned
        self.uid = planned.uid
        self.calls = planned.session.calls
        self.gate = gate
        self.prefill = prefill
        self.decode = decode
        self.shared_tokens = planned.session.shared_prefix_tokens
        shared = self.shared_tokens // page_tokens * page_tokens
        self.prefill_chain = Chain(shared)
        self.decode_chain = Chain(shared)
        self.call_index = 0
        self.attempt = 0
        self.due_s = 0.0
        self.in_flight: SimCall | None = None
        self.entered = False
        self.answered = False
        self.pinned_until_s = 0.0
        self.prefilled_index = -1
        """The latest call whose prompt prefill has begun: what its chain holds is of that prompt."""
        self.context_tokens = 0
        self.first_token_s = -1.0
        self.steps = 0
        self.steps_on_time = 0


class SimCall:
    """One attempt at one call."""

    __slots__ = (
        "cached_tokens",
        "call_id",
        "computed_tokens",
        "decode_held_tokens",
        "decode_matched_tokens",
        "extra_late_steps",
        "first_token_s",
        "join_step",
        "key",
        "late_at_join",
        "load_s",
        "output_tokens",
        "prefill_held_tokens",
        "prompt_tokens",
        "reusable_tokens",
        "sent_s",
        "session",
        "stage",
        "steps_before",
    )

    def __init__(self, session: SimSession, call_id: str, sent_s: float, page_tokens: int) -> None:
        index = session.call_index
        call = session.calls[index]
        self.session = session
        self.call_id = call_id
        self.sent_s = sent_s
        self.prompt_tokens = prompt_tokens = call.prompt_tokens
        self.output_tokens = call.output_tokens
        known = call.cached_prefix_tokens if index else session.shared_tokens
        if known >= prompt_tokens:
            known = prompt_tokens - 1  # the last token is always computed: its logits are needed
        self.reusable_tokens = known - known % page_tokens
        self.key = 0.0
        self.stage = HELD
        self.cached_tokens = 0
        self.computed_tokens = 0
        """Of the prompt, the cached ones included."""
        self.load_s = 0.0
        """What its host tier's copies take to load."""
        self.prefill_held_tokens = 0
        self.decode_held_tokens = 0
        self.decode_matched_tokens = 0
        self.first_token_s = -1.0
        self.join_step = 0
        self.late_at_join = 0
        self.steps_before = 0
        """Steps made before a retraction."""
        self.extra_late_steps = 0
