"""The invariants that `simulation` numbers, each under random loads and deployments."""

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import crowd, hardware, plan_of, plans, session, sessions

from sglang_basin.policy.decisions import Admit, Reason
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.rivals.stock import Stock
from sglang_basin.simulator.cache import PoolError
from sglang_basin.simulator.policies import policy_factory, policy_names
from sglang_basin.simulator.records import Outcome
from sglang_basin.simulator.simulation import ClientSettings, Simulation, simulate

PATIENT = ClientSettings(drain_s=100_000.0, call_timeout_s=1e9)
IMPATIENT = ClientSettings(drain_s=2_000.0, call_timeout_s=1.0, retries=3)

LONGEST_OUTPUT = 150
"""Of the sessions in `loads`."""


def possible(profile):
    """How sessions of patient clients may end. With less room reserved than outputs take, a decode instance whose
    other memory is promised to calls on their way aborts the last call of its batch, as SGLang does."""
    return {Outcome.OK} if profile.decode.reserve_tokens >= LONGEST_OUTPUT else {Outcome.OK, Outcome.ABORTED}


deployments = st.builds(
    hardware,
    prefills=st.sampled_from((1, 2)),
    decodes=st.sampled_from((1, 3)),
    pool=st.sampled_from((12_000, 16_000, 64_000)),
    decode_pool=st.sampled_from((12_000, 16_000, 64_000)),
    host=st.sampled_from((0, 0, 9_600, 48_000)),
    max_running=st.sampled_from((2, 64)),
    reserve=st.sampled_from((0, LONGEST_OUTPUT)),
    lend=st.booleans(),
)
late = st.builds(
    hardware,
    allocation=st.just("late"),
    pool=st.just(16_000),
    decode_pool=st.just(12_000),
    reserve=st.sampled_from((0, LONGEST_OUTPUT)),
)
names = st.sampled_from(policy_names())


@settings(max_examples=120, deadline=None)
@given(plan=plans(), profile=st.one_of(deployments, late), name=names)
def test_1_2_3_pools_add_up_time_runs_forward_and_every_session_finishes(plan, profile, name):
    """`checked` raises on the first event after which a pool does not add up or time went back."""
    policy = policy_factory(name, {}, plan, profile)
    log = simulate(plan, profile, policy, client=PATIENT, checked=True)
    assert set(log.session_outcome) <= possible(profile)
    if set(log.session_outcome) == {Outcome.OK}:
        assert list(log.session_calls_done) == [len(planned.session.calls) for planned in plan.sessions]
        expected = sum(call.output_tokens - 1 for planned in plan.sessions for call in planned.session.calls)
        assert sum(log.call_steps) == expected


@settings(max_examples=120, deadline=None)
@given(plan=plans(), profile=st.one_of(deployments, late), name=names)
def test_1_2_with_clients_that_give_up_anywhere_and_come_back(plan, profile, name):
    log = simulate(plan, profile, policy_factory(name, {}, plan, profile), client=IMPATIENT, checked=True)
    assert Outcome.CANCELLED not in set(log.session_outcome)  # each one came to some end


CROWDED = {
    "small": hardware(pool=13_600, decode_pool=13_600, reserve=LONGEST_OUTPUT),
    "small, lending": hardware(pool=13_600, decode_pool=13_600, reserve=LONGEST_OUTPUT, lend=True),
    "retracting": hardware(pool=64_000, decode_pool=12_000, reserve=0, lend=True),
    "late": hardware(pool=13_600, decode_pool=13_600, reserve=LONGEST_OUTPUT, allocation="late"),
    "host": hardware(pool=13_600, host=20_000, decodes=3, lend=True, reserve=LONGEST_OUTPUT),
    "two prefills, few places": hardware(prefills=2, decodes=2, pool=13_600, max_running=3, host=9_600, reserve=150),
}


