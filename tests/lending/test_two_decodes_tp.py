"""Leases between engines of two ranks each: every rank asks, grants, reads and gives back alike."""

from __future__ import annotations

import pytest
from lending_sessions import always_pull, counter, lending_node
from stack import LOGS
from test_two_decodes import PAGE, unpinned_sessions_answer_as_cold, until

from sglang_basin.config import BasinConfig

pytestmark = [pytest.mark.stack, pytest.mark.slow]
"""Slow: six schedulers on one machine."""


def test_sessions_that_nobody_pins_answer_as_they_would_cold_with_two_ranks() -> None:
    with lending_node(
        decode=2,
        page_size=PAGE,
        engine_arguments=("--tp-size", "2", "--chunked-prefill-size", "512"),
        config=BasinConfig(admission="off", lending="on"),
        environment=always_pull(),
        logs=LOGS / "lending-two-tp",
    ) as node:
        unpinned_sessions_answer_as_cold(node, seed=31)
        for engine in node.plan.of("decode"):
            until(lambda url=engine.url: counter(url, "basin_leased_tokens") == 0, "all leases are back")
        for engine in node.plan.engines:
            assert counter(engine.url, "basin_faults_total") == 0
            log = (LOGS / "lending-two-tp" / f"{engine.name}.log").read_text()
            assert "Traceback" not in log
            assert "leak" not in log
