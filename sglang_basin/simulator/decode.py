"""A decode instance: memory reserved per call, a running batch, retraction, and finished calls' KV kept to lend.

**Steps are not events.** Between two changes of the batch every step of n sequences with c context tokens takes
a + s·i seconds for i = 0, 1, 2, …, where a = step + n·per_sequence + c·per_context and s = n·per_context, since each
step adds n tokens. The end of k steps, the steps done by some time, and how many of them were over the per-token
target follow from that in closed form, so an instance needs one event per change of its batch, however many tokens
are decoded. All sequences of a batch advance together: a call ends when the instance's step counter reaches
the number of its last step, and its late steps are the difference of one shared counter between its start and its end.

Changes take effect at the end of the step under way, as in a real engine.

**Memory.** A call reserves its prompt and one more page; each step then takes one token per sequence. Lent KV is the
instance's prefix cache: at most `lend_share` of the pool, oldest out first, and taken back whenever room is needed.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable

from sglang_basin.simulator.cache import PoolError, PrefixCache
from sglang_basin.simulator.calls import (
    ASKING,
    DECODING,
    NONE,
    OVER,
    READY,
    RETRACTED,
    Event,
    Events,
    SimCall,
)
from sglang_basin.simulator.profile import HardwareProfile

TPOT_BIN_S = 1e-5
"""Resolution of the step times that are kept."""

ROOM_AFTER_RETRACTION_STEPS = 20
"""SGLang's `SGLANG_RETRACT_DECODE_STEPS`."""


