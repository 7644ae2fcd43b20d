"""What lending remembers about one call; kept on SGLang's request itself (`Req`), so that it goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "basin_lent"


@dataclass(slots=True)
class Chance:
    """What became of a call's chance to get its lent part."""

    judged: bool = False
    """Nothing more is to come: the call may go on."""
    asked_s: float | None = None
    """Since when it waits for another decode's answer."""
    looked: bool = False
    """Whether another decode keeps more of its prompt is settled."""
    again: tuple[int, bool] | None = None
    """The call is to be computed anew: decode's prefix, and whether it was barred from the tree before."""


def chance_of(req: Any) -> Chance:
    if (chance := getattr(req, _ATTRIBUTE, None)) is None:
        chance = Chance()
        setattr(req, _ATTRIBUTE, chance)
    return chance


def must_run_again(req: Any) -> bool:
    """Whether the result of the call's forward is void, because its part did not come in time."""
    return chance_of(req).again is not None and req.kv.holds_kv


def decode_prefix(req: Any) -> int | None:
    """For a call that is bootstrapped a second time: how much of its prefix decode has, as it said the first time."""
    again = chance_of(req).again
    return None if again is None else again[0]


def bootstrapped(req: Any) -> None:
    """The call has left the bootstrap queue; a second computation is like a first one."""
    chance = chance_of(req)
    if chance.again is not None:
        req.skip_radix_cache_insert = chance.again[1]
        chance.again = None
