"""The fixtures that start the shared real stacks; what a test does with one is in `stack`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calls import at_rest
from hypothesis import HealthCheck, settings
from stack import BUDGET_TOKENS, FINAL_GRACE_S, HOLD_LIMIT_S, IDLE_TIMEOUT_S, LOGS, TICKET_GRACE_S, Stack, running

from sglang_basin.config import BasinConfig

pytest_plugins = ("fault_table",)

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how fast this one is just now says nothing about the code


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="session")
def basin() -> Iterator[Stack]:
    config = BasinConfig(
        admission="current",
        budget_tokens=BUDGET_TOKENS,
        adaptive_band=0.0,
        pausing="off",
        order="arrival",
        idle_timeout_s=IDLE_TIMEOUT_S,
        hold_limit_s=HOLD_LIMIT_S,
        ticket_grace_s=TICKET_GRACE_S,
        final_grace_s=FINAL_GRACE_S,
        decision_log=str(LOGS / "basin" / "decisions.jsonl"),
    )
    with running("basin", config) as stack:
        yield stack


@pytest.fixture(scope="session")
def stock() -> Iterator[Stack]:
    with running("stock", None) as stack:
        yield stack


@pytest.fixture
def empty(basin: Stack) -> Iterator[Stack]:
    """The stack with nobody live or waiting, before and, checked, after the test."""
    basin.until(lambda: at_rest(basin), "the stack at rest before the test", 60)
    yield basin
    basin.until(lambda: at_rest(basin), "the stack at rest after the test", 60)
    assert basin.metric("prefill", "basin_faults_total") == 0
    assert basin.metric("decode", "basin_faults_total") == 0
