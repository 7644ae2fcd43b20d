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
    if not frames or not frames[-1].startswith(MARK) or (len(frames[-1]) - len(MARK)) % 4:
        return None
    pages = np.frombuffer(frames[-1], dtype="<i4", offset=len(MARK)).astype(np.int64)
    return pages if len(pages) and pages.min() >= 0 else None
