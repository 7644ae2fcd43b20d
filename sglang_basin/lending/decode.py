"""The hooks' own code on decode: finished calls' KV stays in its radix cache, at most a share of the pool of it, and
prefill is told which pages hold a call's prefix.

What is lent is what the tree holds and no call uses: SGLang evicts it, oldest first, before any call waits or is
retracted; prefill is told of that (`holdings`). The pages of a call's prefix are locked by the call itself, from the
moment prefill is told of them until the call has left decode. For a call that another decode has, prefill asks for a
lease of them (`leases`).
"""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any

from sglang_basin.engine import messages
from sglang_basin.engine.metrics import fault, log, metrics
from sglang_basin.lending.holdings import Holdings, Owner
from sglang_basin.lending.leases import Leases
from sglang_basin.lending.pages import pack
from sglang_basin.lending.ranks import ForRanks

SESSION_BYTES = 128
"""A Mooncake session, host and port, is shorter."""

_lender: Any = None
"""This rank's `Lender`, once attached."""


class Lender:
    """One per rank of a decode instance. Ranks see the same tree, so they evict alike."""

    def __init__(self, scheduler: Any, share: float, sessions: tuple[str, ...], *, max_copies: int) -> None:
        """`share`: of the KV pool that finished calls may keep, 0 to 1. `sessions`: each rank's Mooncake session.
        `max_copies`: of so many sessions prefill is told when less of them is kept."""
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self.cap_tokens = int(self._allocator.size * share)
        self.pages: dict[int, bytes] = {}  # room whose metadata is being sent -> its field
        self.buffers: bytes | None = None  # field of the registration message
        self.leases = Leases(self._tree, self._allocator, sessions)
        self.holdings = Holdings(max_copies)  # on the first rank, which has the gate

    @property
    def kept_tokens(self) -> int:
        return int(self._tree.evictable_size())

    @property
    def lendable_tokens(self) -> int:
        """How much finished calls may keep now: the cap, or what running calls leave of the pool if that is less."""
        held = self._allocator.size - self._allocator.available_size() - self.kept_tokens
        return max(0, min(self.cap_tokens, self._allocator.size - held))

    def trim(self) -> None:
        """Drop the oldest of what finished calls left, down to the cap."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if (over := self.kept_tokens - self.cap_tokens) > 0:
            self._tree.evict(EvictParams(num_tokens=over))
        metrics().lent_kept.set(self.kept_tokens)

    def kept_of(self, request: Any, owner: Owner | None) -> int:
        """How many tokens of a finished call's prompt and answer the tree holds; noted for `owner`, if known."""
        end, tokens = self._path_of(request)
        if owner is not None:
            self.holdings.keep(owner, end, tokens)
        return tokens

    def dropping(self, node: int) -> None:
        """SGLang is about to free the KV of this node, the end of a path."""
        if self.holdings.ends_at(node):
            (path,) = self._tree.tree_core.collect_path_info([node])
            before = path[-2:-1]
            self.holdings.drop(node, *((before[0].node_id, before[0].path_end) if before else (0, 0)))

    def _path_of(self, request: Any) -> tuple[int, int]:
        """Where in the tree a call that has just left ends, and after how many tokens."""
        try:
            (path,) = self._tree.tree_core.collect_path_info([request.last_node])
            kept = list(itertools.takewhile(lambda node: node.full_value_len is not None, path))
            return (kept[-1].node_id, kept[-1].path_end) if kept else (0, 0)
        except KeyError:  # it is longer than the share, and its end has been dropped already
            from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
            from sglang.srt.mem_cache.radix_cache import RadixKey

            known = array("q", [*request.origin_input_ids, *request.output_ids])
            key = RadixKey(known, request.extra_key, cache_salt=request.cache_salt)
            match = self._tree.match_prefix(MatchPrefixParams(key=key.page_aligned(self._allocator.page_size)))
            return match.last_device_node, match.device_prefix_len

    def settle(self) -> None:
        """Once a turn: leases whose time is over end, and what they kept counts as lent again."""
        if self.leases:
            self.leases.settle(time.monotonic())
            if not self.leases:
                self.trim()


def attach(scheduler: Any, share: float, max_copies: int) -> None:
    """Build this rank's lender, or say why there is none."""
    global _lender
    from sglang_basin.lending.prefill import unsupported

    if wrong := unsupported(scheduler):
        log.warning("Basin's lending is off on this decode instance: %s", wrong)
        metrics().lending_up.set(0)
        return
    _lender = Lender(scheduler, share, _sessions_of(scheduler), max_copies=max_copies)
    _lender.buffers = _buffers_field(scheduler.disagg_decode_prealloc_queue.kv_manager.kv_args)
    metrics().lending_up.set(1)
    log.info("Basin's lending is on: finished calls keep up to %d tokens", _lender.cap_tokens)


def _buffers_field(kv_args: Any) -> bytes | None:
    """Where the KV buffers are, for a prefill on this machine; None where they cannot be mapped."""
    import torch

    if not torch.cuda.is_available():
        return None
    from sglang_basin.lending import buffers, peer
    from sglang_basin.lending.cuda_memory import CudaDevice

    try:
        return buffers.pack(peer.offer(peer.Own.all_of(kv_args), CudaDevice(torch.cuda.current_device())))
    except Exception as error:  # noqa: BLE001 - Mooncake reads instead
        log.info("Basin: prefill reads what this decode lends by mooncake only, its memory cannot be mapped: %s", error)
        return None


