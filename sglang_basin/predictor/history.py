"""One session's calls, followed through the policy's own numbers (calls seen, present context): an arrival shows how
much the tool's result added, an end how much the model wrote. Kept are sums, not the calls, so the size is fixed and an
update takes less than a microsecond.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.arithmetic import HISTORY, advance, write_row
from sglang_basin.predictor.features import NAMES

HISTORY_BYTES = HISTORY.itemsize

NOTHING = bytes(HISTORY_BYTES - 1) + b"\1"
"""The bytes of a `History` of no calls: no output is missing."""

_CALLS, _CALLS_AT = struct.Struct("<i"), dict(HISTORY.fields or {})["calls"][1]


class History:
    """Sums over one session's calls. Contexts in tokens; `advance` with each change of the session."""

    __slots__ = ("calls", "sums")

    def __init__(self, kept: bytearray | None = None) -> None:
        """The one at the beginning of `kept`, which changes with it; else of a session that has not called yet."""
        kept = kept if kept is not None else bytearray(NOTHING)
        self.sums = np.frombuffer(kept, HISTORY, 1)
        """(1,): an `arithmetic.HISTORY`."""
        self.calls: int = _CALLS.unpack_from(kept, _CALLS_AT)[0]

    def advance(self, calls: int, context_tokens: int, pause_s: float = 0.0) -> bool:
        """Take in the session's present numbers; False when nothing changed. Calls side by side count as one step.

        `pause_s` is the time between the last call's end and this one's arrival; it counts once a call.
        """
        if calls > self.calls:
            self.calls = calls
        changed: bool = advance(self.sums, calls, context_tokens, pause_s)
        return changed

    def row(self, kin_log_peak: float, text_score: float, text_characters: int) -> npt.NDArray[np.float64]:
        """The numbers in the order of `NAMES`; finite for whatever was taken in."""
        row = np.empty(len(NAMES))
        write_row(self.sums, kin_log_peak, text_score, text_characters, row)
        return row
