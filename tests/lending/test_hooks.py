"""The hooks themselves: SGLang's own objects where they exist without a server, pass-through without lending, off after
a fault."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pools import LAYERS, World
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, TransferInfo

from sglang_basin.config import BasinConfig
from sglang_basin.engine import hooks
from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.lending import borrower, decode, prefill
from sglang_basin.lending.pages import MARK, pack, unpack


def prompt(tokens: int) -> list[int]:
    return [1 + i * i % 47 for i in range(tokens)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A prefill and a decode whose hooks are attached."""
    world = World(16)
    monkeypatch.setattr(prefill, "_borrower", world.borrower)
    monkeypatch.setattr(decode, "_lender", world.lender)
    monkeypatch.setattr(prefill, "_lost_tokens", 0)
    prefill._launched.clear()
    return world


def metadata(world: World, pages: np.ndarray | None, *, is_dummy: bool = False) -> list[bytes]:
    """The message that SGLang builds on decode, as our hook leaves it."""
    manager = SimpleNamespace(local_ip="127.0.0.1", rank_port=1, get_session_id=lambda: "decode:1")
    if pages is not None:
        world.lender.pages[7] = pack(pages)
    try:
        return decode.append_pages(
            MooncakeKVManager.build_receiver_metadata_message,
            manager,
            bootstrap_room=7,
            required_dst_info_num=1,
            kv_indices=np.arange(3, dtype=np.int32),
            aux_index=5,
            state_indices=None,
            decode_prefix_len=32,
            is_dummy=is_dummy,
        )
    finally:
        world.lender.pages.clear()


@pytest.mark.parametrize("pages", [None, np.array([4, 9], dtype=np.int32)])
def test_pages_ride_on_sglangs_own_message(world: World, pages: np.ndarray | None) -> None:
    message = metadata(world, pages)
    info = TransferInfo.from_zmq(message)
    assert info.decode_prefix_len == 32
    assert info.dst_kv_indices.tolist() == [0, 1, 2]
    prefill.read_pages(info, TransferInfo, message)
    assert (None if info.lent_pages is None else info.lent_pages.tolist()) == (None if pages is None else [4, 9])


def test_a_message_to_a_rank_that_gets_no_kv_carries_no_pages(world: World) -> None:
    assert not any(MARK in frame for frame in metadata(world, np.array([1], dtype=np.int32), is_dummy=True))


@pytest.mark.parametrize("field", [b"", MARK, MARK + b"abc", MARK + b"\xff\xff\xff\xff", b"other" + bytes(8)])
def test_a_damaged_field_lends_nothing(field: bytes) -> None:
    assert unpack([b"room", field]) is None


def run(world: World, req: Any) -> None:
    """A batch with this call through the hooks around it."""
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=[req], extend_num_tokens=len(req.prompt)
    )
    scheduler = SimpleNamespace()
    assert prefill.run_batch(lambda self, given: given, scheduler, batch) is batch
    prefill.measure(None, scheduler, batch, None)


def test_batches_are_measured_but_not_those_that_waited(world: World) -> None:
    world.decode.cache(prompt(100))
    req = world.arrive([*prompt(100), 1])
    run(world, req)
    assert world.borrower.computing.known
    assert not prefill._launched


class Queue:
    """Prefill's bootstrap queue, as far as the hooks know it."""

    def __init__(self, world: World) -> None:
        self.kv_manager = world.manager
        self.finalized: list[Any] = []

    def finalize(self, req: Any) -> bool:
        return prefill.finalize(lambda queue, req: queue.finalized.append(req) or True, self, req)


def matched(world: World, req: Any) -> Any:
    """What the call is told that it has cached."""
    match = world.prefill.find(req.prompt, limit=100)
    params = SimpleNamespace(req=req, key=req.prompt[:100])
    match = prefill.match(lambda self, params, result: result, world.prefill.tree, params, match)
    req.last_node, req.prefix_len = match.last_device_node, match.device_prefix_len
    return match


def test_a_call_passes_through_the_hooks_and_finds_its_prefix(world: World) -> None:
    """Its part has landed: it is in the tree, like any cached prefix."""
    world.decode.cache(prompt(100))
    req, queue = world.arrive([*prompt(100), 1]), Queue(world)
    assert not queue.finalize(req), "the part is on its way"
    while world.borrower.private_tokens:
        prefill.settle(queue)
    assert queue.finalize(req)
    assert queue.finalized == [req]
    match = matched(world, req)
    assert match.device_prefix_len == 96
    assert len(prefill.prefix_slots(lambda self, req: world.prefill.path(match), world.prefill.tree, req)) == 96
    assert not prefill.run_again(lambda req: False, req)


