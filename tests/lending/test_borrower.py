"""What is lent comes back exactly, and nothing is lost on the way: SGLang's own pools and trees, reads in memory."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import LAYERS, World

from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.lending import prefill
from sglang_basin.lending.borrower import FORWARD_WAIT_S
from sglang_basin.lending.calls import bootstrapped, decode_prefix, must_run_again
from sglang_basin.lending.transport import Plan

PAGES = (1, 16, 64)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 50) for _ in range(tokens)]


def outcome(name: str) -> int:
    return counts(metrics().lent_calls).get(name, 0)


def whole(tokens: int, page: int) -> int:
    return tokens // page * page


@pytest.mark.parametrize("page", PAGES)
def test_an_evicted_prefix_comes_back_and_only_what_is_missing_is_read(page: int) -> None:
    world = World(page)
    first = prompt(150)
    world.decode.cache(first)
    world.prefill.cache(first[:70])
    req = world.arrive([*first, 1, 2, 3])
    world.bootstrap(req)
    counted, cached = world.compute(req)
    assert counted
    assert cached == whole(150, page)
    assert world.transport.read_pages == (whole(150, page) - whole(70, page)) // page
    world.settle_all()
    world.check()


@pytest.mark.parametrize("page", PAGES)
def test_a_forward_follows_the_layers(page: int) -> None:
    """The call may be scheduled once little is missing, and its forward waits for each layer."""
    world = World(page)
    first = prompt(150)
    world.decode.cache(first)
    world.transport.hold()
    req = world.arrive([*first, 1, 2, 3])
    assert not world.turn(req)
    assert not world.turn(req)
    world.transport.release(LAYERS - 1)
    world.now_s = time.monotonic()
    world.bootstrap(req)
    world.now_s += 30.0  # the forward waits for its layers for longer than the test takes
    before = outcome("overlapped")
    counted, cached = False, 0

    original = world.borrower.wait_for_layer

    def release_late(layer: int) -> None:
        if layer == LAYERS - 1:
            assert world.borrower.private_tokens, "all had landed before the last layer was computed"
            world.transport.release()
        original(layer)

    world.borrower.wait_for_layer = release_late  # type: ignore[method-assign]
    counted, cached = world.compute(req)
    assert counted
    assert cached == whole(150, page)
    assert outcome("overlapped") == before + 1
    assert world.borrower.private_tokens == 0
    world.check()


@pytest.mark.parametrize("page", PAGES)
def test_a_part_that_stalls_in_a_forward_costs_it_little_and_is_computed(page: int) -> None:
    world = World(page)
    first = prompt(150)
    world.decode.cache(first)
    world.transport.hold()
    req = world.arrive([*first, 1, 2, 3])
    assert not world.turn(req)
    world.transport.release(LAYERS - 1)
    world.now_s = time.monotonic()
    world.bootstrap(req)
    world.now_s = None
    start = time.monotonic()
    counted, _ = world.compute(req)
    assert time.monotonic() - start < FORWARD_WAIT_S + 2.0
    assert not counted
    assert decode_prefix(req) == req.disagg_decode_prefix_len
    assert req.skip_radix_cache_insert
    req.kv.holds_kv = True
    assert must_run_again(req)
    req.kv.holds_kv = False
    assert world.turn(req)
    bootstrapped(req)
    assert not req.skip_radix_cache_insert
    world.check()
    counted, cached = world.compute(req)
    assert counted
    assert cached == 0
    assert world.borrower.private_tokens == whole(150, page), "the read under way may still write there"
    world.transport.release()
    world.settle_all()
    world.check()


def test_a_peer_that_fails_or_stops_costs_the_patience_once_and_is_left_alone() -> None:
    world = World(16, patience_s=0.2)
    for number in range(4):
        world.decode.cache(prompt(100, number))
    world.transport.hold()
    late = world.arrive([*prompt(100, 0), 1])
    world.now_s = time.monotonic()
    assert not world.turn(late)
    world.now_s += 0.19
    assert not world.turn(late)
    world.now_s += 0.02
    assert world.turn(late), "the patience is over"
    other = world.arrive([*prompt(100, 1), 1])
    before = outcome("breaker")
    assert world.turn(other), "an open breaker lets the call go on at once"
    assert outcome("breaker") == before + 1
    assert world.compute(other) == (True, 0)
    world.transport.failing = True
    world.transport.release()
    world.settle_all()
    world.check()
    world.transport.failing = False
    world.now_s += 10.0
    probe = world.arrive([*prompt(100, 2), 1])
    world.bootstrap(probe)
    assert world.compute(probe)[1] == 96
    again = world.arrive([*prompt(100, 3), 1])
    world.bootstrap(again)
    assert world.compute(again)[1] == 96


def test_a_call_waits_for_room_and_holds_nothing_meanwhile() -> None:
    world = World(16, prefill_tokens=256)
    world.decode.cache(prompt(200, 0))
    taken = world.prefill.allocate(128)
    world.scheduler.disagg_prefill_inflight_queue.append("whoever holds it")
    req = world.arrive([*prompt(200, 0), 1])
    world.now_s = time.monotonic()
    assert not world.turn(req)
    world.now_s += 100.0
    assert not world.turn(req), "the pool is full of calls, and no peer is to blame"
    assert world.borrower.private_tokens == 0
    assert world.prefill.tree.protected_size() == 0
    world.prefill.allocator.free(taken)
    world.now_s = None
    world.bootstrap(req)
    assert world.compute(req) == (True, 192)
    world.check()


def test_calls_that_wait_for_the_pool_do_not_evict_each_others_parts() -> None:
    """Three calls whose prefixes fit the pool one and a half at a time: each gets back what decode keeps, and runs with
    it, however long it waits to be scheduled."""
    world = World(16, prefill_tokens=512)
    for number in range(3):
        world.decode.cache(prompt(240, number))
    calls = [world.arrive([*prompt(240, number), 1, 2, 3]) for number in range(3)]
    world.bootstrap(calls[0])
    assert not world.turn(calls[1]), "256 tokens and two pages of slack are taken, and as many are needed"
    assert not world.borrower.ready(calls[2]), "nobody passes the call that finds no room"
    world.prefill.cache(prompt(200, 7))  # what others compute meanwhile takes what is evictable
    assert world.compute(calls[0]) == (True, 240)
    for call in calls[1:]:
        world.bootstrap(call)
        assert world.compute(call) == (True, 240)
    assert world.transport.read_pages == 45, "each part was read once"
    world.check()


def test_a_call_that_left_just_before_the_cache_is_flushed_holds_no_lock_on_it() -> None:
    world = World(16, prefill_tokens=512)
    world.prefill.cache(prompt(160))
    req = world.arrive([*prompt(160), 1])
    world.bootstrap(req)
    world.leave(req)
    assert world.borrower.drain()
    assert world.prefill.tree.protected_size() == 0


def test_a_fault_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(16, prefill_tokens=512)
    world.prefill.cache(prompt(160))
    world.bootstrap(world.arrive([*prompt(160), 1]))
    assert world.prefill.tree.protected_size() == 160
    monkeypatch.setattr(prefill, "_borrower", world.borrower)
    monkeypatch.setattr(world.borrower, "settle", lambda: 1 / 0)
    prefill.settle(None)
    assert prefill._borrower is None
    assert world.prefill.tree.protected_size() == 0


def test_a_call_that_has_been_computed_needs_no_room() -> None:
    """Late allocation on decode: the call is bootstrapped when its prompt is done."""
    world = World(16, prefill_tokens=256)
    world.prefill.cache(prompt(160))
    world.prefill.allocate(96)
    lock = world.prefill.tree.lock(world.prefill.find(prompt(160)).last_device_node)
    world.scheduler.disagg_prefill_inflight_queue.append("this call")
    req = world.arrive(prompt(160))
    req.kv.holds_kv = True
    assert world.turn(req)
    world.prefill.tree.unlock(lock)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(17, 400), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=7),
    seed=st.integers(0, 2**32),
)
def test_a_call_that_goes_on_finds_its_slots_and_all_that_was_kept_of_its_prompt(
    sizes: list[tuple[int, float, float]], seed: int
) -> None:
    """Whatever the calls' sizes and the order in which they come and are scheduled; and none waits for ever."""
    world = World(16, prefill_tokens=512, decode_tokens=4096)
    rng = random.Random(seed)
    coming = []
    for number, (tokens, on_decode, on_prefill) in enumerate(sizes):
        ids = prompt(tokens, number)
        world.decode.cache(ids[: int(on_decode * tokens)])
        world.prefill.cache(ids[: int(on_prefill * tokens)])
        coming.append(world.arrive(ids))
    inside: list[Any] = []
    deadline = time.monotonic() + 20.0
    while coming or inside:
        assert time.monotonic() < deadline, "calls wait for each other"
        world.borrower.settle()
        for req in [req for req in coming if world.borrower.ready(req)]:
            world.goes_on(req)
            coming.remove(req)
            inside.append(req)
        assert world.borrower.seats.free_tokens >= 0
        if inside and rng.random() < 0.5:
            req = inside.pop(rng.randrange(len(inside)))
            kept = world.decode.find(req.prompt, limit=len(req.prompt) - 1).device_prefix_len
            counted, cached = world.compute(req)
            assert counted
            assert cached >= kept
    world.check()


