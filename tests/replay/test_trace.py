import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.replay import trace as trace_module
from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.plan import build_plan
from sglang_basin.replay.trace import (
    Call,
    Scaling,
    Session,
    TraceError,
    find_trace,
    read_trace,
    scale_session,
    scale_trace,
    shipped_traces,
)


@st.composite
def sessions(draw, max_calls=8):
    """Any session a recording can hold: prompts that grow, diverge, shrink or repeat."""
    calls, context = [], 0
    for _ in range(draw(st.integers(1, max_calls))):
        cached = draw(st.one_of(st.just(context), st.integers(0, context))) if calls else 0
        if calls and draw(st.booleans()):
            cached = calls[-1].prompt_tokens
        new = draw(st.integers(0 if cached else 1, 3000))
        call = Call(cached + new, cached, draw(st.integers(1, 800)), draw(st.floats(0, 500)))
        calls.append(call)
        context = call.context_tokens
    shared = draw(st.integers(0, calls[0].prompt_tokens))
    return Session("some", tuple(calls), shared)


scalings = st.builds(
    Scaling,
    tokens=st.floats(0.002, 3),
    time=st.floats(0.01, 2),
    max_calls=st.none() | st.integers(1, 10),
    tool_cap_s=st.none() | st.floats(0, 30),
    max_context_tokens=st.none() | st.integers(1, 5000),
)


@given(sessions(), scalings)
def test_scaled_sessions_are_possible_and_keep_their_shape(session, scaling):
    scaled = scale_session(session, scaling)
    if scaled is None:
        assert scaling.max_context_tokens is not None
        return
    assert 1 <= len(scaled.calls) <= min(len(session.calls), scaling.max_calls or 10**9)
    assert scaled.calls[-1].tool_s == 0
    assert 0 <= scaled.shared_prefix_tokens <= scaled.calls[0].prompt_tokens
    context = 0
    for index, (call, recorded) in enumerate(zip(scaled.calls, session.calls, strict=False)):
        assert 0 <= call.cached_prefix_tokens <= min(call.prompt_tokens, context)
        assert call.output_tokens >= 1
        assert scaling.tool_cap_s is None or call.tool_s <= scaling.tool_cap_s
        assert scaling.max_context_tokens is None or call.context_tokens <= scaling.max_context_tokens
        if index:
            before = session.calls[index - 1]
            if recorded.cached_prefix_tokens == before.context_tokens:
                assert call.cached_prefix_tokens == context
            elif recorded.cached_prefix_tokens == before.prompt_tokens:
                assert call.cached_prefix_tokens == scaled.calls[index - 1].prompt_tokens
            if recorded.prompt_tokens > recorded.cached_prefix_tokens:
                assert call.prompt_tokens > call.cached_prefix_tokens
        context = call.context_tokens


@given(sessions())
def test_scaling_by_one_changes_nothing_but_the_last_wait(session):
    scaled = scale_session(session, Scaling())
    assert [call.prompt_tokens for call in scaled.calls] == [call.prompt_tokens for call in session.calls]
    assert [call.cached_prefix_tokens for call in scaled.calls] == [c.cached_prefix_tokens for c in session.calls]
    assert [call.tool_s for call in scaled.calls[:-1]] == [call.tool_s for call in session.calls[:-1]]


def test_scaled_prompts_do_not_drift():
    calls = tuple(Call(1000 + 50 * n, 0 if n == 0 else 1000 + 50 * (n - 1) + 30, 30, 1.0) for n in range(60))
    scaled = scale_session(Session("long", calls), Scaling(tokens=1 / 20))
    for call, recorded in zip(scaled.calls, calls, strict=True):
        assert abs(call.prompt_tokens - recorded.prompt_tokens / 20) <= 1


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


GOOD = json.dumps(
    {
        "session_id": "a",
        "unknown_field": [1],
        "calls": [
            {"prompt_tokens": 10, "cached_prefix_tokens": 0, "output_tokens": 2, "tool_s": 1.5},
            {"prompt_tokens": 20, "cached_prefix_tokens": 12, "output_tokens": 0, "tool_s": None, "gap_s": 3},
        ],
    }
)


def test_reads_plain_and_gzipped_alike(tmp_path):
    plain = write(tmp_path / "t.jsonl", GOOD, "")
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    session = Session("a", (Call(10, 0, 2, 1.5), Call(20, 12, 1, 0.0)))
    assert read_trace(plain) == read_trace(packed) == [session]


