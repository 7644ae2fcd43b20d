"""The hooks' own code on prefill: where in SGLang's loop the `Borrower` is asked and told.

Each of these is a pass-through until `attach` has built the borrower, and again after a fault.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_basin.engine.metrics import fault, log, metrics
from sglang_basin.lending import buffers, decode, places
from sglang_basin.lending.calls import bootstrapped, decode_prefix, must_run_again
from sglang_basin.lending.pages import unpack
from sglang_basin.lending.ranks import ForRanks

T = TypeVar("T")

_borrower: Any = None
"""This rank's `Borrower`, once attached."""

_launched: deque[tuple[float, int]] = deque(maxlen=8)
"""Batches whose results are still to come: when they were launched, and how many tokens they compute; 0 for one that
also waited for layers."""

_last_result_s = 0.0

_lost_tokens = 0
"""Slots that were on their way when lending failed and went off; never used again."""


def attach(scheduler: Any, patience_s: float, wanted: str = "auto") -> None:
    """Build this rank's borrower, or say why there is none. `wanted`: `--basin-lending-transport`."""
    global _borrower
    if wrong := unsupported(scheduler):
        log.warning("Basin's lending is off on this prefill instance: %s", wrong)
        metrics().lending_up.set(0)
        return
    from sglang.srt.runtime_context import get_parallel

    from sglang_basin.engine import gate
    from sglang_basin.lending.borrower import Borrower

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    transport = _transport(_kv_manager(scheduler), pool.layer_num, wanted)
    overlap = not _runs_prefill_graphs(scheduler)
    rank = get_parallel().attn_tp_rank
    _borrower = Borrower(
        scheduler,
        transport,
        patience_s=patience_s,
        overlap=overlap,
        counted=rank == 0,
        rank=rank,
        post=gate.post if rank == 0 else None,
    )
    pool.register_layer_transfer_counter(_LayerGate(_borrower, pool.layer_transfer_counter))
    metrics().lending_up.set(1)
    log.info("Basin's lending is on: pulls %s", "layer by layer" if overlap else "whole parts")


def _transport(kv_manager: Any, layers: int, wanted: str) -> Any:
    """Mooncake, and before it mapped memory where there is CUDA."""
    import torch

    from sglang_basin.lending.transport import MooncakeReads

    if wanted == places.MOONCAKE:
        return MooncakeReads(kv_manager, layers, "--basin-lending-transport mooncake")
    if not torch.cuda.is_available():
        return MooncakeReads(kv_manager, layers, "this process has no CUDA device")
    from sglang_basin.lending import nvml
    from sglang_basin.lending.cuda_memory import CudaDevice
    from sglang_basin.lending.peer import Nearest, PeerReads

    try:
        device = CudaDevice(torch.cuda.current_device())
        peer = PeerReads(kv_manager, layers, device, reaches=nvml.unreachable)
    except Exception as error:  # noqa: BLE001 - Mooncake reads instead
        log.warning("Basin reads lent pages by mooncake only: %s", error)
        return MooncakeReads(kv_manager, layers, f"CUDA shares no memory here: {error}")
    return Nearest(peer, MooncakeReads(kv_manager, layers))