def test_a_call_that_is_present_keeps_what_it_has_until_it_is_scheduled() -> None:
    world = World(16, prefill_tokens=512)
    world.prefill.cache(prompt(160))
    req = world.arrive([*prompt(160), 1])
    world.bootstrap(req)
    world.prefill.forget()
    assert world.compute(req) == (True, 160)
    world.check()


@pytest.mark.parametrize("layers_read", [0, LAYERS - 1, LAYERS])
def test_a_call_that_ends_while_it_waits_gives_its_room_back(layers_read: int) -> None:
    """The next one goes on once what was being read for the one that left has come, or will not come any more."""
    world = World(16, prefill_tokens=512)
    world.decode.cache(prompt(240))
    gone, next_one = world.arrive([*prompt(240), 1]), world.arrive(prompt(400, 1))
    world.transport.hold()
    assert not world.turn(gone)
    world.transport.release(layers_read)
    if layers_read:
        world.now_s = time.monotonic()
        world.bootstrap(gone)
    assert not world.turn(next_one)
    world.leave(gone)
    if layers_read < LAYERS:
        assert not world.turn(next_one), "a part of the one that left is still on its way"
        world.transport.release()
    world.bootstrap(next_one)
    assert world.compute(next_one) == (True, 0)
    world.check()


def test_a_call_that_nothing_makes_room_for_goes_on() -> None:
    """What it is too large for is SGLang's to say."""
    world = World(16, prefill_tokens=256)
    world.prefill.allocate(64)
    req = world.arrive(prompt(240))
    assert world.turn(req)


