"""Which heads of which source rank a destination rank needs when the two sides have unequal tensor parallelism."""

from __future__ import annotations

from basin_kernels.page_copy import HeadSlice


def heads_of(rank: int, tp_size: int, kv_heads: int) -> range:
    """The model's KV heads that a rank keeps, as SGLang shards them: dense runs, or one head kept by several ranks.

    `kv_heads` is the whole model's count. Raises ValueError when neither divides the other.
    """
    if tp_size < 1 or kv_heads < 1 or (kv_heads % tp_size and tp_size % kv_heads):
        raise ValueError(f"{kv_heads} KV heads do not divide among {tp_size} ranks")
    if not 0 <= rank < tp_size:
        raise ValueError(f"rank {rank}: there are {tp_size}")
    if tp_size > kv_heads:
        head = rank // (tp_size // kv_heads)
        return range(head, head + 1)
    each = kv_heads // tp_size
    return range(rank * each, (rank + 1) * each)


def head_slices(
    destination_rank: int, *, source_tp: int, destination_tp: int, kv_heads: int
) -> tuple[tuple[int, HeadSlice], ...]:
    """(source rank, slice) of every source rank that the destination rank reads from; each head comes exactly once.

    Where several source ranks keep a head, destination ranks take different ones. MLA's buffer counts as one KV head.
    """
    wanted = heads_of(destination_rank, destination_tp, kv_heads)
    copies = max(1, source_tp // kv_heads)
    each = max(1, kv_heads // source_tp)
    slices = []
    for group in range(wanted.start // each, (wanted.stop - 1) // each + 1):
        source_rank = group * copies + destination_rank % copies
        kept = heads_of(source_rank, source_tp, kv_heads)
        first, last = max(kept.start, wanted.start), min(kept.stop, wanted.stop)
        slices.append((source_rank, HeadSlice(first - kept.start, first - wanted.start, last - first)))
    return tuple(slices)