def unsupported(scheduler: Any) -> str | None:
    """Why this scheduler's KV cannot be lent, or None. The same words on prefill and decode."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_parallel

    tree = scheduler.tree_cache
    if not isinstance(tree, UnifiedRadixCache) or tree.disable:
        return "it needs SGLang's unified radix cache"
    if tuple(tree.tree_components) != (ComponentType.FULL,):
        return "the model keeps state beside attention's KV (sliding window, SSM or linear attention)"
    if type(scheduler.token_to_kv_pool_allocator.get_kvcache()) not in (MHATokenToKVPool, MLATokenToKVPool):
        return "it knows the plain MHA/GQA and MLA pools only"
    if not scheduler.spec_algorithm.is_none():
        return "the draft model's KV is not lent yet (speculative decoding)"
    parallel = get_parallel()
    if parallel.pp_size > 1 or parallel.attn_cp_size > 1:
        return "pipeline and context parallelism are not supported yet"
    manager = _kv_manager(scheduler)
    if not hasattr(getattr(getattr(manager, "engine", None), "engine", None), "batch_transfer_sync_read"):
        return "it reads through Mooncake (--disaggregation-transfer-backend mooncake or mooncake_tcp)"
    if not manager.enable_deferred_decode_kv_release:
        return "it needs SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE, SGLang's default"
    return None


def _kv_manager(scheduler: Any) -> Any:
    if scheduler.disaggregation_mode.value == "prefill":
        return scheduler.disagg_prefill_bootstrap_queue.kv_manager
    return scheduler.disagg_decode_prealloc_queue.kv_manager


def _runs_prefill_graphs(scheduler: Any) -> bool:
    """Whether prefill's forward replays CUDA graphs, in which no layer can be waited for."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    runner = getattr(scheduler.tp_worker.model_runner, "prefill_cuda_graph_runner", None)
    return runner is not None and not isinstance(runner, EagerRunner)


class _LayerGate:
    """Stands where the KV pool expects HiCache's layer counter: waits for HiCache's loads, then for ours."""

    def __init__(self, borrower: Any, inner: Any) -> None:
        self._borrower = borrower
        self._inner = inner

    @property
    def consumer_index(self) -> int:
        return -1 if self._inner is None else self._inner.consumer_index

    def wait_until(self, layer: int) -> None:
        if self._inner is not None:
            self._inner.wait_until(layer)
        self._borrower.wait_for_layer(layer)


def read_pages(result: Any, cls: Any, msg: list[bytes]) -> None:
    """After `TransferInfo.from_zmq`: keep the pages that decode lends for this call with the rest of its message."""
    result.lent_pages = unpack(msg)


def read_buffers(result: Any, cls: Any, msg: list[bytes]) -> None:
    """After `KVArgsRegisterInfo.from_zmq`: keep how the peer's buffers can be mapped with the rest of its message."""
    try:
        result.lent_buffers = buffers.unpack(msg)
    except ValueError as error:
        log.warning(
            "Basin reads what %s lends by mooncake, its message is damaged: %s", result.mooncake_session_id, error
        )
        result.lent_buffers = None


def lenders() -> dict[str, places.Choice]:
    """Decodes that this rank has been lent something by: how it reads from each, and why."""
    return {} if _borrower is None else _borrower.transport.choices()


def read_tokens_per_s() -> float | None:
    """How fast lent KV comes in while it is being read; None while that is not known, or nothing is read."""
    return None if _borrower is None else _borrower.inflow.tokens_per_s


def _or_off(act: Callable[[], T], otherwise: T) -> T:
    """`act()`; should it raise, lending is off until a restart and calls go on as in stock SGLang."""
    global _borrower, _lost_tokens
    try:
        return act()
    except Exception:  # noqa: BLE001 - whatever it was, the calls must go on
        fault("lending", "lending failed and is off until a restart; what is missing is computed")
        _lost_tokens += _borrower.private_tokens
        with contextlib.suppress(Exception):
            _borrower.seats.give_up()  # what they lock could never be evicted again
        _borrower = None
        metrics().lending_up.set(0)
        return otherwise


def hear(told: ForRanks) -> None:
    """A message from rank 0's gate: a copy that another decode keeps, or its answer to a question."""
    if _borrower is not None:
        _or_off(lambda: _borrower.questions.hear(told), None)


def settle(self: Any) -> None:
    """Before `PrefillBootstrapQueue.pop_bootstrapped`, once a turn."""
    if _borrower is not None:
        _or_off(_borrower.settle, None)


