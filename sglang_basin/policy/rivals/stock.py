"""Stock SGLang: every call passes, queues are first come, first served, and LRU decides what stays cached.

Source: SGLang 0.5.23 with its default `--schedule-policy fcfs` and no priority scheduling; in PD, prefill's waiting
queue and decode's preallocation queue are in order of arrival of the *call*.

Left open by the source: nothing. There is nothing to set either.
"""

from __future__ import annotations

from sglang_basin.policy.rivals.table import ProgramTable, RivalSettings


class Stock(ProgramTable):
    """`ProgramTable` as it is: its hooks hold nobody."""

    name = "stock"

    def __init__(self, settings: RivalSettings | None = None) -> None:
        super().__init__(settings or RivalSettings())


SWEEP: tuple[RivalSettings, ...] = (RivalSettings(),)
