"""The budget follows the engine, within its band."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.policy.budget import Budget, BudgetSettings, usable_lent_tokens
from sglang_basin.policy.interface import EngineView


def view(hit_rate: float | None, **changes: int) -> EngineView:
    return EngineView(cache_tokens=1000, hit_rate=hit_rate, **changes)


def test_capacity_counts_every_memory_that_can_give_a_prefix_back_and_is_followed_at_once() -> None:
    budget = Budget(BudgetSettings(), 1)
    budget.observe(view(None, host_tokens=500, lent_tokens=250), queued=False, reserved_tokens=0)
    assert budget.tokens == 1750
    budget.observe(view(None, host_tokens=500), queued=False, reserved_tokens=0)
    assert budget.tokens == 1500


@given(st.integers(0, 10**7), st.floats(0, 1e9), st.floats(0, 1e4))
def test_lent_memory_counts_as_far_as_reading_keeps_up(lent_tokens: int, reads_per_s: float, pause_s: float) -> None:
    one = EngineView(cache_tokens=1000, lent_tokens=lent_tokens, read_tokens_per_s=reads_per_s)
    usable = usable_lent_tokens(one, pause_s)
    assert 0 <= usable <= lent_tokens
    assert usable == lent_tokens or usable + 1 > reads_per_s * pause_s
    assert usable <= usable_lent_tokens(one, 2 * pause_s), "sessions that call less often can share a slower link"
    budget = Budget(BudgetSettings(), 1)
    budget.observe(one, queued=False, reserved_tokens=0, pause_s=pause_s)
    assert budget.tokens == 1000 + usable
    budget.observe(one, queued=False, reserved_tokens=0)
    assert budget.tokens == 1000 + lent_tokens, "nobody has paused yet"


def test_the_knee_caps_the_reference_and_a_fixed_budget_beats_both() -> None:
    assert Budget(BudgetSettings(knee_tokens=1000), 10_000).reference_tokens == 900
    assert Budget(BudgetSettings(knee_tokens=1000), 500).reference_tokens == 500
    assert Budget(BudgetSettings(knee_tokens=1000, fixed_tokens=7), 500).reference_tokens == 7


def test_a_capacity_or_settings_that_are_given_later_hold_like_the_first_ones() -> None:
    budget = Budget(BudgetSettings(knee_tokens=1000), 500)
    budget.capacity_tokens = 2_000
    assert (budget.reference_tokens, budget.tokens) == (900, 900)
    budget.settings = BudgetSettings(fixed_tokens=7)
    budget.observe(view(None), queued=False, reserved_tokens=0)
    assert (budget.reference_tokens, budget.tokens) == (7, 7)


def test_it_loosens_while_sessions_queue_on_the_high_stretch_and_tightens_off_it() -> None:
    budget = Budget(BudgetSettings(band=0.2), 1000)
    for _ in range(100):
        budget.observe(view(0.92), queued=True, reserved_tokens=1000)
    assert budget.tokens == 1200
    for _ in range(100):
        budget.observe(view(0.4), queued=True, reserved_tokens=1000)
    assert budget.tokens == 800


def test_a_cold_start_does_not_pass_for_the_high_stretch() -> None:
    """Regression: a first observation of an empty cache made a later collapse look healthy, and the budget loosened."""
    budget = Budget(BudgetSettings(band=0.2), 1000)
    for _ in range(200):
        budget.observe(view(0.0), queued=False, reserved_tokens=10)
    for _ in range(60):
        budget.observe(view(0.05), queued=True, reserved_tokens=1000)
    assert budget.tokens == 800
