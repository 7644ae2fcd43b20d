import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server import Behaviour, serving
from test_driver import session

from sglang_basin.replay.trace import Scaling
from sglang_basin.replay.unloaded import (
    MeasuredCall,
    UnloadedError,
    UnloadedFile,
    fit_cost_model,
    measure_unloaded,
    read_unloaded,
    write_unloaded,
)

tokens = st.integers(0, 5000)
costs = st.floats(0, 1e-3)


@given(st.lists(st.tuples(tokens, tokens, tokens), min_size=12, max_size=40, unique=True), costs, costs, costs, costs)
def test_the_fit_finds_the_costs_it_was_made_from(rows, fixed, uncached, cached, output):
    calls = [MeasuredCall("s", 0, u, c, o, fixed + uncached * u + cached * c + output * o) for u, c, o in rows]
    model = fit_cost_model(calls)
    assert model.rms_residual_s < 1e-6
    for call in calls:
        predicted = model.call_s(call.uncached_tokens, call.cached_tokens, call.output_tokens)
        assert predicted == pytest.approx(call.seconds, abs=1e-5)


def test_costs_are_never_negative():
    calls = [MeasuredCall("s", n, n, 50 * n % 37, 10, 1.0 - 0.01 * n) for n in range(20)]
    model = fit_cost_model(calls)
    assert min(model.fixed_s, model.per_uncached_token_s, model.per_cached_token_s, model.per_output_token_s) >= 0
    assert model.rms_residual_s > 0.01
    with pytest.raises(UnloadedError, match="at least 8"):
        fit_cost_model(calls[:7])


async def test_measured_sessions_and_modelled_ones(tmp_path):
    measured = [session(4, prompt=100 + 40 * n, output=5 + n, tool_s=5.0, name=f"m{n}") for n in range(4)]
    other = session(6, prompt=150, output=7, tool_s=2.0, name="other")
    async with serving(Behaviour(first_token_s=0.02, token_s=0.005)) as server:
        file = await measure_unloaded(measured, server.url, seed=1, trace_name="t", scaling=Scaling(tool_cap_s=5))
        sent = list(server.requests)
    assert server.most_open_calls == 1
    assert len(sent) == 3 + 16  # a warm-up of three calls goes first
    assert len({body["session_id"] for body in sent}) == 5
    path = tmp_path / "unloaded.json"
    write_unloaded(path, file)
    times = read_unloaded(path)
    assert times.file == file
    for one in measured:
        assert times.is_measured(one)
        calls_s = sum(0.02 + 0.005 * (call.output_tokens - 1) for call in one.calls)
        assert times.session_s(one) == pytest.approx(15 + calls_s, rel=0.02)
    assert not times.is_measured(other)
    assert times.session_s(other) - other.tool_s == pytest.approx(6 * (0.02 + 0.005 * 6), rel=0.3)
    assert times.of([other]) == {"other": pytest.approx(times.session_s(other), abs=1e-4)}
    assert "4 sessions measured" in times.describe()
    times.check("t", Scaling(tool_cap_s=9), "generate")  # waits are added as recorded
    with pytest.raises(UnloadedError, match=r"tokens = 1.0, this run has 0.5"):
        times.check("t", Scaling(tokens=0.5), "generate")
    with pytest.raises(UnloadedError, match="trace = 't'"):
        times.check("u", Scaling(), "generate")


async def test_a_server_that_refuses_on_its_own_cannot_be_measured():
    async with serving(Behaviour(answer=lambda body, number: "reject" if number == 4 else "ok")) as server:
        with pytest.raises(UnloadedError, match=r"call 1 rejected on an idle server \(queue is full"):
            await measure_unloaded([session(3)], server.url, seed=1, trace_name="t", scaling=Scaling())


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "unloaded.json"
    with pytest.raises(UnloadedError, match="No such file"):
        read_unloaded(path)
    path.write_text("{}")
    with pytest.raises(UnloadedError, match="not a file of --measure-unloaded"):
        read_unloaded(path)
    write_unloaded(path, UnloadedFile("t", "generate", {}, [], []))
    with pytest.raises(UnloadedError, match=r"unloaded.json: .*at least 8"):
        read_unloaded(path)
