"""How lent KV comes back in the simulator: each call has room for all of its context before it reads, and the reads of
an instance share its link."""

from __future__ import annotations

import pytest
from loads import hardware, plan_of, session

from sglang_basin.policy.rivals.stock import Stock
from sglang_basin.simulator.profile import HardwareProfile
from sglang_basin.simulator.simulation import ClientSettings, Simulation

PATIENT = ClientSettings(drain_s=10_000.0, call_timeout_s=1e9)
TWICE = ((3_000, 0, 50, 20.0), (3_200, 3_050, 50, 0.0))
LENT_TOKENS = 190 * 16
"""Of a first call's 3,049 tokens of KV, whole pages."""


def first_tokens(profile: HardwareProfile, *arrivals: tuple[float, object]) -> dict[str, list[float]]:
    """When each session's calls got their first tokens, with all pools checked at every event."""
    run = Simulation(plan_of(*arrivals), profile, Stock, client=PATIENT, checked=True)
    seen: dict[str, list[float]] = {}
    joined = run.decodes[0].arrive

    def arrive(now_s: float, call):  # type: ignore[no-untyped-def]
        seen.setdefault(call.session.uid, []).append(now_s)
        return joined(now_s, call)

    run.decodes[0].arrive = arrive  # type: ignore[method-assign]
    run.run()
    return seen


def lending(pool: int, tokens_per_s: float) -> HardwareProfile:
    return hardware(pool=pool, lend=True).changed({"link.write_back_tokens_per_s": str(tokens_per_s)})


def test_a_call_waits_for_what_it_reads() -> None:
    """`b` has evicted what `a` had computed before; `a` gets it from decode."""
    at_s = {}
    for tokens_per_s in (1e5, 1e4):
        arrivals = (0.0, session("a", *TWICE)), (10.0, session("b", TWICE[0]))
        at_s[tokens_per_s] = first_tokens(lending(3_232, tokens_per_s), *arrivals)["s0"]
    assert at_s[1e5][0] == at_s[1e4][0]
    missing_tokens = LENT_TOKENS - (3_232 - 188 * 16)  # what `b` left of it
    assert at_s[1e4][1] - at_s[1e5][1] == pytest.approx(missing_tokens / 1e4 - missing_tokens / 1e5)


def test_reads_share_the_link() -> None:
    """Two calls whose parts are read at the same time: the second one's comes when both have been brought."""
    soon = ((*TWICE[0][:3], 19.6), TWICE[1])  # so that both come back at the same time
    arrivals = (
        (0.0, session("a", *TWICE)),
        (0.001, session("b", *soon)),
        (5.0, session("c", (6_000, 0, 10, 0.0))),
    )
    slow, fast = (first_tokens(lending(6_464, rate), *arrivals) for rate in (1e4, 1e6))
    took_s = sorted(slow[one][1] - fast[one][1] for one in ("s0", "s1"))
    assert took_s[0] > 0.2
    assert took_s[1] > took_s[0] + 0.2


def test_a_call_that_reads_holds_room_for_all_of_its_context() -> None:
    """The pool has room for one context: whoever comes while the call reads waits until decode has its KV, although
    nothing is computed meanwhile."""
    reading_s = LENT_TOKENS / 6e3
    arrivals = (0.0, session("a", *TWICE)), (10.0, session("b", TWICE[0]))
    alone = first_tokens(lending(3_232, 6e3), *arrivals)["s0"][1]
    later = (alone - 0.5 * reading_s, session("c", (1_000, 0, 10, 0.0)))
    at_s = first_tokens(lending(3_232, 6e3), *arrivals, later)
    assert at_s["s0"][1] == alone
    assert at_s["s2"][0] > alone
