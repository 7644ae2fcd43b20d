"""Published rivals as policies on the same interface as the door, so that the simulator can run them side by side.

Each module states its source, what the source leaves open and how that was filled, and offers the settings to sweep:
a comparison reports a rival's best setting. `RIVALS` is the table of them by name; `table` holds what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_basin.policy.interface import ServingPolicy
from sglang_basin.policy.rivals import autellix, concur, continuum, hicache, stock, thunder
from sglang_basin.policy.rivals.table import RivalSettings

__all__ = ["RIVALS", "Rival", "RivalSettings"]


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival by name: how to make one, its published setting, and the settings to try."""

    name: str
    build: Callable[[Any], ServingPolicy]
    """Takes one of `published` or `sweep`."""
    published: RivalSettings
    sweep: Sequence[RivalSettings]


RIVALS: Mapping[str, Rival] = {
    rival.name: rival
    for rival in (
        Rival("stock", stock.Stock, RivalSettings(), stock.SWEEP),
        Rival("hicache", hicache.HiCache, RivalSettings(), hicache.SWEEP),
        Rival("continuum", continuum.Continuum, continuum.ContinuumSettings(), continuum.SWEEP),
        Rival("continuum-constant", continuum.Continuum, continuum.CONSTANT, continuum.CONSTANT_SWEEP),
        Rival("concur", concur.Concur, concur.ConcurSettings(), concur.SWEEP),
        Rival("thunder", thunder.Thunder, thunder.ThunderSettings(), thunder.SWEEP),
        Rival("thunder-watermarked", thunder.Thunder, thunder.WATERMARKED, thunder.WATERMARKED_SWEEP),
        Rival("autellix", autellix.Autellix, autellix.AutellixSettings(), autellix.SWEEP),
    )
}
