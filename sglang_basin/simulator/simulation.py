"""A run: the plan's sessions against a simulated deployment under one policy. Deterministic, no clock, no I/O.

    arrival → policy (Gate) → decode memory → prefill queue → passes → KV transfer → batch → finish → tool → next call
                 └ held until `poll`   └ "early": before prefill; "late": after it

Handlers take (now_s, something) and return the events that follow; the loop alone touches the event queue. Events of
one moment run in the order in which they were made.

Invariants, each with its test in `tests/simulator/test_invariants.py`:

1. The pools of every instance add up at every event, and no part of them is negative.
2. Time never runs backwards.
3. With a policy that lets every session in, every session finishes, given time; except for what SGLang would abort:
   a call that could never fit, and the last of a batch when all other memory is promised to calls on their way.
4. Same settings and seed, same result, byte for byte.
5. A policy is never given anything that has not happened yet.
6. Lent pages can always be taken back: no call waits for decode memory that only lent KV occupies.
7. A lone session takes exactly its unloaded time.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sglang_basin.policy.decisions import Admit, Refuse
from sglang_basin.policy.interface import ServingPolicy
from sglang_basin.replay.goodput import Target
from sglang_basin.replay.plan import Plan, PlannedSession
from sglang_basin.simulator.cache import PoolError
from sglang_basin.simulator.calls import (
    ASKING,
    HELD,
    NONE,
    OVER,
    QUEUED,
    SENDING,
    Event,
    Events,
    SimCall,
    SimSession,
)
from sglang_basin.simulator.decode import DecodeInstance
from sglang_basin.simulator.gate import Gate
from sglang_basin.simulator.prefill import PrefillInstance
from sglang_basin.simulator.profile import HardwareProfile
from sglang_basin.simulator.records import Log, Outcome

PolicyFactory = Callable[[], ServingPolicy]

TICK_S = 1.0
OK = Outcome.OK
"""An attribute of an enum costs more than all else that a line does with it."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0
"""Between tries of the OpenAI and Anthropic SDKs, doubling, unless the answer says `Retry-After`."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How clients behave, as `replay.DriveSettings`."""

    announce_end: bool = True
    """The last call of a session says so, as an agent harness can."""
    retries: int = 0
    """Of a call that was refused or timed out before its first token."""
    call_timeout_s: float = 600.0
    """From a call's sending to its last token."""
    drain_s: float = 0.0
    """After the last arrival, sessions may go on for this long."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, got {self.retries!r}")
        if not self.call_timeout_s > 0:
            raise ValueError(f"call_timeout_s must be positive, got {self.call_timeout_s!r}")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s must not be negative, got {self.drain_s!r}")


class Simulation:
    """One run. `run()` returns its log; the instances stay readable for whoever wants to look inside."""

    def __init__(
        self,
        plan: Plan,
        profile: HardwareProfile,
        policy: PolicyFactory,
        *,
        client: ClientSettings | None = None,
        target: Target | None = None,
        sample_s: float = 30.0,
        checked: bool = False,
    ) -> None:
        """`checked` proves the invariants of all pools after every event, at the price of speed."""
        self.plan = plan
        self.profile = profile
        self.client = client or ClientSettings()
        self.log = Log(plan, sample_s)
        self.now_s = 0.0
        self.end_s = plan.profile.end_s + self.client.drain_s
        self._checked = checked
        self._page = profile.page_tokens
        self._early = profile.decode.allocation == "early"
        self._transfer_s = profile.transfer_s
        self._on_call, self._on_sent = self.on_call, self.on_sent  # bound once, not with every event
        target = target or Target()
        self.prefills = [PrefillInstance(profile, self.on_prefilled) for _ in range(profile.prefill.instances)]
        self.decodes = [
            DecodeInstance(
                profile,
                step_target_s=target.tpot_s,
                reserved=self.on_reserved,
                finished=self.on_finished,
                aborted=self.on_outgrown,
            )
            for _ in range(profile.decode.instances)
        ]
        self.gates = [Gate(policy(), profile, prefill, self.decodes) for prefill in self.prefills]
        trunk_tokens = max((s.session.shared_prefix_tokens for s in plan.sessions), default=0)
        # Calls that could not run on an otherwise empty deployment are refused at once, as by SGLang.
        self._reserve_tokens = profile.decode.reserve_tokens
        self._prefill_fits_tokens = profile.prefill.pool_tokens - trunk_tokens - self._page
        self._decode_fits_tokens = (
            profile.decode.pool_tokens - 3 * self._page - (trunk_tokens if profile.decode.lend else 0)
        )
        self._queue: list[tuple[float, int, Callable[[float, object], Events], object]] = []
        """(minus when, minus how many were made before, handler, what it is given), sorted, so that the next event is
        the last: most events are soon, and go in near there. Half as many comparisons as a heap makes."""
        self._made = itertools.count(0, -1)
        self._deadlines: deque[tuple[float, SimSession]] = deque()
        """(when an attempt was sent, whose it was), oldest first: all clients have the same patience."""
        self.sessions: list[SimSession] = []
        self.live_sessions: dict[str, SimSession] = {}
        self.working_set_tokens = 0
        self.waiting_first = 0
        self._sample_every = max(1, round(sample_s / TICK_S))
        self._ticks = 0

    # The loop.

    def run(self) -> Log:
        self._push(self._arrival(0))
        self._push(((TICK_S, self.on_tick, None),))
        queue, made, end_s = self._queue, self._made, self.end_s
        pop, checked = queue.pop, self._checked
        while queue:
            minus_s, _, handler, subject = pop()
            now_s = -minus_s
            if now_s > end_s:
                break
            if checked and now_s < self.now_s:
                raise PoolError(f"time ran backwards, from {self.now_s} to {now_s}")
            self.now_s = now_s
            for at_s, then, what in handler(now_s, subject):
                insort(queue, (-at_s, next(made), then, what))
            if checked:
                self.check()
        self._close()
        return self.log

    def _push(self, events: Events) -> None:
        for at_s, handler, subject in events:
            insort(self._queue, (-at_s, next(self._made), handler, subject))

    # Sessions and their calls.

    def _arrival(self, number: int) -> Events:
        sessions = self.plan.sessions
        return ((sessions[number].arrival_s, self.on_arrival, number),) if number < len(sessions) else NONE

    def on_arrival(self, now_s: float, number: int) -> Events:
        planned = self.plan.sessions[number]
        prefill = _affine(planned, "prefill", len(self.prefills))
        decode = _affine(planned, "decode", len(self.decodes))
        session = SimSession(
            number, planned, self.gates[prefill], self.prefills[prefill], self.decodes[decode], self._page
        )
        self.sessions.append(session)
        self.live_sessions[session.uid] = session
        self.waiting_first += 1
        return [*self._arrival(number + 1), *self.on_call(now_s, session)]

    def on_call(self, now_s: float, session: SimSession) -> Events:
        """The session asks for its next call, or tries the last one again."""
        index = session.call_index
        if not session.attempt:
            session.due_s = now_s
        call = SimCall(session, f"{session.uid}/{index}.{session.attempt}", now_s, self._page)
        session.in_flight = call
        self._deadlines.append((now_s, session))
        first = len(self._deadlines) == 1
        gate = session.gate
        ends = self.client.announce_end and index == len(session.calls) - 1
        decision = gate.ask(call, now_s, ends)
        if isinstance(decision, Admit):
            events = self._admitted(now_s, call)
        elif isinstance(decision, Refuse):
            events = self._refused(now_s, call, decision)
        else:
            events = self._wake(now_s, gate, polled=False)
        return [(now_s + self.client.call_timeout_s, self.on_deadline, None), *events] if first else events

    def _admitted(self, now_s: float, call: SimCall) -> Events:
        session = call.session
        prompt, output = call.prompt_tokens, call.output_tokens
        self.working_set_tokens += prompt - session.context_tokens  # of a session that enters, 0
        session.entered = True
        session.context_tokens = prompt
        if output < self._reserve_tokens:
            output = self._reserve_tokens
        if prompt > self._prefill_fits_tokens or prompt + output > self._decode_fits_tokens:
            return self._failed(now_s, call, Outcome.ERROR, None)
        call.key = session.gate.policy.order(session.uid, now_s)
        return session.decode.ask(now_s, call) if self._early else session.prefill.enqueue(now_s, call)

    def on_reserved(self, now_s: float, call: SimCall) -> Events:
        """Decode has given the call its memory."""
        if self._early:
            return call.session.prefill.enqueue(now_s, call)
        return self._send(now_s, call)

    def on_prefilled(self, now_s: float, call: SimCall) -> Events:
        """The prompt is computed."""
        session = call.session
        session.gate.policy.prefilled(call.call_id, now_s, cached_tokens=call.cached_tokens)
        if self._early:
            return self._send(now_s, call)
        return session.decode.ask(now_s, call)

    def _send(self, now_s: float, call: SimCall) -> Events:
        call.stage = SENDING
        prompt = call.prompt_tokens
        seconds = self._transfer_s(prompt - call.cached_tokens, prompt - call.decode_matched_tokens)
        return ((now_s + seconds, self._on_sent, call),)

    def on_sent(self, now_s: float, call: SimCall) -> Events:
        if call.stage == OVER:
            return NONE  # aborted on its way; its memory is free again
        session = call.session
        prefill = session.prefill
        prefill.release(call)
        if not session.answered:
            session.answered = True
            self.waiting_first -= 1
        events = session.decode.arrive(now_s, call)
        return [*events, *prefill.start(now_s)] if prefill.waiting_calls else events

    def on_finished(self, now_s: float, call: SimCall) -> Events:
        session, output = call.session, call.output_tokens
        gate = session.gate
        policy = gate.policy
        session.in_flight = None
        self.working_set_tokens += output
        session.context_tokens += output
        self.log.call(call, now_s, OK, False)
        policy.finish(call.call_id, output, now_s)
        tool_s = session.calls[session.call_index].tool_s
        session.call_index += 1
        session.attempt = 0
        if session.call_index == len(session.calls):
            self._ended(now_s, session, OK)
            return self._changed(now_s, gate) if gate.held else NONE
        events: list[Event] = [(now_s + tool_s, self._on_call, session)]
        keep_s = policy.keep_until_s(session.uid, now_s)
        if keep_s is not None and keep_s > now_s:
            session.prefill.pin(session)
            session.pinned_until_s = keep_s
            events.append((keep_s, self.on_unpin, session))
        if gate.held:
            events += self._changed(now_s, gate)
        return events

    def on_unpin(self, now_s: float, session: SimSession) -> Events:
        if session.prefill_chain.pinned and session.pinned_until_s <= now_s:
            session.prefill.unpin(session)
            return session.prefill.start(now_s)
        return NONE

    def _ended(self, now_s: float, session: SimSession, outcome: Outcome) -> None:
        del self.live_sessions[session.uid]
        if not session.answered:
            self.waiting_first -= 1
        if session.entered:
            self.working_set_tokens -= session.context_tokens
        if session.prefill_chain.pinned:
            session.prefill.unpin(session)
        self.log.session(session, now_s, outcome)

    # What goes wrong.

    def on_deadline(self, now_s: float, _nothing: None) -> Events:
        """The client of the oldest call gives up, if that call is not over; looks ahead to the next one."""
        deadlines, timeout_s = self._deadlines, self.client.call_timeout_s
        events: list[Event] = []
        while deadlines:
            sent_s, session = deadlines[0]
            call = session.in_flight
            if call is not None and call.sent_s == sent_s:
                if sent_s + timeout_s > now_s:
                    events.append((sent_s + timeout_s, self.on_deadline, None))
                    break
                events += self._abort(now_s, call)
                events += self._failed(now_s, call, Outcome.TIMEOUT, None)
            deadlines.popleft()
        return events

    def _abort(self, now_s: float, call: SimCall) -> Events:
        """The client is gone: the call leaves wherever it is. A pass under way computes on for nobody."""
        session, stage = call.session, call.stage
        session.gate.held.pop(call.call_id, None)
        session.gate.policy.abandon(call.call_id, now_s)
        if stage == HELD:
            call.stage = OVER
            return NONE
        events: list[Event] = [*session.decode.remove(now_s, call)]
        if stage == QUEUED:
            events += session.prefill.forget(now_s, call)
        if stage == SENDING or (stage == ASKING and not self._early):
            session.prefill.release(call)
            events += session.prefill.start(now_s)
        return events

    def on_outgrown(self, now_s: float, call: SimCall) -> Events:
        """It alone was too large for decode's pool."""
        call.session.gate.policy.abandon(call.call_id, now_s)
        return self._failed(now_s, call, Outcome.ABORTED, None)

    def _refused(self, now_s: float, call: SimCall, decision: Refuse) -> Events:
        return self._failed(now_s, call, Outcome.REJECTED, decision.retry_after_s)

    def _failed(self, now_s: float, call: SimCall, outcome: Outcome, retry_after_s: float | None) -> Events:
        """The attempt is over; the client tries again as `replay.driver.retry_wait_s` does, or gives the session up."""
        call.stage = OVER
        session, gate = call.session, call.session.gate
        again = outcome in (Outcome.REJECTED, Outcome.TIMEOUT) and call.first_token_s < 0
        again = again and session.attempt < self.client.retries
        self.log.call(call, now_s, outcome, again)
        session.in_flight = None
        events: list[Event] = []
        if again:
            backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**session.attempt)
            session.attempt += 1
            wait_s = backoff_s if retry_after_s is None else retry_after_s
            events.append((now_s + wait_s, self.on_call, session))
        else:
            if outcome is Outcome.ERROR:
                gate.policy.abandon(call.call_id, now_s)
            self._ended(now_s, session, outcome)
        if gate.held:
            events += self._changed(now_s, gate)
        return events

    # The policy's clock.

    def _changed(self, now_s: float, gate: Gate) -> Events:
        """Something ended while calls are held: let the policy look again."""
        gate.observe(now_s)
        return self._poll(now_s, gate)

    def _poll(self, now_s: float, gate: Gate) -> Events:
        events: list[Event] = []
        for call, outcome in gate.poll(now_s):
            if isinstance(outcome, Admit):
                events += self._admitted(now_s, call)
            else:
                events += self._refused(now_s, call, outcome)
        if gate.held:
            events += self._wake(now_s, gate, polled=True)
        return events

    def _wake(self, now_s: float, gate: Gate, *, polled: bool) -> Events:
        """Come back when the policy says, if that is before the next tick. Just polled, "now" can only mean that."""
        wake_s = gate.policy.wake_s(now_s)
        if wake_s is None or (polled and wake_s <= now_s):
            return NONE
        next_tick_s = (math.floor(now_s / TICK_S) + 1) * TICK_S
        if wake_s >= next_tick_s or (gate.wake_s is not None and gate.wake_s <= wake_s):
            return NONE
        gate.wake_s = max(wake_s, now_s)
        return ((gate.wake_s, self.on_wake, gate),)

    def on_wake(self, now_s: float, gate: Gate) -> Events:
        gate.wake_s = None
        return self._changed(now_s, gate)

    def on_tick(self, now_s: float, _nothing: None) -> Events:
        """Once a second for every policy, whatever happens."""
        events: list[Event] = []
        for gate in self.gates:
            gate.tick()
            gate.observe(now_s)
            events += self._poll(now_s, gate)
        self._ticks += 1
        if self._ticks % self._sample_every == 0:
            self.log.sample(self, now_s)
        if self.live_sessions or len(self.sessions) < len(self.plan.sessions):
            events.append((now_s + TICK_S, self.on_tick, None))
        return events

    # Records.

    def _close(self) -> None:
        """Sessions still open at the end of the run are unfinished, their calls cancelled."""
        ended_s = self.end_s if self.live_sessions else min(self.now_s, self.end_s)
        for session in list(self.live_sessions.values()):
            call = session.in_flight
            if call is not None:
                session.decode.cut(ended_s, call)
                self.log.call(call, ended_s, Outcome.CANCELLED, False)
            self.log.session(session, ended_s, Outcome.CANCELLED)
        self.log.close(self, ended_s)

    def check(self) -> None:
        """Raise PoolError unless every pool adds up."""
        for number, prefill in enumerate(self.prefills):
            chains = [s.prefill_chain for s in self.sessions if s.prefill is prefill]
            prefill.cache.check(chains, prefill.held_tokens)
            if prefill.host is not None:
                prefill.host.check(chains)
            if prefill.waiting_calls < 0:
                raise PoolError(f"prefill {number}: {prefill.waiting_calls} waiting calls")
        for decode in self.decodes:
            chains = [s.decode_chain for s in self.sessions if s.decode is decode]
            decode.cache.check(chains, decode.held_tokens)
            decode.check()


def _affine(planned: PlannedSession, role: str, instances: int) -> int:
    """The instance that a session's calls go to, by jump consistent hashing (Lamping and Veach, 2014): one more
    instance moves only its own share of the sessions."""
    if instances == 1:
        return 0
    key = int.from_bytes(hashlib.blake2b(f"{role}/{planned.uid}".encode(), digest_size=8).digest(), "big")
    bucket, following = -1, 0
    while following < instances:
        bucket = following
        key = (key * 2862933555777941757 + 1) % 2**64
        following = int((bucket + 1) * (2**31 / ((key >> 33) + 1)))
    return bucket


def simulate(
    plan: Plan,
    profile: HardwareProfile,
    policy: PolicyFactory,
    *,
    client: ClientSettings | None = None,
    target: Target | None = None,
    sample_s: float = 30.0,
    checked: bool = False,
) -> Log:
    """Run a plan to its end."""
    run = Simulation(plan, profile, policy, client=client, target=target, sample_s=sample_s, checked=checked)
    return run.run()
