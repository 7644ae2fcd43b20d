"""Room in prefill's pool for calls that go on: each has all the slots it needs before it leaves the bootstrap queue.

SGLang lets calls into the waiting queue without memory, and what a call has cached counts as evictable until it is
scheduled. With lending that ends in a loop: calls that wait for the pool evict each other's parts that have just been
read, so they are computed after all; passes take longer, calls hold the pool longer, and more of them wait. So a call
takes a *seat* first: its cached prefix is locked, and the slots for the rest of its prompt, read or computed, are
counted as taken. A call that finds no room waits in the bootstrap queue, where it holds nothing, and so do those that
go behind it. The seat ends when the call is scheduled, since it holds its slots itself then, or gone.

What a seat is granted depends on the pool and the queues alone, so all ranks grant alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Seat:
    """A call's room from the bootstrap queue until it is scheduled."""

    lock: Any
    """On the part of its prompt that prefill has."""
    needs_tokens: int
    """Slots that it has yet to allocate, whole pages."""


class Seats:
    """One per rank. Asked in the order of the bootstrap queue, once for each call and turn at most."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page = self._allocator.page_size
        self._by_rid: dict[str, Seat] = {}
        self._full = False

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def begin_turn(self) -> None:
        """Before calls leave the bootstrap queue: end the seats of those that are in neither queue any more."""
        self._full = False
        if self._by_rid:
            scheduler = self._scheduler
            waiting = {req.rid for req in (*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.waiting_queue)}
            self.end(rid for rid in list(self._by_rid) if rid not in waiting)

    def take(self, req: Any, match: Any, *, coming: bool = False) -> bool:
        """Whether the call has a seat now. `match` (`MatchResult`): what prefill has of its prompt. `coming`: whether
        slots that no call holds are being read into, and will be evictable or free within the patience."""
        if self._full:
            return False
        # Locked first: what was evictable of it is room no more.
        lock = self._tree.lock(match.last_device_node)
        whole_tokens = -(-len(req.origin_input_ids) // self._page) * self._page
        seat = Seat(lock, whole_tokens - match.device_prefix_len + 2 * self._page)
        if self.free_tokens >= seat.needs_tokens or not (coming or self._anybody_inside()):
            self._by_rid[req.rid] = seat
            return True
        self._tree.unlock(lock)
        self._full = True
        return False

    def allocated(self, rid: str, tokens: int) -> None:
        """Of what the call needs so much has its slots now."""
        if (seat := self._by_rid.get(rid)) is not None:
            seat.needs_tokens -= tokens

    def cached(self, rid: str, match: Any) -> None:
        """Prefill has more of the call's prompt now."""
        if (seat := self._by_rid.get(rid)) is not None:
            before, seat.lock = seat.lock, self._tree.lock(match.last_device_node)
            self._tree.unlock(before)

    def end(self, rids: Iterable[str]) -> None:
        for rid in rids:
            if (seat := self._by_rid.pop(rid, None)) is not None:
                self._tree.unlock(seat.lock)

    def give_up(self) -> None:
        """End all seats. Their calls stay where they are, as SGLang has them without lending."""
        self.end(list(self._by_rid))

    @property
    def awaits_forward(self) -> bool:
        """Whether a call with a seat is in the waiting queue."""
        return bool(self._by_rid) and any(req.rid in self._by_rid for req in self._scheduler.waiting_queue)

    @property
    def free_tokens(self) -> int:
        """Slots that are free or can be made so, without those that calls inside have yet to allocate."""
        chunked = self._scheduler.chunked_req
        promised = 0 if chunked is None else len(chunked.origin_input_ids) - chunked.prefix_len
        promised += sum(seat.needs_tokens for seat in self._by_rid.values())
        return int(self._allocator.available_size() + self._tree.evictable_size()) - promised

    def _anybody_inside(self) -> bool:
        """Whether there is a call that will make room; if not, what this one needs is SGLang's to judge."""
        scheduler = self._scheduler
        return bool(self._by_rid or scheduler.chunked_req or scheduler.disagg_prefill_inflight_queue)
