"""Copies KV pages from a peer's paged buffers into ours: K and V, or MLA's one buffer, of a layer in one launch.

Prefill reads decode's pages through peer-mapped memory (CUDA IPC) on a side stream, layer by layer, while it computes.
The kernel therefore runs as few programs as the link needs (`programs`), and a launch never waits for the device.

    copy = PageCopy(layers, source_page_tokens=64, destination_page_tokens=64)   # once for each peer
    copy.warm_up()
    ids = copy.place(source_pages, destination_pages)                            # once for each pull
    for layer in range(copy.layers):
        copy.launch(layer, ids)
        arrived[layer].record()

What is copied is bytes, so any dtype goes. A buffer is a pool of SGLang's, `[tokens, heads, dim]`, or
`[pages, page tokens, heads, dim]`; its heads and dims are dense, its tokens and pages may be strided.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PROGRAMS = 32
"""Programs of a launch. Each has 32 KiB in flight, so these have 1 MiB, enough for NVLink's 450 GB/s at a latency of 2
microseconds (an assumption; `bench_page_copy.py` tries several). By its registers an SM holds three."""

WARPS = 8
TILE_ELEMENTS = WARPS * 32 * 32
"""Elements of a program's turn: 32 for each thread, which are eight 16-byte vectors where alignment allows."""

WIDEST_WORD_BYTES = 16
LEAST_COLUMNS, MOST_COLUMNS = 32, 2048
"""Elements of one row that a tile may span: one full 128-byte line up to 8 KiB, at the widest word."""

TABLE_FIELDS = 7
"""Of a buffer in the kernel's table, each in words: source and destination address, page stride of both, row stride
of both, and the row's length."""

_ELEMENTS = {
    16: (tl.int32, 4),
    8: (tl.int32, 2),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}
"""By the word's bytes: the element the kernel moves, and how many of them make a word."""


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """`count` heads of each token, from head `source_first` of the source to `destination_first` of the destination.

    Heads are counted within the buffers of one tensor-parallel rank (see `heads.head_slices`).
    """

    source_first: int
    destination_first: int
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Page ids on the destination's device, from `PageCopy.place`. `tokens` is how many they cover."""

    source_ids: torch.Tensor
    destination_ids: torch.Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class _Side:
    """One buffer as the kernel sees it, with the head slice's offset in `address`. All but `pages` in bytes."""

    address: int
    pages: int
    page_stride: int
    token_stride: int
    token_bytes: int