def _sessions_of(scheduler: Any) -> tuple[str, ...]:
    """Each rank's Mooncake session, in the ranks' order. All ranks call this at the same time."""
    import torch

    own = scheduler.disagg_decode_prealloc_queue.kv_manager.get_session_id().encode()
    group = scheduler.attn_tp_cpu_group
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return (own.decode(),)
    mine = torch.tensor(list(own.ljust(SESSION_BYTES, b"\0")), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(everyones, mine, group=group)
    return tuple(bytes(session.tolist()).rstrip(b"\0").decode() for session in everyones)


def kept_tokens_of(request: Any, owner: Owner | None) -> int:
    """How much of a finished call's context is kept here, of whichever session it is; 0 where lending is off."""
    if _lender is None:
        return 0
    try:
        return int(_lender.kept_of(request, owner))
    except Exception:  # noqa: BLE001 - the end of the call is reported all the same
        fault("lending", "could not tell how much of a finished call is kept")
        return 0


def take_shortened(most: int) -> list[tuple[Owner, int]]:
    """Sessions, so many at a time, of which less is kept than prefill knows, and how much."""
    return [] if _lender is None else _lender.holdings.take_shorter(most)


def note_dropped(self: Any, node_id: int, tracker: Any) -> None:
    """Before `UnifiedRadixCache._evict_device_leaf`."""
    if _lender is None:
        return
    try:
        _lender.dropping(node_id)
    except Exception:  # noqa: BLE001 - a lease finds it out
        fault("lending", "could not note that a kept copy has become shorter")


def flushed() -> None:
    """SGLang has emptied its tree."""
    if _lender is not None:
        _lender.holdings.drop_all()


def hear(told: ForRanks) -> None:
    """A message from rank 0's gate: a prefill asks for a lease, or returns one."""
    ask = told.message
    if isinstance(ask, messages.Return):
        if _lender is not None:
            _lender.leases.end(told.peer, ask.room)
    elif isinstance(ask, messages.Borrow):
        from sglang_basin.engine import gate

        gate.post(told.peer, _answer(told.peer, ask))  # goes out on rank 0 only


def _answer(prefill: str, ask: messages.Borrow) -> messages.Lease:
    try:
        if _lender is not None:
            return _lender.leases.grant(prefill, ask, time.monotonic())
    except Exception:  # noqa: BLE001 - prefill computes the tokens
        fault("lending", "could not lease a session's pages")
    return messages.Lease(ask.room)


def settle() -> None:
    """Once a turn, on all ranks."""
    if _lender is not None:
        _lender.settle()


def leased_tokens() -> int:
    """Tokens that a prefill may be reading now."""
    return 0 if _lender is None else _lender.leases.tokens


def lendable_tokens() -> int:
    """What this rank's pool can lend now; 0 where lending is off."""
    return 0 if _lender is None else _lender.lendable_tokens


def trim(result: Any, self: Any, req: Any, *, checkpointed: bool) -> None:
    """After `UnifiedRadixCache.on_release`: a call has left, its KV may be in the tree now."""
    if _lender is not None:
        _lender.trim()


def tell_pages(
    original: Any, self: Any, decode_req: Any, kv_indices: Any, page_size: int, state_indices: Any = None, **others: Any
) -> None:
    """Around `DecodePreallocQueue._send_kv_metadata`: find the pages of the prefix that this call found on the device.
    With HiCache on decode, the rest of the prefix is still on its way there and cannot be read."""
    if _lender is None:
        return original(self, decode_req, kv_indices, page_size, state_indices, **others)
    room = decode_req.req.bootstrap_room
    try:
        if (field := _pages_field(self, decode_req, others.get("decode_prefix_len") or 0)) is not None:
            _lender.pages[room] = field
    except Exception:  # noqa: BLE001 - the call goes on without anything lent
        fault("lending", "could not tell prefill which pages hold a call's prefix")
    try:
        return original(self, decode_req, kv_indices, page_size, state_indices, **others)
    finally:
        _lender.pages.pop(room, None)


def _pages_field(queue: Any, decode_req: Any, promised_tokens: int) -> bytes | None:
    from sglang.srt.mem_cache.common import kv_to_page_indices

    if decode_req.prefix_match is None:
        return None
    tokens = min(promised_tokens, decode_req.prefix_match.l1_prefix_len)
    if tokens == 0:
        return None
    allocator = queue.token_to_kv_pool_allocator
    slots = queue.req_to_token_pool.req_to_token[decode_req.req.kv.req_pool_idx, :tokens]
    return pack(kv_to_page_indices(allocator.translate_kv_indices_for_transfer(slots), allocator.page_size))


def append_pages(original: Any, self: Any, **fields: Any) -> list[bytes]:
    """Around `MooncakeKVManager.build_receiver_metadata_message`."""
    message = original(self, **fields)
    pages = None if _lender is None or fields["is_dummy"] else _lender.pages.get(fields["bootstrap_room"])
    return message if pages is None else [*message, pages]


def append_buffers(original: Any, self: Any) -> list[bytes]:
    """Around `MooncakeKVManager.build_receiver_registration_message`."""
    message = original(self)
    return message if _lender is None or _lender.buffers is None else [*message, _lender.buffers]
