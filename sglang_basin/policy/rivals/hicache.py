"""HiCache alone: stock scheduling over a prefill cache with a host tier.

Source: SGLang's hierarchical cache (`--enable-hierarchical-cache`, LMSYS blog "SGLang HiCache", September 2025): KV
that the device pool evicts goes to host memory and is loaded back on a hit. Scheduling does not change.

The host tier belongs to the engine, so it is a matter of the hardware profile, not of the policy: run this policy on
a profile with `host_tokens` above 0. It exists under its own name so that tables of results say what ran.
"""

from __future__ import annotations

from sglang_basin.policy.rivals.stock import SWEEP, Stock

__all__ = ["SWEEP", "HiCache"]


class HiCache(Stock):
    name = "hicache"
