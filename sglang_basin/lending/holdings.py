"""How much a decode instance keeps of each session that it told a prefill of, so that prefill hears when that becomes
less. Pure: a node of the radix tree is a number.

A copy is a path in the tree. SGLang drops a path from its end, one node after the other, and splits a node so that the
lower part keeps the number: what ends a copy is the node that it ended at.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

Owner = tuple[str, str]
"""A prefill, as decode's control channel knows it, and the name of one of its sessions."""


@dataclass(frozen=True, slots=True)
class _Copy:
    end: int
    """The last node of its path."""
    tokens: int


class Holdings:
    """The latest copy of each session, and which of them have become shorter since that was last asked."""

    def __init__(self, max_copies: int) -> None:
        """Of more copies, those kept longest are forgotten, and nothing more is told of them."""
        self._max_copies = max_copies
        self._copies: OrderedDict[Owner, _Copy] = OrderedDict()
        self._ending: dict[int, set[Owner]] = {}  # by node
        self._shorter: OrderedDict[Owner, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    def tokens_of(self, owner: Owner) -> int:
        copy = self._copies.get(owner)
        return 0 if copy is None else copy.tokens

    def keep(self, owner: Owner, end: int, tokens: int) -> None:
        """A call of this session has left `tokens` tokens, on a path to node `end`."""
        if tokens < self.tokens_of(owner):
            self._note_shorter(owner)
        self._forget(owner)
        if tokens > 0:
            self._copies[owner] = _Copy(end, tokens)
            self._ending.setdefault(end, set()).add(owner)
            if len(self._copies) > self._max_copies:
                self._forget(next(iter(self._copies)))

    def ends_at(self, node: int) -> bool:
        """Whether a copy does."""
        return node in self._ending

    def drop(self, node: int, before: int, tokens: int) -> None:
        """`node` leaves the tree: copies that ended there end at node `before`, after `tokens` tokens; 0: they are no
        more."""
        for owner in list(self._ending.get(node, ())):
            self.keep(owner, before, tokens)

    def drop_all(self) -> None:
        """The tree is empty."""
        for owner in list(self._copies):
            self.keep(owner, 0, 0)

    def take_shorter(self, most: int) -> list[tuple[Owner, int]]:
        """Copies that have become shorter, and what is left of each in tokens; each once, so many at a time."""
        taken = [self._shorter.popitem(last=False)[0] for _ in range(min(most, len(self._shorter)))]
        return [(owner, self.tokens_of(owner)) for owner in taken]

    def _note_shorter(self, owner: Owner) -> None:
        self._shorter[owner] = None
        if len(self._shorter) > self._max_copies:
            self._shorter.popitem(last=False)

    def _forget(self, owner: Owner) -> None:
        if (copy := self._copies.pop(owner, None)) is not None:
            owners = self._ending[copy.end]
            owners.discard(owner)
            if not owners:
                del self._ending[copy.end]
