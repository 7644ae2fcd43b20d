"""Decode's side of leases: pages that are locked in its tree for a time, for a prefill to read.

A lease ends when prefill returns it or when its time and `MARGIN_S` are over, by this side's clock, which began to
count later than prefill's. Ranks hear of asking and returning in one order (`ranks`) and agree on when time is over, so
their trees stay alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_basin.engine import messages
from sglang_basin.engine.metrics import metrics
from sglang_basin.lending.questions import tokens_of

MARGIN_S = 1.0
"""Pages stay locked so much longer than prefill uses what it reads."""

MAX_LEASES = 256


@dataclass(frozen=True, slots=True)
class _Locked:
    lock: Any
    tokens: int
    until_s: float


class Leases:
    """One per rank of a decode instance, in the scheduler's thread."""

    def __init__(self, tree: Any, allocator: Any, sessions: tuple[str, ...]) -> None:
        """`sessions`: of each rank, where its KV can be read."""
        self._tree = tree
        self._allocator = allocator
        self._sessions = sessions
        self._held: dict[tuple[str, int], _Locked] = {}  # by prefill and room

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """Tokens under lease; what two leases share counts twice."""
        return sum(held.tokens for held in self._held.values())

    def grant(self, prefill: str, ask: messages.Borrow, now_s: float) -> messages.Lease:
        """Lock what the tree has of the prompt and say where it is. At most half of what is free or could be freed is
        ever under lease, so that decode's own calls do not wait for it."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.common import kv_to_page_indices
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.end(prefill, ask.room)
        page = self._allocator.page_size
        key = RadixKey(tokens_of(ask.prompt), ask.extra_key, cache_salt=ask.cache_salt).page_aligned(page)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        tokens = min(match.device_prefix_len, messages.MAX_LEASED_PAGES * page)
        if tokens == 0:
            return messages.Lease(ask.room)
        free_tokens = self._allocator.available_size() + self._tree.evictable_size()
        if len(self) >= MAX_LEASES or 2 * (self.tokens + tokens) > free_tokens:
            return messages.Lease(ask.room, busy=True)
        node = match.last_device_node
        slots = self._tree.tree_core.collect_full_device_indices(node, self._tree.root_node_handle(ask.extra_key))
        slots = self._allocator.translate_kv_indices_for_transfer(slots[:tokens])
        pages = kv_to_page_indices(slots, page).astype("<i4").tobytes()
        self._held[prefill, ask.room] = _Locked(self._tree.lock(node), tokens, now_s + ask.seconds + MARGIN_S)
        self._show()
        return messages.Lease(ask.room, tokens, pages, self._sessions)

    def end(self, prefill: str, room: int) -> None:
        """The pages may be freed again."""
        if (held := self._held.pop((prefill, room), None)) is not None:
            self._tree.unlock(held.lock)
            self._show()

    def settle(self, now_s: float) -> None:
        """Once a turn: end the leases whose time is over on all ranks."""
        if not self._held:
            return
        import torch

        held = list(self._held)
        over = torch.tensor([int(now_s >= self._held[lease].until_s) for lease in held], dtype=torch.int64)
        self._tree._all_reduce_attn_groups(over, torch.distributed.ReduceOp.MIN)
        for lease, is_over in zip(held, over.tolist(), strict=True):
            if is_over:
                self.end(*lease)

    def _show(self) -> None:
        metrics().leased.set(self.tokens)
