"""The budget that reservations are held against, and how it follows the engine.

Reference: min(0.9 × knee, capacity), where capacity counts every memory that can give a prefix back (device, host
tier, lent decode memory); without a calibrated knee, the capacity; or a number that the user fixed. Lent memory counts
as far as reading it back keeps up (`usable_lent_tokens`). In service the budget moves within a small band around the
reference: up while sessions queue and the hit rate is on its high stretch, down once it falls off (the article's rule,
DESIGN section 2; the step sizes are ours).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_basin.policy.interface import EngineView

LOWEST_HIGH_SHARE = 0.7
"""However low the hit rate is at low load, its high stretch is taken to be at least this part of the configured one."""


def usable_lent_tokens(view: EngineView, pause_s: float | None) -> int:
    """How much of the lent memory is as good as cache, when sessions pause for `pause_s` between two calls.

    A session calls once a turn, and what prefill has lost of its context must be read back each time. With L tokens of
    the sessions' contexts on decode alone and turns of at least `pause_s`, at most L / pause_s tokens a second are
    needed (Little's law); reading brings `read_tokens_per_s`. Beyond that calls wait for their reads, or are computed,
    and the memory holds prefixes without giving them back. While either is unknown all of it counts.
    """
    if view.read_tokens_per_s is None or pause_s is None:
        return view.lent_tokens
    return min(view.lent_tokens, int(view.read_tokens_per_s * pause_s))


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """How a budget is set. Shares are parts of the reference."""

    fixed_tokens: int | None = None
    """The reference as the user set it; None derives it."""
    knee_tokens: int | None = None
    """The working set above which the hit rate collapses, from calibration."""
    knee_share: float = 0.9
    band: float = 0.0
    """How far the budget may move from its reference, to either side; 0 keeps it there."""
    step_up: float = 0.01
    step_down: float = 0.05
    """Per observation with fresh calls; falling off the stretch is worse than a longer queue, hence the difference."""
    healthy_hit_rate: float = 0.9
    """The high stretch of the hit rate until the deployment's own has been seen."""
    tolerance: float = 0.05
    """The hit rate is on its high stretch within this much of it."""


class Budget:
    """A token budget that follows what it observes. `tokens` is what holds now."""

    def __init__(self, settings: BudgetSettings, capacity_tokens: int) -> None:
        """`capacity_tokens` holds until the first observation. Raises ValueError naming a wrong setting."""
        if settings.fixed_tokens is not None and settings.fixed_tokens < 1:
            raise ValueError(f"budget_tokens: must be at least 1, got {settings.fixed_tokens}")
        if not 0 <= settings.band < 1:
            raise ValueError(f"budget band: must be at least 0 and below 1, got {settings.band}")
        self.settings = settings
        """Replaced by others, they hold from the next observation on."""
        self.factor = 1.0
        self.high_hit_rate = settings.healthy_hit_rate
        """The deployment's own high stretch: what the hit rate is while the working set is well below the budget."""
        self.capacity_tokens = max(1, capacity_tokens)

    @property
    def capacity_tokens(self) -> int:
        """With it `reference_tokens` and `tokens` change: computed here, since the door reads them at each decision."""
        return self._capacity_tokens

    @capacity_tokens.setter
    def capacity_tokens(self, tokens: int) -> None:
        self._capacity_tokens = tokens
        settings = self.settings
        self.reference_tokens = tokens
        if settings.fixed_tokens is not None:
            self.reference_tokens = settings.fixed_tokens
        elif settings.knee_tokens is not None:
            self.reference_tokens = max(1, int(min(settings.knee_share * settings.knee_tokens, tokens)))
        self._move(self.factor)

    def _move(self, factor: float) -> None:
        self.factor = factor
        self.tokens = max(1, int(factor * self.reference_tokens))

    def observe(self, view: EngineView, *, queued: bool, reserved_tokens: float, pause_s: float | None = None) -> None:
        """Follow the engine: its capacity at once, its hit rate within the band. `pause_s`: between two calls of a
        session, on average; None if unknown."""
        own_tokens = view.capacity_tokens - view.lent_tokens
        self.capacity_tokens = max(1, own_tokens + usable_lent_tokens(view, pause_s))
        settings = self.settings
        if view.hit_rate is None:
            return
        if reserved_tokens < 0.7 * self.reference_tokens:
            # A cold cache misses at low load too: its first rates must not pass for the high stretch.
            self.high_hit_rate += 0.05 * (view.hit_rate - self.high_hit_rate)
            self.high_hit_rate = max(self.high_hit_rate, LOWEST_HIGH_SHARE * settings.healthy_hit_rate)
        high = self.high_hit_rate
        if view.hit_rate < high - 2 * settings.tolerance:
            self._move(max(1 - settings.band, self.factor - settings.step_down))
        elif queued and view.hit_rate >= high - settings.tolerance:
            self._move(min(1 + settings.band, self.factor + settings.step_up))
