"""The fluid model: its curve, its equilibria, surges on it, and the command line over it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_basin import capacity as command
from sglang_basin.policy.capacity import (
    Deployment,
    DeploymentError,
    Surge,
    equilibria,
    fate,
    largest_surge,
    limits,
    peak,
    scan,
    stable_point,
    tipping_point,
    trajectory,
)

EXAMPLE = Deployment.from_mapping(tomllib.loads(command.EXAMPLE), "example")
BASE_PER_S = 3.3 / 60


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    context = draw(st.floats(500, 200_000))
    new = context * draw(st.floats(0.001, 0.5))
    return Deployment(
        cache_tokens=draw(st.floats(1_000, 2e7)),
        mean_context_tokens=context,
        calls_per_session=draw(st.floats(2, 200)),
        new_tokens_per_call=new,
        output_tokens_per_call=draw(st.floats(1, 2_000)),
        tool_s=draw(st.floats(0.1, 120)),
        prefill_new_token_s=draw(st.floats(1e-6, 1e-2)),
        prefill_cached_token_s=draw(st.floats(0, 1e-6)),
        prefill_fixed_s=draw(st.floats(0, 0.5)),
        prefill_instances=draw(st.integers(1, 8)),
        decode_step_s=draw(st.floats(0.001, 0.2)),
        decode_tokens=draw(st.floats(1_000, 2e7)),
        decode_slots=draw(st.sampled_from([math.inf, 8, 256])),
        rest_s=draw(st.floats(0, 1)),
        shared_tokens=draw(st.floats(0, 0.99)) * (context - new),
        knee=draw(st.floats(0.5, 3)),
        knee_sharpness=draw(st.floats(1, 40)),
    )


@given(deployments(), st.one_of(st.just(0.0), st.floats(1e-9, 1e6)))
def test_the_curve_is_continuous_positive_and_within_the_bounds_of_its_stations(
    deployment: Deployment, sessions: float
) -> None:
    here = deployment.calls_per_s(sessions)
    for nearby in (sessions * (1 + 1e-9), sessions + 1e-9):
        assert deployment.calls_per_s(nearby) == pytest.approx(here, rel=1e-5, abs=1e-6)
    prefill_s = deployment.prefill_s(sessions)
    loop_s = deployment.tool_s + deployment.decode_s + deployment.rest_s + prefill_s
    assert 0 <= here <= sessions / loop_s * (1 + 1e-9)  # nobody is faster than alone
    assert here <= deployment.prefill_instances / prefill_s * (1 + 1e-9)
    assert (here > 0) == (sessions > 0)


@given(deployments(), st.floats(0.001, 1e6))
def test_the_curve_solves_the_loop_that_it_states(deployment: Deployment, sessions: float) -> None:
    calls = deployment._cycle_calls_per_s(sessions)
    prefill_s = deployment.prefill_s(sessions)
    away_s = deployment.tool_s + deployment.decode_s + deployment.rest_s
    idle = 1 - calls * prefill_s / deployment.prefill_instances
    assume(idle > 1e-6)  # below that the difference has no digits left to compare
    assert calls * (away_s + prefill_s / idle) == pytest.approx(sessions, rel=1e-6)


@given(deployments(), st.lists(st.floats(0, 1e7), min_size=2, max_size=2))
def test_more_sessions_never_hit_more_and_the_hit_rate_stays_within_its_ends(
    deployment: Deployment, two: list[float]
) -> None:
    few, many = sorted(two)
    assert deployment.hit_rate(few) >= deployment.hit_rate(many) - 1e-12
    assert deployment.worst_hit_rate - 1e-9 <= deployment.hit_rate(many) <= deployment.best_hit_rate + 1e-9
    assert deployment.prefill_s(few) > 0


@given(deployments())
@settings(max_examples=50)
def test_without_bound_the_curve_goes_where_it_says(deployment: Deployment) -> None:
    far = deployment.completions_per_s(1e12)
    assert far == pytest.approx(deployment.completions_at_the_end_per_s, rel=0.01)


@given(deployments(), st.floats(0.02, 3.0))
@settings(max_examples=60, deadline=None)
def test_equilibria_are_zeros_alternate_and_none_is_missed_on_the_scan(deployment: Deployment, load: float) -> None:
    top = peak(deployment)
    assert all(deployment.completions_per_s(n) <= top.completions_per_s * (1 + 1e-9) for n in scan(deployment))
    rate = load * top.completions_per_s
    assume(abs(load - 1) > 1e-6)
    found = equilibria(deployment, rate)
    for point in found:
        assert deployment.completions_per_s(point.sessions) == pytest.approx(rate, rel=1e-6)
    assert [point.sessions for point in found] == sorted(point.sessions for point in found)
    assert [point.stable for point in found] == [i % 2 == 0 for i in range(len(found))]
    assert bool(found) == (load < 1)
    end = deployment.completions_at_the_end_per_s
    if found and abs(end / rate - 1) > 0.05:  # the last one's kind follows from where the curve ends
        assert found[-1].stable == (end > rate)
    signs = [deployment.completions_per_s(n) >= rate for n in scan(deployment)]
    crossings = sum(a != b for a, b in itertools.pairwise([False, *signs]))
    assert len(found) in (crossings, crossings + 2)  # the two at the very top may lie between points of the scan


@given(deployments(), st.floats(0.1, 0.95))
@settings(max_examples=40, deadline=None)
def test_sessions_return_to_the_stable_point_and_run_from_the_tipping_point(
    deployment: Deployment, load: float
) -> None:
    rate = load * peak(deployment).completions_per_s
    for point in equilibria(deployment, rate):
        for side in (0.995, 1.005):
            drift = rate - deployment.completions_per_s(side * point.sessions)
            towards = drift * (1 - side) > 0
            neighbours = [other for other in equilibria(deployment, rate) if other is not point]
            if all(abs(other.sessions / point.sessions - 1) > 0.02 for other in neighbours):
                assert towards == point.stable


@given(deployments(), st.floats(0.1, 0.95), st.floats(0.0, 5.0), st.floats(10, 2000))
@settings(max_examples=40, deadline=None)
def test_what_becomes_of_a_surge_is_what_the_trajectory_does(
    deployment: Deployment, load: float, extra: float, surge_s: float
) -> None:
    """The verdict comes from the tipping point; the trajectory after the surge must agree about its direction."""
    rate = load * peak(deployment).completions_per_s
    result = fate(deployment, rate, Surge(extra=extra, from_s=0, to_s=surge_s), step_s=surge_s / 100)
    assert result is not None
    assert result.sessions_after >= result.sessions_before * (1 - 1e-6)
    if result.tipping is not None:
        assume(abs(result.sessions_after / result.tipping - 1) > 1e-3)
    path = trajectory(deployment, lambda _: rate, start_sessions=result.sessions_after, until_s=surge_s, step_s=surge_s)
    if result.recovers:
        assert result.recovered_s is not None
        way_s = result.recovered_s
        assume(way_s < 1000 * deployment.calls_per_session * deployment.decode_s)
        back = trajectory(
            deployment, lambda _: rate, start_sessions=result.sessions_after, until_s=way_s, step_s=max(way_s, 1) / 500
        )[-1][1]
        assert back == pytest.approx(min(result.sessions_after, 1.05 * result.sessions_before), rel=0.01)
        assert path[-1][1] <= result.sessions_after * (1 + 1e-9)
    else:
        assert result.tipping is not None
        further = any(point.stable and point.sessions > result.tipping for point in equilibria(deployment, rate))
        assert path[-1][1] > (result.tipping if further else result.sessions_after)


@pytest.mark.parametrize(
    ("cache", "context", "new", "decode", "surge_s"),
    [
        (586_573.0, 81_304.0, 21_260.5, 1_051_618.0, 270.0),
        (586_391.0, 81_304.0, 40_652.0, 484_553.0, 51.0),
        (586_224.0, 81_281.0, 40_640.5, 484_346.0, 51.0),
    ],
)
def test_a_dip_of_the_curve_between_two_points_of_the_scan(
    cache: float, context: float, new: float, decode: float, surge_s: float
) -> None:
    """Found by the test above: the rate crossed such a dip twice, unseen, or touched it."""
    deployment = Deployment(
        cache_tokens=cache,
        mean_context_tokens=context,
        calls_per_session=2.0,
        new_tokens_per_call=new,
        output_tokens_per_call=1.0,
        tool_s=72.0,
        prefill_new_token_s=0.001953125,
        prefill_cached_token_s=0.0,
        prefill_fixed_s=0.0,
        prefill_instances=6,
        decode_step_s=0.001,
        decode_tokens=decode,
        knee=0.5,
        knee_sharpness=12.0,
    )
    rate = 0.375 * peak(deployment).completions_per_s
    result = fate(deployment, rate, Surge(extra=5.0, from_s=0, to_s=surge_s), step_s=surge_s / 100)
    assert result is not None
    end = trajectory(deployment, lambda _: rate, start_sessions=result.sessions_after, until_s=1e5, step_s=10.0)[-1][1]
    if result.recovers and result.recovered_s != math.inf:
        assert end == pytest.approx(result.sessions_before, rel=0.05)
    elif not result.recovers:
        assert result.tipping is not None
        assert end > result.tipping


def test_the_example_shows_the_articles_trap() -> None:
    """3.3 sessions a minute, ten minutes of surge: +33 % recovers within 20 minutes, +100 % never does."""
    stable = stable_point(EXAMPLE, BASE_PER_S)
    tipping = tipping_point(EXAMPLE, BASE_PER_S)
    assert stable is not None
    assert tipping is not None
    assert EXAMPLE.hit_rate(stable) > 0.95
    assert stable < peak(EXAMPLE).sessions < tipping
    small = fate(EXAMPLE, BASE_PER_S, Surge(extra=0.33, from_s=900, to_s=1500))
    large = fate(EXAMPLE, BASE_PER_S, Surge(extra=1.0, from_s=900, to_s=1500))
    assert small is not None
    assert large is not None
    assert small.recovers
    assert small.recovered_s is not None
    assert small.recovered_s < 20 * 60
    assert not large.recovers
    largest = largest_surge(EXAMPLE, BASE_PER_S, 600)
    assert largest is not None
    for extra, recovers in ((largest - 0.01, True), (largest + 0.01, False)):
        result = fate(EXAMPLE, BASE_PER_S, Surge(extra=extra, from_s=0, to_s=600))
        assert result is not None
        assert result.recovers is recovers


def test_a_larger_cache_or_a_lower_rate_moves_the_tipping_point_away() -> None:
    larger = dataclasses.replace(EXAMPLE, cache_tokens=2 * EXAMPLE.cache_tokens)
    tipping = tipping_point(EXAMPLE, BASE_PER_S) or 0.0
    assert (tipping_point(larger, BASE_PER_S) or 0.0) > 1.5 * tipping
    assert (tipping_point(EXAMPLE, 0.8 * BASE_PER_S) or 0.0) > tipping
    below_the_end = 0.9 * EXAMPLE.completions_at_the_end_per_s
    assert tipping_point(EXAMPLE, below_the_end) is None
    assert largest_surge(EXAMPLE, below_the_end, 600) == math.inf


def test_too_high_a_rate_has_no_stable_point_and_no_surge_to_speak_of() -> None:
    rate = 1.01 * peak(EXAMPLE).completions_per_s
    assert stable_point(EXAMPLE, rate) is None
    assert tipping_point(EXAMPLE, rate) is None
    assert fate(EXAMPLE, rate, Surge(extra=0.0, from_s=0, to_s=1)) is None
    assert largest_surge(EXAMPLE, rate, 600) is None


def test_the_first_limit_follows_the_articles_two_quotients() -> None:
    found = limits(EXAMPLE)
    assert found.cache_sessions == pytest.approx(1.9 * 700_000 / 26_000)
    served_s = EXAMPLE.prefill_s(0.0) + 2.5
    assert found.served_share == pytest.approx(served_s / (served_s + 11.0))
    assert found.decode_sessions == pytest.approx(700_000 / 26_000 / found.served_share)
    assert found.first == "cache"
    assert limits(dataclasses.replace(EXAMPLE, decode_tokens=200_000)).first == "decode"
    assert limits(dataclasses.replace(EXAMPLE, decode_slots=2)).first == "decode"


def test_decode_memory_bounds_the_curve() -> None:
    short = dataclasses.replace(EXAMPLE, decode_tokens=100_000)
    assert peak(short).completions_per_s < peak(EXAMPLE).completions_per_s
    places = 100_000 / 26_000
    assert short.calls_per_s(40) == pytest.approx(places / (short.prefill_s(40) + short.decode_s))


def test_the_trajectory_is_exact_where_the_answer_is_known_and_ends_steps_on_the_jumps() -> None:
    """Far below every limit X(N)/K is N / T: N(t) = λT + (N0 - λT) exp(-t/T), piece by piece."""
    roomy = dataclasses.replace(
        EXAMPLE, cache_tokens=1e12, decode_tokens=1e12, prefill_fixed_s=1e-9, prefill_new_token_s=0.0
    )
    roomy = dataclasses.replace(roomy, prefill_cached_token_s=0.0)
    lifetime_s = roomy.calls_per_session * (roomy.tool_s + roomy.decode_s)
    rates = (0.1, 0.3, 0.1)
    path = trajectory(
        roomy,
        lambda t: rates[0] if t < 100.5 else rates[1] if t < 333.3 else rates[2],
        start_sessions=2.0,
        until_s=1000.0,
        breaks_s=(100.5, 333.3),
        step_s=7.0,
    )
    times = [t for t, _ in path]
    assert times == sorted(times)
    assert {0.0, 100.5, 333.3, 1000.0} <= set(times)
    assert max(b - a for a, b in itertools.pairwise(times)) <= 7.0 + 1e-9
    sessions = 2.0
    for rate, length_s in zip(rates, (100.5, 232.8, 666.7), strict=True):
        limit = rate * lifetime_s
        sessions = limit + (sessions - limit) * math.exp(-length_s / lifetime_s)
    assert path[-1][1] == pytest.approx(sessions, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_tokens": 0}, "cache_tokens: must be above 0"),
        ({"cache_tokens": math.nan}, "cache_tokens: must be a number"),
        ({"cache_tokens": "many"}, "cache_tokens: must be a number, got 'many'"),
        ({"tool_s": -1}, "tool_s: must be at least 0"),
        ({"tool_s": math.inf}, "tool_s: must be finite"),
        ({"new_tokens_per_call": 30_000}, "new_tokens_per_call: must be at most mean_context_tokens"),
        ({"shared_tokens": 25_900}, "shared_tokens: must be at most"),
        ({"prefill_new_token_s": 0, "prefill_cached_token_s": 0, "prefill_fixed_s": 0}, "prefill must take time"),
        ({"decode_slots": True}, "decode_slots: must be a number"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        dataclasses.replace(EXAMPLE, **changes)


def test_wrong_surges_and_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        Surge(extra=-1.1, from_s=0, to_s=1)
    with pytest.raises(ValueError, match="from_s"):
        Surge(extra=1, from_s=2, to_s=1)
    with pytest.raises(ValueError, match="arrivals_per_s"):
        equilibria(EXAMPLE, 0.0)
    with pytest.raises(ValueError, match="step_s"):
        trajectory(EXAMPLE, lambda _: 1.0, start_sessions=0, until_s=1, step_s=0)


# The command.


@pytest.fixture
def description(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.toml"
    path.write_text(command.EXAMPLE, encoding="utf-8")
    return path


def test_the_command_prints_the_trap_and_draws_it(description: Path, capsys: pytest.CaptureFixture) -> None:
    plot = description.parent / "out" / "curve.png"
    arguments = ["--deployment", str(description), "--rate", "3.3/min", "--surge", "+100%", "--plot", str(plot)]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "which is full first" in printed
    assert "tipping point" in printed
    assert "stuck" in printed
    assert "metastable" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_flags_win_over_the_file_and_json_agrees_with_the_model(
    description: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--deployment", str(description), "--cache-tokens", "1.4M", "--rate", "200/h", "--json", "-"]
    assert command.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    larger = dataclasses.replace(EXAMPLE, cache_tokens=1_400_000)
    assert result["deployment"]["cache_tokens"] == 1_400_000
    assert result["deployment"]["decode_slots"] is None
    assert result["equilibria"][0]["sessions"] == pytest.approx(stable_point(larger, 200 / 3600))
    assert result["limits"]["first"] == limits(larger).first


def test_the_command_draws_a_safe_and_an_overloaded_deployment_and_one_without_a_rate(
    description: Path, capsys: pytest.CaptureFixture
) -> None:
    for rate, verdict in ((["--rate", "1/min"], "safe"), (["--rate", "60/min"], "overload"), ([], "cache is full")):
        plot = description.parent / f"{verdict.split()[0]}.png"
        assert command.main(["--deployment", str(description), *rate, "--plot", str(plot)]) == 0
        assert verdict in capsys.readouterr().out
        assert plot.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing cache_tokens"),
        (["--deployment", "nowhere.toml"], "nowhere.toml"),
        (["--deployment", "DESCRIPTION", "--cache-tokens", "0"], "cache_tokens: must be above 0"),
        (["--deployment", "DESCRIPTION", "--surge", "+100%"], "add --rate"),
        (["--deployment", "DESCRIPTION", "--rate", "3/min", "--for", "0s"], "--for"),
        (["--deployment", "DESCRIPTION", "--plot", "curve.txt"], "curve.txt"),
        (["--deployment", "DESCRIPTION", "--plot", "/dev/null/curve.png"], "cannot write"),
    ],
)
def test_wrong_arguments_are_told_with_their_name(
    arguments: list[str], message: str, description: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = [str(description) if word == "DESCRIPTION" else word for word in arguments]
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache_tokens = [", "not TOML"),
        ("cash_tokens = 1", "did you mean 'cache_tokens'"),
        ("cache_tokens = 'big'", "missing mean_context_tokens"),
    ],
)
def test_a_wrong_file_is_told_with_its_field(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    assert command.main(["--deployment", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "wrong.toml" in error


def test_numbers_are_read_as_people_write_them() -> None:
    assert command.number("700k") == 700_000
    assert command.number("1.5M") == 1_500_000
    assert command.number("4e-5") == 4e-5
    assert command.number("700_000") == 700_000
    for text in ("", "many", "1kk", "0x10", "_"):
        with pytest.raises(ValueError, match="is not a number"):
            command.number(text)
