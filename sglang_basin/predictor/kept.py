"""What is kept of each session while it runs: one record of fixed size, six hundred bytes (`arithmetic.KEPT`).

    Subject         what was told of a session before its first call
    History         its calls, as sums: what a guess is made of
    KeptSessions    the records of many sessions, by name

Calls are followed through the policy's own numbers (calls seen, present context): an arrival shows how much the tool's
result added, an end how much the model wrote.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_basin.predictor.arithmetic import COLUMNS, KEPT, NOTHING, advance, write_row

Records = npt.NDArray[Any]
"""(sessions,) of `arithmetic.KEPT`."""


class Subject(NamedTuple):
    """What is known of a session beside its calls; all of it may be missing."""

    kin: int | None = None
    task: int | None = None
    text_score: float = 0.0
    characters: int = 0


class History:
    """One session's, by itself. Contexts in tokens; `advance` with each change of the session."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Records = NOTHING.copy()
        """(1,)"""

    @property
    def calls(self) -> int:
        return int(self.kept["calls"][0])

    def advance(self, calls: int, context_tokens: int, pause_s: float = 0.0) -> bool:
        """Take in the session's present numbers; False when nothing changed. Calls side by side count as one step.

        `pause_s` is the time between the last call's end and this one's arrival; it counts once a call.
        """
        changed: bool = advance(self.kept, 0, calls, context_tokens, pause_s)
        return changed

    def tell(self, subject: Subject) -> None:
        """Kin and task are the caller's to remember."""
        self.kept["text_score"], self.kept["characters"] = subject.text_score, subject.characters

    def row(self, kin_log_peak: float, text_score: float, text_characters: int) -> npt.NDArray[np.float64]:
        """The numbers in the order of `features.NAMES`; finite for whatever was taken in."""
        row = np.empty(COLUMNS)
        write_row(self.kept, 0, kin_log_peak, text_score, text_characters, row)
        return row


_AT = {name: at for name, (_, at, *_) in (KEPT.fields or {}).items()}
_TOLD, _KEYS = struct.Struct("<dQQIB"), struct.Struct("<QQIB")
"""Text score, kin, task, characters; which of them were told."""
_TOLD_AT, _KEYS_AT = _AT["text_score"], _AT["kin"]
_DESCRIBED, _KIN, _TASK = 1, 2, 4
_NOTHING = NOTHING.tobytes()
_SIZE = KEPT.itemsize


class KeptSessions:
    """Records by session name, the oldest of which goes when there are too many. A session's place is a number, its
    own until it goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, int] = {}  # oldest first
        self._free: list[int] = []
        self._blocks: list[Records] = []  # of 256 places each
        self._memory: list[bytearray] = []
        """That of the blocks, byte by byte: reading one field of numpy's takes as long as a whole guess."""
        self.find = self._places.get
        """The place of the session of this name; None for an unknown one."""

    def __len__(self) -> int:
        return len(self._places)

    def __deepcopy__(self, memo: object) -> KeptSessions:
        raise TypeError("kept sessions cannot be copied: in a copy, records and their bytes would be two memories")

    def begin(self, name: str) -> int:
        """A session of which nothing is known."""
        if len(self._places) >= self._most:
            self.forget(next(iter(self._places)))
        if not self._free:
            self._grow()
        place = self._places[name] = self._free.pop()
        self._write(place, 0, _NOTHING)
        return place

    def begin_again(self, place: int) -> None:
        """Another session, of which the same was told."""
        memory, start = self._memory[place >> 8], (place & 255) * _SIZE
        told = memory[start + _TOLD_AT : start + _TOLD_AT + _TOLD.size]
        self._write(place, 0, _NOTHING)
        self._write(place, _TOLD_AT, told)

    def forget(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is not None:
            self._free.append(place)

    def record(self, place: int) -> tuple[Records, int]:
        """Among which records it is, and where there."""
        return self._blocks[place >> 8], place & 255

    def tell(self, place: int, subject: Subject) -> None:
        """Raises struct.error for numbers that cannot be."""
        kin, task, text_score, characters = subject
        told = _DESCRIBED + _KIN * (kin is not None) + _TASK * (task is not None)
        self._write(place, _TOLD_AT, _TOLD.pack(text_score, kin or 0, task or 0, characters, told))

    def is_told(self, place: int) -> bool:
        return bool(self._memory[place >> 8][(place & 255) * _SIZE + _TOLD_AT + _TOLD.size - 1])

    def keys_told(self, place: int) -> tuple[int | None, int | None]:
        """Kin and task."""
        kin, task, _, told = _KEYS.unpack_from(self._memory[place >> 8], (place & 255) * _SIZE + _KEYS_AT)
        return kin if told & _KIN else None, task if told & _TASK else None

    def _write(self, place: int, offset: int, what: bytes | bytearray) -> None:
        start = (place & 255) * _SIZE + offset
        self._memory[place >> 8][start : start + len(what)] = what

    def _grow(self) -> None:
        memory, first = bytearray(256 * _SIZE), 256 * len(self._blocks)
        self._blocks.append(np.frombuffer(memory, KEPT))
        self._memory.append(memory)
        self._free = list(range(first + 255, first - 1, -1))
