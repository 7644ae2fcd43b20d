"""The hooks' own code on decode: finished calls' KV stays in its radix cache, at most a share of the pool of it, and
prefill is told which pages hold a call's prefix.

What is lent is what the tree holds and no call uses: SGLang evicts it, oldest first, before any call waits or is
retracted. The pages of a call's prefix are locked by the call itself, from the moment prefill is told of them until
the call has left decode.
"""

from __future__ import annotations

from typing import Any

from sglang_basin.engine.metrics import fault, log, metrics
from sglang_basin.lending.pages import pack

_lender: Any = None
"""This rank's `Lender`, once attached."""


class Lender:
    """One per rank of a decode instance. Ranks see the same tree, so they evict alike."""

    def __init__(self, scheduler: Any, share: float) -> None:
        """`share`: of the KV pool that finished calls may keep, 0 to 1."""
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self.cap_tokens = int(self._allocator.size * share)
        self.pages: dict[int, bytes] = {}  # room whose metadata is being sent -> its field
        self.buffers: bytes | None = None  # field of the registration message

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


def attach(scheduler: Any, share: float) -> None:
    """Build this rank's lender, or say why there is none."""
    global _lender
    from sglang_basin.lending.prefill import unsupported

    if wrong := unsupported(scheduler):
        log.warning("Basin's lending is off on this decode instance: %s", wrong)
        metrics().lending_up.set(0)
        return
    _lender = Lender(scheduler, share)
    _lender.buffers = _buffers_field(scheduler.disagg_decode_prealloc_queue.kv_manager.kv_args)
    metrics().lending_up.set(1)
    log.info("Basin's lending is on: finished calls keep up to %d tokens", _lender.cap_tokens)


def _buffers_field(kv_args: Any) -> bytes | None:
    """Where the KV buffers are, for a prefill on this machine; None where they cannot be mapped."""
    import torch

    if not torch.cuda.is_available():
        return None
    from sglang_basin.lending import buffers, peer
    from sglang_basin.lending.cuda_memory import CudaDevice, CudaError

    try:
        return buffers.pack(peer.offer(peer.Own.all_of(kv_args), CudaDevice(torch.cuda.current_device())))
    except (CudaError, OSError) as error:
        log.info("Basin: prefill reads what this decode lends by mooncake only, its memory cannot be mapped: %s", error)
        return None


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
