"""Two instances' KV pools and radix trees, SGLang's own, in this process; what is between them is memory."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_basin.engine import messages
from sglang_basin.lending.borrower import Borrower
from sglang_basin.lending.decode import Lender
from sglang_basin.lending.pages import pack, unpack
from sglang_basin.lending.ranks import ForRanks, Kept
from sglang_basin.lending.transport import Plan, TransferFailed

LAYERS = 3
PEER = "decode:1"
ELSEWHERE = "decode:2"
HOLDER, PREFILL = b"gate of decode 2", "tcp://prefill"


class Instance:
    """One side: pool, allocator, tree. The KV of a token depends on the whole prompt up to it, as a model's does."""

    def __init__(self, tokens: int, page: int, ranks: Any = None) -> None:
        """`ranks`: torch's process group of the ranks that share a tree's decisions."""
        self.page = page
        self.pool = MHATokenToKVPool(tokens, page, torch.float32, 1, 2, LAYERS, "cpu", enable_memory_saver=False)
        kind: Any = (tokens,) if page == 1 else (tokens, page)
        allocator = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
        self.allocator: Any = allocator(*kind, torch.float32, "cpu", self.pool, need_sort=False)
        rows = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
                attn_tp_cache_group=ranks,
            )
        )

    def kv(self, prompt: list[int], layer: int) -> torch.Tensor:
        """What the KV of each of the prompt's tokens is."""
        sums = torch.tensor(list(itertools.accumulate(prompt)), dtype=torch.float32)
        return sums[:, None, None] + torch.tensor([0.25, 0.5]) + layer

    def write(self, prompt: list[int], slots: torch.Tensor, start: int, layer: int) -> None:
        """Compute tokens `start` and later of the prompt into `slots`."""
        self.pool.k_buffer[layer][slots] = self.kv(prompt, layer)[start:]
        self.pool.v_buffer[layer][slots] = -self.kv(prompt, layer)[start:]

    def holds(self, prompt: list[int], slots: torch.Tensor, layer: int) -> bool:
        """Whether the slots hold the KV of the prompt's first tokens."""
        wanted = self.kv(prompt, layer)[: len(slots)]
        return bool(
            torch.equal(self.pool.k_buffer[layer][slots], wanted)
            and torch.equal(self.pool.v_buffer[layer][slots], -wanted)
        )

    def allocate(self, tokens: int) -> torch.Tensor:
        short = tokens - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        slots = self.allocator.alloc(tokens)
        assert slots is not None, f"{tokens} tokens do not fit"
        return slots.to(torch.int64)

    def find(self, prompt: list[int], limit: int | None = None) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt), None, limit=limit)))

    def path(self, match: Any) -> torch.Tensor:
        return self.tree.path_device_indices(match.last_device_node)

    def cache(self, prompt: list[int]) -> None:
        """Have the whole pages of a prompt in the tree, computed here."""
        whole = prompt[: len(prompt) // self.page * self.page]
        match = self.find(whole)
        have = match.device_prefix_len
        if have == len(whole):
            return
        lock = self.tree.lock(match.last_device_node)
        slots = torch.cat([self.path(match), self.allocate(len(whole) - have)])
        for layer in range(LAYERS):
            self.write(whole, slots[have:], have, layer)
        self.tree.insert(
            InsertParams(key=RadixKey(array("q", whole), None), value=slots, prev_prefix_len=have, inserted_len=have)
        )
        self.tree.unlock(lock)

    def forget(self) -> None:
        self.tree.evict(EvictParams(num_tokens=self.tree.evictable_size()))

    @property
    def accounted_tokens(self) -> int:
        return self.allocator.available_size() + self.tree.evictable_size() + self.tree.protected_size()


class Copies:
    """A transport from decodes to a prefill of this process: `hold` stops its reads, `failing` makes them fail."""

    def __init__(self, decodes: dict[str, Instance], prefill: Instance) -> None:
        self.layers = LAYERS
        self.page_bytes = 2 * LAYERS * 2 * 4 * prefill.page
        self.decodes, self.prefill = decodes, prefill
        self.failing = False
        self.read_pages = 0
        self.finished = 0
        self._layers_let_through = 10**6
        self._changed = threading.Condition()

    def hold(self) -> None:
        with self._changed:
            self._layers_let_through = 0

    def release(self, layers: int = 10**6) -> None:
        with self._changed:
            self._layers_let_through += layers
            self._changed.notify_all()

    def mismatch(self, peer: str) -> str | None:
        return None if peer in self.decodes else "unknown"

    def finish(self, plan: Plan) -> None:
        self.finished += 1

    def name_of(self, peer: str) -> str:
        return "mooncake"

    def choices(self) -> dict[str, Any]:
        return {}

    def read(self, plan: Plan, layer: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._layers_let_through > 0)
            self._layers_let_through -= 1
        if self.failing:
            raise TransferFailed("told to")
        page = self.prefill.page
        for theirs, ours, pages in zip(plan.theirs, plan.ours, plan.pages, strict=True):
            for name in ("k_buffer", "v_buffer"):
                source = getattr(self.decodes[plan.peer].pool, name)[layer][theirs * page : (theirs + pages) * page]
                getattr(self.prefill.pool, name)[layer][ours * page : (ours + pages) * page] = source
        self.read_pages += plan.total_pages if layer == 0 else 0


class Manager:
    """The tables of SGLang's KV manager that lending reads."""

    def __init__(self) -> None:
        self.transfer_infos: dict[int, dict[str, Any]] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.request_status: dict[int, Any] = {}
        self.asked_to_ack: list[int] = []

    def _maybe_ack_drained_abort(self, room: int) -> None:
        self.asked_to_ack.append(room)


class World:
    """A prefill with a borrower and a decode that lends, and the way of a call through both. `now_s` is the borrower's
    clock where a test sets it, so as not to depend on how fast the machine is."""

    def __init__(
        self,
        page: int,
        *,
        prefill_tokens: int = 512,
        decode_tokens: int = 1024,
        patience_s: float = 5.0,
        share: float = 1.0,
        ranks: Any = None,
    ) -> None:
        self.page = page
        self.prefill, self.decode = Instance(prefill_tokens, page, ranks), Instance(decode_tokens, page)
        self.elsewhere = Instance(decode_tokens, page)
        self.transport = Copies({PEER: self.decode, ELSEWHERE: self.elsewhere}, self.prefill)
        self.manager = Manager()
        self.scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=self.manager, queue=[]),
            waiting_queue=[],
            disagg_prefill_inflight_queue=[],
            tree_cache=self.prefill.tree,
            token_to_kv_pool_allocator=self.prefill.allocator,
            chunked_req=None,
        )
        self.now_s: float | None = None
        self.posted: list[tuple[bytes, Any]] = []
        self.borrower = Borrower(
            self.scheduler,
            self.transport,
            patience_s=patience_s,
            post=lambda holder, message: self.posted.append((holder, message)) or True,
            clock=lambda: time.monotonic() if self.now_s is None else self.now_s,
        )
        self.lender, self.lender_elsewhere = (
            Lender(
                SimpleNamespace(tree_cache=decode.tree, token_to_kv_pool_allocator=decode.allocator),
                share,
                (session,),
                max_copies=100,
            )
            for decode, session in ((self.decode, PEER), (self.elsewhere, ELSEWHERE))
        )
        self._rooms = itertools.count(1)

    def arrive(self, prompt: list[int]) -> Any:
        """A call comes: decode locks what it has of the prompt and tells prefill."""
        room = next(self._rooms)
        match = self.decode.find(prompt, limit=len(prompt) - 1)
        have = match.device_prefix_len
        req = SimpleNamespace(
            rid=f"call-{room}",
            bootstrap_room=room,
            origin_input_ids=array("q", prompt),
            prompt=prompt,
            extra_key=None,
            cache_salt=None,
            priority=None,
            disagg_decode_prefix_len=have,
            skip_radix_cache_insert=False,
            pending_bootstrap=False,
            prefix_len=0,
            kv=SimpleNamespace(holds_kv=False, cache_protected_len=0),
            decode_lock=self.decode.tree.lock(match.last_device_node),
            _compute_max_prefix_len=lambda tokens: tokens - 1,
        )
        message = [b""] * 10
        if have:
            pages = self.decode.path(match)[:: self.page] // self.page
            message.append(pack(pages.numpy().astype("int32")))
        info = SimpleNamespace(mooncake_session_id=PEER, is_dummy=False, lent_pages=unpack(message))
        self.manager.transfer_infos[room] = {PEER: info}
        self.manager.req_to_decode_prefix_len[room] = have
        self.manager.request_status[room] = KVPoll.WaitingForInput
        self.scheduler.disagg_prefill_bootstrap_queue.queue.append(req)
        return req

    def tell_copy(self, req: Any, tokens: int) -> None:
        """Prefill's gate knows that the other decode keeps so much of the call's session."""
        self.borrower.questions.hear(ForRanks(HOLDER, Kept(req.bootstrap_room, tokens)))

    def deliver(self, *, answers: bool = True) -> list[Any]:
        """Carry what prefill has posted to the other decode, and its answers back. Returns what was posted."""
        posted, self.posted[:] = list(self.posted), []
        leases = self.lender_elsewhere.leases
        for holder, message in posted:
            assert holder == HOLDER
            heard = messages.decode_from_prefill(messages.encode(message))
            if isinstance(heard, messages.Return):
                leases.end(PREFILL, heard.room)
                continue
            lease = messages.decode_from_decode(messages.encode(leases.grant(PREFILL, heard, time.monotonic())))
            if answers:
                self.borrower.questions.hear(ForRanks(HOLDER, lease))
        return [message for _, message in posted]

    def leave(self, req: Any) -> None:
        """The call has left prefill's queues, and decode, which may now use the pages for others."""
        self._dequeue(req)
        self.decode.tree.unlock(req.decode_lock)

    def bootstrap(self, req: Any, timeout_s: float = 10.0) -> None:
        """Turns of the scheduler's loop until the call goes on to the waiting queue."""
        deadline = time.monotonic() + timeout_s
        while not self.turn(req):
            assert time.monotonic() < deadline, "the call is stuck in the bootstrap queue"
            time.sleep(0.001)

    def turn(self, req: Any) -> bool:
        self.deliver()
        self.borrower.settle()
        if not self.borrower.ready(req):
            return False
        self.goes_on(req)
        return True

    def goes_on(self, req: Any) -> None:
        """From the bootstrap queue to the waiting queue."""
        self._dequeue(req)
        self.scheduler.waiting_queue.append(req)

    def _dequeue(self, req: Any) -> None:
        for queue in (self.scheduler.disagg_prefill_bootstrap_queue.queue, self.scheduler.waiting_queue):
            if req in queue:
                queue.remove(req)

    def settle_all(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.borrower.private_tokens:
            assert time.monotonic() < deadline, "slots stay private"
            self.borrower.settle()
            time.sleep(0.001)

    def compute(self, req: Any) -> tuple[bool, int]:
        """Schedule and run the call as prefill does. Returns whether the result counts, and how much was cached."""
        here, prompt = self.prefill, req.prompt
        self._dequeue(req)
        limit = len(prompt) - 1
        match = self.borrower.matched(req, limit, here.find(prompt, limit=limit))
        cached = match.device_prefix_len
        tail = self.borrower.tail(req)
        protected = cached if match.cache_protected_len is None else match.cache_protected_len
        before = here.path(match)
        prefix = (before if tail is None else torch.cat([before, tail]))[:cached]
        lock = here.tree.lock(match.last_device_node)
        whole = -(-len(prompt) // self.page) * self.page
        new = here.allocate(whole - cached)
        req.kv.holds_kv, req.kv.cache_protected_len = True, protected

        def forward() -> bool:
            sound = True
            for layer in range(LAYERS):
                self.borrower.wait_for_layer(layer)
                sound &= here.holds(prompt, prefix, layer)
                here.write(prompt, new[: len(prompt) - cached], cached, layer)
            return sound

        parts = self.borrower.shown([req])
        sound = self.borrower.run(forward, parts) if parts else forward()
        void = req.pending_bootstrap
        if void:
            here.allocator.free(torch.cat([prefix, new])[req.kv.cache_protected_len :])
            req.kv.holds_kv, req.pending_bootstrap = False, False
            self.scheduler.disagg_prefill_bootstrap_queue.queue.append(req)
        else:
            assert sound, "the forward ran on KV that is not the prompt's"
            full = len(prompt) // self.page * self.page
            slots = torch.cat([prefix, new])
            key = RadixKey(array("q", prompt[:full]), None)
            here.tree.insert(
                InsertParams(key=key, value=slots[:full], prev_prefix_len=protected, inserted_len=protected)
            )
            here.allocator.free(slots[full:]) if full < whole else None
        here.tree.unlock(lock)
        return not void, cached

    def check(self) -> None:
        """Every token of prefill's pool is free, in the tree or on its way, and what is in the tree is right."""
        self.borrower.settle()
        assert self.prefill.accounted_tokens + self.borrower.private_tokens == self.prefill.allocator.size
        assert self.prefill.tree.protected_size() == 0 or self.borrower.private_tokens or self.borrower.seats
