"""What a prefill instance's scheduler knows about itself, as the door's `EngineView`."""

from __future__ import annotations

from collections import deque
from typing import Any

from sglang_basin.policy.interface import EngineView

WINDOW_S = 60.0


class HitRate:
    """Cached over prompt tokens of the calls prefilled in the last minute."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, int, int]] = deque()
        self._cached_tokens = 0
        self._prompt_tokens = 0

    def note(self, cached_tokens: int, prompt_tokens: int, now_s: float) -> None:
        self._calls.append((now_s, cached_tokens, prompt_tokens))
        self._cached_tokens += cached_tokens
        self._prompt_tokens += prompt_tokens

    def at(self, now_s: float) -> float | None:
        """None while no call was prefilled."""
        while self._calls and self._calls[0][0] < now_s - WINDOW_S:
            _, cached_tokens, prompt_tokens = self._calls.popleft()
            self._cached_tokens -= cached_tokens
            self._prompt_tokens -= prompt_tokens
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None


class EngineWatch:
    """Reads the pools and queues of a live scheduler. Of hybrid models it sees the full-attention pool alone."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._hits = HitRate()

    def prefilled(self, req: Any, now_s: float) -> None:
        """`req` is through prefill."""
        self._hits.note(req.cached_tokens, len(req.origin_input_ids), now_s)

    def view(self, now_s: float, lent_tokens: int = 0, read_tokens_per_s: float | None = None) -> EngineView:
        """`lent_tokens`: what others' memory adds to this cache; `read_tokens_per_s`: how fast it comes back."""
        scheduler = self._scheduler
        cache_tokens = scheduler.max_total_num_tokens
        free_tokens = scheduler.token_to_kv_pool_allocator.available_size()
        bootstrap = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
        return EngineView(
            cache_tokens=cache_tokens,
            host_tokens=_host_tokens(scheduler.tree_cache),
            lent_tokens=lent_tokens,
            cache_used_share=1.0 - free_tokens / cache_tokens,
            hit_rate=self._hits.at(now_s),
            prefill_waiting_calls=len(scheduler.waiting_queue) + (len(bootstrap.queue) if bootstrap else 0),
            read_tokens_per_s=read_tokens_per_s,
        )


def _host_tokens(tree_cache: Any) -> int:
    """What HiCache's host tier holds beyond the device's pool; 0 without one. Written through, it holds the device's
    pages a second time, so only what it is larger by counts; written back, it holds what the device evicted."""
    pools = getattr(tree_cache, "host_pool_group", None)
    if pools is None:
        return 0
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.runtime_context import get_memory

    entry = pools.entry_map.get(PoolName.KV)
    host_tokens = int(entry.host_pool.logical_size) if entry is not None else 0
    if get_memory().hicache_write_policy == "write_back":
        return host_tokens
    return max(0, host_tokens - int(tree_cache.token_to_kv_pool_allocator.size))
