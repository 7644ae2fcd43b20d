"""Whose call is it, when its client names no session: the session whose last context the prompt extends.

An agent resends its whole conversation with each call, so the prompts themselves tell sessions apart. The rule, with
the longest context winning throughout (`Standing` is what a session is doing):

1. A prompt that *extends* a session's last one is that session's next call. Of several such sessions one that has
   been answered goes first: only an answered client has something to add.
2. A prompt that *equals* a session's last one is a second try, if the first was never answered: turned away, aborted,
   failed. It is so too while the first still runs, for a client that has timed out comes back before its abort is
   noticed; but not if it was the session's first call, nor if an answered session is extended. Otherwise it is a twin,
   a session of its own: side by side rollouts of one task start with the very same prompt, some of them while others
   are already answered.
3. A prompt that extends a session's *first* one but not its last is that session with its history rewritten (chat
   templates strip old reasoning once the user writes again; clients edit and undo), if no call of it runs. If one
   does, the prompt is a fork that runs beside it: a session of its own.
4. Any other prompt starts a new conversation. So does a client that compacts its context, for a summary in place of
   the first message leaves nothing to know it by; the session before the summary ends by time.

Whether a new conversation is an agent's session is another question. Most prompts without a name may be single ones,
each of which would hold room at the door until it ends by time. So a conversation is a session from its first call on
only where the request itself says that there will be more (`sure`); else from its second call on, the first that
extends another. Later calls of a client whose prompts change from their start, for the time of day say, are thus never
held; no cache helps them either.

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

Runs = Callable[[str], bool]
"""Whether a call of this session is under way or waits at the door."""

MAX_LOOSE = 20_000
"""So many conversations are known that are no session: not yet, or no longer. One that has ended and calls again begins
anew, but under its old name, from which `policy.idle` learns that it was given up too early."""

MAX_TWINS = 1_000
"""So many of those that have a prompt in common, their first or their last: they are looked at one by one when it comes
again, and some clients send the same prompt all day. As many rollouts of a task may start side by side."""

MIN_TOKENS = 32
"""Shorter prompts belong to nobody: half the world extends them, and they hold nothing worth guarding."""


class Standing(Enum):
    """What a session is doing, as far as its prompts' owners are in question."""

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


class Placement(NamedTuple):
    """Where a call belongs."""

    session_id: str
    is_session: bool
    """False for a conversation of which more must come before it counts as a session."""


class _Thread:
    """One conversation's first and last prompt, each with the fingerprint at the start of the cell that it ends in, and
    whether the last one has its answer."""

    __slots__ = ("answered", "first", "first_cell", "last", "last_cell", "session_id")

    def __init__(self, session_id: str, fingerprint: int, cell: int) -> None:
        self.session_id = session_id
        self.first = self.last = fingerprint
        self.first_cell = self.last_cell = cell
        self.answered = False

    def standing(self, runs: Runs) -> Standing:
        if runs(self.session_id):
            return Standing.RUNNING
        return Standing.ANSWERED if self.answered else Standing.OPEN


