"""The closed form of decode against a loop that makes one step after the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import hardware, plan_of, session

from sglang_basin.policy.rivals.stock import Stock
from sglang_basin.replay.goodput import Target
from sglang_basin.simulator.records import Outcome
from sglang_basin.simulator.simulation import ClientSettings, Simulation, simulate

PATIENT = ClientSettings(drain_s=10_000.0, call_timeout_s=1e9)


def step_by_step(profile, joins, target_s):
    """joins: (KV arrival, prompt, output) in order. Returns per call (first token, end, steps on time)."""
    costs = profile.decode
    waiting = sorted((at_s, number) for number, (at_s, _, _) in enumerate(joins))
    batch: dict[int, int] = {}  # call -> tokens so far, the first one included
    first, end, on_time = {}, {}, dict.fromkeys(range(len(joins)), 0)
    now_s = 0.0
    while waiting or batch:
        if not batch and waiting:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s + 1e-12:
            number = waiting.pop(0)[1]
            first[number] = now_s
            batch[number] = 1
        for number in [number for number, tokens in batch.items() if tokens == joins[number][2]]:
            end[number] = now_s
            del batch[number]
        if not batch:
            continue
        context = sum(joins[number][1] + tokens for number, tokens in batch.items())
        step_s = costs.step_s + costs.per_sequence_s * len(batch) + costs.per_context_token_s * context
        now_s += step_s
        for number in batch:
            batch[number] += 1
            on_time[number] += step_s <= target_s
        for number in [number for number, tokens in batch.items() if tokens == joins[number][2]]:
            end[number] = now_s
            del batch[number]
    return [(first[number], end[number], on_time[number]) for number in range(len(joins))]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 6), st.integers(1, 3000), st.integers(1, 200)), min_size=1, max_size=10, unique=True
    ),
    st.floats(0.02, 0.04),
)
def test_batches_advance_as_if_step_by_step(arrivals, target_s):
    profile = hardware(decode_pool=1_600_000, reserve=0)
    target = Target(tpot_s=target_s)
    plan = plan_of(*[(at_s, session(f"t{n}", (p, 0, o, 0.0))) for n, (at_s, p, o) in enumerate(sorted(arrivals))])
    run = Simulation(plan, profile, Stock, client=PATIENT, target=target, checked=True)
    arrived = {}
    arrive = run.decodes[0].arrive

    def watch(now_s, call):
        arrived[call.session.number] = now_s
        return arrive(now_s, call)

    run.decodes[0].arrive = watch
    log = run.run()
    joins = [(arrived[n], p, o) for n, (_, p, o) in enumerate(sorted(arrivals))]
    expected = step_by_step(profile, joins, target_s)
    rows = {log.call_session[row]: row for row in range(len(log.call_session))}
    for number, (first_s, end_s, on_time) in enumerate(expected):
        row = rows[number]
        assert log.call_first_token_s[row] == pytest.approx(first_s, abs=1e-6)
        assert log.call_end_s[row] == pytest.approx(end_s, abs=1e-6)
        assert log.call_steps_on_time[row] == pytest.approx(
            on_time, abs=1
        )  # a step at the very target may go either way


def test_when_memory_runs_out_the_call_with_the_least_output_gives_way_and_comes_back():
    profile = hardware(decode_pool=1_600, reserve=0)
    long_outputs = [(0.0, session("a", (600, 0, 400, 0.0))), (1.0, session("b", (600, 0, 300, 0.0)))]
    run = Simulation(plan_of(*long_outputs), profile, Stock, client=PATIENT, checked=True)
    log = run.run()
    assert run.decodes[0].retractions == 1
    assert list(log.session_outcome) == [Outcome.OK] * 2
    first, second = (log.session_end_s[number] for number in (0, 1))
    assert second > first, "the later call was the one to give way"
    assert sorted(log.call_steps) == [299, 399]
    assert min(log.call_steps_on_time[row] - log.call_steps[row] for row in (0, 1)) == -1  # the step over the gap


def test_a_call_that_could_never_run_fails_at_once():
    plan = plan_of((0.0, session("a", (70_000, 0, 5, 0.0))), (0.0, session("b", (100, 0, 70_000, 0.0))))
    log = simulate(plan, hardware(), Stock, client=PATIENT)
    assert list(log.session_outcome) == [Outcome.ERROR] * 2
    assert list(log.session_end_s) == [0.0, 0.0]


def test_early_reservation_is_a_second_limit_and_late_allocation_is_not():
    """Eight prompts fit prefill together, decode holds two: with early reservation the others' prefills wait."""
    sessions = [(0.0, session(f"t{n}", (3_000, 0, 100, 0.0))) for n in range(8)]
    first = {}
    for allocation in ("early", "late"):
        profile = hardware(decode_pool=8_000, reserve=0, allocation=allocation)
        run = Simulation(plan_of(*sessions), profile, Stock, client=PATIENT, checked=True)
        done = []
        for prefill in run.prefills:
            finished = prefill._prefilled
            prefill._prefilled = lambda now_s, call, f=finished, done=done: [done.append(now_s), *f(now_s, call)][1:]
        run.run()
        first[allocation] = max(done)
    assert first["late"] < first["early"]


def test_lending_spares_prefill_what_decode_still_has():
    """Prefill's pool holds one context of two, decode both: without lending the second call computes all again."""
    calls = ((3_000, 0, 50, 20.0), (3_200, 3_050, 50, 0.0))
    sessions = [(0.0, session("a", *calls)), (10.0, session("b", *calls))]
    computed = {}
    for lend in (False, True):
        profile = hardware(pool=3_232, lend=lend)
        run = Simulation(plan_of(*sessions), profile, Stock, client=PATIENT, checked=True)
        log = run.run()
        computed[lend] = log.totals["computed_tokens"]
    assert computed[False] > 2 * 3_000 + 2 * 2_900
    # 3,049 tokens of KV exist after the first call (the last token's is never made): 190 whole pages of 16.
    assert computed[True] == 2 * 3_000 + 2 * (3_200 - 190 * 16)
    assert log.totals["written_back_tokens"] > 0


def test_write_back_only_when_it_pays():
    calls = ((3_000, 0, 50, 20.0), (3_200, 3_050, 50, 0.0))
    sessions = [(0.0, session("a", *calls)), (10.0, session("b", *calls))]
    slow = hardware(pool=3_232, lend=True).changed({"link.write_back_tokens_per_s": "1000"})
    log = simulate(plan_of(*sessions), slow, Stock, client=PATIENT, checked=True)
    assert log.totals["written_back_tokens"] == 0
