import pytest

from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.plan import build_plan
from sglang_basin.replay.trace import find_trace, read_trace
from sglang_basin.simulator.policies import PolicyError, policy_factory
from sglang_basin.simulator.profile import read_profile
from sglang_basin.simulator.simulation import simulate


@pytest.fixture(scope="module")
def plan():
    return build_plan(read_trace(find_trace("swe_bench")), ArrivalProfile(rate_per_s=0.1, duration_s=300.0), 1)


def test_the_shipped_model_serves_and_learns(plan):
    profile = read_profile("h200-1p3d")
    build = policy_factory("basin", {"predictor": "trained"}, plan, profile)
    doors = []

    def kept():
        doors.append(build())
        return doors[-1]

    log = simulate(plan, profile, kept)
    predictor = doors[0]._predictor
    assert predictor.counts.predictions > len(log.call_session)
    assert predictor.counts.learned >= 5
    assert predictor.counts.fallbacks == predictor.counts.failures == 0
    assert len(predictor) == len(plan.sessions) - predictor.counts.learned  # those that the run's end cut off


def test_an_absent_model_is_a_policy_error(plan):
    with pytest.raises(PolicyError, match=r"absent\.npz"):
        policy_factory("basin", {"predictor": "trained", "model": "absent.npz"}, plan, read_profile("h200-1p3d"))
