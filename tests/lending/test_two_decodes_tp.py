"""Leases between engines of two ranks each: every rank asks, grants, reads and gives back alike."""

from __future__ import annotations

import pytest
from lending_sessions import always_pull, counter, lending_node, outcomes, play
from stack import LOGS
from test_two_decodes import until

from sglang_basin.config import BasinConfig

pytestmark = [pytest.mark.stack, pytest.mark.slow]
"""Slow: six schedulers on one machine."""

PAGE = 16


def test_sessions_that_nobody_pins_answer_as_they_would_cold_with_two_ranks() -> None:
    with lending_node(
        decode=2,
        page_size=PAGE,
        engine_arguments=("--tp-size", "2", "--chunked-prefill-size", "512"),
        config=BasinConfig(admission="off", lending="on"),
        environment=always_pull(),
        logs=LOGS / "lending-two-tp",
    ) as node:
        turns = play(
            node,
            sessions=8,
            turns=4,
            page_size=PAGE,
            most_tokens=1_400,
            concurrency=3,
            disconnects=8,
            seed=31,
            pinned=False,
        )
        assert [turn for turn in turns if not turn.equal] == []
        prefill = node.plan.of("prefill")[0].url
        assert outcomes(prefill).get("leased", 0) > 0
        assert outcomes(prefill).get("failed", 0) == 0
        for engine in node.plan.of("decode"):
            until(lambda url=engine.url: counter(url, "basin_leased_tokens") == 0, "all leases are back")
        for engine in node.plan.engines:
            assert counter(engine.url, "basin_faults_total") == 0
            log = (LOGS / "lending-two-tp" / f"{engine.name}.log").read_text()
            assert "Traceback" not in log
            assert "leak" not in log