def test_a_call_passes_through_the_hooks_while_its_part_is_near(world: World) -> None:
    """Its part is not in the tree, and it is shown it all the same."""
    world.now_s = time.monotonic()
    world.decode.cache(prompt(100))
    world.transport.hold()
    req, queue = world.arrive([*prompt(100), 1]), Queue(world)
    assert not queue.finalize(req)
    world.transport.release(LAYERS - 1)
    while not queue.finalize(req):
        prefill.settle(queue)
    assert queue.finalized == [req]
    assert world.borrower.private_tokens == 96
    assert world.prefill.find(req.prompt).device_prefix_len == 0
    match = matched(world, req)
    assert match.device_prefix_len == 96

    def nothing_in_the_tree(self: Any, req: Any) -> Any:
        raise AssertionError("the tree alone was asked")

    assert len(prefill.prefix_slots(nothing_in_the_tree, world.prefill.tree, req)) == 96
    world.transport.release()


def test_a_fault_switches_lending_off_and_calls_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.decode.cache(prompt(100))
    world.transport.hold()
    flowing = world.arrive([*prompt(100), 1])
    assert not world.turn(flowing)
    before = counts(metrics().faults).get("lending", 0)

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(world.borrower, "settle", broken)
    prefill.settle(SimpleNamespace())
    assert counts(metrics().faults)["lending"] == before + 1
    assert prefill.finalize(lambda self, req: True, SimpleNamespace(), flowing)
    asked: list[int] = []
    prefill.count_private(lambda self, ps, uncached: asked.append(uncached), SimpleNamespace(), None)
    assert asked == [96], "the slots on their way are no leak"
    run(world, flowing)
    world.transport.release()


def test_a_fault_as_a_part_begins_leaks_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang ends a server whose pool does not add up."""
    world.decode.cache(prompt(100))

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(borrower.Plan, "of", broken)
    assert prefill.finalize(lambda self, req: True, SimpleNamespace(), world.arrive([*prompt(100), 1]))
    assert prefill._borrower is None
    lost: list[int] = []
    prefill.count_private(lambda self, ps, uncached: lost.append(uncached), SimpleNamespace(), None)
    assert world.prefill.accounted_tokens + lost[0] == world.prefill.allocator.size
    assert lost == [96]


def test_the_cache_is_not_flushed_under_a_read(world: World) -> None:
    world.decode.cache(prompt(100))
    world.transport.hold()
    assert not world.turn(world.arrive([*prompt(100), 1]))
    assert prefill.refuse_flush(lambda self: True, SimpleNamespace()) is False
    world.transport.release()
    world.settle_all()
    assert prefill.refuse_flush(lambda self: True, SimpleNamespace()) is True


def test_only_lending_registers_its_hooks() -> None:
    off, on = hooks.needed(BasinConfig()), hooks.needed(BasinConfig(lending="on"))
    assert off == hooks.HOOKS
    assert set(on) - set(off) == set(hooks.LENDING)
    assert hooks.mismatches(hooks.LENDING) == []


def test_without_lending_the_hooks_pass_everything_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_borrower", None)
    monkeypatch.setattr(decode, "_lender", None)
    req = SimpleNamespace(rid="r", kv=SimpleNamespace(holds_kv=False), last_node=None)
    prefill.settle(None)
    assert prefill.finalize(lambda self, req: True, None, req)
    assert prefill.match(lambda self, params, result: "as it was", None, None, None) == "as it was"
    assert prefill.prefix_slots(lambda self, req: "slots", None, req) == "slots"
    assert prefill.run_batch(lambda self, batch: "ran", None, None) == "ran"
    prefill.measure(None, None, None, None)
    assert prefill.run_again(lambda req: True, req) is True
    assert prefill.run_again(lambda req: False, req) is False
    assert prefill.refuse_flush(lambda self: True, None)
    assert prefill.count_private(lambda self, ps, uncached: uncached, None, None, 3) == 3
    assert decode.tell_pages(lambda self, *rest, **others: "told", None, None, None, 1) == "told"
    assert decode.append_pages(lambda self, **fields: [b"m"], None, is_dummy=False, bootstrap_room=1) == [b"m"]
    decode.trim(None, None, req, checkpointed=True)
