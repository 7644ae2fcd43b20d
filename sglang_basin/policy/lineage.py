"""Whose call is it, when its client names no session: the session whose last context the prompt extends.

An agent resends its whole conversation with each call, so the prompts themselves tell sessions apart. The rule, with
the longest context winning throughout (`Standing` says what a session is doing):

1. A prompt that *extends* a session's last one is that session's next call. Of several such sessions one that has
   been answered goes first: only an answered client has something to add.
2. A prompt that *equals* a session's last one is a second try, if the first was never answered: turned away, aborted,
   failed. It is so too while the first still runs, if it was not the session's first call, for a client that has timed
   out comes back before its abort is noticed. Otherwise it is a twin, a session of its own: side by side rollouts of
   one task start with the very same prompt, some of them while others are already answered.
3. A prompt that extends a session's *first* one but not its last is that session with its history rewritten (chat
   templates strip old reasoning once the user writes again; clients edit and undo), if no call of it runs. If one
   does, the prompt is a fork that runs beside it: a session of its own.
4. Any other prompt starts a new session. So does a client that compacts its context, for a summary in place of the
   first message leaves nothing to know it by; the session before the summary ends by time.

A prompt ends for this purpose where the template's opening of the answer may change once it is history
(`engine.openings`): everything up to the end of the last message must survive, so a task never continues another task
that its text begins with.

This module sees prompts as fingerprints of their prefixes (`engine.fingerprints`). Of each session it keeps two, of
its first prompt and of its last; a prompt is looked up by the prefixes at every `CELL_TOKENS` tokens first, and token
by token only within cells where some session's prompt ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

CELL_TOKENS = 64

MIN_TOKENS = 32
"""Shorter prompts belong to nobody: half the world extends them, and they hold nothing worth guarding."""


class Standing(Enum):
    """What a session is doing, as far as inference cares."""

    RUNNING = "running"
    """A call of it is under way or waits at the door."""
    ANSWERED = "answered"
    """No call is under way, and the last one got its answer."""
    OPEN = "open"
    """No call is under way, and the last one was turned away, aborted or failed."""


class Prompt(Protocol):
    """A prompt's prefixes as 64-bit fingerprints; equal for equal prefixes, else different but for chance."""

    @property
    def tokens(self) -> int:
        """Length up to the end of its last message."""

    @property
    def cells(self) -> Sequence[int]:
        """Of the prefixes of 0, CELL_TOKENS, 2 · CELL_TOKENS … tokens, up to `tokens`."""

    def within(self, cell: int) -> Sequence[int]:
        """Of the prefixes of cell · CELL_TOKENS + 0, 1, 2 … tokens, up to the next cell or `tokens`."""


class _End(NamedTuple):
    """Where a prompt of a session ended."""

    tokens: int
    fingerprint: int
    cell: int
    """The fingerprint at the start of the cell that it ends in."""


class _Thread:
    """One session's first and last prompt."""

    __slots__ = ("first", "last", "session_id")

    def __init__(self, session_id: str, end: _End) -> None:
        self.session_id = session_id
        self.first = self.last = end


class Lineage:
    """The inferred sessions of one prefill instance. Not thread-safe; about 750 bytes a session."""

    def __init__(self, *, max_sessions: int, prefix: str) -> None:
        """Session ids are `prefix` and a number. Over `max_sessions` the one without a call for longest is
        forgotten."""
        self._max_sessions = max_sessions
        self._prefix = prefix
        self._threads: OrderedDict[str, _Thread] = OrderedDict()  # longest without a call first
        self._at: dict[int, tuple[_Thread, ...]] = {}  # by the fingerprints of their first and last prompts
        self._cells: dict[int, int] = {}  # fingerprint at a cell's start -> how many ends lie in the cell
        self._started = 0

    def __len__(self) -> int:
        return len(self._threads)

    def place(self, prompt: Prompt, standing: Callable[[str], Standing]) -> str | None:
        """The session that a call with this prompt belongs to, a new one if need be; the prompt is now its last.

        None for a prompt below `MIN_TOKENS`. `standing` is asked about sessions that were not forgotten.
        """
        if prompt.tokens < MIN_TOKENS:
            return None
        cell, offset = divmod(prompt.tokens, CELL_TOKENS)
        end = _End(prompt.tokens, prompt.within(cell)[offset], prompt.cells[cell])
        thread = self._find(prompt, standing)
        if thread is None:
            self._started += 1
            thread = _Thread(f"{self._prefix}{self._started}", end)
            self._threads[thread.session_id] = thread
            self._add(thread, end)
            if len(self._threads) > self._max_sessions:
                self.forget(next(iter(self._threads)))
        else:
            self._threads.move_to_end(thread.session_id)
            self._set_last(thread, end)
        return thread.session_id

    def forget(self, session_id: str) -> None:
        """The session has ended; unknown ones are passed over."""
        thread = self._threads.pop(session_id, None)
        if thread is not None:
            for end in {thread.first, thread.last}:
                self._remove(thread, end)

    def _find(self, prompt: Prompt, standing: Callable[[str], Standing]) -> _Thread | None:
        for cell in [number for number, start in enumerate(prompt.cells) if start in self._cells][::-1]:
            fingerprints = prompt.within(cell)
            for offset in range(len(fingerprints) - 1, -1, -1):
                threads = self._at.get(fingerprints[offset])
                if threads is None:
                    continue
                tokens = cell * CELL_TOKENS + offset
                choose = _to_try_again if tokens == prompt.tokens else _to_go_on
                if (found := choose(threads, tokens, standing)) is not None:
                    return found
        return None

    def _set_last(self, thread: _Thread, end: _End) -> None:
        before, thread.last = thread.last, end
        if before not in (end, thread.first):
            self._remove(thread, before)
        if end not in (before, thread.first):
            self._add(thread, end)

    def _add(self, thread: _Thread, end: _End) -> None:
        self._at[end.fingerprint] = (*self._at.get(end.fingerprint, ()), thread)
        self._cells[end.cell] = self._cells.get(end.cell, 0) + 1

    def _remove(self, thread: _Thread, end: _End) -> None:
        others = tuple(other for other in self._at[end.fingerprint] if other is not thread)
        if others:
            self._at[end.fingerprint] = others
        else:
            del self._at[end.fingerprint]
        if self._cells[end.cell] == 1:
            del self._cells[end.cell]
        else:
            self._cells[end.cell] -= 1


def _to_try_again(threads: Sequence[_Thread], tokens: int, standing: Callable[[str], Standing]) -> _Thread | None:
    """Rule 2: the session whose last prompt, `tokens` long and equal to the one in question, is tried again."""
    running = None
    for thread in threads:
        if thread.last.tokens != tokens:
            continue
        state = standing(thread.session_id)
        if state is Standing.OPEN:
            return thread
        if state is Standing.RUNNING and thread.first.tokens < tokens:
            running = thread
    return running


def _to_go_on(threads: Sequence[_Thread], tokens: int, standing: Callable[[str], Standing]) -> _Thread | None:
    """Rules 1 and 3: the session whose last or first prompt, `tokens` long, the one in question extends."""
    best: tuple[int, _Thread] | None = None
    for thread in threads:
        state = standing(thread.session_id)
        if thread.last.tokens == tokens:
            rank = {Standing.ANSWERED: 0, Standing.OPEN: 1, Standing.RUNNING: 2}[state]
        elif thread.first.tokens == tokens and state is not Standing.RUNNING:
            rank = 3
        else:
            continue
        if best is None or rank < best[0]:
            best = rank, thread
    return None if best is None else best[1]
