"""The bookkeeping that every rival needs: which programs and calls exist, and which of them wait.

A *program* is what the rivals' papers call a session: one agent with its growing context. `ProgramTable` implements
all of `policy.interface.ServingPolicy`; a rival overrides the hooks marked below and nothing else. What the table
promises:

1. A call is known from `call` until `finish`, `abandon`, its program's `end` or its refusal; asking again about a
   known call changes nothing. A call without a session passes and is not kept.
2. Each held call ends exactly once: by an `Admit` from `poll`, by the client (`abandon`, `finish`), or refused in
   `end`.
3. A program ends by `end`, with a call announced as its last one, or after `idle_timeout_s` without any call: the
   same ends that the door sees, so that no policy is told more than another.
4. Cost per event is O(1); memory is O(programs + calls).

Rivals refuse nothing and have no time limit of their own at the door unless their source has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_basin.policy.decisions import Admit, Decision, Outcome, Queue, Reason, Refuse
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.sessions import Call, Stage
from sglang_basin.policy.sharing import SharedFront

RETRY_AFTER_S = 30.0
"""What a client is told whose program ended while a call of it waited; as at the door."""


@dataclass(frozen=True, kw_only=True)
class RivalSettings:
    """What all rivals have in common. A rival's own settings extend it; times are seconds."""

    idle_timeout_s: float = 600.0
    """A program without any call for this long has ended."""

    def __post_init__(self) -> None:
        require_positive(self, "idle_timeout_s")


def require_positive(settings: object, *names: str) -> None:
    """Raises ValueError naming the first of these fields that is not above zero."""
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name}: must be positive, got {getattr(settings, name)}")


def require_share(settings: object, *names: str) -> None:
    """Raises ValueError naming the first of these fields that is not between 0 and 1."""
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name}: must be between 0 and 1, got {getattr(settings, name)}")


@dataclass(slots=True)
class Program:
    """One program, from its first call to its end."""

    session_id: str
    arrived_s: float
    context_tokens: int
    """Its latest prompt, and that call's output once it is known."""
    steps: int = 0
    """Calls so far, the present one included."""
    calls: dict[str, Call] = field(default_factory=dict)
    """Calls not yet over, by call id."""
    held: int = 0
    """How many of them wait."""
    found_tokens: int | None = None
    """What its first call found cached; None until then."""

    @property
    def running(self) -> bool:
        """Whether a call of it is being served (the papers' "reasoning", as opposed to "acting" in a tool)."""
        return len(self.calls) > self.held


