"""The field that decode appends to SGLang's metadata message: which of its pages hold a call's prefix, in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MARK = b"basin-pages-1:"

Pages = npt.NDArray[np.int64]


def pack(pages: npt.NDArray[np.integer]) -> bytes:
    """`pages`: one dimension, page numbers of decode's pool."""
    return MARK + np.ascontiguousarray(pages, dtype="<i4").tobytes()


def unpack(frames: list[bytes]) -> Pages | None:
    """The pages in a metadata message, or None if it has none: from a decode that lends nothing, or damaged."""
    if not frames or not frames[-1].startswith(MARK):
        return None
    return numbers(frames[-1][len(MARK) :])


def numbers(raw: bytes) -> Pages | None:
    """Page numbers of 4 bytes each, little-endian; None if they are none or damaged."""
    if not raw or len(raw) % 4:
        return None
    pages = np.frombuffer(raw, dtype="<i4").astype(np.int64)
    return pages if pages.min() >= 0 else None