def hasty(profile):
    """Decode so fast that clients who give up do so in front of prefill as well."""
    return profile.changed({"decode.step_s": "0.004", "decode.per_sequence_s": "0.0001"})


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("deployment", CROWDED)
@pytest.mark.parametrize("seed", [1, 2])
def test_1_2_3_under_a_crowd(deployment, name, seed):
    profile, plan = CROWDED[deployment], crowd(seed, shared=300 * (seed - 1))
    policy = policy_factory(name, {}, plan, profile)
    log = simulate(plan, profile, policy, client=PATIENT, checked=True)
    assert set(log.session_outcome) <= possible(profile)
    impatient = Simulation(plan, hasty(profile), policy, client=IMPATIENT, checked=True)
    assert Outcome.CANCELLED not in set(impatient.run().session_outcome)
    assert [prefill.held_tokens for prefill in impatient.prefills] == [0] * len(impatient.prefills)
    assert [decode.held_tokens for decode in impatient.decodes] == [0] * len(impatient.decodes)
    assert [prefill.waiting_calls for prefill in impatient.prefills] == [0] * len(impatient.prefills)
    assert [decode.waiting_calls for decode in impatient.decodes] == [0] * len(impatient.decodes)
    assert impatient.working_set_tokens == impatient.waiting_first == 0


def test_the_crowds_get_into_every_corner():
    """Otherwise the test above proves nothing."""
    runs = [
        Simulation(crowd(1), profile, Stock, client=client)
        for name in CROWDED
        for profile, client in ((CROWDED[name], PATIENT), (hasty(CROWDED[name]), IMPATIENT))
    ]
    logs = [run.run() for run in runs]
    assert sum(log.totals["retractions"] for log in logs) > 0
    assert sum(log.totals["loaded_back_tokens"] for log in logs) > 0
    assert sum(log.totals["written_back_tokens"] for log in logs) > 0
    outcomes = {outcome for log in logs for outcome in log.call_outcome}
    assert {Outcome.OK, Outcome.TIMEOUT} <= outcomes
    aborted_in = {
        (first >= 0)
        for log in logs
        for first, outcome in zip(log.call_first_token_s, log.call_outcome, strict=True)
        if outcome == Outcome.TIMEOUT
    }
    assert aborted_in == {True, False}


@settings(max_examples=60, deadline=None)
@given(plan=plans(), profile=deployments)
def test_1_nothing_is_held_once_everything_is_over(plan, profile):
    run = Simulation(plan, profile, Stock, client=IMPATIENT, checked=True)
    run.run()
    assert [prefill.held_tokens for prefill in run.prefills] == [0] * len(run.prefills)
    assert [decode.held_tokens for decode in run.decodes] == [0] * len(run.decodes)
    assert run.working_set_tokens == 0
    assert run.waiting_first == 0
    assert not run.live_sessions


def test_1_a_pool_that_does_not_add_up_is_noticed():
    run = Simulation(plan_of((0.0, session("a", (100, 0, 5, 0.0)))), hardware(), Stock, checked=True)
    run.prefills[0].cache.free_tokens -= 1
    with pytest.raises(PoolError, match="do not add up"):
        run.run()


@settings(max_examples=25, deadline=None)
@given(plan=plans(), profile=deployments, name=names)
def test_4_same_settings_same_numbers(plan, profile, name):
    first, second = (
        simulate(plan, profile, policy_factory(name, {}, plan, profile), client=IMPATIENT) for _ in range(2)
    )
    assert first.digest() == second.digest()
    assert first.reasons == second.reasons


class Witness(Stock):
    """Keeps everything that it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def call(self, call_id, session_id, prompt_tokens, now_s, **more):
        self.told.append(("call", now_s, call_id, session_id, prompt_tokens, more))
        return super().call(call_id, session_id, prompt_tokens, now_s, **more)

    def finish(self, call_id, output_tokens, now_s):
        self.told.append(("finish", now_s, call_id, output_tokens))
        super().finish(call_id, output_tokens, now_s)

    def observe(self, view, now_s):
        self.told.append(("observe", now_s, view))


@settings(max_examples=30, deadline=None)
@given(first=sessions(), cut=st.data())
def test_5_a_policy_is_told_nothing_of_what_lies_ahead(first, cut):
    """Two sessions that differ only after some call look the same to a policy up to that call's end."""
    kept = cut.draw(st.integers(1, len(first.calls)))
    last = first.calls[kept - 1]
    grown = (last.context_tokens + 900, last.context_tokens, 77, 0.0)
    rows = [(c.prompt_tokens, c.cached_prefix_tokens, c.output_tokens, c.tool_s) for c in first.calls[:kept]]
    other = session(first.trace_id, *rows, grown)
    seen = []
    for drawn in (first, other):
        witness = Witness()
        simulate(
            plan_of((1.0, drawn)),
            hardware(),
            lambda witness=witness: witness,
            client=dataclasses.replace(PATIENT, announce_end=False),
        )
        ends = [at for at, entry in enumerate(witness.told) if entry[0] == "finish"]
        seen.append(witness.told[: ends[kept - 1] + 1])
    assert seen[0] == seen[1]


