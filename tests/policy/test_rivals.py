"""What every rival promises, and the rules of each as its source states them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.policy.decisions import Admit, Queue, Reason, Refuse
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.rivals import RIVALS
from sglang_basin.policy.rivals.autellix import Autellix, AutellixSettings
from sglang_basin.policy.rivals.concur import Concur, ConcurSettings
from sglang_basin.policy.rivals.continuum import (
    COLD_START_SAMPLES,
    Continuum,
    ContinuumSettings,
    StepCorrelation,
    ToolTimes,
    upper_hull,
)
from sglang_basin.policy.rivals.table import ProgramTable, RivalSettings
from sglang_basin.policy.rivals.thunder import WATERMARKED, Thunder, ThunderSettings

VIEW = EngineView(cache_tokens=100, host_tokens=100, cache_used_share=0.9, hit_rate=0.1, decode_tokens=100)


def rival_and_settings() -> st.SearchStrategy:
    return st.sampled_from(list(RIVALS)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(list(RIVALS[name].sweep)))
    )


@pytest.mark.parametrize("name", list(RIVALS))
def test_the_sweep_offers_each_setting_once_and_the_published_one_among_them(name: str) -> None:
    rival = RIVALS[name]
    assert len(set(rival.sweep)) == len(rival.sweep)
    assert rival.published in rival.sweep
    assert {rival.build(setting).name for setting in rival.sweep} == {name}


def test_a_setting_that_makes_no_sense_is_refused_by_name() -> None:
    for build, field in (
        (lambda: RivalSettings(idle_timeout_s=0), "idle_timeout_s"),
        (lambda: ConcurSettings(period_s=0), "period_s"),
        (lambda: ConcurSettings(low_usage=0.6), "low_usage"),
        (lambda: ConcurSettings(usage="gpu"), "usage"),  # type: ignore[arg-type]
        (lambda: ThunderSettings(pause_target=1.1), "pause_target"),
        (lambda: ThunderSettings(resume_hysteresis=1.0), "resume_hysteresis"),
        (lambda: AutellixSettings(first_quantum_tokens=0.0), "first_quantum_tokens"),
        (lambda: ContinuumSettings(reload_s_per_token=-1.0), "reload_s_per_token"),
        (lambda: ContinuumSettings(hold_weight=math.nan), "hold_weight"),
    ):
        with pytest.raises(ValueError, match=field):
            build()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "last", "prefilled", "finish", "finish", "abandon", "end", "view", "tick"]),
        st.integers(0, 7),  # session
        st.integers(0, 15),  # which of the calls
        st.integers(0, 80),  # tokens
        st.floats(0.0, 20.0),  # seconds that pass before
    ),
    max_size=80,
)


@given(rival_and_settings(), EVENTS)
@settings(max_examples=400, deadline=None)
def test_no_call_is_lost_and_none_waits_for_ever(chosen: tuple, events: list) -> None:
    """Each held call ends exactly once; once calls finish and time passes nothing waits and nothing is left behind."""
    name, setting = chosen
    policy = RIVALS[name].build(setting)
    assert isinstance(policy, ProgramTable)
    now_s, made = 0.0, itertools.count()
    running: dict[str, str] = {}
    waiting: dict[str, str] = {}

    def settle() -> None:
        for outcome in policy.poll(now_s):
            assert isinstance(outcome, Admit)
            assert 0 <= outcome.waited_s <= now_s
            running[outcome.call_id] = waiting.pop(outcome.call_id)  # KeyError: it did not wait, or ended twice
        assert policy.held_calls == len(waiting)
        for session_id in {*running.values(), *waiting.values()}:
            assert math.isfinite(policy.order(session_id, now_s))
        wake_s = policy.wake_s(now_s)
        assert wake_s is None or wake_s >= now_s

    for kind, session, which, tokens, pause_s in events:
        now_s += pause_s
        session_id = f"s{session}"
        known = sorted({**running, **waiting})
        call_id = known[which % len(known)] if known else None
        if kind in ("call", "last"):
            call_id = f"c{next(made)}"
            decision = policy.call(call_id, session_id, tokens, now_s, ends_session=kind == "last")
            assert decision.call_id == call_id
            assert isinstance(decision, Admit | Queue)
            (running if isinstance(decision, Admit) else waiting)[call_id] = session_id
            again = policy.call(call_id, session_id, tokens, now_s)
            assert isinstance(again, type(decision))
        elif kind == "end":
            refused = policy.end(session_id, now_s)
            assert {outcome.call_id for outcome in refused} == {c for c, s in waiting.items() if s == session_id}
            assert all(isinstance(outcome, Refuse) for outcome in refused)
            waiting = {c: s for c, s in waiting.items() if s != session_id}
            running = {c: s for c, s in running.items() if s != session_id}
        elif kind == "view":
            policy.observe(VIEW._replace(cache_tokens=1 + tokens, cache_used_share=which / 15), now_s)
        elif call_id is not None and kind == "prefilled":
            policy.prefilled(call_id, now_s, cached_tokens=tokens if which % 2 else None)
        elif call_id is not None and kind in ("finish", "abandon"):
            session_id = running.pop(call_id, None) or waiting.pop(call_id)
            if kind == "finish":
                policy.finish(call_id, tokens, now_s)
                pinned_until_s = policy.keep_until_s(session_id, now_s)
                assert pinned_until_s is None or now_s < pinned_until_s < math.inf
            else:
                policy.abandon(call_id, now_s)
        settle()

    for _ in range(4000):  # calls finish, time passes: every held call goes on at some point
        for call_id in list(running):
            del running[call_id]
            policy.finish(call_id, 1, now_s)
        if not waiting:
            break
        wake_s = policy.wake_s(now_s)
        assert wake_s is not None, "calls wait and nobody will ever be asked about them"
        now_s = wake_s + 0.001
        settle()
    assert not waiting
    now_s += 700.0
    settle()
    assert policy.programs == 0
    assert policy.wake_s(now_s) is None
    for value in vars(policy).values():  # every table of the rival's own is empty
        if isinstance(value, dict):
            assert not value
    if isinstance(policy, Thunder):
        assert policy.used_tokens == 0
    if isinstance(policy, Concur):
        assert policy.active_tokens == 0


# CONCUR.


def concur(**changes: object) -> Concur:
    return Concur(ConcurSettings(**{"period_s": 10.0, "initial_window": 2, **changes}))


def test_concur_holds_agents_over_the_window_in_order_of_arrival() -> None:
    policy = concur()
    assert isinstance(policy.call("1", "a", 10, 0.0), Admit)
    assert isinstance(policy.call("2", "b", 10, 0.0), Admit)
    assert isinstance(policy.call("3", "c", 10, 0.0), Queue)
    assert isinstance(policy.call("4", "d", 10, 0.0), Queue)
    policy.finish("1", 5, 1.0)
    assert policy.poll(1.0) == []  # its tool runs: still active
    policy.end("a", 2.0)
    assert policy.poll(2.0) == [Admit("3", Reason.FITS, 2.0)]


def test_concur_gives_no_place_to_an_agent_that_gave_up_waiting() -> None:
    policy = concur(initial_window=1)
    policy.call("1", "a", 10, 0.0)
    policy.call("2", "b", 10, 0.0)
    policy.call("3", "c", 10, 0.0)
    policy.abandon("2", 1.0)
    policy.end("a", 2.0)
    assert policy.poll(2.0) == [Admit("3", Reason.NOBODY_LIVE, 2.0)]
    assert isinstance(policy.call("4", "b", 10, 3.0), Queue)  # back again, at the end of the line


@pytest.mark.parametrize(
    ("contexts", "hit_rate", "window"),
    [(19, 0.1, 4), (20, 0.1, 2), (50, 0.1, 2), (51, 0.1, 1), (51, 0.2, 2), (51, None, 2)],
)
def test_concur_follows_its_law(contexts: int, hit_rate: float | None, window: int) -> None:
    policy = concur()
    policy.call("1", "a", contexts, 0.0)
    policy.observe(EngineView(cache_tokens=100, hit_rate=hit_rate), 9.0)
    policy.poll(9.9)
    assert policy.window == 2
    policy.poll(10.0)
    assert policy.window == window


def test_concur_pauses_an_agent_at_a_step_boundary_and_resumes_it_before_new_ones() -> None:
    policy = concur()
    for call_id, session in (("1", "a"), ("2", "b")):
        policy.call(call_id, session, 50, 0.0)
    assert isinstance(policy.call("3", "new", 10, 0.0), Queue)
    policy.observe(EngineView(cache_tokens=100, hit_rate=0.0), 9.0)
    policy.poll(10.0)
    assert policy.window == 1
    policy.finish("1", 1, 11.0)
    assert isinstance(policy.call("4", "a", 60, 12.0), Queue)
    assert policy.poll(12.0) == []
    policy.end("b", 13.0)
    assert policy.poll(13.0) == [Admit("4", Reason.NOBODY_LIVE, 1.0)]
    assert policy.held_calls == 1


# ThunderAgent.


def thunder(capacity: int, base: ThunderSettings | None = None, **changes: object) -> Thunder:
    policy = Thunder(dataclasses.replace(base or ThunderSettings(), **{"buffer_tokens": 0, **changes}))
    policy.observe(EngineView(cache_tokens=capacity), 0.0)
    return policy


def test_thunder_lets_a_new_program_in_when_it_fits_and_nobody_waits() -> None:
    policy = thunder(100)
    assert policy.call("1", "a", 60, 0.0) == Admit("1", Reason.FITS)
    assert isinstance(policy.call("2", "b", 41, 0.0), Queue)
    assert isinstance(policy.call("3", "c", 10, 0.0), Queue)
    assert policy.poll(4.9) == []
    assert policy.poll(5.0) == [Admit("3", Reason.FITS, 5.0)]  # the shortest of those that fit


@pytest.mark.parametrize(("subtracts", "room_for"), [(True, 4), (False, 3)])
def test_thunder_subtracts_what_programs_share_as_its_original_does(subtracts: bool, room_for: int) -> None:
    """Eight programs have shown that 8,000 of their 10,000 tokens are shared, so that 2,000 are their own."""
    policy = thunder(10**6, subtracts_shared=subtracts)
    for number in range(8):
        policy.call(f"c{number}", f"s{number}", 10_000, 0.0)
        policy.prefilled(f"c{number}", 0.0, cached_tokens=8_000)
        policy.end(f"s{number}", 1.0)
    policy.observe(EngineView(cache_tokens=35_000 if not subtracts else 8_000), 2.0)
    entered = [isinstance(policy.call(f"n{number}", f"t{number}", 10_000, 2.0), Admit) for number in range(6)]
    assert sum(entered) == room_for


def test_thunder_pauses_the_shortest_acting_program_first() -> None:
    policy = thunder(100)
    for call_id, session, tokens in (("1", "a", 30), ("2", "b", 20), ("3", "c", 40)):
        assert isinstance(policy.call(call_id, session, tokens, 0.0), Admit)
    for call_id in ("1", "2", "3"):
        policy.finish(call_id, 10, 1.0)  # 40, 30 and 50 tokens: 20 too many
    policy.poll(5.0)
    assert isinstance(policy.call("4", "a", 40, 6.0), Admit)
    assert isinstance(policy.call("5", "b", 30, 6.0), Queue)
    policy.end("c", 7.0)
    assert policy.poll(10.0) == [Admit("5", Reason.FITS, 4.0)]


def test_thunder_marks_reasoning_programs_and_pauses_them_when_their_call_returns() -> None:
    policy = thunder(100)
    policy.call("1", "a", 50, 0.0)
    policy.call("2", "b", 40, 0.0)
    policy.finish("2", 30, 1.0)
    policy.call("3", "b", 70, 2.0)  # 120 of 100, both reasoning
    policy.poll(5.0)
    policy.finish("1", 0, 6.0)
    assert isinstance(policy.call("4", "a", 50, 7.0), Queue)
    policy.finish("3", 0, 8.0)
    assert isinstance(policy.call("5", "b", 70, 9.0), Admit)


def test_thunder_counts_acting_programs_less_the_longer_they_act_when_it_looks_for_room() -> None:
    for half_life_s, restored in ((None, []), (1.0, ["2"])):
        policy = thunder(100, acting_half_life_s=half_life_s)
        policy.call("1", "a", 80, 0.0)
        policy.finish("1", 0, 0.0)
        assert isinstance(policy.call("2", "b", 90, 0.0), Queue)
        assert [outcome.call_id for outcome in policy.poll(5.0)] == restored


def test_thunder_lets_a_call_pass_that_waited_for_half_an_hour() -> None:
    policy = thunder(100)
    policy.call("1", "a", 50, 0.0)
    assert isinstance(policy.call("2", "huge", 101, 0.0), Queue)
    assert policy.poll(1799.0) == []
    assert policy.poll(1804.0) == [Admit("2", Reason.ADMISSION_OFF, 1804.0)]


def test_thunder_watermarked_pauses_down_to_its_target_and_restores_below_the_hysteresis() -> None:
    policy = thunder(100, WATERMARKED)
    for call_id, session, tokens in (("1", "a", 10), ("2", "b", 20), ("3", "c", 45)):
        assert isinstance(policy.call(call_id, session, tokens, 0.0), Admit)
        policy.finish(call_id, 5, 1.0)
    policy.poll(5.0)
    assert policy.used_tokens == 90  # not above 0.95
    policy.call("4", "c", 56, 6.0)
    policy.poll(10.0)
    assert policy.used_tokens == 81 - 25  # 96: below 0.80 only without a and b
    assert isinstance(policy.call("5", "b", 25, 11.0), Queue)
    assert [outcome.call_id for outcome in policy.poll(15.0)] == ["5"]  # 56 + 25 is at most 85; a no longer fits
    assert isinstance(policy.call("6", "a", 15, 16.0), Queue)


# Autellix.


def test_autellix_serves_the_least_served_program_first() -> None:
    policy = Autellix(AutellixSettings(output_weight=2.0, first_quantum_tokens=None))
    policy.call("1", "a", 100, 0.0)
    policy.finish("1", 10, 1.0)
    assert policy.attained_tokens("a") == 120
    policy.call("2", "a", 150, 2.0)
    policy.finish("2", 5, 3.0)
    assert policy.attained_tokens("a") == 120 + 40 + 10  # of 150 tokens 110 had been served before
    assert policy.order("new", 4.0) < policy.order("a", 3.0)


def test_autellix_keeps_programs_of_one_level_in_order_of_arrival_and_promotes_who_waited_long() -> None:
    policy = Autellix(AutellixSettings(output_weight=1.0, first_quantum_tokens=100.0, promote_after_s=60.0))
    for session, tokens in (("small", 99), ("same", 10), ("large", 100), ("huge", 400)):
        policy.call(session, session, tokens, 0.0)
        policy.finish(session, 0, 1.0)
    assert policy.order("small", 2.0) < policy.order("same", 3.0) < policy.order("large", 1.0) < policy.order("huge", 0)
    policy.poll(61.0)
    assert policy.order("huge", 0.5) < policy.order("same", 3.0) < policy.order("large", 1.5)


# Continuum.


def test_continuum_pins_for_two_seconds_and_puts_pinned_calls_first() -> None:
    policy = Continuum(ContinuumSettings(constant_ttl_s=2.0))
    for session, arrived_s in (("old", 0.0), ("quick", 1.0)):
        policy.call(f"{session}-1", session, 10, arrived_s)
    for session in ("old", "quick"):
        policy.finish(f"{session}-1", 5, 5.0)
        assert policy.keep_until_s(session, 5.0) == 7.0
    policy.call("quick-2", "quick", 20, 6.0)
    policy.call("old-2", "old", 20, 8.0)
    assert policy.order("quick", 6.0) < policy.order("old", 8.0) == 0.0
    policy.finish("quick-2", 5, 9.0)
    policy.call("quick-3", "quick", 30, 20.0)
    assert policy.order("quick", 20.0) == 1.0  # its pin had run out: by the program's arrival again


def test_continuum_pins_nothing_for_a_program_that_has_ended() -> None:
    policy = Continuum(ContinuumSettings(constant_ttl_s=2.0))
    policy.call("1", "a", 10, 0.0, ends_session=True)
    policy.finish("1", 5, 1.0)
    assert policy.keep_until_s("a", 1.0) is None


def test_continuum_pins_nothing_while_another_call_of_the_program_runs() -> None:
    policy = Continuum(ContinuumSettings(constant_ttl_s=2.0))
    policy.call("1", "a", 10, 0.0)
    policy.call("2", "a", 12, 0.0)
    policy.finish("1", 5, 1.0)
    assert policy.keep_until_s("a", 1.0) is None
    policy.finish("2", 5, 2.0)
    assert policy.keep_until_s("a", 2.0) == 4.0


def test_continuum_pins_by_the_exponential_prior_until_tool_times_are_known() -> None:
    policy = Continuum(ContinuumSettings(reload_s_per_token=0.01))
    policy.call("1", "a", 300, 0.0)
    policy.finish("1", 0, 1.0)
    assert policy.keep_until_s("a", 1.0) == pytest.approx(1.0 + math.log(3.0))  # 3 s of reload, mean tool time 1 s
    policy.call("2", "b", 99, 0.0)
    policy.finish("2", 0, 1.0)
    assert policy.keep_until_s("b", 1.0) is None


@given(st.lists(st.floats(0.0, 100.0), min_size=COLD_START_SAMPLES + 1, max_size=300), st.floats(0.01, 1000.0))
@settings(deadline=None)
def test_the_ttl_is_the_maximum_of_the_utility_over_all_tool_times(tool_times: list, benefit_s: float) -> None:
    times = ToolTimes()
    for tool_s in tool_times:
        times.learn(tool_s)

    def utility(tau: float) -> float:
        return sum(tool_s <= tau for tool_s in tool_times) / len(tool_times) * benefit_s - tau

    times._hull = upper_hull(times._sorted)  # as of now, not of the last refresh
    times._hull_seen = times._seen
    best = max(utility(tau) for tau in [0.0, *tool_times])
    assert utility(times.best_ttl_s(benefit_s)) == pytest.approx(best, abs=1e-6 + 1e-9 * benefit_s)


@given(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=200))
def test_tool_times_remember_only_the_last_ones(tool_times: list) -> None:
    times = ToolTimes(memory=16)
    for tool_s in tool_times:
        times.learn(tool_s)
    assert times._sorted == sorted(tool_times[-16:])
    assert times.mean_s == pytest.approx(sum(tool_times[-16:]) / len(tool_times[-16:]), abs=1e-9)


@given(st.lists(st.integers(1, 60), max_size=40))
def test_eta_is_the_negated_correlation_of_steps_done_and_left(lengths: list) -> None:
    correlation = StepCorrelation(memory=8)
    for steps in lengths:
        correlation.learn(steps)
    pairs = [(k, steps - k) for steps in lengths[-8:] for k in range(1, steps)]
    if len({k for k, _ in pairs}) < 2:
        assert correlation.eta == 0.0
        return
    mean_done = sum(done for done, _ in pairs) / len(pairs)
    mean_left = sum(left for _, left in pairs) / len(pairs)
    product = sum((done - mean_done) * (left - mean_left) for done, left in pairs)
    done2 = sum((done - mean_done) ** 2 for done, _ in pairs)
    left2 = sum((left - mean_left) ** 2 for _, left in pairs)
    assert correlation.eta == pytest.approx(-product / math.sqrt(done2 * left2), abs=1e-9)