def test_seats_end_when_their_calls_are_not_scheduled() -> None:
    """Something else has taken the slots that were promised: locks of waiting calls must not keep it from going on."""
    world = World(16, prefill_tokens=512, patience_s=2.0)
    world.prefill.cache(prompt(160))
    req = world.arrive([*prompt(160), 1])
    world.now_s = time.monotonic()
    assert world.turn(req)
    for _ in range(2):
        world.now_s += 1.5
        world.borrower.ran()
        world.borrower.settle()
        assert world.prefill.tree.protected_size() == 160, "forwards run, its turn will come"
    world.now_s += 2.1
    world.borrower.settle()
    assert world.prefill.tree.protected_size() == 0
    assert world.compute(req)[0]
    world.check()


def test_an_abort_waits_for_the_read_before_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(16)
    world.decode.cache(prompt(100))
    world.transport.hold()
    req = world.arrive([*prompt(100), 1])
    assert not world.turn(req)
    acknowledged: list[int] = []
    monkeypatch.setattr(prefill, "_borrower", world.borrower)
    room = req.bootstrap_room
    prefill.hold_abort_ack(lambda manager, room: acknowledged.append(room), world.manager, room)
    assert acknowledged == []
    assert world.manager.asked_to_ack == []
    world.transport.release()
    world.settle_all()
    assert world.manager.asked_to_ack == [room], "asked again when the read was through"
    prefill.hold_abort_ack(lambda manager, room: acknowledged.append(room), world.manager, room)
    assert acknowledged == [room]
    world.leave(req)
    world.check()
    assert world.prefill.find(prompt(100)).device_prefix_len == 96, "what was read before the abort is as good as any"


@pytest.mark.parametrize("failing", [False, True])
def test_copies_under_way_are_waited_for_before_anything_is_let_go(failing: bool) -> None:
    """A transport launches ahead, so its last read may return, or fail, before the last byte is written."""
    world = World(16)
    world.decode.cache(prompt(100))
    through = threading.Event()

    def finish(plan: Plan) -> None:
        assert through.wait(10)

    world.transport.finish = finish  # type: ignore[method-assign]
    world.transport.failing = failing
    req = world.arrive([*prompt(100), 1])
    ended = time.monotonic() + 0.1
    while time.monotonic() < ended:
        world.turn(req)
    assert world.borrower.private_tokens == 96
    assert req.bootstrap_room in world.borrower.reading, "decode keeps the pages"
    through.set()
    world.settle_all()
    assert req.bootstrap_room not in world.borrower.reading
    world.leave(req)
    world.check()


