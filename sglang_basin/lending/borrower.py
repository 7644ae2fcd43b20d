"""Prefill's side of lending: which calls get their lent part, and how it becomes part of prefill's cache.

All of it runs in the scheduler's thread of every rank; `Pull` alone has a thread. A call's lent part goes through

    seated    the call is bootstrapped and prefill's pool has room for all of it (`seats`)
    asked     decode holds more of its prefix than prefill's caches: wait for a lease if it is another decode
              (`questions`), half the patience at most
    flowing   slots are allocated, the prefix before them is locked, a thread reads
    near      so little is missing that the call may be scheduled: the forward of layer l waits for layer l alone.
              The call's own decode may lack the tokens of a lease; it gets them behind the forward
              (`prefill.send_cached`)
    landed    all is there: the slots join the radix tree like computed KV, before or after the call ran; until it is
              scheduled, the call keeps them from being evicted
    given up  the peer failed or took longer than the patience: the call goes on as if nothing was lent, and the slots
              stay out of use until the last read is through

Until it has landed the part is nobody else's: it is neither in the tree nor in the allocator. So a call that ends early
needs no clean-up here; its part lands or is given up all the same. What ranks must agree on (how long the part is,
whether it has come) is reduced to the least over all of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_basin.engine.messages import MAX_PROMPT_BYTES
from sglang_basin.engine.metrics import log, metrics
from sglang_basin.lending.breaker import Breaker
from sglang_basin.lending.calls import Chance, chance_of
from sglang_basin.lending.pages import Pages
from sglang_basin.lending.pull import Pull
from sglang_basin.lending.questions import Post, Question, Questions
from sglang_basin.lending.seats import Seats
from sglang_basin.lending.transport import Plan, Transport
from sglang_basin.lending.worth import Inflow, Line, Link, worth

NEAR_S = 0.1
"""A call is scheduled when the rest of its part is expected within this time: its batch may wait so long."""

FORWARD_WAIT_S = 0.15
"""A forward waits for a layer no longer than this in all, whatever was expected: the batch's other calls wait too."""

PULLS_AT_ONCE = 8

DRAIN_TURNS = 50
DRAIN_TURN_S = 0.01


class Came(IntEnum):
    """How far a part has come on one rank, in the order in which the least of all ranks is taken."""

    GIVEN_UP = 0
    FLOWING = 1
    NEAR = 2
    LANDED = 3


@dataclass(slots=True)
class Part:
    """The tokens `start` to `end` of one call's prompt, on their way from `peer` into `slots`."""

    req: Any
    peer: str
    start: int
    end: int
    key: Any
    before: torch.Tensor
    """Slots of the tokens before `start`, which `lock` keeps in the tree."""
    lock: Any
    slots: torch.Tensor
    pull: Pull
    lent_bytes: int
    until_s: float
    """The end of the call's patience."""
    leased_by: bytes | None = None
    """The decode whose lease it is, to be given back; None for the call's own decode."""
    near: bool = False
    shown_from: int | None = None
    """The call was last told that it has everything up to `end`, of which so much came from the tree."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class _Peer:
    breaker: Breaker = field(default_factory=Breaker)
    link: Link = field(default_factory=Link)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a decode lends for a call, as this rank sees it: the tokens up to `end` lie in `pages`."""

    peer: str
    pages: Pages
    end: int
    lease: Question | None = None
    """By which another decode than the call's own lends it."""


class Reading:
    """Rooms whose pages on decode are being read. Decode keeps an aborted call's pages until prefill has acknowledged
    the abort; while a room is here, it does not (see `prefill.hold_abort_ack`). Used from several threads."""

    def __init__(self, kv_manager: Any) -> None:
        self._manager = kv_manager
        self._lock = threading.Lock()
        self._rooms: Counter[int] = Counter()

    def begin(self, room: int) -> bool:
        """Whether the room's pages may be read; every True is to be followed by `end`.

        The room is entered before its state is looked at, and an abort marks the room before it looks here: one of the
        two sees the other.
        """
        with self._lock:
            self._rooms[room] += 1
        if self._manager.request_status.get(room) in (None, KVPoll.Failed):
            self.end(room)
            return False
        return True

    def end(self, room: int) -> None:
        with self._lock:
            self._rooms[room] -= 1
            if self._rooms[room] <= 0:
                del self._rooms[room]
        self._manager._maybe_ack_drained_abort(room)

    def __contains__(self, room: int) -> bool:
        with self._lock:
            return room in self._rooms


