"""Head slices for unequal tensor parallelism: complete, and the same cut as SGLang's own transfer makes."""

from __future__ import annotations

import pytest
from basin_kernels.heads import head_slices, heads_of
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params

SIZES = st.sampled_from([1, 2, 4, 8, 16])


@given(SIZES, SIZES, SIZES)
def test_every_head_comes_once_from_a_rank_that_keeps_it(source_tp: int, destination_tp: int, kv_heads: int) -> None:
    for rank in range(destination_tp):
        wanted = list(heads_of(rank, destination_tp, kv_heads))
        received: dict[int, int] = {}
        for source_rank, part in head_slices(
            rank, source_tp=source_tp, destination_tp=destination_tp, kv_heads=kv_heads
        ):
            kept = heads_of(source_rank, source_tp, kv_heads)
            for n in range(part.count):
                received[part.destination_first + n] = kept[part.source_first + n]
        assert [received.get(n) for n in range(len(wanted))] == wanted
        assert len(received) == len(wanted)


@given(SIZES, SIZES, SIZES)
def test_slices_are_those_of_sglangs_transfer(source_tp: int, destination_tp: int, kv_heads: int) -> None:
    for rank in range(destination_tp):
        for source_rank, part in head_slices(
            rank, source_tp=source_tp, destination_tp=destination_tp, kv_heads=kv_heads
        ):
            theirs = compute_head_slice_params(source_tp, destination_tp, source_rank, rank, kv_heads)
            if source_tp != destination_tp:
                assert (part.source_first, part.count, part.destination_first) == theirs[:3]


@pytest.mark.parametrize(
    ("rank", "tp_size", "kv_heads", "message"),
    [(0, 3, 8, "8 KV heads do not divide among 3"), (2, 2, 8, "rank 2: there are 2"), (0, 0, 8, "do not divide")],
)
def test_impossible_shards_are_refused(rank: int, tp_size: int, kv_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heads_of(rank, tp_size, kv_heads)
