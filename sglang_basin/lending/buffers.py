"""The field that decode appends to SGLang's registration message: how others on its machine map its KV buffers.

A buffer is a stretch of a device allocation, and what CUDA lets another process map is whole allocations, by a handle
of 64 bytes. Nothing here is trusted further than it was checked: sizes here, and against the mapping once it is open.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MARK = b"basin-buffers-1:"
HANDLE_BYTES = 64
"""Of CUDA's `CUipcMemHandle`."""

MAX_BUFFERS = 4096
MAX_FIELD_BYTES = 1 << 20

Bytes = Annotated[int, msgspec.Meta(ge=1, lt=2**48)]


class Allocation(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A device allocation that can be mapped."""

    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    size_bytes: Bytes


class Buffer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One layer's K, V or MLA buffer: `pages` dense pages from `offset_bytes` of an allocation on."""

    allocation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_BUFFERS)]
    offset_bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
    pages: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    page_bytes: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Buffers(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """All KV buffers of one rank, in SGLang's order (K of every layer, then V), and where that rank runs."""

    machine: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """The same for all processes of a machine, see `places.Place`."""
    processes: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """Its PID namespace, in which `process` counts."""
    process: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """The GPU's UUID as NVML writes it."""
    allocations: Annotated[tuple[Allocation, ...], msgspec.Meta(min_length=1, max_length=MAX_BUFFERS)]
    buffers: Annotated[tuple[Buffer, ...], msgspec.Meta(min_length=1, max_length=MAX_BUFFERS)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Buffers).decode


def pack(buffers: Buffers) -> bytes:
    return MARK + _encode(buffers)


def unpack(frames: list[bytes]) -> Buffers | None:
    """The field in a registration message, or None if it has none. Raises ValueError for a damaged one."""
    if not frames or not frames[-1].startswith(MARK):
        return None
    if len(frames[-1]) > MAX_FIELD_BYTES:
        raise ValueError(f"{len(frames[-1])} bytes of KV buffers, at most {MAX_FIELD_BYTES} are read")
    try:
        told = _decode(memoryview(frames[-1])[len(MARK) :])
    except msgspec.DecodeError as error:
        raise ValueError(f"KV buffers: {error}") from None
    for number, buffer in enumerate(told.buffers):
        if buffer.allocation >= len(told.allocations):
            raise ValueError(f"KV buffer {number}: in allocation {buffer.allocation} of {len(told.allocations)}")
        end = buffer.offset_bytes + buffer.pages * buffer.page_bytes
        if end > (size := told.allocations[buffer.allocation].size_bytes):
            raise ValueError(f"KV buffer {number}: ends at byte {end} of an allocation of {size}")
    return told
