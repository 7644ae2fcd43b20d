"""Which bytes a read moves: real buffers of both sides in this process, an engine that copies between addresses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.lending.transport import MooncakeReads, Plan, TransferFailed

LAYERS, POOL_PAGES = 3, 16
PEER = "decode:1"


class Engine:
    """What Mooncake does, within one process; answers `status`."""

    def __init__(self) -> None:
        self.status = 0
        self.moved_bytes = 0

    def batch_transfer_sync_read(self, peer: str, ours: list[int], theirs: list[int], lengths: list[int]) -> int:
        assert peer == PEER
        for here, there, length in zip(ours, theirs, lengths, strict=True):
            ctypes.memmove(here, there, length)
            self.moved_bytes += length
        return self.status


class Sides:
    """The KV buffers of both sides: K of all layers, then V (MHA), or one for each layer (MLA)."""

    def __init__(self, buffers: int, item_bytes: int) -> None:
        rng = np.random.default_rng(1)
        self.theirs = rng.integers(1, 255, (buffers, POOL_PAGES, item_bytes), dtype=np.uint8)
        self.ours = np.zeros_like(self.theirs)
        self.engine = Engine()
        self.registered = SimpleNamespace(
            dst_kv_ptrs=[buffer.ctypes.data for buffer in self.theirs],
            dst_kv_item_len=item_bytes,
            dst_attn_tp_size=1,
        )
        self.manager: Any = SimpleNamespace(
            kv_args=SimpleNamespace(
                kv_data_ptrs=[buffer.ctypes.data for buffer in self.ours], kv_item_lens=[item_bytes] * buffers
            ),
            decode_kv_args_table={PEER: self.registered},
            attn_tp_size=1,
            engine=SimpleNamespace(engine=self.engine),
        )
        self.reads = MooncakeReads(self.manager, LAYERS)


pages = st.permutations(range(POOL_PAGES))


@settings(deadline=None)
@given(theirs=pages, ours=pages, count=st.integers(1, POOL_PAGES), per_layer=st.sampled_from([1, 2]))
def test_a_layer_brings_its_pages_and_nothing_else(
    theirs: list[int], ours: list[int], count: int, per_layer: int
) -> None:
    sides = Sides(per_layer * LAYERS, item_bytes=24)
    there, here = np.array(theirs[:count]), np.array(ours[:count])
    plan = Plan.of(PEER, there, here)
    assert plan.total_pages == count
    wanted = np.zeros_like(sides.ours)
    for layer in range(LAYERS):
        sides.reads.read(plan, layer)
        for buffer in range(layer, per_layer * LAYERS, LAYERS):
            wanted[buffer, here] = sides.theirs[buffer, there]
        assert np.array_equal(sides.ours, wanted)
    assert sides.engine.moved_bytes == count * sides.reads.page_bytes


def test_neighbouring_pages_are_one_run() -> None:
    plan = Plan.of(PEER, np.array([3, 4, 5, 9, 1]), np.array([7, 8, 9, 10, 11]))
    assert (plan.theirs.tolist(), plan.ours.tolist(), plan.pages.tolist()) == ([3, 9, 1], [7, 10, 11], [3, 1, 1])


def test_a_plan_without_pages_or_with_unequal_ones_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pages there"):
        Plan.of(PEER, np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="2 pages there, 1 here"):
        Plan.of(PEER, np.array([1, 2]), np.array([1]))


def test_a_read_that_mooncake_refuses_is_a_failure() -> None:
    sides = Sides(2 * LAYERS, 8)
    sides.engine.status = -1
    with pytest.raises(TransferFailed, match="answered -1 to a read of 16 bytes"):
        sides.reads.read(Plan.of(PEER, np.array([1]), np.array([2])), 0)


def test_a_peer_of_another_shape_is_named() -> None:
    sides = Sides(2 * LAYERS, 8)
    assert sides.reads.mismatch(PEER) is None
    assert "not registered" in str(sides.reads.mismatch("decode:2"))
    sides.registered.dst_attn_tp_size = 2
    assert "TP 2, prefill 1" in str(sides.reads.mismatch(PEER))
    sides.registered.dst_kv_item_len = 4
    assert "4 bytes a layer, prefill's 8" in str(sides.reads.mismatch(PEER))
    sides.registered.dst_kv_ptrs = [1]
    assert "1 KV buffers, prefill 6" in str(sides.reads.mismatch(PEER))
    with pytest.raises(ValueError, match="6 KV buffers for 4 layers"):
        MooncakeReads(sides.manager, 4)