def test_5_what_a_policy_is_given_has_no_way_to_the_plan():
    """Plain values only: a number, a text or a record of numbers cannot lead to a session's future."""
    witness = Witness()
    plan = plan_of((0.0, session("a", (100, 0, 5, 3.0), (300, 105, 9, 0.0))))
    simulate(plan, hardware(), lambda: witness, client=PATIENT)
    plain = (int, float, str, bool, type(None))
    for _, *values in witness.told:
        for value in values:
            fields = value.values() if isinstance(value, Mapping) else [value]
            if isinstance(value, EngineView):
                fields = list(value)
            assert all(isinstance(field, plain) for field in fields)


@settings(max_examples=60, deadline=None)
@given(plan=plans(), pool=st.sampled_from((12_000, 16_000)))
def test_6_lent_pages_never_keep_a_call_waiting(plan, pool):
    """Whenever a call waits for decode memory, it would not fit even with all lent KV gone."""
    profile = hardware(decode_pool=pool, lend=True, reserve=0)
    run = Simulation(plan, profile, Stock, client=PATIENT, checked=True)
    check = run.check

    def also_lent():
        check()
        for decode in run.decodes:
            waiting = [call for _, _, call in decode._asking if call.stage == 1]
            if waiting and not decode._retracted:
                head = min(entry for entry in decode._asking if entry[2].stage == 1)[2]
                chain = head.session.decode_chain
                need = -(-head.prompt_tokens // 16) * 16 + 16
                own = decode.cache.match(chain, head.reusable_tokens)
                assert need - own > decode.cache.free_tokens + decode.cache.evictable_tokens - own
            assert decode.cache.evictable_tokens <= pool // 2

    run.check = also_lent
    run.run()


@settings(max_examples=100, deadline=None)
@given(
    drawn=sessions(), profile=st.builds(hardware, decodes=st.sampled_from((1, 3)), host=st.sampled_from((0, 48_000)))
)
def test_7_a_lone_session_takes_its_unloaded_time(drawn, profile):
    log = simulate(plan_of((3.0, drawn)), profile, Stock, client=PATIENT)
    assert log.session_end_s[0] - 3.0 == pytest.approx(profile.unloaded_s(drawn), rel=1e-9)


def test_1_a_retry_waits_for_the_pass_that_its_aborted_attempt_is_in():
    slow = hardware().changed({"prefill.per_token_s": "0.01"})  # a pass of 400 tokens takes 4 s
    client = ClientSettings(call_timeout_s=1.0, retries=5, drain_s=1_000.0)
    log = simulate(plan_of((0.0, session("a", (400, 0, 5, 0.0)))), slow, Stock, client=client, checked=True)
    assert log.call_retried[0]
    assert log.session_outcome[0] == Outcome.OK
    assert log.call_first_token_s[-1] > 4.0
    assert log.call_cached_tokens[-1] == 384  # what the aborted attempt computed


class NeverAgain(Stock):
    """Holds every first call for ever."""

    def _arrived(self, program, call, now_s):
        return None


def test_a_policy_that_holds_for_ever_leaves_timed_out_sessions_behind():
    plan = plan_of((0.0, session("a", (100, 0, 5, 0.0))), (1.0, session("b", (100, 0, 5, 0.0))))
    log = simulate(plan, hardware(), NeverAgain, client=ClientSettings(call_timeout_s=20.0))
    assert list(log.session_outcome) == [Outcome.TIMEOUT] * 2
    assert list(log.session_end_s) == [20.0, 21.0]


class HoldsUntil(Stock):
    """Lets everybody in at one moment that it names by `wake_s`."""

    AT_S = 7.25

    def _arrived(self, program, call, now_s):
        return Reason.FITS if now_s >= self.AT_S else None

    def _due(self, now_s):
        return [(p, Reason.FITS) for p in self._programs.values() if p.held] if now_s >= self.AT_S else []

    def wake_s(self, now_s):
        return self.AT_S if now_s < self.AT_S else None


def test_a_policy_is_polled_when_it_asks_to_be():
    log = simulate(plan_of((0.1, session("a", (100, 0, 5, 0.0)))), hardware(), HoldsUntil, client=PATIENT)
    assert 7.25 < log.call_first_token_s[0] < 7.5
    assert log.reasons == {"admit: fits": 1}
    assert Admit("x", Reason.FITS).reason.value == "fits"