class Lineage:
    """The inferred sessions of one prefill instance. Not thread-safe; about 500 bytes a conversation."""

    def __init__(self, *, max_sessions: int, prefix: str) -> None:
        """Session ids are `prefix` and a number. Of more than `max_sessions` sessions the one without a call for
        longest is forgotten."""
        self._max_sessions = max_sessions
        self._prefix = prefix
        self._sessions: OrderedDict[str, _Thread] = OrderedDict()  # longest without a call first
        self._loose: OrderedDict[str, _Thread] = OrderedDict()  # likewise
        # By the fingerprints of their first and last prompts; nearly all of these are of one conversation alone.
        self._at: dict[int, _Thread | tuple[_Thread, ...]] = {}
        self._cells: dict[int, int] = {}  # fingerprint at a cell's start -> how many ends lie in the cell
        self._started = 0

    def __len__(self) -> int:
        return len(self._sessions) + len(self._loose)

    def place(self, prompt: Prompt, runs: Runs, *, sure: bool = True) -> Placement | None:
        """Where a call with this prompt belongs; the prompt is the last of its conversation from now on.

        `sure` says that a conversation that begins with this call will go on. `runs` is asked about conversations that
        were not forgotten. None for a prompt below `MIN_TOKENS`.
        """
        if prompt.tokens < MIN_TOKENS:
            return None
        number, offset = divmod(prompt.tokens, CELL_TOKENS)
        fingerprint, cell = prompt.within(number)[offset], prompt.cells[number]
        thread = self._find(prompt, runs)
        if thread is None:
            self._started += 1
            thread = _Thread(f"{self._prefix}{self._started}", fingerprint, cell)
            self._add(thread, fingerprint, cell)
            is_session = sure
        else:
            is_session = sure or thread.session_id in self._sessions or thread.last != fingerprint
            self._set_last(thread, fingerprint, cell)
        self._file(thread, is_session)
        return Placement(thread.session_id, is_session)

    def answered(self, session_id: str) -> None:
        """A call of the conversation was answered to its end; unknown ones are passed over."""
        if (thread := self._known(session_id)) is not None:
            thread.answered = True

    def ended(self, session_id: str) -> None:
        """The session has ended; unknown ones are passed over."""
        if (thread := self._sessions.get(session_id)) is not None:
            self._file(thread, is_session=False)

    def forget(self, session_id: str) -> None:
        """Know nothing of the conversation any more; unknown ones are passed over."""
        if (thread := self._known(session_id)) is not None:
            self._sessions.pop(session_id, None)
            self._loose.pop(session_id, None)
            for fingerprint, cell in {(thread.first, thread.first_cell), (thread.last, thread.last_cell)}:
                self._remove(thread, fingerprint, cell)

    def _known(self, session_id: str) -> _Thread | None:
        return self._sessions.get(session_id) or self._loose.get(session_id)

    def _file(self, thread: _Thread, is_session: bool) -> None:
        """Put a conversation where it belongs, as the one heard of last."""
        kept, others, most = (self._sessions, self._loose, self._max_sessions)
        if not is_session:
            kept, others, most = (self._loose, self._sessions, MAX_LOOSE)
        others.pop(thread.session_id, None)
        kept[thread.session_id] = thread
        kept.move_to_end(thread.session_id)
        if len(kept) > most:
            self.forget(next(iter(kept)))
        if not is_session:
            for fingerprint in {thread.first, thread.last}:
                loose = [twin for twin in self._ending(fingerprint) if twin.session_id in self._loose]
                if len(loose) > MAX_TWINS:
                    self.forget(loose[0].session_id)

    def _find(self, prompt: Prompt, runs: Runs) -> _Thread | None:
        tried_again: _Thread | None = None
        for cell in [number for number, start in enumerate(prompt.cells) if start in self._cells][::-1]:
            fingerprints = prompt.within(cell)
            for offset in range(len(fingerprints) - 1, -1, -1):
                if fingerprints[offset] not in self._at:
                    continue
                threads = self._ending(fingerprints[offset])
                if cell * CELL_TOKENS + offset == prompt.tokens:
                    tried_again, is_open = _equal(threads, fingerprints[offset], runs)
                    if is_open:
                        return tried_again
                elif (found := _extended(threads, fingerprints[offset], runs)) is not None:
                    thread, was_answered = found
                    return thread if was_answered or tried_again is None else tried_again
        return tried_again

    def _ending(self, fingerprint: int) -> tuple[_Thread, ...]:
        """The conversations whose first or last prompt has this fingerprint."""
        found = self._at.get(fingerprint, ())
        return found if isinstance(found, tuple) else (found,)

    def _set_last(self, thread: _Thread, fingerprint: int, cell: int) -> None:
        thread.answered = False
        if fingerprint == thread.last:
            return
        if thread.last != thread.first:
            self._remove(thread, thread.last, thread.last_cell)
        thread.last, thread.last_cell = fingerprint, cell
        if fingerprint != thread.first:
            self._add(thread, fingerprint, cell)

    def _add(self, thread: _Thread, fingerprint: int, cell: int) -> None:
        others = self._ending(fingerprint)
        self._at[fingerprint] = (*others, thread) if others else thread
        self._cells[cell] = self._cells.get(cell, 0) + 1

    def _remove(self, thread: _Thread, fingerprint: int, cell: int) -> None:
        others = tuple(other for other in self._ending(fingerprint) if other is not thread)
        if others:
            self._at[fingerprint] = others if len(others) > 1 else others[0]
        else:
            del self._at[fingerprint]
        if self._cells[cell] == 1:
            del self._cells[cell]
        else:
            self._cells[cell] -= 1


def _equal(threads: Sequence[_Thread], fingerprint: int, runs: Runs) -> tuple[_Thread | None, bool]:
    """The session whose last prompt, equal to the one in question, is tried again, if any; and whether it is open for
    that, or still runs."""
    running = None
    for thread in threads:
        if thread.last != fingerprint:
            continue
        standing = thread.standing(runs)
        if standing is Standing.OPEN:
            return thread, True
        if standing is Standing.RUNNING and thread.first != fingerprint:
            running = thread
    return running, False


def _extended(threads: Sequence[_Thread], fingerprint: int, runs: Runs) -> tuple[_Thread, bool] | None:
    """The session whose last prompt, or else whose first one, is extended by the one in question, as this fingerprint
    says; and whether it is the last one, and was answered."""
    best: tuple[int, _Thread] | None = None
    for thread in threads:
        standing = thread.standing(runs)
        if thread.last == fingerprint:
            rank = [Standing.ANSWERED, Standing.OPEN, Standing.RUNNING].index(standing)
        elif thread.first == fingerprint and standing is not Standing.RUNNING:
            rank = 3
        else:
            continue
        if best is None or rank < best[0]:
            best = rank, thread
    return None if best is None else (best[1], best[0] == 0)
