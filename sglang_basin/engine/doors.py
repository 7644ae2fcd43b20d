"""Where the doors of prefill instances listen, as a decode gate knows it: each data-parallel rank's as many ports above
the first one's. How many ranks there are, a door says when it is first asked."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from sglang_basin.engine.control import address

MAX_INSTANCES = 256


class Doors:
    """Prefill instances go by the address of their first door."""

    def __init__(self, port_offset: int) -> None:
        """`port_offset` is from an instance's bootstrap port to its first door."""
        self.port_offset = port_offset
        self._of: dict[str, tuple[str, ...]] = {}  # instance -> its doors
        self._at: dict[str, tuple[str, int]] = {}  # door -> (its instance, rank)
        self._where: dict[str, tuple[str, int]] = {}  # instance -> host and port of its first door
        self._named_s: OrderedDict[str, float] = OrderedDict()  # instance -> when a call last named it, oldest first

    def instance(self, host: str, bootstrap_port: int, now_s: float) -> str | None:
        """The prefill instance with this bootstrap address, which a call has just named. None for one too many: a
        client that talks to decode itself may name what it likes."""
        port = bootstrap_port + self.port_offset
        first = address(host, port)
        if first not in self._of:
            if len(self._of) >= MAX_INSTANCES:
                return None
            self._where[first] = host, port
            self.count(first, 1)
        self._named_s[first] = now_s
        self._named_s.move_to_end(first)
        return first

    def unnamed_since(self, then_s: float) -> list[str]:
        """The instances that no call has named since then."""
        return list(itertools.takewhile(lambda instance: self._named_s[instance] < then_s, self._named_s))

    def all_of(self, instance: str) -> list[str]:
        """Every door that the instance has had."""
        return [door for door, (its, _) in self._at.items() if its == instance]

    def forget(self, instance: str) -> None:
        for door in self.all_of(instance):
            del self._at[door]
        del self._of[instance], self._where[instance], self._named_s[instance]

    def of(self, instance: str) -> tuple[str, ...]:
        """The doors of an instance, as far as they are known."""
        return self._of[instance]

    def count(self, instance: str, ranks: int) -> None:
        """The instance has so many ranks."""
        host, port = self._where[instance]
        self._of[instance] = tuple(address(host, port + rank) for rank in range(ranks))
        for rank, door in enumerate(self._of[instance]):
            self._at[door] = instance, rank

    def instance_of(self, door: str) -> str:
        return self._at[door][0]

    def rank_of(self, door: str) -> int | None:
        """The data-parallel rank behind a door; None where its instance has but one."""
        instance, rank = self._at[door]
        return rank if len(self._of[instance]) > 1 else None
