"""Prefill's questions to decodes that keep more of a call's prompt than the one it landed on.

A question goes out when the call is bootstrapped, and the call waits for the answer, half its patience at most. The
answer is a lease: pages that the other decode keeps locked for the call's whole patience from the moment it was asked,
and a little longer. So by prefill's own clock they are safe until the patience, counted from the question, is over:
whatever is read later does not count, and no clocks are compared.

One `Questions` per rank of a prefill instance, all of it in the scheduler's thread. What it knows comes over the
broadcast (`ranks`) and is the same on all ranks; the first rank alone sends.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_basin.engine import messages
from sglang_basin.engine.metrics import metrics
from sglang_basin.lending.breaker import Breaker
from sglang_basin.lending.pages import Pages, numbers
from sglang_basin.lending.ranks import ForRanks, Kept

MAX_CALLS = 10_000
"""Calls whose copy elsewhere is remembered until they are bootstrapped; many never are."""

QUESTIONS_AT_ONCE = 64

Post = Callable[[bytes, messages.FromPrefill], bool]


@dataclass(slots=True)
class Question:
    """Asked of `holder` for the call of `room`."""

    room: int
    holder: bytes
    asked_s: float
    until_s: float
    """What is read of the lease after this does not count."""
    answered: bool = False
    tokens: int = 0
    """So many of the prompt's first are lent,"""
    pages: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """in these pages,"""
    session: str | None = None
    """to be read there by this rank; None if nothing is lent."""


@dataclass(slots=True)
class Holder:
    """Another decode, as far as questions to it have shown."""

    breaker: Breaker = field(default_factory=Breaker)
    session: str | None = None
    """Where this rank reads from it, known from its first lease on."""


class Questions:
    """What this rank asked of other decodes."""

    def __init__(self, post: Post | None, rank: int, patience_s: float) -> None:
        """`post` sends, on the first rank; None on others. `rank`: which of a lease's sessions is this rank's."""
        self._post = post
        self._rank = rank
        self._patience_s = patience_s
        self._kept: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # by room
        self._open: dict[int, Question] = {}  # by room
        self._holders: dict[bytes, Holder] = {}

    def __len__(self) -> int:
        return len(self._open)

    def hear(self, told: ForRanks) -> None:
        """A message from the broadcast."""
        if isinstance(told.message, Kept):
            self._kept[told.message.room] = told.peer, told.message.tokens
            if len(self._kept) > MAX_CALLS:
                self._kept.popitem(last=False)
        elif isinstance(told.message, messages.Lease):
            self._answered(told.peer, told.message)

    def copy_of(self, room: int) -> tuple[bytes, int] | None:
        """Who else keeps the session of this call, and how many tokens of it; asked once."""
        return self._kept.pop(room, None)

    def holder(self, holder: bytes) -> Holder:
        return self._holders.setdefault(holder, Holder())

    def may_ask(self, req: Any, holder: bytes, now_s: float) -> bool:
        """Whether `holder` answers questions, as far as is known, and this one can be put."""
        fits = max(len(req.extra_key or ""), len(req.cache_salt or "")) <= messages.MAX_KEY_CHARACTERS
        return fits and len(self._open) < QUESTIONS_AT_ONCE and self.holder(holder).breaker.allows(now_s)

    def ask(self, req: Any, tokens: int, holder: bytes, now_s: float) -> None:
        """Ask for the first `tokens` of the call's prompt."""
        room, lease_s = req.bootstrap_room, min(self._patience_s, messages.MAX_LEASE_S)
        self.holder(holder).breaker.begin()
        self._open[room] = Question(room, holder, now_s, now_s + lease_s)
        prompt = np.asarray(req.origin_input_ids[:tokens], dtype="<i4").tobytes()
        self._send(holder, messages.Borrow(room, prompt, lease_s, req.extra_key or None, req.cache_salt or None))

    def of(self, room: int) -> Question | None:
        return self._open.get(room)

    def open(self) -> list[Question]:
        return list(self._open.values())

    def patient(self, question: Question, now_s: float) -> bool:
        """Whether the call still waits for an answer, or may still use it."""
        return now_s < (question.until_s if question.answered else question.asked_s + self._patience_s / 2)

    def take(self, room: int) -> bool:
        """Whether there was a lease for this call; whoever took it is to `give_back` it when its pages are read."""
        return self._open.pop(room, None) is not None

    def give_back(self, holder: bytes, room: int) -> None:
        self._send(holder, messages.Return(room))

    def drop(self, question: Question, now_s: float) -> None:
        """The call goes on without the lease."""
        del self._open[question.room]
        if not question.answered:
            self.holder(question.holder).breaker.failed(now_s)
            self._count("late")
        if question.session is not None or not question.answered:
            self.give_back(question.holder, question.room)

    def _answered(self, holder: bytes, lease: messages.Lease) -> None:
        question = self._open.get(lease.room)
        if question is None or question.holder != holder or question.answered:
            if lease.tokens:
                self.give_back(holder, lease.room)  # too late
            return
        question.answered = True
        known = self.holder(holder)
        known.breaker.succeeded()
        pages = numbers(lease.pages)
        if lease.tokens and pages is not None and self._rank < len(lease.sessions):
            question.tokens, question.pages, question.session = lease.tokens, pages, lease.sessions[self._rank]
            known.session = question.session
        self._count("lent" if lease.tokens else "busy" if lease.busy else "nothing")

    def _send(self, holder: bytes, message: messages.FromPrefill) -> None:
        if self._post is not None:
            self._post(holder, message)

    def _count(self, answer: str) -> None:
        if self._post is not None:
            metrics().leases.labels(answer).inc()


def tokens_of(prompt: bytes) -> array[int]:
    """The token ids of `messages.Borrow`, as SGLang's radix key wants them. Raises ValueError for a damaged one."""
    return array("q", np.frombuffer(prompt, dtype="<i4").astype("<i8").tobytes())