class ProgramTable:
    """Base of the rivals. Lets every call pass and leaves queues in order of arrival until a hook says otherwise."""

    name = "rival"

    def __init__(self, settings: RivalSettings) -> None:
        self._idle_timeout_s = settings.idle_timeout_s
        self._programs: dict[str, Program] = {}
        self._calls: dict[str, Call] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()  # programs without a call -> since when
        self._held_count = 0
        self._now_s = float("-inf")
        self._view: EngineView | None = None
        self._front = SharedFront()

    def shared_tokens(self, program: Program) -> int:
        """How much of the program's context others share, as far as first calls have told: what the door goes by."""
        found_tokens = self._front.expected_tokens if program.found_tokens is None else program.found_tokens
        return min(found_tokens, self._front.tokens, program.context_tokens)

    # Hooks.

    def _arrived(self, program: Program, call: Call, now_s: float) -> Reason | None:
        """A call arrived: why it passes, or None to hold it. `program` counts the call already, unheld."""
        return Reason.ADMISSION_OFF

    def _due(self, now_s: float) -> Iterable[tuple[Program, Reason]]:
        """Programs whose held calls go on now. May change the rival's own state; called by each `poll`."""
        return ()

    def _tick_s(self, now_s: float) -> float | None:
        """When the rival itself wants to be polled next; None if it need not."""
        return None

    def _prefilled(self, program: Program, call: Call, now_s: float) -> None:
        """Prefill is done with the call."""

    def _returned(self, program: Program, call: Call, output_tokens: int, now_s: float) -> None:
        """A call that was served is over; the program's context holds its output, its `calls` no longer hold it."""

    def _gave_up(self, program: Program, now_s: float) -> None:
        """The last held call of the program is gone without having been served."""

    def _ended(self, program: Program, now_s: float) -> None:
        """The program is over and out of the table."""

    # ServingPolicy.

    def call(
        self,
        call_id: str,
        session_id: str | None,
        prompt_tokens: int,
        now_s: float,
        *,
        ends_session: bool = False,
    ) -> Decision:
        now_s = self._advance(now_s)
        known = self._calls.get(call_id)
        if known is not None:
            return self._present(known, now_s)
        if session_id is None:
            return Admit(call_id, Reason.NO_IDENTITY)
        program = self._programs.get(session_id)
        if program is None:
            program = self._programs[session_id] = Program(session_id, now_s, prompt_tokens)
        program.context_tokens = max(program.context_tokens, prompt_tokens) if program.calls else prompt_tokens
        program.steps += 1
        call = Call(call_id, session_id, prompt_tokens, now_s, Stage.PREFILLING, ends_session)
        program.calls[call_id] = self._calls[call_id] = call
        self._idle.pop(session_id, None)
        reason = self._arrived(program, call, now_s)
        if reason is not None:
            return Admit(call_id, reason)
        call.stage = Stage.HELD
        program.held += 1
        self._held_count += 1
        return self._present(call, now_s)

    def prefilled(self, call_id: str, now_s: float, *, cached_tokens: int | None = None) -> None:
        now_s = self._advance(now_s)
        call = self._calls.get(call_id)
        if call is not None and call.stage is Stage.PREFILLING:
            call.stage = Stage.DECODING
            program = self._programs[call.session_id]
            if cached_tokens is not None and program.found_tokens is None:
                program.found_tokens = min(max(0, cached_tokens), call.prompt_tokens)
                self._front.learn(program.found_tokens)
            self._prefilled(program, call, now_s)

    def finish(self, call_id: str, output_tokens: int, now_s: float) -> None:
        now_s = self._advance(now_s)
        call = self._calls.get(call_id)
        if call is None:
            return
        program = self._programs[call.session_id]
        held = call.stage is Stage.HELD
        self._drop(program, call)
        if held:
            if program.held == 0:
                self._gave_up(program, now_s)
        else:
            grown = call.prompt_tokens + max(0, output_tokens)
            program.context_tokens = max(program.context_tokens, grown) if program.calls else grown
            self._returned(program, call, max(0, output_tokens), now_s)
        if program.calls:
            return
        if call.ends_session and not held:
            self._end(program, now_s)
        else:
            self._idle[program.session_id] = now_s

    def abandon(self, call_id: str, now_s: float) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            known = self._programs[call.session_id].context_tokens - call.prompt_tokens
            self.finish(call_id, max(0, known), now_s)

    def end(self, session_id: str, now_s: float) -> list[Refuse]:
        now_s = self._advance(now_s)
        program = self._programs.get(session_id)
        if program is None:
            return []
        refused = [
            Refuse(call.call_id, Reason.SESSION_ENDED, now_s - call.arrived_s, RETRY_AFTER_S)
            for call in program.calls.values()
            if call.stage is Stage.HELD
        ]
        for call in list(program.calls.values()):
            self._drop(program, call)
        self._end(program, now_s)
        return refused

    def poll(self, now_s: float) -> list[Outcome]:
        now_s = self._advance(now_s)
        self._expire(now_s)
        outcomes: list[Outcome] = []
        for program, reason in self._due(now_s):
            for call in program.calls.values():
                if call.stage is Stage.HELD:
                    call.stage = Stage.PREFILLING
                    outcomes.append(Admit(call.call_id, reason, now_s - call.arrived_s))
            self._held_count -= program.held
            program.held = 0
        return outcomes

    def observe(self, view: EngineView, now_s: float) -> None:
        self._advance(now_s)
        self._view = view

    def wake_s(self, now_s: float) -> float | None:
        """The rival's own next tick, or when an idle program ends for which others may wait."""
        times = []
        tick_s = self._tick_s(now_s)
        if tick_s is not None:
            times.append(tick_s)
        if self._held_count and self._idle:
            times.append(next(iter(self._idle.values())) + self._idle_timeout_s)
        return max(now_s, min(times)) if times else None

    def order(self, session_id: str, call_arrived_s: float) -> float:
        return call_arrived_s

    def keep_until_s(self, session_id: str, now_s: float) -> float | None:
        return None

    # What others look at.

    @property
    def held_calls(self) -> int:
        return self._held_count

    @property
    def programs(self) -> int:
        return len(self._programs)

    # Inside.

    def _present(self, call: Call, now_s: float) -> Decision:
        if call.stage is not Stage.HELD:
            return Admit(call.call_id, Reason.LIVE_SESSION, now_s - call.arrived_s)
        need = self._programs[call.session_id].context_tokens
        return Queue(call.call_id, Reason.NO_HEADROOM, need_tokens=need, free_tokens=0, ahead=self._held_count - 1)

    def _drop(self, program: Program, call: Call) -> None:
        del program.calls[call.call_id]
        del self._calls[call.call_id]
        if call.stage is Stage.HELD:
            program.held -= 1
            self._held_count -= 1

    def _end(self, program: Program, now_s: float) -> None:
        del self._programs[program.session_id]
        self._idle.pop(program.session_id, None)
        self._ended(program, now_s)

    def _expire(self, now_s: float) -> None:
        while self._idle:
            session_id, since_s = next(iter(self._idle.items()))
            if now_s - since_s < self._idle_timeout_s:
                return
            self._end(self._programs[session_id], now_s)

    def _advance(self, now_s: float) -> float:
        self._now_s = max(self._now_s, now_s)
        return self._now_s
