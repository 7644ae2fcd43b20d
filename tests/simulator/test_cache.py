"""The chains against a radix tree kept page by page, with leaf-first LRU, the slow and obvious way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.simulator.cache import Chain, HostTier, PoolError, PrefixCache

PAGE = 16


class PageTree:
    """Every page is a node: (path, last use). A path is the texts of the pages before and itself."""

    def __init__(self, pages):
        self.pages = pages
        self.nodes: dict[tuple, int] = {}
        self.locked: set[tuple] = set()
        self.clock = 0

    def match(self, path):
        for count in range(len(path), 0, -1):
            if path[:count] in self.nodes:
                return count
        return 0

    def use(self, path):
        self.clock += 1
        for count in range(1, len(path) + 1):
            self.nodes[path[:count]] = self.clock

    def make_room(self, pages):
        while len(self.nodes) + pages > self.pages:
            inner = {path[:-1] for path in self.nodes}
            leaves = [path for path in self.nodes if path not in inner and path not in self.locked]
            del self.nodes[min(leaves, key=lambda path: self.nodes[path])]


@st.composite
def uses(draw):
    """(session, pages kept of its last path, pages added): mostly the whole path is kept."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 4), st.sampled_from((1.0, 1.0, 1.0, 0.5, 0.9)), st.integers(1, 6), st.integers(0, 3)
            ),
            max_size=60,
        )
    )


@settings(max_examples=300, deadline=None)
@given(uses(), st.sampled_from((0, 2)))
def test_chains_keep_what_a_leaf_first_lru_radix_tree_keeps(steps, shared):
    pages = 24
    tree = PageTree(pages)
    cache = PrefixCache(pages * PAGE, PAGE)
    chains = [Chain(shared * PAGE) for _ in range(5)]
    paths = [tuple(("system", page) for page in range(shared)) for _ in range(5)]
    running: dict[int, int] = {}  # session -> held private tokens
    texts = 0
    for number, kept_share, added, ends_after in steps:
        if number in running:
            continue
        path = paths[number]
        kept = max(shared, int(len(path) * kept_share)) if len(path) > shared else shared
        new = []
        for _ in range(added):
            texts += 1
            new.append(texts)
        wanted = path[:kept] + tuple(new)
        if len(wanted) > 10:
            wanted = path[:shared] + tuple(new)
            kept = shared
        chain = chains[number]
        matched = cache.match(chain, kept * PAGE)
        assert matched == tree.match(path[:kept]) * PAGE
        need = len(wanted) * PAGE - matched
        private = max(0, matched - shared * PAGE)
        if need > cache.free_tokens + cache.evictable_tokens - private:
            continue
        tree.locked |= {wanted[:count] for count in range(1, len(wanted) + 1)}
        tree.use(wanted[: matched // PAGE])
        tree.make_room(need // PAGE)
        tree.use(wanted)
        cache.lock(chain, matched)
        cache.take(need)
        held = chain.tokens + need - (cache.grow_trunk(shared * PAGE) if cache.trunk_tokens < shared * PAGE else 0)
        running[number] = held
        paths[number] = wanted
        cache.check(chains, sum(running.values()))
        for done in list(running)[:ends_after]:
            chain = chains[done]
            tree.use(paths[done])
            cache.unlock(chain, running[done], running[done])
            del running[done]
            tree.locked = {paths[other][:count] for other in running for count in range(1, len(paths[other]) + 1)}
        cache.check(chains, sum(running.values()))
        for chain, path in zip(chains, paths, strict=True):
            resident = tree.match(path)
            assert cache.match(chain, len(path) * PAGE) == resident * PAGE or chain.locked
        assert pages * PAGE - cache.free_tokens == len(tree.nodes) * PAGE


def test_a_pinned_chain_is_not_evicted_and_keeps_its_age():
    cache = PrefixCache(4 * PAGE, PAGE)
    old, new = Chain(0), Chain(0)
    for chain in (old, new):
        cache.lock(chain, 0)
        cache.take(2 * PAGE)
        cache.unlock(chain, 2 * PAGE, 2 * PAGE)
    cache.pin(old)
    cache.evict(PAGE)
    assert (old.tokens, new.tokens) == (2 * PAGE, PAGE)
    with pytest.raises(PoolError, match="not there"):
        cache.evict(3 * PAGE)
    cache.unpin(old)
    cache.evict(PAGE)
    assert old.tokens == PAGE


def held_and_left(cache, chain, pages):
    """One call of `pages` pages, from what is there."""
    matched = cache.match(chain, pages * PAGE)
    cache.lock(chain, matched)
    cache.take(pages * PAGE - matched)
    cache.host.store(chain, pages * PAGE)
    cache.unlock(chain, pages * PAGE, pages * PAGE)


def test_the_host_gives_back_what_the_device_lost_oldest_lost_first():
    host = HostTier(6 * PAGE, PAGE)
    cache = PrefixCache(4 * PAGE, PAGE, host)
    first, second, third = Chain(0), Chain(0), Chain(0)
    for chain in (first, second):
        held_and_left(cache, chain, 3)
    assert first.tokens == PAGE
    assert host.beyond(first, PAGE, 3 * PAGE) == 2 * PAGE
    held_and_left(cache, third, 2)  # the host is full: the first chain's tail makes room
    assert host.beyond(first, cache.match(first, 3 * PAGE), 3 * PAGE) == PAGE
    assert third.host_tokens == 2 * PAGE
    host.check((first, second, third))


def test_the_host_keeps_copies_whose_original_is_on_the_device():
    host = HostTier(2 * PAGE, PAGE)
    cache = PrefixCache(8 * PAGE, PAGE, host)
    first, second = Chain(0), Chain(0)
    held_and_left(cache, first, 2)
    held_and_left(cache, second, 2)
    assert (first.host_tokens, second.host_tokens) == (2 * PAGE, 0)