def test_nothing_is_read_for_a_call_that_decode_has_given_up() -> None:
    from sglang.srt.disaggregation.base import KVPoll

    world = World(16)
    world.decode.cache(prompt(100))
    req = world.arrive([*prompt(100), 1])
    world.manager.request_status[req.bootstrap_room] = KVPoll.Failed
    assert world.turn(req)
    assert world.transport.read_pages == 0
    assert world.manager.asked_to_ack == [req.bootstrap_room]
    world.check()
    assert world.prefill.tree.protected_size() == 0


def test_a_call_whose_part_stalls_before_it_is_scheduled_is_computed_at_once() -> None:
    """It was told that its part is near, was not admitted, and then the peer stopped: the old answer must not count."""
    world = World(16)
    world.decode.cache(prompt(100))
    world.transport.hold()
    req = world.arrive([*prompt(100), 1])
    assert not world.turn(req)
    world.transport.release(LAYERS - 1)
    world.now_s = time.monotonic()
    world.bootstrap(req)
    match = world.prefill.find(req.prompt, limit=100)
    assert world.borrower.matched(req, 100, match).device_prefix_len == 96
    assert world.borrower.tail(req) is not None
    world.now_s += 1.0
    world.borrower.settle()
    assert world.compute(req) == (True, 0)
    assert world.borrower.tail(req) is None
    world.transport.release()
    world.settle_all()
    world.check()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_evict_each_other_get_their_own_kv_back(page: int, seed: int) -> None:
    """Random sessions over a small pool: calls overlap, reads are slow, fail and stall, decode frees what it may."""
    rng = random.Random(100 * page + seed)
    world = World(page, prefill_tokens=512, decode_tokens=2048, patience_s=0.05, share=0.8)
    contexts = [prompt(rng.randint(60, 120), 1000 * seed + number) for number in range(8)]
    inside: list[Any] = []
    came_back = 0
    for _ in range(120):
        world.borrower.settle()
        action = rng.random()
        if action < 0.05:
            world.transport.hold()
        elif action < 0.2:
            world.transport.failing = rng.random() < 0.3
            world.transport.release(rng.choice((1, 2, 10**6)))
        elif action < 0.6 or not inside:
            number = rng.randrange(len(contexts))
            if number in [n for n, _ in inside]:
                continue
            ids = [*contexts[number], *(rng.randint(1, 50) for _ in range(rng.randint(1, 20)))]
            inside.append((number, world.arrive(ids[:200])))
        else:
            number, req = inside.pop(rng.randrange(len(inside)))
            world.bootstrap(req)
            bootstrapped(req)
            counted, cached = world.compute(req)
            if not counted:
                world.bootstrap(req)
                bootstrapped(req)
                counted, cached = world.compute(req)
                assert counted
            came_back += cached
            world.leave(req)
            contexts[number] = req.prompt if len(req.prompt) < 180 else prompt(80, rng.randrange(10**6))
            world.decode.cache(req.prompt)
            world.lender.trim()
            assert world.lender.kept_tokens <= world.lender.cap_tokens
        assert world.prefill.accounted_tokens + world.borrower.private_tokens == world.prefill.allocator.size, (
            "tokens of prefill's pool were lost or counted twice"
        )
    world.transport.failing = False
    world.transport.release()
    for _, req in inside:
        world.bootstrap(req)
        world.leave(req)
    world.settle_all()
    world.check()
    assert world.decode.accounted_tokens == world.decode.allocator.size
    assert came_back > 0
    assert not world.borrower.reading._rooms


def test_decode_keeps_its_share_and_drops_the_oldest() -> None:
    world = World(16, decode_tokens=640, share=0.5)
    for number in range(5):
        world.decode.cache(prompt(96, number))
        world.lender.trim()
        assert world.lender.kept_tokens <= 320
    kept = [world.decode.find(prompt(96, number)).device_prefix_len for number in range(5)]
    assert kept[0] == kept[1] == 0
    assert kept[3] == kept[4] == 96


def test_what_decode_can_lend_shrinks_as_its_own_calls_grow() -> None:
    world = World(16, decode_tokens=640, share=0.5)
    assert world.lender.lendable_tokens == 320
    world.decode.cache(prompt(96))
    assert world.lender.lendable_tokens == 320, "what is lent already is part of it"
    running = world.decode.allocate(480)
    assert world.lender.lendable_tokens == 160
    world.decode.allocator.free(running)
    assert world.lender.lendable_tokens == 320
