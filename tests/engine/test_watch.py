"""What prefill knows about itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import PoolName

from sglang_basin.engine.watch import EngineWatch


@pytest.mark.parametrize(("policy", "host_tokens"), [("write_through", 2_000), ("write_back", 3_000)])
def test_a_host_tier_counts_by_what_it_adds(monkeypatch: pytest.MonkeyPatch, policy: str, host_tokens: int) -> None:
    """With HiCache on, looking at it once raised, and the gate was off from the start."""
    monkeypatch.setattr(runtime_context, "get_memory", lambda: SimpleNamespace(hicache_write_policy=policy))
    allocator = SimpleNamespace(size=1_000, available_size=lambda: 400)
    entry = SimpleNamespace(host_pool=SimpleNamespace(logical_size=3_000))
    scheduler = SimpleNamespace(
        max_total_num_tokens=1_000,
        token_to_kv_pool_allocator=allocator,
        tree_cache=SimpleNamespace(
            host_pool_group=SimpleNamespace(entry_map={PoolName.KV: entry}), token_to_kv_pool_allocator=allocator
        ),
        waiting_queue=[],
    )
    view = EngineWatch(scheduler).view(0.0, lent_tokens=500)
    assert view.host_tokens == host_tokens
    assert view.capacity_tokens == 1_000 + host_tokens + 500