class DecodeInstance:
    """Calls back: `reserved(now_s, call)` when a call has got its memory, `finished(now_s, call)` after its last token,
    `aborted(now_s, call)` when there is no memory for the last call of the batch. They return what follows."""

    def __init__(
        self,
        profile: HardwareProfile,
        *,
        step_target_s: float,
        reserved: Callable[[float, SimCall], Events],
        finished: Callable[[float, SimCall], Events],
        aborted: Callable[[float, SimCall], Events],
    ) -> None:
        self._costs = costs = profile.decode
        self._page = profile.page_tokens
        self._step_target_s = step_target_s
        self._reserved = reserved
        self._finished = finished
        self._aborted = aborted
        self._on_plan = self.on_plan  # bound once, not with every event
        self.cache = PrefixCache(costs.pool_tokens, profile.page_tokens)
        self._lend_cap_tokens = int(costs.pool_tokens * costs.lend_share) if costs.lend else 0
        self._asking: list[tuple[float, int, SimCall]] = []
        self._ready: list[tuple[float, int, SimCall]] = []
        self._finishing: list[tuple[int, int, SimCall]] = []
        self._retracted: deque[SimCall] = deque()
        self._arrivals = 0
        self.waiting_calls = 0
        self.expected_calls = 0
        """Reserved, and not in the batch yet."""
        self.held_tokens = 0
        """Of running and expected calls, output included."""
        self.running_calls = 0
        self.retractions = 0
        # The batch.
        self.at_s = 0.0
        """When step number `steps` ended."""
        self.steps = 0
        self._context_tokens = 0
        self._per_context_s = costs.per_context_token_s
        self._base_s, self._slope_s = costs.step_s, 0.0
        """A step takes `_base_s` + `_per_context_s` · context, and each one after it `_slope_s` more."""
        self._late_steps = 0
        self._planned_step = 0
        self._plan = 0
        self.tpot_bins: defaultdict[int, int] = defaultdict(int)
        """Decode steps of sequences by their duration in `TPOT_BIN_S`."""

    # Memory.

    def ask(self, now_s: float, call: SimCall) -> Events:
        """A call wants its memory. It gets it now or when its turn comes."""
        call.stage = ASKING
        if not (self._asking or self._retracted):  # nobody goes before it
            if not self._lend_cap_tokens:
                # Room even when the plan is through: then there is no need to know how far it is.
                promised_tokens = (self._planned_step - self.steps) * self.running_calls
                if self._reserve(call, promised_tokens):
                    return self._reserved(now_s, call)
            self._settle(now_s)
            if self._reserve(call):
                events = self._reserved(now_s, call)
                return [*events, *self._replan()] if self._runs_short() else events
        self._arrivals += 1
        heapq.heappush(self._asking, (call.key, self._arrivals, call))
        self.waiting_calls += 1
        return self.grant(now_s)

    def grant(self, now_s: float) -> Events:
        """Give memory to retracted calls first, then to those that ask, in order, as far as it reaches."""
        if not (self._asking or self._retracted):
            return NONE
        self._settle(now_s)  # the step under way has its memory already
        events: list[Event] = []
        granted = False
        while self._retracted and self._resume(now_s, self._retracted[0], events):
            granted = True
        asking = self._asking
        while asking and not self._retracted:
            call = asking[0][2]
            if call.stage != OVER:
                if not self._reserve(call):
                    break
                granted = True
                self.waiting_calls -= 1
                events += self._reserved(now_s, call)
            heapq.heappop(asking)
        if granted and self._runs_short():
            events += self._replan()
        return events

    def _reserve(self, call: SimCall, promised_tokens: int = 0) -> bool:
        cache, page, lends = self.cache, self._page, self._lend_cap_tokens
        need = -(-call.prompt_tokens // page) * page + page
        free = cache.free_tokens + cache.evictable_tokens - promised_tokens
        matched = 0
        if lends:
            chain = call.session.decode_chain
            shared = chain.shared_tokens
            matched = cache.match(chain, call.reusable_tokens)
            need -= matched
            if matched > shared:
                free -= matched - shared
        if need + self._costs.reserve_tokens * (1 + self.running_calls + self.expected_calls) > free:
            return False
        held = need
        if lends:
            cache.lock(chain, matched)
            cache.take(need)
            held += chain.tokens
            if cache.trunk_tokens < shared:
                held -= cache.grow_trunk(shared)
        else:
            cache.free_tokens -= need
        call.decode_matched_tokens = matched
        call.decode_held_tokens = held
        self.held_tokens += held
        self.expected_calls += 1
        return True

    def _give_back(self, call: SimCall, keep: bool) -> None:
        """Free a call's memory; `keep` leaves what whole pages of prompt and output hold as lent KV."""
        held = call.decode_held_tokens
        self.held_tokens -= held
        call.decode_held_tokens = 0
        cache = self.cache
        if not self._lend_cap_tokens:
            cache.free_tokens += held
            return
        chain = call.session.decode_chain
        if keep:
            whole = call.prompt_tokens + call.output_tokens - 1
            kept = min(max(0, whole - whole % self._page - chain.shared_tokens), held)
        else:
            kept = min(chain.tokens, held)  # what was lent to it before it came
        cache.unlock(chain, held, kept)
        if cache.evictable_tokens > self._lend_cap_tokens:
            cache.evict(cache.evictable_tokens - self._lend_cap_tokens)

    # The batch.

    def arrive(self, now_s: float, call: SimCall) -> Events:
        """The call's KV is here."""
        call.stage = READY
        if self.running_calls >= self._costs.max_running or self._ready:
            self._arrivals += 1
            heapq.heappush(self._ready, (call.key, self._arrivals, call))
            return NONE
        self._settle(now_s)
        self._join(call)
        return self._replan()

    def _join(self, call: SimCall) -> None:
        costs, before = self._costs, call.steps_before
        self.expected_calls -= 1
        self.running_calls = running = self.running_calls + 1
        self._base_s = costs.step_s + running * costs.per_sequence_s
        self._slope_s = costs.per_context_token_s * running
        self._context_tokens += call.prompt_tokens + 1 + before
        call.stage = DECODING
        if call.first_token_s < 0:
            call.first_token_s = self.at_s
        call.join_step = steps = self.steps
        call.late_at_join = self._late_steps
        self._arrivals += 1
        heapq.heappush(self._finishing, (steps + call.output_tokens - 1 - before, self._arrivals, call))

    def _part(self, call: SimCall) -> None:
        """Take a call out of the batch: its steps so far are counted on it, its output's memory is its own."""
        costs, made = self._costs, self.steps - call.join_step
        call.steps_before = steps = call.steps_before + made
        call.extra_late_steps += self._late_steps - call.late_at_join
        call.decode_held_tokens += made
        self.running_calls = running = self.running_calls - 1
        self._base_s = costs.step_s + running * costs.per_sequence_s
        self._slope_s = costs.per_context_token_s * running
        self._context_tokens -= call.prompt_tokens + 1 + steps

    def on_plan(self, now_s: float, plan: int) -> Events:
        """The planned step has ended: calls finish, or memory has run out."""
        if plan != self._plan:
            return NONE  # the batch changed meanwhile
        self._advance(self._planned_step - self.steps)
        self.at_s = now_s  # the same up to rounding, which must not make time run backwards
        events: list[Event] = []
        finishing = self._finishing
        while finishing and (finishing[0][0] <= self.steps or finishing[0][2].stage != DECODING):
            call = heapq.heappop(finishing)[2]
            if call.stage != DECODING:
                continue
            self._part(call)
            call.stage = OVER
            self._give_back(call, True)
            events += self._finished(now_s, call)
        if self.cache.free_tokens + self.cache.evictable_tokens < self.running_calls:
            events += self._retract(now_s)
        while self._ready and self.running_calls < self._costs.max_running:
            call = heapq.heappop(self._ready)[2]
            if call.stage != OVER:
                self._join(call)
        events += self._replan()
        if self._asking or self._retracted:
            events += self.grant(now_s)
        return events

    def remove(self, now_s: float, call: SimCall) -> Events:
        """The call was aborted, wherever it is on this instance; it is over when this returns."""
        stage, call.stage = call.stage, OVER
        if stage == ASKING:
            self.waiting_calls -= 1
            return NONE
        if stage == RETRACTED:
            self._retracted.remove(call)
            return NONE
        if not call.decode_held_tokens:
            return NONE  # nothing was reserved for it yet
        if stage == DECODING:
            self._settle(now_s)
            self._part(call)
        else:
            self.expected_calls -= 1
        self._give_back(call, False)
        events: list[Event] = []
        if stage == DECODING:
            while self._ready and self.running_calls < self._costs.max_running:
                ready = heapq.heappop(self._ready)[2]
                if ready.stage != OVER:
                    self._join(ready)
            events += self._replan()
        events += self.grant(now_s)
        return events

    def cut(self, now_s: float, call: SimCall) -> None:
        """The run is over: count the steps of a call that is in the batch."""
        if call.stage == DECODING:
            self._settle(now_s, False)
            self._part(call)
            call.stage = OVER

    def check(self) -> None:
        """Raise PoolError unless the batch adds up."""
        batch = [entry[2] for entry in self._finishing if entry[2].stage == DECODING]
        context = sum(call.prompt_tokens + 1 + call.steps_before + self.steps - call.join_step for call in batch)
        if len(batch) != self.running_calls or context != self._context_tokens:
            raise PoolError(
                f"decode: {len(batch)} calls with {context} tokens run, "
                f"{self.running_calls} with {self._context_tokens} are said to"
            )
        if self.expected_calls < 0 or self.waiting_calls < 0:
            raise PoolError(f"decode: {self.expected_calls} expected, {self.waiting_calls} waiting calls")

    # Retraction, as SGLang's: the least output first, until there is room for a few more steps.

    def _retract(self, now_s: float) -> Events:
        running = [entry[2] for entry in self._finishing if entry[2].stage == DECODING]
        running.sort(key=lambda call: (-(self.steps - call.join_step + call.steps_before), call.prompt_tokens))
        events: list[Event] = []
        while self._room_steps() < ROOM_AFTER_RETRACTION_STEPS:
            call = running.pop()
            if not running:
                if self._room_steps() < 1:  # all other memory is promised: SGLang aborts it, too
                    self._part(call)
                    call.stage = OVER
                    self._give_back(call, False)
                    events += self._aborted(now_s, call)
                break
            self._part(call)
            call.stage = RETRACTED
            self._give_back(call, False)
            call.extra_late_steps += 1  # the step over the gap
            self._retracted.append(call)
            self.retractions += 1
        self._finishing = [entry for entry in self._finishing if entry[2].stage == DECODING]
        heapq.heapify(self._finishing)
        return events

    def _resume(self, now_s: float, call: SimCall, events: list[Event]) -> bool:
        cache = self.cache
        tokens = call.prompt_tokens + call.steps_before + 1
        need = -(-tokens // self._page) * self._page + self._page
        others = self.running_calls + self.expected_calls
        if need + self._costs.reserve_tokens * others > cache.free_tokens + cache.evictable_tokens:
            return False
        self._retracted.popleft()
        if self._lend_cap_tokens:
            cache.lock(call.session.decode_chain, 0)
            cache.take(need)
        else:
            cache.free_tokens -= need
        call.decode_held_tokens = need
        self.held_tokens += need
        self.expected_calls += 1
        call.stage = READY
        events.append((now_s + tokens / self._costs.resume_tokens_per_s, self.on_resumed, call))
        return True

    def on_resumed(self, now_s: float, call: SimCall) -> Events:
        return NONE if call.stage == OVER else self.arrive(now_s, call)

    # Steps in closed form.

    def _room_steps(self) -> int:
        """Steps until the memory has run out."""
        running = self.running_calls
        return (self.cache.free_tokens + self.cache.evictable_tokens) // running if running else 1 << 60

    def _runs_short(self) -> bool:
        """Memory does not last until the planned step."""
        cache = self.cache
        return (self._planned_step - self.steps) * self.running_calls > cache.free_tokens + cache.evictable_tokens

    def _replan(self) -> Events:
        """Plan the next change: a call's last step, or the last step there is room for."""
        self._plan = plan = self._plan + 1
        finishing = self._finishing
        while finishing and finishing[0][2].stage != DECODING:
            heapq.heappop(finishing)
        if not finishing:
            return NONE
        steps = finishing[0][0] - self.steps
        cache = self.cache
        if steps * self.running_calls > cache.free_tokens + cache.evictable_tokens:
            steps = self._room_steps()
        self._planned_step = self.steps + steps
        first_s = self._base_s + self._per_context_s * self._context_tokens
        seconds = steps * first_s + self._slope_s * (steps * (steps - 1) // 2)
        return ((self.at_s + seconds, self._on_plan, plan),)

    def _advance(self, steps: int, until_s: float = 0.0) -> None:
        """Let so many whole steps pass, and then the one that is under way at `until_s`, if it was planned."""
        running, at_s, context = self.running_calls, self.at_s, self._context_tokens
        slope_s, target_s, bins = self._slope_s, self._step_target_s, self.tpot_bins
        step_s = self._base_s + self._per_context_s * context
        if steps:
            if step_s + slope_s * (steps - 1) > target_s:
                on_time = 0 if step_s > target_s else int((target_s - step_s) / slope_s) + 1
                self._late_steps += steps - min(on_time, steps)
            seconds = steps * step_s + slope_s * (steps * (steps - 1) // 2)
            at_s += seconds
            bins[int(seconds / steps / TPOT_BIN_S)] += steps * running
        if at_s < until_s and self.steps + steps < self._planned_step:
            if steps:
                step_s = self._base_s + self._per_context_s * (context + steps * running)
            if step_s > target_s:
                self._late_steps += 1
            at_s += step_s
            bins[int(step_s / TPOT_BIN_S)] += running
            steps += 1
        grown = steps * running
        self.steps += steps
        self.at_s = at_s
        self._context_tokens = context + grown
        self.held_tokens += grown
        cache = self.cache
        free = cache.free_tokens
        if grown > free:
            cache.evict(grown - free)
            free = cache.free_tokens
        cache.free_tokens = free - grown

    def _settle(self, now_s: float, finish: bool = True) -> None:
        """Let all planned steps pass that have ended by now, and the one under way, at whose end the batch may change,
        unless it is not to `finish`."""
        gap_s = now_s - self.at_s
        if gap_s <= 0:
            return
        if self.running_calls:
            slope_s = self._slope_s
            first_s = self._base_s + self._per_context_s * self._context_tokens
            if slope_s > 0:
                linear = first_s - 0.5 * slope_s
                steps = int((math.sqrt(linear * linear + 2 * slope_s * gap_s) - linear) / slope_s + 1e-9)
            else:
                steps = int(gap_s / first_s + 1e-9)
            left = self._planned_step - self.steps
            self._advance(steps if steps < left else left, now_s if finish else 0.0)
        if finish and self.at_s < now_s:  # nothing runs, or by rounding
            self.at_s = now_s
