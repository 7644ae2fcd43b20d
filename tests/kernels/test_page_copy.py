"""The page copy against its torch reference, by Triton's interpreter, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from basin_kernels import page_copy
from basin_kernels.page_copy import HeadSlice, PageCopy, Placement, copy_pages_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

POISON = 0xA5
COMPILED = page_copy.copy_rows_kernel
"""The kernel as it runs on a GPU, before `interpreted` takes its place."""


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """Runs launches of this module through Triton's interpreter, without the variable that must be set at import."""
    patch = pytest.MonkeyPatch()
    patch.setattr(page_copy, "copy_rows_kernel", InterpretedFunction(COMPILED.fn))
    yield
    patch.undo()


def pool(shape: tuple[int, ...], dtype: torch.dtype, seed: int | None, *, gap_bytes: int = 0, offset_bytes: int = 0):
    """A buffer of random bytes (`seed`) or of poison, its tokens `gap_bytes` apart, its start off alignment."""
    item = dtype.itemsize
    tokens = math.prod(shape[:-2])
    token_bytes = shape[-1] * shape[-2] * item + gap_bytes
    raw = torch.full((offset_bytes + tokens * token_bytes,), POISON, dtype=torch.uint8)
    if seed is not None:
        raw = torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    rows = raw[offset_bytes:].view(dtype)
    token_stride = token_bytes // item
    strides = [token_stride, shape[-1], 1]
    if len(shape) == 4:
        strides.insert(0, shape[1] * token_stride)
    return rows.as_strided(shape, strides)


def storage(buffer: torch.Tensor) -> torch.Tensor:
    """Every byte behind a buffer, those between its tokens too."""
    return torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())


@st.composite
def copies(draw: st.DrawFn) -> tuple[Callable[[], PageCopy], list[int], list[int], int]:
    """How to make one and the same copy afresh, with poisoned destinations; page ids; programs."""
    page = draw(st.sampled_from([1, 2, 16, 64]))
    destination_page = draw(st.sampled_from([page, page, 1]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]))
    dim = draw(st.sampled_from([1, 3, 8, 64, 72, 128]))
    source_heads, destination_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = None
    if draw(st.booleans()):
        count = draw(st.integers(1, min(source_heads, destination_heads)))
        heads = HeadSlice(
            draw(st.integers(0, source_heads - count)), draw(st.integers(0, destination_heads - count)), count
        )
    else:
        destination_heads = source_heads
    buffers = draw(st.integers(1, 2))
    item = dtype.itemsize
    gaps = [draw(st.sampled_from([0, 0, 16, 8 * item, item])) for _ in range(2)]
    offsets = [draw(st.sampled_from([0, 0, 16, item])) for _ in range(2)]
    pages = [draw(st.integers(1, 6)), draw(st.integers(1, 6))]
    moved = draw(st.integers(0, min(pages)))
    source_ids = draw(st.lists(st.integers(0, pages[0] - 1), min_size=moved, max_size=moved))
    per_page = page // destination_page
    destination_ids = draw(st.permutations(range(pages[1] * per_page)))[: moved * per_page]
    paged = draw(st.booleans())

    def shape(side: int, heads: int, width: int) -> tuple[int, ...]:
        page_tokens = (page, destination_page)[side]
        count = pages[side] * page // page_tokens
        return (count, page_tokens, heads, width) if paged else (count * page_tokens, heads, width)

    def make() -> PageCopy:
        layers = [
            [
                (
                    pool(
                        shape(0, source_heads, dim * (1 + n)),
                        dtype,
                        layer * 2 + n,
                        gap_bytes=gaps[0],
                        offset_bytes=offsets[0],
                    ),
                    pool(
                        shape(1, destination_heads, dim * (1 + n)),
                        dtype,
                        None,
                        gap_bytes=gaps[1],
                        offset_bytes=offsets[1],
                    ),
                )
                for n in range(buffers)
            ]
            for layer in range(2)
        ]
        return PageCopy(layers, source_page_tokens=page, destination_page_tokens=destination_page, heads=heads)

    return make, source_ids, list(destination_ids), draw(st.integers(1, 5))


@settings(max_examples=80, deadline=None)
@given(copies())
def test_kernel_writes_what_the_reference_writes_and_no_other_byte(case) -> None:
    make, source_ids, destination_ids, programs = case
    ours, expected = make(), make()
    placement = ours.place(source_ids, destination_ids)
    ours.launch(1, placement, programs=programs)
    copy_pages_reference(expected, 1, placement)
    for layer in range(2):
        for (_, written), (_, reference) in zip(ours.pairs[layer], expected.pairs[layer], strict=True):
            assert torch.equal(storage(written), storage(reference))
    assert ours.intact()
    untouched = make()
    assert all(
        torch.equal(storage(a), storage(b)) for (_, a), (_, b) in zip(ours.pairs[0], untouched.pairs[0], strict=True)
    ), "a launch of layer 1 wrote into layer 0"


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_mla_pages_in_fp8_pass_through_one_buffer(page_tokens: int) -> None:
    shape = (5 * page_tokens, 1, 576)
    layers = [[(pool(shape, torch.float8_e4m3fn, 1), pool(shape, torch.float8_e4m3fn, None))]]
    copy = PageCopy(layers, source_page_tokens=page_tokens, destination_page_tokens=page_tokens)
    copy.launch(0, copy.place([4, 0, 2], [1, 3, 0]))
    source, destination = (buffer.view(torch.uint8).view(5, -1) for buffer in layers[0][0])
    assert torch.equal(destination[[1, 3, 0]], source[[4, 0, 2]])
    assert (destination[[2, 4]] == POISON).all()


