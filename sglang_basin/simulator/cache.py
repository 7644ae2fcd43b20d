"""A KV pool with a prefix cache, as SGLang's radix tree behaves on sessions that share only a system prompt.

    tree                              here
    system prompt ─┬─ session A ───   `trunk_tokens`, and one `Chain` per session: how much of its
                   ├─ session B ─     private part is resident, from the front
                   └─ session C ──    (C's old tail, after its prompt changed in the middle, is a chain of its own)

Why that is exact for such a trace: a radix tree whose sequences share only a common front is a star of paths. A match
or an insertion touches a path from its root, so the last use never increases towards the leaf, and all nodes that the
latest call touched carry the same time. Leaf-first LRU therefore takes the least recently used path and eats it from
its end, page by page, before it touches the next; how long the resident front is and when it was last used say all.
A tail that the latest prompt no longer extends is a leaf with an older time: it becomes a chain that nobody will ever
match. The system prompt is touched by every call, so LRU reaches it last: it stays once computed. Two simplifications:
SGLang frees whole tree nodes (one call's new tokens) where this frees pages, and a trunk that only some of the
sessions use would in time be evicted.

All sizes are tokens in whole pages. `free + held + evictable + pinned = pool` at every moment, where *held* is what
calls hold, chains of running calls and the trunk included; `check` proves it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable


class PoolError(AssertionError):
    """An invariant of a pool is broken: a fault of the simulator itself."""


class Chain:
    """One session's private part in one pool, front first."""

    __slots__ = ("host_tokens", "locked", "pinned", "shared_tokens", "tokens", "touched")

    def __init__(self, shared_tokens: int) -> None:
        self.shared_tokens = shared_tokens
        """Where the private part begins: the length of the system prompt, in whole pages."""
        self.tokens = 0
        """Resident private tokens."""
        self.host_tokens = 0
        """Private tokens with a copy in the host tier, counted from the front like `tokens`."""
        self.locked = False
        """A running call uses it; its tokens count as held."""
        self.pinned = False
        """Kept on purpose: neither held nor evictable."""
        self.touched = 0.0


