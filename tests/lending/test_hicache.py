"""Lending beside HiCache, prefill's host tier: what the device has lost comes from the host first, the rest is lent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lending_sessions import HICACHE, always_pull, counter, lending_node, outcomes, play
from stack import LOGS

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node

pytestmark = [pytest.mark.stack, pytest.mark.slow]
"""Slow: SGLang makes a host tier only where 10 GB of memory stay free, which other tests' stacks take."""

PAGE = 64


@pytest.fixture(
    scope="module",
    params=["on", "off"],
    ids=["lending", "without lending"],
)
def tiers(request: pytest.FixtureRequest) -> Iterator[tuple[Node, str]]:
    """A node, and whether it lends."""
    with lending_node(
        page_size=PAGE,
        decode_tokens=100_000,
        prefill_arguments=HICACHE,
        engine_arguments=("--chunked-prefill-size", "512"),
        config=BasinConfig(admission="off", lending=request.param),
        environment=always_pull(),
        logs=LOGS / f"hicache-{request.param}",
    ) as node:
        yield node, request.param


def test_a_host_tier_and_lending_share_one_layer_counter(tiers: tuple[Node, str]) -> None:
    """More contexts than device and host hold together: some come from the device, some from the host, some are
    lent, and all answers are those of cold runs."""
    node, lending = tiers
    prefill = node.plan.of("prefill")[0].url
    turns = play(node, sessions=16, turns=4, page_size=PAGE, most_tokens=1_400, concurrency=3, disconnects=8, seed=5)
    assert [turn for turn in turns if not turn.equal] == []
    came = outcomes(prefill)
    assert counter(prefill, "sglang:load_back_tokens_total") > 0, "the host tier was never read"
    if lending == "on":
        assert came.get("landed", 0) + came.get("overlapped", 0) > 0
        assert came.get("present", 0) > 0, "nothing was there already, on the device or the host"
    else:
        assert came == {}
    for engine in node.plan.engines:
        assert counter(engine.url, "basin_faults_total") == 0
        log = (LOGS / f"hicache-{lending}" / f"{engine.name}.log").read_text()
        assert "Traceback" not in log
        assert "leak" not in log