def finalize(original: Any, self: Any, req: Any) -> bool:
    """Around `PrefillBootstrapQueue.finalize_bootstrap`: a call goes on once its lent part is settled."""
    if _borrower is None:
        return original(self, req)
    if not _or_off(lambda: _borrower.ready(req), True):
        return False
    if (prefix := decode_prefix(req)) is not None:
        self.kv_manager.req_to_decode_prefix_len[req.bootstrap_room] = prefix
    finalized = original(self, req)
    if finalized:
        bootstrapped(req)
    return finalized


def match(original: Any, self: Any, params: Any, result: Any) -> Any:
    """Around `UnifiedRadixCache._finalize_match_result`."""
    result = original(self, params, result)
    if _borrower is None or params.req is None:
        return result
    return _or_off(lambda: _borrower.matched(params.req, len(params.key), result), result)


def prefix_slots(original: Any, self: Any, req: Any) -> Any:
    """Around `UnifiedRadixCache.prefix_device_indices`: the path in the tree, then the part that is on its way."""
    tail = None if _borrower is None else _borrower.tail(req)
    if tail is None:
        return original(self, req)
    import torch

    path = self.tree_core.collect_full_device_indices(req.last_node, self.root_node_handle(req.extra_key))
    return torch.cat([path, tail])[: req.prefix_len]


def send_cached(original: Any, self: Any, req: Any, allow_send: bool = True) -> None:
    """Around `Scheduler.maybe_send_cached_prefix_chunk`, which sends decode what a call has cached while the forward
    runs: not what is on its way; the send behind the forward has it."""
    original(self, req, allow_send and not (_borrower is not None and _borrower.shown((req,))))


def run_batch(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.run_batch`."""
    if _borrower is None or not batch.forward_mode.is_extend():
        return original(self, batch, *args, **kwargs)
    _borrower.ran()
    parts = _or_off(lambda: _borrower.shown(batch.reqs), ())
    _launched.append((time.monotonic(), 0 if parts else batch.extend_num_tokens))
    if not parts:
        return original(self, batch, *args, **kwargs)
    return _borrower.run(lambda: original(self, batch, *args, **kwargs), parts)


def measure(done: Any, self: Any, batch: Any, result: Any) -> None:
    """After `Scheduler.process_batch_result_disagg_prefill`: what the batch's tokens took to compute."""
    global _last_result_s
    if _borrower is None or not _launched:
        return
    now_s = time.monotonic()
    launched_s, tokens = _launched.popleft()
    if tokens:
        computing = _borrower.computing
        _or_off(lambda: computing.note(tokens, now_s - max(launched_s, _last_result_s)), None)
    _last_result_s = now_s


def run_again(original: Any, req: Any) -> bool:
    """Around `prefill.should_force_retry`: SGLang's own way back to the queue, for a call whose part failed in the
    forward."""
    return original(req) or must_run_again(req)


def hold_abort_ack(original: Any, self: Any, room: int) -> None:
    """Around `CommonKVManager._maybe_ack_drained_abort`: decode keeps an aborted call's pages while they are read."""
    if _borrower is None or room not in _borrower.reading:
        original(self, room)


def refuse_flush(original: Any, self: Any, *args: Any, **kwargs: Any) -> bool:
    """Around `Scheduler.flush_cache`: not while slots are being written to, nor while pages are leased (on decode);
    SGLang's own answer when it is not idle."""
    if leased := decode.leased_tokens():
        log.warning("Cache not flushed: %d tokens are leased to a prefill", leased)
        return False
    if _borrower is not None and not _or_off(_borrower.drain, True):
        log.warning("Cache not flushed: %d lent tokens are still on their way", _borrower.private_tokens)
        return False
    if flushed := original(self, *args, **kwargs):
        decode.flushed()
    return flushed


def count_private(original: Any, self: Any, ps: Any, uncached: int = 0) -> Any:
    """Around `_check_all_pools`: slots on their way are neither free nor in the tree, and no leak."""
    return original(self, ps, uncached + _lost_tokens + (0 if _borrower is None else _borrower.private_tokens))