def test_pages_far_into_a_large_pool_are_addressed_in_64_bits() -> None:
    """Beyond 2^31 bytes, 2^32 bytes and 2^31 four-byte elements. Pages that nothing touches cost no memory."""
    page_tokens, page_bytes = 64, 64 * 8 * 128 * 2
    pages = (9 << 30) // page_bytes
    buffer = torch.empty((pages * page_tokens, 8, 128), dtype=torch.bfloat16)
    source_pages = [1 + (1 << 31) // page_bytes, 1 + (1 << 32) // page_bytes, pages - 2]
    destination_pages = [pages - 1, 2 + (1 << 32) // page_bytes, 0]
    source, destination = (
        (torch.tensor(ids)[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        for ids in (source_pages, destination_pages)
    )
    buffer[source] = torch.randn(len(source), 8, 128).bfloat16()
    copy = PageCopy([[(buffer, buffer)]], source_page_tokens=page_tokens, destination_page_tokens=page_tokens)
    copy.launch(0, copy.place(source_pages, destination_pages), programs=4)
    assert torch.equal(buffer[destination], buffer[source])


def test_page_ids_from_the_device_outside_the_buffers_are_left_out_and_reported() -> None:
    layers = [[(pool((4, 1, 8), torch.bfloat16, 1), pool((4, 1, 8), torch.bfloat16, None))]]
    copy = PageCopy(layers, source_page_tokens=1, destination_page_tokens=1)
    ids = [torch.tensor(values, dtype=torch.int32) for values in ([0, 9, -1, 2, 1], [3, 0, 1, 7, -1])]
    copy.launch(0, Placement(*ids, tokens=5))
    source, destination = (buffer.view(torch.uint8).view(4, -1) for buffer in layers[0][0])
    assert torch.equal(destination[3], source[0])
    assert (destination[:3] == POISON).all()
    assert not copy.intact()


def buffers(shape=(8, 2, 16), dtype=torch.bfloat16, *, destination=None, destination_dtype=None):
    return [[(torch.zeros(shape, dtype=dtype), torch.zeros(destination or shape, dtype=destination_dtype or dtype))]]


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (buffers(), {"source_page_tokens": 0}, "source_page_tokens: must be at least 1, got 0"),
        ([], {}, "layers: every layer needs"),
        ([*buffers(), [*buffers()[0], *buffers()[0]]], {}, "layers: every layer needs"),
        (buffers((8, 16)), {}, r"layer 0, buffer 0, source: expected \[tokens, heads, dim\]"),
        (buffers(destination_dtype=torch.float16), {}, "of 16 torch.bfloat16, the destination of 16 torch.float16"),
        (buffers(destination=(8, 2, 32)), {}, "heads of 16 .* of 32"),
        (buffers(destination=(8, 4, 16)), {}, r"say which of them by heads=HeadSlice"),
        (buffers(), {"heads": HeadSlice(1, 0, 2)}, "source: heads 1 to 2 of 2"),
        (buffers(), {"heads": HeadSlice(0, -1, 1)}, "destination: heads -1 to -1 of 2"),
        (buffers((2, 8, 2, 16)), {}, "pages of 8 tokens, expected 4"),
        ([[(torch.zeros(8, 16, 2).transpose(1, 2), torch.zeros(8, 2, 16))]], {}, "must be dense"),
        ([[(torch.zeros(1, 2, 16).expand(8, 2, 16), torch.zeros(8, 2, 16))]], {}, "tokens overlap"),
        ([[(torch.zeros(8, 2, 16, device="meta"), torch.zeros(8, 2, 16))]], {}, "sources are on meta"),
    ],
)
def test_buffers_that_cannot_be_copied_are_refused(layers, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        PageCopy(layers, **{"source_page_tokens": 4, "destination_page_tokens": 4, **options})


@pytest.mark.parametrize(
    ("source_pages", "destination_pages", "message"),
    [
        ([2], [0], "source_pages: no page 2, the buffers have pages 0 to 1"),
        ([0], [-1], "destination_pages: no page -1"),
        ([0, 0], [1, 1], "destination_pages: a page is given twice"),
        ([0, 1], [1], "source_pages cover 8 tokens .* destination_pages 4"),
        (torch.zeros(1), [1], "source_pages: expected a list of ints, got torch.float32"),
        (torch.zeros(1, 1, dtype=torch.int64), [1], "of shape"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), [1], "source_pages are on meta, the destinations on cpu"),
    ],
)
def test_wrong_pages_are_refused(source_pages, destination_pages, message) -> None:
    copy = PageCopy(buffers(), source_page_tokens=4, destination_page_tokens=4)
    with pytest.raises(ValueError, match=message):
        copy.place(source_pages, destination_pages)


def test_wrong_launches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = PageCopy(buffers(), source_page_tokens=4, destination_page_tokens=4)
    placement = copy.place([0], [1])
    with pytest.raises(IndexError, match="layer 1: this copy has layers 0 to 0"):
        copy.launch(1, placement)
    with pytest.raises(ValueError, match="programs: must be at least 1"):
        copy.launch(0, placement, programs=0)
    monkeypatch.setattr(page_copy, "copy_rows_kernel", COMPILED)
    with pytest.raises(ValueError, match="buffers are on cpu: the kernel needs a GPU"):
        copy.launch(0, placement)