class PrefixCache:
    """One instance's pool. `host` is asked to remember what is evicted."""

    def __init__(self, pool_tokens: int, page_tokens: int, host: HostTier | None = None) -> None:
        self.pool_tokens = pool_tokens
        self.page_tokens = page_tokens
        self.host = host
        self.free_tokens = pool_tokens
        self.evictable_tokens = 0
        self.trunk_tokens = 0
        self._touches = 0
        self._lru: list[tuple[float, Chain]] = []
        """(last use, chain), sorted; may hold stale entries. A chain that was just used goes to its end."""
        self._oldest = 0
        """Where it begins: what is before that was evicted or stale."""
        self._tidy_at = 1024

    def match(self, chain: Chain, limit_tokens: int) -> int:
        """Resident tokens of a prompt of which the first `limit_tokens` (whole pages) may be reused."""
        tokens = chain.shared_tokens
        if self.trunk_tokens < tokens:
            tokens = self.trunk_tokens
        else:
            tokens += chain.tokens
        return tokens if tokens < limit_tokens else limit_tokens

    def lock(self, chain: Chain, matched_tokens: int) -> None:
        """A call starts to use the first `matched_tokens` of the chain; what lies beyond will not be matched again."""
        keep = matched_tokens - chain.shared_tokens
        if keep < 0:
            keep = 0
        if not chain.pinned:
            self.evictable_tokens -= chain.tokens
        chain.pinned = False
        chain.locked = True
        if keep < chain.tokens:
            dead = Chain(chain.shared_tokens)
            dead.tokens = chain.tokens - keep
            dead.touched = chain.touched - 0.5  # just older, and unlike any other
            self.evictable_tokens += dead.tokens
            insort(self._lru, (dead.touched, dead), self._oldest)
            chain.tokens = keep
        chain.touched = 0.0

    def take(self, tokens: int) -> None:
        """Hold `tokens` more, evicting for them. The caller has made sure that they are there."""
        if tokens > self.free_tokens:
            self.evict(tokens - self.free_tokens)
        self.free_tokens -= tokens

    def grow_trunk(self, tokens: int) -> int:
        """Held tokens that turn out to be the system prompt now belong to the trunk. Returns by how much it grew."""
        grown = tokens - self.trunk_tokens
        if grown <= 0:
            return 0
        self.trunk_tokens = tokens
        return grown

    def unlock(self, chain: Chain, held_tokens: int, kept_tokens: int) -> None:
        """The call lets go of `held_tokens` private tokens; the first `kept_tokens` (whole pages) stay cached."""
        self.free_tokens += held_tokens - kept_tokens
        chain.locked = False
        chain.tokens = kept_tokens
        self._touches = touched = self._touches + 1
        chain.touched = touched
        if self.host is not None:
            self.host.left_device(chain)
        self.evictable_tokens += kept_tokens
        lru = self._lru
        lru.append((touched, chain))
        if len(lru) > self._tidy_at:
            self._tidy()

    def pin(self, chain: Chain) -> None:
        """Keep what is resident of a chain that no call uses, until `unpin` or the session's next call."""
        if not (chain.locked or chain.pinned):
            chain.pinned = True
            self.evictable_tokens -= chain.tokens

    def unpin(self, chain: Chain) -> None:
        """The chain is ordinary again, as old as it is."""
        if chain.pinned:
            chain.pinned = False
            self.evictable_tokens += chain.tokens
            insort(self._lru, (chain.touched, chain), self._oldest)

    def _tidy(self) -> None:
        """Forget the stale entries."""
        self._lru = lru = [entry for entry in self._lru[self._oldest :] if _rests(entry)]
        self._oldest = 0
        self._tidy_at = max(1024, 2 * len(lru))

    def evict(self, tokens: int) -> None:
        """Free at least `tokens`, least recently used first, each chain from its end. Raises PoolError if it cannot."""
        page = self.page_tokens
        left = -(-tokens // page) * page
        lru = self._lru
        while left > 0:
            if self._oldest == len(lru):
                raise PoolError(f"{tokens} tokens to evict, but {left} of them are not there")
            touched, chain = lru[self._oldest]
            if chain.touched != touched or chain.pinned or not chain.tokens:
                self._oldest += 1
                continue
            gone = chain.tokens if chain.tokens < left else left
            chain.tokens -= gone
            left -= gone
            self.free_tokens += gone
            self.evictable_tokens -= gone
            if self.host is not None:
                self.host.left_device(chain)

    def check(self, chains: Iterable[Chain], held_tokens: int) -> None:
        """Raise PoolError unless the pool adds up. `held_tokens` is what the instance says its calls hold, besides
        the trunk."""
        pinned = sum(chain.tokens for chain in chains if chain.pinned)
        resting = {id(entry[1]): entry[1] for entry in self._lru[self._oldest :] if _rests(entry)}
        evictable = sum(chain.tokens for chain in resting.values())
        parts = (self.free_tokens, self.evictable_tokens, held_tokens, pinned, self.trunk_tokens)
        if min(parts) < 0:
            raise PoolError(f"negative part of a pool: free, evictable, held, pinned, trunk = {parts}")
        if sum(parts) != self.pool_tokens:
            raise PoolError(f"free, evictable, held, pinned, trunk = {parts} do not add up to {self.pool_tokens}")
        if evictable != self.evictable_tokens:
            raise PoolError(f"{evictable} tokens can be evicted, {self.evictable_tokens} are said to be")


def _rests(entry: tuple[float, Chain]) -> bool:
    touched, chain = entry
    return chain.touched == touched and not chain.pinned and chain.tokens > 0


class HostTier:
    """The host's copies, write-through: whatever prefill computed is copied, if room can be made for it.

    As in HiCache, only copies whose device original is gone make room, least recently used first, each from its end.
    """

    def __init__(self, tokens: int, page_tokens: int) -> None:
        self.tokens = tokens
        self.page_tokens = page_tokens
        self.free_tokens = tokens
        self._lru: list[tuple[float, Chain]] = []

    def beyond(self, chain: Chain, matched_tokens: int, limit_tokens: int) -> int:
        """Tokens that follow `matched_tokens` on the device and can be loaded back."""
        if matched_tokens != chain.shared_tokens + chain.tokens:
            return 0
        return max(0, min(chain.shared_tokens + chain.host_tokens, limit_tokens) - matched_tokens)

    def forget_beyond(self, chain: Chain, limit_tokens: int) -> None:
        """The session's prompt changed after `limit_tokens`: the copies beyond are of no more use."""
        keep = max(0, limit_tokens - chain.shared_tokens)
        if chain.host_tokens > keep:
            self.free_tokens += chain.host_tokens - keep
            chain.host_tokens = keep

    def store(self, chain: Chain, tokens: int) -> None:
        """Copy the chain's first `tokens` private tokens; as much from the front as room can be made for."""
        need = tokens - chain.host_tokens
        if need <= 0:
            return
        if need > self.free_tokens:
            self._evict(need - self.free_tokens)
        copied = min(need, self.free_tokens) // self.page_tokens * self.page_tokens
        chain.host_tokens += copied
        self.free_tokens -= copied

    def left_device(self, chain: Chain) -> None:
        if chain.host_tokens > chain.tokens:
            heapq.heappush(self._lru, (chain.touched, chain))

    def _evict(self, tokens: int) -> None:
        lru, left = self._lru, tokens
        while left > 0 and lru:
            touched, chain = lru[0]
            only_here = chain.host_tokens - chain.tokens
            if chain.touched != touched or only_here <= 0:
                heapq.heappop(lru)
                continue
            gone = min(only_here, -(-left // self.page_tokens) * self.page_tokens)
            chain.host_tokens -= gone
            self.free_tokens += gone
            left -= gone
            if gone == only_here:
                heapq.heappop(lru)

    def check(self, chains: Iterable[Chain]) -> None:
        """Raise PoolError unless the tier adds up over all chains there are."""
        used = sum(chain.host_tokens for chain in chains)
        if self.free_tokens < 0 or used + self.free_tokens != self.tokens:
            raise PoolError(f"host tier: {used} used and {self.free_tokens} free of {self.tokens}")
