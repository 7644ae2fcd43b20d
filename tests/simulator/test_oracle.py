import numpy as np
import pytest

from sglang_basin.policy.sessions import Session
from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.plan import build_plan
from sglang_basin.replay.trace import find_trace, read_trace
from sglang_basin.simulator.oracle import NoisyOracle, OracleSettings


@pytest.fixture(scope="module")
def plan():
    profile = ArrivalProfile(rate_per_s=1.0, duration_s=2400.0)
    return build_plan(read_trace(find_trace("swe_bench")), profile, 1)


def seen(uid, context):
    return Session(uid, 0.0, context, 0.0)


def ranks(values):
    return np.argsort(np.argsort(values))


@pytest.mark.parametrize("wanted", [0.0, 0.56, 0.64, 0.95])
def test_signals_have_the_wanted_rank_correlation(plan, wanted):
    oracle = NoisyOracle(plan, OracleSettings(rank_correlation=wanted))
    signals = [oracle.signal(planned.uid) for planned in plan.sessions]
    peaks = [planned.session.peak_tokens for planned in plan.sessions]
    assert np.corrcoef(ranks(signals), ranks(peaks))[0, 1] == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize("part_done", [0.0, 0.5])
def test_quantiles_are_calibrated_from_the_start_and_on_the_way(plan, part_done):
    oracle = NoisyOracle(plan, OracleSettings(rank_correlation=0.6))
    hits = dict.fromkeys((0.1, 0.5, 0.9), 0)
    count = 0
    for planned in plan.sessions:
        peak = planned.session.peak_tokens
        context = int(part_done * 30_000)
        if peak < context:
            continue
        prediction = oracle.predict(seen(planned.uid, context))
        count += 1
        for share in hits:
            hits[share] += peak <= prediction.at(share)
    for share, number in hits.items():
        assert number / count == pytest.approx(share, abs=0.05)


def test_one_is_an_oracle(plan):
    oracle = NoisyOracle(plan, OracleSettings(rank_correlation=1.0))
    planned = plan.sessions[3]
    assert oracle.predict(seen(planned.uid, 100)).at(0.5) == planned.session.peak_tokens


def test_never_below_the_present_context_and_improving_if_asked(plan):
    blind = NoisyOracle(plan, OracleSettings(rank_correlation=0.3))
    learns = NoisyOracle(plan, OracleSettings(rank_correlation=0.3, improves=True))
    errors = {id(blind): [], id(learns): []}
    for planned in plan.sessions[:300]:
        peak = planned.session.peak_tokens
        for context in (peak // 10, peak // 2, int(0.9 * peak)):
            for oracle in (blind, learns):
                prediction = oracle.predict(seen(planned.uid, context))
                assert prediction.at(0.1) >= context
                if context > peak // 2:
                    errors[id(oracle)].append(abs(prediction.at(0.5) - peak) / peak)
    assert np.mean(errors[id(learns)]) < 0.5 * np.mean(errors[id(blind)])


def test_every_policy_sees_the_same_predictions(plan):
    first, second = NoisyOracle(plan), NoisyOracle(plan)
    second.predict(seen(plan.sessions[5].uid, 500))  # asked in another order
    for planned in plan.sessions[:20]:
        assert first.predict(seen(planned.uid, 2_000)) == second.predict(seen(planned.uid, 2_000))