def test_unknown_tool_waits_come_from_the_gap_less_the_generation(tmp_path):
    calls = [
        {"prompt_tokens": 9, "output_tokens": 1, "gap_s": 5, "gen_s": 2},
        {"prompt_tokens": 9, "output_tokens": 1},
    ]
    (session,) = read_trace(write(tmp_path / "t.jsonl", json.dumps({"session_id": "a", "calls": calls})))
    assert session.calls[0].tool_s == 3


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{broken", "t.jsonl:2: "),
        ('{"session_id": "b", "calls": []}', "calls"),
        ('{"session_id": "b"}', "calls"),
        ('{"session_id": "", "calls": [{"prompt_tokens": 1, "output_tokens": 1}]}', "session_id"),
        ('{"session_id": "b", "calls": [{"prompt_tokens": -1, "output_tokens": 1}]}', "prompt_tokens"),
        ('{"session_id": "b", "calls": [{"prompt_tokens": 1000, "output_tokens": "x"}]}', "output_tokens"),
        ('{"session_id": "b", "calls": [{"prompt_tokens": 1, "output_tokens": 1, "tool_s": -4}]}', "tool_s"),
        (
            '{"session_id": "b", "calls": [{"prompt_tokens": 5, "cached_prefix_tokens": 3, "output_tokens": 1}]}',
            r"calls\[0\].cached_prefix_tokens is 3",
        ),
        (GOOD, "'a' was already on line 1"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, named):
    with pytest.raises(TraceError, match=named) as caught:
        read_trace(write(tmp_path / "t.jsonl", GOOD, line))
    assert "t.jsonl:2" in str(caught.value)


def test_broken_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match=r"neither a file nor one of the shipped traces.*swe_bench"):
        find_trace("swe_bnech")
    with pytest.raises(TraceError, match="no session"):
        read_trace(write(tmp_path / "empty.jsonl", ""))
    cut = tmp_path / "cut.jsonl.gz"
    lines = "".join(GOOD.replace('"a"', f'"{n}"') + "\n" for n in range(3000))
    cut.write_bytes(gzip.compress(lines.encode())[:-200])
    with pytest.raises(TraceError, match="broken gzip after line"):
        read_trace(cut)
    fake = tmp_path / "fake.jsonl.gz"
    fake.write_text(GOOD)
    with pytest.raises(TraceError, match="broken gzip"):
        read_trace(fake)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00garbage\n")
    with pytest.raises(TraceError, match=r"binary\.jsonl:1"):
        read_trace(binary)
    monkeypatch.setattr(trace_module, "MAX_LINE_BYTES", 100)
    with pytest.raises(TraceError, match=r"t.jsonl:1: the line is longer"):
        read_trace(write(tmp_path / "t.jsonl", GOOD))
    monkeypatch.setattr(trace_module, "MAX_LINE_BYTES", 10_000)
    monkeypatch.setattr(trace_module, "MAX_FILE_BYTES", 300)
    with pytest.raises(TraceError, match="the trace is larger"):
        read_trace(write(tmp_path / "t.jsonl", GOOD, GOOD.replace('"a"', '"b"')))


def test_shipped_traces_are_whole_and_small():
    paths = shipped_traces()
    assert set(paths) == {"swe_bench", "swe_bench_lmcache", "claude_code_kvtester", "mooncake_conversation"}
    assert sum(path.stat().st_size for path in paths.values()) < 2_000_000
    counts = {name: len(read_trace(path)) for name, path in paths.items()}
    assert counts == {
        "swe_bench": 414,
        "swe_bench_lmcache": 20,
        "claude_code_kvtester": 507,
        "mooncake_conversation": 1877,
    }
    notice = (paths["swe_bench"].parent / "NOTICE").read_text()
    assert all(name in notice for name in paths)


def test_plans_are_the_same_for_the_same_seed_and_reuse_sessions_under_new_ids():
    trace = scale_trace(read_trace(find_trace("swe_bench_lmcache")), Scaling(tokens=0.1))
    profile = ArrivalProfile(rate_per_s=1, duration_s=50, tail_s=10, process="fixed")
    plan = build_plan(trace, profile, seed=5)
    assert plan == build_plan(trace, profile, seed=5)
    assert plan != build_plan(trace, profile, seed=6)
    assert len(plan.sessions) == 60
    assert len({planned.uid for planned in plan.sessions}) == 60
    deck = [planned.session.trace_id for planned in plan.sessions]
    for start in (0, 20, 40):
        assert len(set(deck[start : start + 20])) == 20
    assert sum(planned.counted for planned in plan.sessions) == 50
    recorded = build_plan(trace, profile, seed=5, order="recorded", max_sessions=25)
    assert [planned.session for planned in recorded.sessions] == [*trace, *trace[:5]]


def test_no_plan_from_nothing():
    profile = ArrivalProfile(rate_per_s=1, duration_s=1)
    with pytest.raises(ValueError, match="without sessions"):
        build_plan([], profile, 1)
    with pytest.raises(TraceError, match="at most 5 tokens"):
        scale_trace([Session("a", (Call(10, 0, 1, 0.0),))], Scaling(max_context_tokens=5))
    with pytest.raises(ValueError, match="tokens must be positive"):
        Scaling(tokens=0)
