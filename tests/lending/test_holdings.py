"""What decode says it keeps of each session is what its tree holds, and prefill is told when that becomes less."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import World
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.lending import decode, prefill
from sglang_basin.lending.holdings import Holdings, Owner

DOOR = "tcp://prefill"

OWNERS = st.sampled_from([(DOOR, "a"), (DOOR, "b"), ("tcp://other", "a")])
NODES = st.integers(1, 15)
"""Of a binary tree: the parent of node n is n // 2, the root is 0."""


def depth(node: int) -> int:
    return 16 * node.bit_length()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), OWNERS, NODES),
            st.tuples(st.just("drop"), NODES),
            st.tuples(st.just("drop_all")),
            st.tuples(st.just("take_shorter"), st.integers(0, 2)),
        )
    )
)
def test_prefill_is_told_of_each_copy_that_has_become_shorter(steps: list[Any]) -> None:
    """What it knows, by the ends of calls and by what is taken, is never less than what is kept; and no more once all
    has been taken."""
    holdings = Holdings(max_copies=10)
    ends: dict[Owner, int] = {}
    known: dict[Owner, int] = {}
    for what, *details in steps:
        if what == "keep":
            owner, end = details
            holdings.keep(owner, end, depth(end))
            ends[owner], known[owner] = end, depth(end)
        elif what == "drop":
            (node,) = details
            assert holdings.ends_at(node) == (node in ends.values())
            holdings.drop(node, node // 2, depth(node // 2))
            ends = {owner: node // 2 if end == node else end for owner, end in ends.items()}
        elif what == "drop_all":
            holdings.drop_all()
            ends = dict.fromkeys(ends, 0)
        else:
            known |= dict(holdings.take_shorter(*details))
        for owner, end in ends.items():
            assert holdings.tokens_of(owner) == depth(end) <= known[owner]
    known |= dict(holdings.take_shorter(100))
    assert known == {owner: depth(end) for owner, end in ends.items()}
    assert len(holdings) == sum(end > 0 for end in ends.values())
    assert holdings.take_shorter(100) == []


def test_no_more_copies_are_remembered_than_may_be() -> None:
    holdings = Holdings(max_copies=2)
    for number in range(4):
        holdings.keep((DOOR, str(number)), number + 1, 16)
    assert len(holdings) == 2
    assert holdings.tokens_of((DOOR, "1")) == 0
    assert not holdings.ends_at(1)
    for _ in range(3):  # and nobody takes what there is to tell
        holdings.drop_all()
        for number in range(4):
            holdings.keep((DOOR, str(number)), number + 1, 16)
    assert len(holdings.take_shorter(100)) <= 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> World:
    """SGLang's own tree, with the hook in it."""
    original = UnifiedRadixCache._evict_device_leaf
    world = World(16, decode_tokens=1024, share=0.5)
    monkeypatch.setattr(decode, "_lender", world.lender)

    def hooked(self: Any, node_id: int, tracker: Any) -> Any:
        decode.note_dropped(self, node_id, tracker)
        return original(self, node_id, tracker)

    monkeypatch.setattr(UnifiedRadixCache, "_evict_device_leaf", hooked)
    return world


def leave(world: World, context: list[int]) -> Any:
    """A call with this context, the last token of its answer included, as it leaves decode."""
    world.decode.cache(context[:-1])
    return SimpleNamespace(
        origin_input_ids=array("q", context[:-5]),
        output_ids=array("q", context[-5:]),
        extra_key=None,
        cache_salt=None,
        last_node=world.decode.find(context[:-1]).last_device_node,
    )


def prompt(tokens: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randint(1, 50) for _ in range(tokens)]


def test_what_is_kept_of_a_call_is_what_the_tree_has_of_it(told: World) -> None:
    request = leave(told, prompt(200, "a"))
    assert decode.kept_tokens_of(request, None) == 192
    assert len(told.lender.holdings) == 0, "nobody knows whose it is"
    assert decode.kept_tokens_of(request, (DOOR, "a")) == 192
    assert told.lender.holdings.tokens_of((DOOR, "a")) == 192


def test_a_context_beyond_the_share_is_kept_as_far_as_it_was_not_dropped(told: World) -> None:
    """Its end has been dropped before anybody asks how much of it is kept."""
    context = prompt(700, "long")
    told.decode.cache(context[:320])
    request = leave(told, context)
    told.lender.trim()
    assert told.lender.kept_tokens <= 512
    assert decode.kept_tokens_of(request, (DOOR, "long")) == 320


def test_emptying_the_tree_drops_all(told: World) -> None:
    decode.kept_tokens_of(leave(told, prompt(100, "a")), (DOOR, "a"))
    scheduler = SimpleNamespace()
    assert prefill.refuse_flush(lambda self: False, scheduler) is False
    assert decode.take_shortened(10) == []
    assert prefill.refuse_flush(lambda self: True, scheduler) is True
    assert decode.take_shortened(10) == [((DOOR, "a"), 0)]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_told_follows_the_tree(told: World, seed: int) -> None:
    """Sessions that share a beginning grow, and their calls and others' push them out, oldest first. What prefill
    knows is what the tree holds, but for the beginning that another session has brought back."""
    rng = random.Random(seed)
    beginning = prompt(48, "beginning")
    contexts = {str(number): beginning + prompt(40, (seed, number)) for number in range(8)}
    known: dict[str, int] = {}
    shortened, faults = 0, counts(metrics().faults)
    for _ in range(120):
        name = rng.choice(list(contexts))
        contexts[name] += prompt(rng.randint(1, 60), rng.random())
        if len(contexts[name]) > 400:
            contexts[name] = beginning + prompt(40, rng.random())
        request = leave(told, contexts[name])
        told.lender.trim()
        known[name] = decode.kept_tokens_of(request, (DOOR, name))
        if rng.random() < 0.3:
            told.decode.allocator.free(told.decode.allocate(rng.randint(20, 40) * 16))
        for (door, owner), tokens in decode.take_shortened(rng.choice((1, 100))):
            assert door == DOOR
            shortened += tokens < known[owner]
            known[owner] = min(known[owner], tokens)
        if told.lender.holdings._shorter:
            continue
        holdings = told.lender.holdings
        lengths = {owner: _held(told, contexts[owner]) for owner in known}
        for owner, held in lengths.items():
            assert holdings.tokens_of((DOOR, owner)) == known[owner]
            assert known[owner] <= held <= max(known[owner], len(beginning)), (owner, known[owner], held)
    assert shortened > 10
    assert counts(metrics().faults) == faults


def _held(world: World, context: list[int]) -> int:
    """How much of a context the tree holds; looking does not count as use."""
    return int(world.decode.tree.tree_core.match_full_device_prefix(RadixKey(array("q", context), None))[0])
