"""Where lending is off: what the log says, and that calls go on as in stock SGLang."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import World
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel

from sglang_basin.engine.metrics import metrics
from sglang_basin.lending import decode, prefill

STATE = "the model keeps state beside attention's KV (sliding window, SSM or linear attention)"


def sliding_window_tree() -> Any:
    """SGLang's own tree and pools of a model with two full and two sliding-window layers."""
    pool = SWAKVPool(256, 64, 16, torch.float32, 1, 2, [1, 3], [0, 2], "cpu")
    allocator = SWATokenToKVPoolAllocator(256, 64, 16, torch.float32, "cpu", pool, need_sort=False)
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=allocator,
            page_size=16,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
            sliding_window_size=32,
        )
    )


def scheduler_of(tree: Any, **fields: Any) -> Any:
    manager = SimpleNamespace(
        engine=SimpleNamespace(engine=SimpleNamespace(batch_transfer_sync_read=None)),
        enable_deferred_decode_kv_release=True,
    )
    plain = {
        "disaggregation_mode": SimpleNamespace(value="prefill"),
        "disagg_prefill_bootstrap_queue": SimpleNamespace(kv_manager=manager),
        "disagg_decode_prealloc_queue": SimpleNamespace(kv_manager=manager),
        "tree_cache": tree,
        "token_to_kv_pool_allocator": tree.token_to_kv_pool_allocator,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
    }
    return SimpleNamespace(**(plain | fields))


@pytest.fixture(autouse=True)
def detached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_borrower", None)
    monkeypatch.setattr(decode, "_lender", None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_model_with_other_state_keeps_lending_off_and_says_so(role: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics().lending_up.set(1)
    scheduler = scheduler_of(sliding_window_tree(), disaggregation_mode=SimpleNamespace(value=role))
    with caplog.at_level(logging.WARNING, logger="sglang.basin"):
        if role == "prefill":
            prefill.attach(scheduler, 2.0)
        else:
            decode.attach(scheduler, 0.5, 100)
    assert caplog.messages == [f"Basin's lending is off on this {role} instance: {STATE}"]
    assert prefill._borrower is None
    assert decode._lender is None
    assert metrics().lending_up._value.get() == 0
    queue = SimpleNamespace()
    assert prefill.finalize(lambda self, req: "stock", queue, SimpleNamespace()) == "stock"
    assert decode.append_buffers(lambda self: [b"stock"], queue) == [b"stock"]
    assert decode.lendable_tokens() == 0


def test_a_plain_model_is_supported_and_other_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("pp_size", "attn_cp_size"):
        monkeypatch.setitem(get_parallel()._overrides, size, 1)
    tree = World(16).prefill.tree
    assert prefill.unsupported(scheduler_of(tree)) is None
    for fields, why in (
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
        ({"tree_cache": SimpleNamespace(disable=False)}, "unified radix cache"),
        ({"disagg_prefill_bootstrap_queue": SimpleNamespace(kv_manager=SimpleNamespace())}, "through Mooncake"),
    ):
        assert why in str(prefill.unsupported(scheduler_of(tree, **fields)))