@triton.jit(do_not_specialize=["first_buffer", "buffers", "rows", "column_tiles", "source_pages", "destination_pages"])
def copy_rows_kernel(
    table,  # int64 [buffers of all layers, TABLE_FIELDS]
    source_ids,  # int32 or int64 [rows / SOURCE_PAGE_ROWS]
    destination_ids,  # int32 or int64 [rows / DESTINATION_PAGE_ROWS]
    skipped,  # int32 [1], set to 1 when a page id is out of bounds; such rows are not copied
    first_buffer,
    buffers,
    rows,
    column_tiles,
    source_pages,
    destination_pages,
    SOURCE_PAGE_ROWS: tl.constexpr,
    DESTINATION_PAGE_ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,  # elements of a word
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    TABLE_FIELDS: tl.constexpr,
):
    """Each program takes every `programs`-th tile of ROW_TILE rows by COLUMN_TILE elements of a buffer.

    The table counts in words, so the compiler sees that every address is a multiple of the word and moves whole ones.
    Page strides times page ids need 64 bits; a row's own length fits in 32.
    """
    row_tiles = (rows + ROW_TILE - 1) // ROW_TILE
    WORD_BYTES: tl.constexpr = LANES * (ELEMENT.primitive_bitwidth // 8)
    for tile in range(tl.program_id(0), buffers * row_tiles * column_tiles, tl.num_programs(0)):
        row = (tile // column_tiles) % row_tiles * ROW_TILE + tl.arange(0, ROW_TILE)
        column = tile % column_tiles * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        entry = table + (first_buffer + tile // column_tiles // row_tiles) * TABLE_FIELDS

        source_page = tl.load(source_ids + row // SOURCE_PAGE_ROWS, mask=row < rows, other=0).to(tl.int64)
        destination_page = tl.load(destination_ids + row // DESTINATION_PAGE_ROWS, mask=row < rows, other=0).to(
            tl.int64
        )
        known = (source_page >= 0) & (source_page < source_pages)
        known = known & (destination_page >= 0) & (destination_page < destination_pages)
        tl.store(skipped + row * 0, 1, mask=(row < rows) & (known == 0))

        source_word = source_page * tl.load(entry + 2) + row % SOURCE_PAGE_ROWS * tl.load(entry + 4)
        destination_word = destination_page * tl.load(entry + 3) + row % DESTINATION_PAGE_ROWS * tl.load(entry + 5)
        source = tl.multiple_of((tl.load(entry) * WORD_BYTES).to(tl.pointer_type(ELEMENT)), WORD_BYTES)
        destination = tl.multiple_of((tl.load(entry + 1) * WORD_BYTES).to(tl.pointer_type(ELEMENT)), WORD_BYTES)
        mask = (known & (row < rows))[:, None] & (column < tl.load(entry + 6).to(tl.int32) * LANES)[None, :]
        moved = tl.load(source + (source_word * LANES)[:, None] + column[None, :], mask=mask, cache_modifier=".cg")
        tl.store(destination + (destination_word * LANES)[:, None] + column[None, :], moved, mask=mask)


class PageCopy:
    """How pages of `layers` go from their source buffers to their destination buffers; made once for each peer.

    `layers` has, for each layer, its (source, destination) pairs: K and V, or one buffer for MLA, and scales if the
    cache has any. Sources may be on another GPU that the destinations' GPU can read. Source pages have
    `source_page_tokens` tokens, destination pages `destination_page_tokens` (1 for slots). `heads` None copies all
    heads of each token; a slice copies some of them and leaves the others as they are.

    Keeps its buffers alive. Not thread-safe. Raises ValueError, naming the buffer, for what cannot be copied.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
        *,
        source_page_tokens: int,
        destination_page_tokens: int,
        heads: HeadSlice | None = None,
    ) -> None:
        for name, tokens in (("source", source_page_tokens), ("destination", destination_page_tokens)):
            if tokens < 1:
                raise ValueError(f"{name}_page_tokens: must be at least 1, got {tokens}")
        if not layers or len({len(pairs) for pairs in layers}) != 1 or not layers[0]:
            raise ValueError("layers: every layer needs the same number of (source, destination) pairs, at least one")
        self.source_page_tokens = source_page_tokens
        self.destination_page_tokens = destination_page_tokens
        self.heads = heads
        self.pairs = tuple(tuple(pairs) for pairs in layers)
        sides = []
        for layer, pairs in enumerate(self.pairs):
            for number, (source, destination) in enumerate(pairs):
                where = f"layer {layer}, buffer {number}"
                _check_pair(source, destination, heads, where)
                first = (0, 0) if heads is None else (heads.source_first, heads.destination_first)
                count = source.shape[-2] if heads is None else heads.count
                sides.append(
                    (
                        _side(source, first[0], count, source_page_tokens, f"{where}, source"),
                        _side(destination, first[1], count, destination_page_tokens, f"{where}, destination"),
                    )
                )
        self._source_device = _one_device([source for pairs in self.pairs for source, _ in pairs], "sources")
        self.device = _one_device([destination for pairs in self.pairs for _, destination in pairs], "destinations")
        if self._source_device.type != self.device.type:
            raise ValueError(f"sources are on {self._source_device}, destinations on {self.device}")
        if self._source_device != self.device and not _reaches(self.device, self._source_device):
            raise ValueError(f"{self.device} cannot read the memory of {self._source_device}: no peer access")
        self.source_pages = min(source.pages for source, _ in sides)
        self.destination_pages = min(destination.pages for _, destination in sides)
        self._set_geometry(sides)

    def _set_geometry(self, sides: Sequence[tuple[_Side, _Side]]) -> None:
        """Longest contiguous runs as rows, widest word that divides everything, tile with little of it masked off."""
        dense = all(side.token_stride == side.token_bytes for pair in sides for side in pair)
        self.row_tokens = math.gcd(self.source_page_tokens, self.destination_page_tokens) if dense else 1
        table = [
            (
                source.address,
                destination.address,
                source.page_stride,
                destination.page_stride,
                self.row_tokens * source.token_stride,
                self.row_tokens * destination.token_stride,
                self.row_tokens * source.token_bytes,
            )
            for source, destination in sides
        ]
        self.word_bytes = math.gcd(WIDEST_WORD_BYTES, *(field for entry in table for field in entry))
        self._element, self._lanes = _ELEMENTS[self.word_bytes]
        words = [[field // self.word_bytes for field in entry] for entry in table]
        self._table = torch.tensor(words, dtype=torch.int64).to(self.device)
        longest = max(entry[-1] for entry in words) * self._lanes
        self.column_tile = _column_tile(longest)
        self._column_tiles = triton.cdiv(longest, self.column_tile)
        self._skipped = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def layers(self) -> int:
        return len(self.pairs)

    def place(
        self, source_pages: Iterable[int] | torch.Tensor, destination_pages: Iterable[int] | torch.Tensor
    ) -> Placement:
        """Bring page ids to the device: the source's pages in the order in which the destination's pages take them.

        Copies on the device's current stream: call it under the stream that launches.

        Ids on the host are checked here: within bounds, no destination twice. A tensor that is on the device already
        is taken as it is, without waiting for it; `launch` leaves out what lies outside the buffers and `intact`
        tells. Its destinations must be free of duplicates. Raises ValueError.
        """
        source_ids = _ids_on(self.device, source_pages, self.source_pages, "source_pages")
        destination_ids = _ids_on(
            self.device, destination_pages, self.destination_pages, "destination_pages", unique=True
        )
        tokens = source_ids.numel() * self.source_page_tokens
        if tokens != destination_ids.numel() * self.destination_page_tokens:
            raise ValueError(
                f"source_pages cover {tokens} tokens ({source_ids.numel()} pages of {self.source_page_tokens}), "
                f"destination_pages {destination_ids.numel() * self.destination_page_tokens} "
                f"({destination_ids.numel()} of {self.destination_page_tokens})"
            )
        return Placement(source_ids, destination_ids, tokens)

    def launch(self, layer: int, placement: Placement, *, programs: int = PROGRAMS) -> None:
        """Copy one layer's pages on the device's current stream; returns at once. Raises ValueError, IndexError."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer}: this copy has layers 0 to {self.layers - 1}")
        if programs < 1:
            raise ValueError(f"programs: must be at least 1, got {programs}")
        if self.device.type != "cuda" and isinstance(copy_rows_kernel, triton.JITFunction):
            raise ValueError(
                f"buffers are on {self.device}: the kernel needs a GPU; copy_pages_reference runs anywhere"
            )
        if placement.tokens == 0:
            return
        buffers = len(self.pairs[0])
        rows = placement.tokens // self.row_tokens
        tiles = buffers * self._column_tiles * triton.cdiv(rows, TILE_ELEMENTS // self.column_tile)
        with _current(self.device):
            copy_rows_kernel[(min(programs, tiles),)](*self._arguments(layer, placement, rows), **self._constants())

    def intact(self) -> bool:
        """Whether every page id so far was within the buffers. Waits for the device: ask behind the last event."""
        return not self._skipped.item()

    def warm_up(self) -> None:
        """Compile what `launch` will run: about a second, which no call should pay."""
        ids = torch.empty(1, dtype=torch.int64, device=self.device)
        arguments = self._arguments(0, Placement(ids, ids, 0), 0)
        with _current(self.device):
            copy_rows_kernel.warmup(*arguments, grid=(1,), **self._constants())

    def _arguments(self, layer: int, placement: Placement, rows: int) -> tuple[object, ...]:
        buffers = len(self.pairs[0])
        return (
            self._table,
            placement.source_ids,
            placement.destination_ids,
            self._skipped,
            layer * buffers,
            buffers,
            rows,
            self._column_tiles,
            self.source_pages,
            self.destination_pages,
        )

    def _constants(self) -> dict[str, object]:
        return {
            "SOURCE_PAGE_ROWS": self.source_page_tokens // self.row_tokens,
            "DESTINATION_PAGE_ROWS": self.destination_page_tokens // self.row_tokens,
            "ELEMENT": self._element,
            "LANES": self._lanes,
            "ROW_TILE": TILE_ELEMENTS // self.column_tile,
            "COLUMN_TILE": self.column_tile,
            "TABLE_FIELDS": TABLE_FIELDS,
            "num_warps": WARPS,
        }


def copy_pages_reference(copy: PageCopy, layer: int, placement: Placement) -> None:
    """What `PageCopy.launch` does, by torch indexing, on any device."""
    source_tokens = _token_ids(placement.source_ids, copy.source_page_tokens)
    destination_tokens = _token_ids(placement.destination_ids, copy.destination_page_tokens)
    for source, destination in copy.pairs[layer]:
        count = source.shape[-2] if copy.heads is None else copy.heads.count
        first = (0, 0) if copy.heads is None else (copy.heads.source_first, copy.heads.destination_first)
        taken = source.view(torch.uint8)[_at(source, source_tokens)][:, first[0] : first[0] + count]
        into = destination.view(torch.uint8)[..., first[1] : first[1] + count, :]
        into[_at(destination, destination_tokens)] = taken.to(destination.device)


def _token_ids(pages: torch.Tensor, page_tokens: int) -> torch.Tensor:
    offsets = torch.arange(page_tokens, device=pages.device)
    return (pages.to(torch.int64)[:, None] * page_tokens + offsets[None, :]).flatten()


def _at(buffer: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tokens = tokens.to(buffer.device)
    return (tokens,) if buffer.dim() == 3 else (tokens // buffer.shape[1], tokens % buffer.shape[1])


def _check_pair(source: torch.Tensor, destination: torch.Tensor, heads: HeadSlice | None, where: str) -> None:
    for name, buffer in (("source", source), ("destination", destination)):
        if buffer.dim() not in (3, 4):
            raise ValueError(
                f"{where}, {name}: expected [tokens, heads, dim] or [pages, page tokens, heads, dim], "
                f"got shape {tuple(buffer.shape)}"
            )
        if buffer.stride(-1) != 1 or (buffer.shape[-2] > 1 and buffer.stride(-2) != buffer.shape[-1]):
            raise ValueError(
                f"{where}, {name}: heads and dims of a token must be dense, got strides {buffer.stride()} "
                f"of shape {tuple(buffer.shape)}"
            )
    if source.dtype != destination.dtype or source.shape[-1] != destination.shape[-1]:
        raise ValueError(
            f"{where}: the source has heads of {source.shape[-1]} {source.dtype}, "
            f"the destination of {destination.shape[-1]} {destination.dtype}"
        )
    if heads is None:
        if source.shape[-2] != destination.shape[-2]:
            raise ValueError(
                f"{where}: the source has {source.shape[-2]} heads, the destination {destination.shape[-2]}; "
                f"say which of them by heads=HeadSlice(...)"
            )
        return
    for name, buffer, first in (
        ("source", source, heads.source_first),
        ("destination", destination, heads.destination_first),
    ):
        if first < 0 or heads.count < 1 or first + heads.count > buffer.shape[-2]:
            raise ValueError(f"{where}, {name}: heads {first} to {first + heads.count - 1} of {buffer.shape[-2]}")


def _side(buffer: torch.Tensor, first_head: int, head_count: int, page_tokens: int, where: str) -> _Side:
    item_bytes = buffer.element_size()
    head_bytes = buffer.shape[-1] * item_bytes
    if buffer.dim() == 4 and buffer.shape[1] != page_tokens:
        raise ValueError(f"{where}: pages of {buffer.shape[1]} tokens, expected {page_tokens}")
    token_stride = buffer.stride(-3) * item_bytes
    if min(buffer.stride()) < 0 or token_stride < buffer.shape[-2] * head_bytes:
        raise ValueError(f"{where}: tokens overlap, strides {buffer.stride()} of shape {tuple(buffer.shape)}")
    return _Side(
        address=buffer.data_ptr() + first_head * head_bytes,
        pages=buffer.shape[0] if buffer.dim() == 4 else buffer.shape[0] // page_tokens,
        page_stride=buffer.stride(0) * item_bytes if buffer.dim() == 4 else page_tokens * token_stride,
        token_stride=token_stride,
        token_bytes=head_count * head_bytes,
    )


def _reaches(device: torch.device, peer: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.can_device_access_peer(device, peer)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _one_device(buffers: Sequence[torch.Tensor], name: str) -> torch.device:
    devices = {buffer.device for buffer in buffers}
    if len(devices) != 1:
        raise ValueError(f"{name} are on several devices: {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _column_tile(row_elements: int) -> int:
    """The widest tile of which a row leaves at most an eighth unused; else the one that leaves least."""
    widths = [LEAST_COLUMNS << n for n in range((MOST_COLUMNS // LEAST_COLUMNS).bit_length())]
    unused = {width: -row_elements % width / (row_elements + -row_elements % width) for width in widths}
    return max((w for w in widths if unused[w] <= 1 / 8), default=min(widths, key=unused.__getitem__))


def _ids_on(
    device: torch.device, ids: Iterable[int] | torch.Tensor, limit: int, name: str, *, unique: bool = False
) -> torch.Tensor:
    given = ids if isinstance(ids, torch.Tensor) else torch.tensor(list(ids), dtype=torch.int64)
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected a list of ints, got {given.dtype} of shape {tuple(given.shape)}")
    if given.device.type != "cpu":
        if given.device != device:
            raise ValueError(f"{name} are on {given.device}, the destinations on {device}")
        return given.contiguous()
    given = given.to(torch.int64).contiguous()
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= limit):
        wrong = next(page for page in given.tolist() if not 0 <= page < limit)
        raise ValueError(f"{name}: no page {wrong}, the buffers have pages 0 to {limit - 1}")
    if unique and given.unique().numel() != given.numel():
        raise ValueError(f"{name}: a page is given twice")
    return given if device.type == "cpu" else given.pin_memory().to(device, non_blocking=True)
