"""SGLang's session radix cache (`--enable-session-radix-cache`) under Basin: who ends is closed there, on both sides.

Nobody else would: no client of today closes a session, and SGLang keeps what it holds for one until that happens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from calls import at_rest, generate, new_session, prompt
from stack import BUDGET_TOKENS, LOGS, Stack, running

from sglang_basin.config import BasinConfig

pytestmark = [pytest.mark.stack, pytest.mark.slow]

NAME = "radix-sessions"
RADIX = "--enable-session-radix-cache"


@pytest.fixture(scope="module")
def radix() -> Iterator[Stack]:
    config = BasinConfig(admission="current", budget_tokens=BUDGET_TOKENS, idle_timeout_s=5.0, idle_floor_s=5.0)
    keeping = ("--disaggregation-decode-enable-radix-cache", RADIX)
    with running(NAME, config, prefill_arguments=(RADIX,), decode_arguments=keeping) as stack:
        yield stack


def closed(side: str) -> list[tuple[str, str]]:
    """Sessions that one side's SGLang has closed, each with how many references it had."""
    log = (LOGS / NAME / f"{side}-0.log").read_text(encoding="utf-8")
    return re.findall(r"release_session (\S+): indexed (\d+) component leaves", log)


def test_sessions_that_end_are_closed_on_both_sides(radix: Stack) -> None:
    announced, idle = new_session(), new_session()
    assert generate(radix, announced, prompt(100, 1), ends=True).ok
    assert generate(radix, idle, prompt(100, 2)).ok
    for side in ("prefill", "decode"):
        radix.until(lambda side=side: closed(side) == [(announced, "1"), (idle, "1")], f"both are closed on {side}")
    again = generate(radix, idle, prompt(120, 2))
    assert again.json()["meta_info"]["cached_tokens"] == 96, "what it had cached stays, for anybody"
    for side in ("prefill", "decode"):
        radix.until(lambda side=side: closed(side)[2:] == [(idle, "1")], f"its next session is closed on {side}, too")
    radix.until(lambda: at_rest(radix), "the stack is at rest", 60)