class Borrower:
    """One per rank of a prefill instance."""

    def __init__(
        self,
        scheduler: Any,
        transport: Transport,
        *,
        patience_s: float,
        overlap: bool = True,
        counted: bool = True,
        rank: int = 0,
        post: Post | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`overlap` False where a forward cannot wait for single layers: a part is then used once it has landed.
        `counted`: whether this rank's decisions, which are all ranks', are the ones on the metrics. `rank` is this
        rank's number; `post`, on the first rank, sends to other decodes' gates."""
        self.scheduler = scheduler
        self.transport = transport
        self.patience_s = patience_s
        self.overlap = overlap
        self.counted = counted
        self.computing = Line()
        self.inflow = Inflow()
        self.kv_manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
        self.reading = Reading(self.kv_manager)
        self.questions = Questions(post, rank, patience_s)
        self._clock = clock
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page = self._allocator.page_size
        self._parts: dict[str, Part] = {}  # by rid; flowing or near
        self._stuck: list[Part] = []  # given up, their last read not yet through
        self._in_hand_tokens = 0  # allocated for a part that does not exist yet; stays so if making it fails
        self.seats = Seats(scheduler)
        self._stalled_s: float | None = None  # since when no forward ran although calls with a seat wait for one
        self._peers: dict[str, _Peer] = {}
        self._warned: set[str] = set()
        self._forward: tuple[tuple[Part, ...], float] = ((), 0.0)  # parts in the running forward, until when it waits

    # In the scheduler's loop.

    @property
    def private_tokens(self) -> int:
        """Slots that are neither free nor in the tree."""
        return self._in_hand_tokens + sum(part.tokens for part in (*self._parts.values(), *self._stuck))

    def settle(self) -> None:
        """Once a turn, before calls leave the bootstrap queue: what has landed joins the tree, what failed is given
        up."""
        self.seats.begin_turn()
        if not (self._parts or self._stuck or self.seats or self.questions):
            return
        now_s = self._clock()
        parts, stuck = list(self._parts.values()), list(self._stuck)
        questions = self.questions.open()
        came = self._agree(
            [
                *(self._came(part, now_s) for part in parts),
                *(part.pull.over for part in stuck),
                *(self.questions.patient(question, now_s) for question in questions),
                not self._stalls(now_s),
            ]
        )
        for part, far in zip(parts, came, strict=False):
            if far == Came.LANDED:
                self._publish(part)
            elif far == Came.GIVEN_UP:
                self._give_up(part)
            else:
                part.near = far == Came.NEAR
        for part, over in zip(stuck, came[len(parts) :], strict=False):
            if over:
                self._stuck.remove(part)
                self._allocator.free(part.slots)
                self._give_back(part)
        for question, patient in zip(questions, came[len(parts) + len(stuck) :], strict=False):
            if not patient and self.questions.of(question.room) is question:
                self.questions.drop(question, now_s)
        if not came[-1]:
            self.seats.give_up()

    def drain(self) -> bool:
        """Before the pool is reset: whether no slot is on its way any more, after waiting a little for those that
        are. The same on all ranks."""
        self.seats.begin_turn()  # a lock would outlive the tree that it is on
        for _ in range(DRAIN_TURNS):
            if not self.private_tokens:
                break
            time.sleep(DRAIN_TURN_S)
            self.settle()
        return not self.private_tokens

    def ready(self, req: Any) -> bool:
        """Whether a bootstrapped call may go on to the waiting queue, now that what is lent to it has come, is about to
        come or will not come. Called each turn until it says so."""
        if (part := self._parts.get(req.rid)) is not None:
            return part.near
        if req.rid not in self.seats and not req.kv.holds_kv and not self._seat(req):
            return False
        chance = chance_of(req)
        if chance.judged:
            return True
        if self._waits_for_answer(req, chance):
            return False
        return self._ask(req, chance)

    def ran(self) -> None:
        """A forward was launched."""
        self._stalled_s = None

    # When a call is matched and run.

    def matched(self, req: Any, limit: int, result: Any) -> Any:
        """The tree's answer (`MatchResult`) to a match of `limit` tokens for `req`, with a part that is near as its
        continuation."""
        part = self._parts.get(req.rid)
        if part is None:
            return result
        part.shown_from = None
        have = result.device_prefix_len
        if not part.near or not part.start <= have < part.end <= limit or have + result.host_hit_length >= part.end:
            return result
        part.shown_from = have
        return result._replace(
            device_prefix_len=part.end,
            cache_protected_len=have,
            last_host_node=result.last_device_node,
            best_match_node=result.last_device_node,
            host_hit_length=0,
            full_kv_hit_length=part.end,
        )

    def tail(self, req: Any) -> torch.Tensor | None:
        """Slots that continue the call's path in the tree, if its latest match was told so."""
        part = self._parts.get(req.rid)
        if part is None or part.shown_from is None:
            return None
        return part.slots[part.shown_from - part.start :]

    def wait_for_layer(self, layer: int) -> None:
        """In a forward, before it reads the KV of `layer`."""
        parts, until_s = self._forward
        for part in parts:
            part.pull.wait(layer + 1, until_s)

    def shown(self, reqs: Iterable[Any]) -> tuple[Part, ...]:
        """The parts, still on their way, that these calls of a batch run with."""
        if not self._parts:
            return ()
        parts = (self._parts.get(req.rid) for req in reqs)
        return tuple(part for part in parts if part is not None and part.shown_from is not None)

    def run(self, forward: Callable[[], Any], parts: tuple[Part, ...]) -> Any:
        """Run the forward of a batch that these parts belong to."""
        until_s = self._clock() + FORWARD_WAIT_S
        self._forward = parts, until_s
        try:
            result = forward()
        finally:
            self._forward = (), 0.0
        for part, landed in zip(parts, self._agree([self._all_there(part, until_s) for part in parts]), strict=True):
            if landed:
                self._hand_over(part)
            else:
                self._compute_again(part)
        return result

    # How a part begins.

    def _seat(self, req: Any) -> bool:
        """Give the call its room in the pool, if there is any for it now."""
        limit = req._compute_max_prefix_len(len(req.origin_input_ids))
        _, match = self._cached(req, limit // self._page * self._page)
        return self.seats.take(req, match, coming=bool(self._parts))

    def _stalls(self, now_s: float) -> bool:
        """Whether calls with a seat have waited for a forward for longer than the patience: something else has taken
        what they were promised, and what they lock may be what it waits for."""
        if not self.seats.awaits_forward:
            self._stalled_s = None
        elif self._stalled_s is None:
            self._stalled_s = now_s
        return self._stalled_s is not None and now_s - self._stalled_s > self.patience_s

    def _waits_for_answer(self, req: Any, chance: Chance) -> bool:
        """Whether the call waits for another decode to say what it lends; asks it the first time. The same on all
        ranks."""
        if (question := self.questions.of(req.bootstrap_room)) is not None:
            return not question.answered
        if chance.looked:
            return False
        chance.looked = True
        copy = self.questions.copy_of(req.bootstrap_room)
        return copy is not None and self._ask_holder(req, chance, *copy)

    def _ask_holder(self, req: Any, chance: Chance, holder: bytes, kept_tokens: int) -> bool:
        """Ask another decode for a lease, if it has more than the call's own and prefill, and reading it may pay."""
        own, _ = self._offer(req)
        (own_end,) = self._agree([0 if own is None else own.end])
        limit = min(kept_tokens, req._compute_max_prefix_len(len(req.origin_input_ids)), MAX_PROMPT_BYTES // 4)
        _, match = self._cached(req, end := limit // self._page * self._page)
        have = match.device_prefix_len + match.host_hit_length
        session = self.questions.holder(holder).session
        if end <= max(own_end, have) or session in self._own_sessions(req.bootstrap_room):
            return False  # its own decode has offered what it has: the prompt has left the copy there
        if not self._agree([self.questions.may_ask(req, holder, self._clock())])[0]:
            return False
        if session is not None and self._refused(session, end - have):
            return False
        chance.asked_s = self._clock()
        self.questions.ask(req, end, holder, chance.asked_s)
        return True

    def _ask(self, req: Any, chance: Chance) -> bool:
        """`ready` for a call that has not been judged, and for which all offers are here. The same on all ranks."""
        own, refusal = self._offer(req)
        leased = self._leased(req)
        own_end, leased_end = self._agree([0 if offer is None else offer.end for offer in (own, leased)])
        for offer, end in ((leased, leased_end), (own, own_end)):
            if offer is None or end == 0 or (offer is leased and end <= own_end):
                continue
            key, match = self._cached(req, end)
            start = match.device_prefix_len
            if start + match.host_hit_length >= end:
                refusal = "present"
            elif (refusal := self._refused(offer.peer, end - start)) is None:
                waited_s = 0.0 if chance.asked_s is None else self._clock() - chance.asked_s
                return not self._begin(req, offer, key, match, start, end, self.patience_s - waited_s)
        return self._judge(req, refusal or "other_rank")

    def _cached(self, req: Any, end: int) -> tuple[Any, Any]:
        """The key of the call's first `end` tokens, and what prefill's tree has of it (`MatchResult`)."""
        key = RadixKey(req.origin_input_ids, req.extra_key, limit=end, cache_salt=req.cache_salt)
        key = key.page_aligned(self._page)
        return key, self._tree.match_prefix(MatchPrefixParams(key=key))

    def _leased(self, req: Any) -> _Offer | None:
        """What another decode has leased for this call."""
        question = self.questions.of(req.bootstrap_room)
        if question is None or question.session is None or self._unlike(question.session):
            return None
        limit = min(question.tokens, req._compute_max_prefix_len(len(req.origin_input_ids)))
        end = min(limit // self._page, len(question.pages)) * self._page
        return _Offer(question.session, question.pages, end, question)

    def _own_sessions(self, room: int) -> set[str]:
        """Where the decode that has the call can be read."""
        return {info.mooncake_session_id for info in list(self.kv_manager.transfer_infos.get(room, {}).values())}

    def _offer(self, req: Any) -> tuple[_Offer | None, str | None]:
        """What decode lends for this call, or why this rank cannot take it."""
        room = req.bootstrap_room
        lending = [
            info
            for info in list(self.kv_manager.transfer_infos.get(room, {}).values())
            if getattr(info, "lent_pages", None) is not None
        ]
        if len(lending) != 1:
            return None, "none"
        (info,) = lending
        prefix = self.kv_manager.req_to_decode_prefix_len.get(room, 0)
        limit = min(prefix, req._compute_max_prefix_len(len(req.origin_input_ids)))
        end = min(limit // self._page, len(info.lent_pages)) * self._page
        if end <= 0:
            return None, "none"
        if self._unlike(info.mooncake_session_id):
            return None, "layout"
        return _Offer(info.mooncake_session_id, info.lent_pages, end), None

    def _unlike(self, peer: str) -> bool:
        """Whether this peer's KV cannot be read; says why once."""
        wrong = self.transport.mismatch(peer)
        if wrong is not None and wrong not in self._warned:
            self._warned.add(wrong)
            log.warning("Basin: %s lends nothing to this prefill: %s", peer, wrong)
        return wrong is not None

    def _refused(self, peer: str, tokens: int) -> str | None:
        """Why the tokens are computed rather than pulled, or None. One rank's reason is every rank's."""
        now_s = self._clock()
        known = self._peers.setdefault(peer, _Peer())
        lent_bytes = tokens // self._page * self.transport.page_bytes
        verdict = worth(tokens, lent_bytes, known.link, self.computing, now_s)
        allowed = known.breaker.allows(now_s)
        free = len(self._parts) + len(self._stuck) < PULLS_AT_ONCE
        if self._agree([allowed and free and verdict.pull])[0]:
            return None
        if not verdict.pull:
            log.info("Basin computes %d tokens that %s lends: %s", tokens, peer, verdict)
        return "breaker" if not allowed else "busy" if not free else "not_worth"

    def _begin(self, req: Any, offer: _Offer, key: Any, match: Any, start: int, end: int, patience_s: float) -> bool:
        """Allocate, lock and start reading; False, with nothing kept, if that fails or the call has just ended."""
        tree = self._tree
        lock = tree.lock(match.last_device_node)
        before = tree.tree_core.collect_full_device_indices(
            match.last_device_node, tree.root_node_handle(req.extra_key)
        )
        short = end - start - self._allocator.available_size()
        if short > 0:
            tree.evict(EvictParams(num_tokens=short))
        slots = self._allocator.alloc(end - start)
        self._in_hand_tokens = 0 if slots is None else end - start
        room = req.bootstrap_room
        lease = offer.lease
        may_read = slots is not None and (lease is not None or self.reading.begin(room))
        if not self._agree([may_read])[0]:
            if may_read and lease is None:
                self.reading.end(room)
            if slots is not None:
                self._allocator.free(slots)
            self._in_hand_tokens = 0
            tree.unlock(lock)
            return not self._judge(req, "no_room" if slots is None else "call_ended")
        slots = slots.to(torch.int64)
        ours = (slots[:: self._page] // self._page).cpu().numpy()
        plan = Plan.of(offer.peer, offer.pages[start // self._page : end // self._page], ours)
        transport, reading = self.transport, self.reading
        pull = Pull(
            transport.layers,
            lambda layer: transport.read(plan, layer),
            lambda: _end(transport, plan, None if lease else reading, room),
            str(room),
            float("inf") if lease is None else lease.until_s,
        )
        self._peers[offer.peer].breaker.begin()
        lent_bytes = plan.total_pages * transport.page_bytes
        until_s = self._clock() + patience_s
        self._parts[req.rid] = part = Part(
            req, offer.peer, start, end, key, before[:start], lock, slots, pull, lent_bytes, until_s
        )
        self._in_hand_tokens = 0
        self.seats.allocated(req.rid, part.tokens)
        if lease is not None and self.questions.take(room):
            part.leased_by = lease.holder
        self._end_question(req)  # a shorter lease than what its own decode has
        pull.start()
        log.debug("Basin pulls tokens %d to %d of call %s from %s", start, end, req.rid, offer.peer)
        return True

    def _judge(self, req: Any, outcome: str) -> bool:
        chance_of(req).judged = True
        self._end_question(req)
        self._count(outcome)
        return True

    def _end_question(self, req: Any) -> None:
        """The call has no use, or none any more, for what it asked another decode for."""
        if (question := self.questions.of(req.bootstrap_room)) is not None:
            self.questions.drop(question, self._clock())

    def _give_back(self, part: Part) -> None:
        if part.leased_by is not None:
            self.questions.give_back(part.leased_by, part.req.bootstrap_room)
            part.leased_by = None

    def _count(self, outcome: str) -> None:
        if self.counted:
            metrics().lent_calls.labels(outcome).inc()

    # How a part ends.

    def _came(self, part: Part, now_s: float) -> Came:
        pull = part.pull
        if pull.landed:
            return Came.LANDED
        if pull.over or now_s > part.until_s:
            return Came.GIVEN_UP
        return Came.NEAR if self.overlap and pull.remaining_s(now_s) <= NEAR_S else Came.FLOWING

    def _all_there(self, part: Part, until_s: float) -> bool:
        part.pull.wait_over(until_s)
        return part.pull.landed

    def _publish(self, part: Part) -> None:
        """The part joins the tree, evictable like any cached prefix; slots that the tree has no use for are freed."""
        del self._parts[part.req.rid]
        self._tree.insert(
            InsertParams(
                key=part.key[: part.end],
                value=torch.cat([part.before, part.slots]),
                prev_prefix_len=part.start,
                inserted_len=part.start,
                priority=part.req.priority or 0,
            )
        )
        self.seats.cached(part.req.rid, self._cached(part.req, part.end)[1])
        self._tree.unlock(part.lock)
        chance_of(part.req).judged = True
        self._landed(part, "landed")

    def _hand_over(self, part: Part) -> None:
        """The call ran with the part, whose slots are in the call's row now: SGLang inserts them like computed ones."""
        del self._parts[part.req.rid]
        if unused := part.shown_from - part.start:
            self._allocator.free(part.slots[:unused])
        self._tree.unlock(part.lock)
        self._landed(part, "overlapped")

    def _landed(self, part: Part, own_outcome: str) -> None:
        """`own_outcome` is counted if the call's own decode lent it."""
        outcome = own_outcome if part.leased_by is None else "leased"
        self._give_back(part)
        pull = part.pull
        seconds = pull.ended_s - pull.began_s
        known = self._peers[part.peer]
        known.breaker.succeeded()
        known.link.note(part.lent_bytes, seconds, self._clock())
        self.inflow.note(part.tokens, pull.began_s, pull.ended_s)
        self._count(outcome)
        if self.counted:
            metrics().lent_tokens.inc(part.tokens)
            metrics().lent_bytes.labels(self.transport.name_of(part.peer)).inc(part.lent_bytes)
            metrics().lent_seconds.observe(seconds)
        log.debug("Basin got tokens %d to %d of call %s in %.4f s", part.start, part.end, part.req.rid, seconds)

    def _give_up(self, part: Part) -> None:
        late = not part.pull.over
        part.pull.give_up()
        del self._parts[part.req.rid]
        chance_of(part.req).judged = True
        self._tree.unlock(part.lock)
        self.seats.end((part.req.rid,))  # it needs slots for the part once more
        self._peers[part.peer].breaker.failed(now_s := self._clock())
        if late:
            self.inflow.note(part.tokens, part.pull.began_s, now_s)  # it takes that long at least
        self._count("late" if late else "failed")
        log.warning(
            "Basin gives up on %d lent tokens of call %s after %.2f s: %s %s; they are computed",
            part.tokens,
            part.req.rid,
            now_s - part.pull.began_s,
            part.peer,
            "is late" if late else "failed",
        )
        self._stuck.append(part)

    def _compute_again(self, part: Part) -> None:
        """The forward ran on slots that were not filled: its result for this call is void. The call goes back to the
        bootstrap queue as SGLang's own optimistic prefill does, without the part's slots, and is computed."""
        req = part.req
        chance_of(req).again = (req.disagg_decode_prefix_len, req.skip_radix_cache_insert)
        req.skip_radix_cache_insert = True
        req.kv.cache_protected_len = part.end  # what is freed with the row begins behind the part
        req.pending_bootstrap = True
        if self.scheduler.chunked_req is req:
            self.scheduler.chunked_req = None
        self._give_up(part)

    def _agree(self, values: list[int]) -> list[int]:
        """The least of each value over all ranks."""
        agreed = torch.tensor([int(value) for value in values], dtype=torch.int64)
        self._tree._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MIN)
        return agreed.tolist()


def _end(transport: Transport, plan: Plan, reading: Reading | None, room: int) -> None:
    """In the reading thread, behind the last layer. `reading` is None for a lease."""
    try:
        transport.finish(plan)
    finally:
        if reading is not None:
            reading.end(room)
