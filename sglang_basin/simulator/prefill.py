"""A prefill instance: a waiting queue, chunked forward passes, and the prefix cache.

As SGLang's scheduler: each pass takes the call that is in the middle of its prompt, then waiting calls in order until
`chunk_tokens` new tokens are together; the first waiting call whose whole prompt does not fit the pool stops the loop.
The prefix is matched when a call is taken, not when it starts to wait. A call holds its memory until its KV has left
for decode.

With lending a call comes by its memory earlier (`lending.seats`, `lending.borrower`): in order, before it may wait for
a pass, it takes room for its whole prompt, which locks what it has cached; what decode still has beyond that is read
into that room, one call after the other over the instance's link; and only then does it wait for a pass.

Three simplifications: the whole prompt's memory is taken with the first chunk, a chunk's end is not page-aligned, and
no layer is computed before the last one has been read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sglang_basin.lending.worth import READ_MAY_TAKE
from sglang_basin.simulator.cache import HostTier, PrefixCache
from sglang_basin.simulator.calls import NONE, OVER, PREFILLING, QUEUED, Event, Events, SimCall, SimSession
from sglang_basin.simulator.profile import HardwareProfile


class PrefillInstance:
    """`prefilled(now_s, call)` is called for each call whose prompt is done and returns what follows."""

    def __init__(self, profile: HardwareProfile, prefilled: Callable[[float, SimCall], Events]) -> None:
        self._costs = costs = profile.prefill
        self._profile = profile
        self._page = page = profile.page_tokens
        self._prefilled = prefilled
        self._on_pass_end = self.on_pass_end  # bound once, not with every event
        self.host = HostTier(costs.host_tokens, page) if costs.host_tokens else None
        self.cache = PrefixCache(costs.pool_tokens, page, self.host)
        self._queue: list[tuple[float, int, SimCall]] = []  # may hold calls that are over
        self._lends = profile.decode.lend
        self._plain = not (self._lends or self.host)  # nothing is read or loaded
        self._ready: list[tuple[float, int, SimCall]] = []  # with lending: those that have their memory and their part
        self._link_free_s = 0.0
        self._arrivals = 0
        self._chunked: SimCall | None = None
        self.running = False
        self.waiting_calls = 0
        self.pinned: dict[SimSession, None] = {}
        """Sessions whose context is kept on purpose; a set in a fixed order."""
        self.held_tokens = 0
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.written_back_tokens = 0
        self.loaded_tokens = 0
        # Of the calls taken since someone last looked.
        self.recent_prompt_tokens = 0
        self.recent_cached_tokens = 0

    def enqueue(self, now_s: float, call: SimCall) -> Events:
        idle = not (self.running or self._queue or self._chunked)
        if idle and self._plain and self._take(call):  # as `_pass` would, without a turn through the queue
            call.stage = PREFILLING
            self._chunked = call
            return self._pass(now_s)
        self._arrivals += 1
        heapq.heappush(self._queue, (call.key, self._arrivals, call))
        call.stage = QUEUED
        self.waiting_calls += 1
        return self.start(now_s)

    def forget(self, now_s: float, call: SimCall) -> Events:
        """A waiting call was aborted; its entry is skipped when its turn comes."""
        self.waiting_calls -= 1
        if not call.prefill_held_tokens:
            return NONE
        self.release(call)
        return self.start(now_s)

    def start(self, now_s: float) -> Events:
        """Begin the next pass, if there is anything to do and none is under way."""
        if self._lends:
            return [*self._seat(now_s), *self._pass(now_s)]
        return self._pass(now_s)

    def _seat(self, now_s: float) -> Events:
        """With lending: give waiting calls their memory, in order, as far as it reaches, and read what is lent."""
        events: list[Event] = []
        queue = self._queue
        while queue:
            call = queue[0][2]
            if call.stage != OVER:
                if not self._take(call):
                    break
                landed_s = self._read(call, now_s)
                if landed_s > now_s:
                    events.append((landed_s, self.on_landed, call))
                else:
                    heapq.heappush(self._ready, queue[0])
            heapq.heappop(queue)
        return events

    def _read(self, call: SimCall, now_s: float) -> float:
        """When the call has what decode lends it, if reading pays; now if nothing is read."""
        cached, lent, prompt = call.cached_tokens, call.decode_matched_tokens, call.prompt_tokens
        if lent <= cached:
            return now_s
        landed_s = max(now_s, self._link_free_s) + (lent - cached) / self._profile.link.write_back_tokens_per_s
        seconds = self._profile.prefill_s
        if landed_s - now_s >= READ_MAY_TAKE * (seconds(prompt - cached, cached) - seconds(prompt - lent, lent)):
            return now_s
        self._link_free_s = landed_s
        self.written_back_tokens += lent - cached
        self.computed_tokens -= lent - cached
        self.recent_cached_tokens += lent - cached
        call.cached_tokens = call.computed_tokens = lent
        return landed_s

    def on_landed(self, now_s: float, call: SimCall) -> Events:
        if call.stage == OVER:
            return NONE
        self._arrivals += 1
        heapq.heappush(self._ready, (call.key, self._arrivals, call))
        return self._pass(now_s)

    def _pass(self, now_s: float) -> Events:
        if self.running:
            return NONE
        costs = self._costs
        budget = costs.chunk_tokens
        batch: list[tuple[SimCall, int]] = []
        seconds = load_s = 0.0
        call = self._chunked
        queue = self._ready if self._lends else self._queue
        while budget > 0:
            if call is None:
                if not queue:
                    break
                call = queue[0][2]
                if call.stage == OVER:
                    heapq.heappop(queue)
                    call = None
                    continue
                if not (self._lends or self._take(call)):
                    break
                heapq.heappop(queue)
                call.stage = PREFILLING
                self.waiting_calls -= 1
                load_s += call.load_s
            done = call.computed_tokens
            new = call.prompt_tokens - done
            if new > budget:
                new = budget
            budget -= new
            seconds += new * (costs.per_token_s + costs.attention_s * (done + 0.5 * new))
            batch.append((call, new))
            call = None
        if not batch:
            return NONE
        self._chunked = None
        self.running = True
        seconds += costs.fixed_s
        if seconds < load_s:
            seconds = load_s
        self.busy_s += seconds
        return ((now_s + seconds, self._on_pass_end, batch),)

    def _take(self, call: SimCall) -> bool:
        """Give a waiting call its memory and its prefix. False when the pool cannot hold it now."""
        session, cache, page = call.session, self.cache, self._page
        chain = session.prefill_chain
        if chain.locked:
            return False  # an aborted attempt of the same session is still in the pass that it was aborted in
        prompt, limit = call.prompt_tokens, call.reusable_tokens
        if session.prefilled_index == session.call_index:  # an earlier attempt at this very prompt got this far
            limit = (prompt - 1) // page * page
        matched = cache.match(chain, limit)
        need = -(-prompt // page) * page - matched
        shared = chain.shared_tokens
        available = cache.free_tokens + cache.evictable_tokens
        if matched > shared and not chain.pinned:
            available -= matched - shared
        if need > available and not (self.pinned and self._unpin(need - available, session)):
            return False
        cached = matched
        host = self.host
        if host is not None:
            loaded = host.beyond(chain, matched, limit)
            host.forget_beyond(chain, limit)
            cached += loaded
            self.loaded_tokens += loaded
            call.load_s = loaded / self._costs.host_load_tokens_per_s
        if chain.pinned:
            del self.pinned[session]
        session.prefilled_index = session.call_index
        cache.lock(chain, matched)
        cache.take(need)
        held = chain.tokens + need
        if cache.trunk_tokens < shared:
            held -= cache.grow_trunk(shared)
        call.prefill_held_tokens = held
        self.held_tokens += held
        call.cached_tokens = call.computed_tokens = cached
        self.computed_tokens += prompt - cached
        self.recent_prompt_tokens += prompt
        self.recent_cached_tokens += cached
        return True

    def _unpin(self, tokens: int, for_session: SimSession) -> bool:
        """Memory is short: give up pins, that of the session whose calls come last in order first, and those of
        sessions whose next call waits already only when nothing else would ever free memory."""
        order = sorted(self.pinned, key=lambda session: session.gate.policy.order(session.uid, session.due_s))
        for waiting_too in (False, True):
            if waiting_too and self.held_tokens:
                break
            for session in reversed(order):
                if tokens <= 0:
                    return True
                chain, call = session.prefill_chain, session.in_flight
                waits = call is not None and call.stage <= QUEUED
                if not chain.pinned or session is for_session or (waits and not waiting_too):
                    continue
                tokens -= chain.tokens
                self.unpin(session)
        return tokens <= 0

    def pin(self, session: SimSession) -> None:
        """Keep the session's context until `unpin` or its next call."""
        self.cache.pin(session.prefill_chain)
        self.pinned[session] = None

    def unpin(self, session: SimSession) -> None:
        self.cache.unpin(session.prefill_chain)
        self.pinned.pop(session, None)

    def on_pass_end(self, now_s: float, batch: list[tuple[SimCall, int]]) -> Events:
        self.running = False
        events: list[Event] = []
        for call, new in batch:
            call.computed_tokens += new
            if call.stage == OVER:
                self.release(call)
            elif call.computed_tokens < call.prompt_tokens:
                self._chunked = call
            else:
                if self.host is not None:
                    chain = call.session.prefill_chain
                    self.host.store(chain, self._whole_private(call))
                events += self._prefilled(now_s, call)
        if (self.waiting_calls or self._chunked) and not self.running:  # what followed may have started the next pass
            events += self.start(now_s)
        return events

    def _whole_private(self, call: SimCall) -> int:
        done, held = call.computed_tokens, call.prefill_held_tokens
        tokens = done - done % self._page - call.session.prefill_chain.shared_tokens
        if tokens > held:
            return held
        return tokens if tokens > 0 else 0

    def release(self, call: SimCall) -> None:
        """The call needs its memory no more: what it computed stays in the cache."""
        held = call.prefill_held_tokens
        self.held_tokens -= held
        self.cache.unlock(call.session.prefill_chain, held, self._whole_private(call))
        call.prefill_held_tokens = 0
