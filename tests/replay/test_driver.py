import asyncio
import time

import pytest
from replay_server import Behaviour, serving

from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.driver import DriveSettings, ServerError, check_server, run, served_model
from sglang_basin.replay.plan import build_plan
from sglang_basin.replay.records import read_records
from sglang_basin.replay.stream import ChatAnswer, EventDecoder, GenerateAnswer, ProtocolError
from sglang_basin.replay.summary import hit_rate, summarize, time_series
from sglang_basin.replay.trace import Call, Session


def session(calls=3, *, prompt=60, output=6, tool_s=0.0, name="s"):
    made, context = [], 0
    for index in range(calls):
        made.append(Call(context + prompt, context, output, tool_s if index < calls - 1 else 0.0))
        context = made[-1].context_tokens
    return Session(name, tuple(made), 0)


def plan_of(sessions, *, rate=200.0, duration=0.5, seed=1, **more):
    profile = ArrivalProfile(rate_per_s=rate, duration_s=duration, process="fixed", **more)
    return build_plan(sessions, profile, seed, order="recorded", max_sessions=len(sessions))


async def replay(server, plan, *, drain_s=20.0, **settings):
    unloaded_s = settings.pop("unloaded_s", None)
    return await run(plan, server.url, settings=DriveSettings(drain_s=drain_s, **settings), unloaded_s=unloaded_s)


def outcomes(result):
    return [record.outcome for record in result.calls], [record.outcome for record in result.sessions]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
async def test_a_session_resends_what_the_server_answered(incremental, tokens_per_chunk):
    behaviour = Behaviour(token_s=0.002, incremental=incremental, tokens_per_chunk=tokens_per_chunk)
    async with serving(behaviour) as server:
        result = await replay(server, plan_of([session(4)]))
    assert outcomes(result) == (["ok"] * 4, ["finished"])
    bodies = server.requests
    for index, (body, record) in enumerate(zip(bodies, result.calls, strict=True)):
        assert body["stream"] is True
        assert body["session_id"] == "replay-1-00000"
        assert body["sampling_params"] == {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}
        assert body.get("metadata") == ({"basin_session_end": "true"} if index == 3 else None)
        assert len(body["input_ids"]) == record.prompt_tokens == record.planned_prompt_tokens
        assert record.cached_tokens == record.planned_cached_tokens  # the server compared real tokens
        assert record.output_tokens == 6
        assert sum(tokens for tokens, _ in record.steps) <= 5
        assert record.due_at_s <= record.first_token_at_s <= record.end_at_s
    assert all(headers["x-basin-session-id"] == "replay-1-00000" for headers in server.headers)


async def test_decode_steps_show_the_servers_pace():
    async with serving(Behaviour(first_token_s=0.1, token_s=0.02)) as server:
        result = await replay(server, plan_of([session(1, output=12)]))
    (call,) = result.calls
    assert 0.1 <= call.ttft_s < 2
    assert sum(tokens for tokens, _ in call.steps) == 11
    assert 0.5 * 11 * 0.02 < sum(seconds for _, seconds in call.steps) < 2


async def test_tools_are_waited_for_and_the_end_need_not_be_announced():
    async with serving() as server:
        result = await replay(server, plan_of([session(3, tool_s=0.15)]), announce_end=False)
    for before, after in zip(result.calls, result.calls[1:], strict=False):
        assert 0.15 <= after.due_at_s - before.end_at_s < 2
    assert all("metadata" not in body for body in server.requests)
    assert result.sessions[0].total_s >= 0.3


@pytest.mark.parametrize(
    ("what", "call", "session_outcome", "status"),
    [
        ("reject", "rejected", "rejected", 503),
        ("abort_503", "rejected", "rejected", 503),
        ("abort", "aborted", "failed", None),
        ("drop", "dropped", "dropped", None),
        ("cut", "dropped", "dropped", None),
        ("garbage", "error", "failed", None),
        ("bad_request", "error", "failed", 400),
        ("error", "error", "failed", 502),
    ],
)
async def test_a_call_that_dies_ends_its_session(what, call, session_outcome, status):
    behaviour = Behaviour(token_s=0.002, answer=lambda body, number: what if number == 1 else "ok")
    async with serving(behaviour) as server:
        result = await replay(server, plan_of([session(3)]), retries=0)
    assert outcomes(result) == (["ok", call], [session_outcome])
    assert result.sessions[0].calls_done == 1
    died = result.calls[-1]
    assert died.status == status
    assert died.error
    assert died.retry_after_s == {"reject": 0.05, "abort_503": 7.0, "abort": 7.0}.get(what)
    assert len(server.requests) == 2


async def test_a_stalled_call_times_out_and_is_closed():
    async with serving(Behaviour(answer=lambda body, number: "stall")) as server:
        started = time.perf_counter()
        result = await replay(server, plan_of([session(2)]), call_timeout_s=0.3)
        assert time.perf_counter() - started < 10
        assert outcomes(result) == (["timeout"], ["failed"])
        await asyncio.sleep(0.1)
        assert server.open_calls == 0


async def test_retries_honour_retry_after_and_count_into_the_wait():
    behaviour = Behaviour(answer=lambda body, number: "reject" if number < 2 else "ok")
    async with serving(behaviour) as server:
        result = await replay(server, plan_of([session(2)]), retries=2)
    assert outcomes(result) == (["rejected", "rejected", "ok", "ok"], ["finished"])
    first = result.calls[2]
    assert [record.retried for record in result.calls] == [True, True, False, False]
    assert [record.attempt for record in result.calls] == [0, 1, 2, 0]
    assert 0.1 <= first.ttft_s < 5
    assert first.due_at_s == result.calls[0].due_at_s
    assert server.requests[0] == server.requests[2]
    summary = summarize(result)
    assert summary.call_outcomes == {"ok": 2}
    assert summary.first_call_wait_p50_s == pytest.approx(first.ttft_s)


async def test_retries_are_not_spent_on_bad_requests_or_broken_streams():
    for what in ("bad_request", "cut"):
        behaviour = Behaviour(token_s=0.002, answer=lambda body, number, what=what: what)
        async with serving(behaviour) as server:
            await replay(server, plan_of([session(2)]), retries=3)
        assert len(server.requests) == 1


async def test_the_end_of_the_run_leaves_sessions_unfinished_and_calls_closed(tmp_path):
    slow = plan_of([session(2, name=f"s{n}") for n in range(5)], duration=0.4)
    async with serving(Behaviour(first_token_s=30)) as server:
        path = tmp_path / "calls.jsonl"
        result = await run(slow, server.url, records_path=path)
        await asyncio.sleep(0.1)
        assert server.open_calls == 0
    assert outcomes(result) == (["cancelled"] * 5, ["unfinished"] * 5)
    assert not result.interrupted
    assert 0.4 <= result.elapsed_s < 5
    assert read_records(path) == result
    summary = summarize(result, unloaded_s={f"s{n}": 1.0 for n in range(5)})
    assert (summary.goodput_per_hour, summary.completed_share) == (0, 0)
    assert summary.first_call_wait_p50_s > 0.2  # lower bounds of sessions still waiting


async def test_sessions_of_the_tail_are_driven_but_not_judged():
    sessions = [session(1, name=f"s{n}") for n in range(8)]
    profile = ArrivalProfile(rate_per_s=20, duration_s=0.2, tail_s=0.2, process="fixed")
    async with serving() as server:
        result = await replay(server, build_plan(sessions, profile, 1))
    summary = summarize(result, unloaded_s={s.trace_id: 1.0 for s in sessions})
    assert len(server.requests) == len(result.sessions) == 8
    assert summary.offered_sessions == summary.within_target_sessions == 4
    assert summary.offered_per_hour == pytest.approx(4 / 0.2 * 3600)


async def test_two_runs_of_one_plan_send_the_same_bodies():
    plan = plan_of([session(3, name=f"s{n}") for n in range(4)])
    sent = []
    for _ in range(2):
        async with serving() as server:
            await replay(server, plan)
        sent.append(sorted((body["session_id"], len(body["input_ids"]), str(body)) for body in server.requests))
    assert sent[0] == sent[1]
    assert len(sent[0]) == 12


async def test_chat_calls_grow_a_conversation():
    async with serving() as server:
        result = await replay(server, plan_of([session(3)]), endpoint="chat", model="m")
    assert outcomes(result) == (["ok"] * 3, ["finished"])
    first, second, third = server.requests
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["messages"][len(first["messages"])]["role"] == "assistant"
    assert third["messages"][: len(second["messages"])] == second["messages"]
    assert first["model"] == "m"
    assert first["stream_options"]["include_usage"] is True
    record = result.calls[1]
    assert record.prompt_tokens == pytest.approx(record.planned_prompt_tokens, rel=0.1)
    assert record.cached_tokens == record.prompt_tokens // 2
    assert record.output_tokens == 6


async def test_500_concurrent_sessions():
    sessions = [session(2, prompt=400, output=16, tool_s=1.0, name=f"s{n}") for n in range(500)]
    plan = plan_of(sessions, rate=1000.0, duration=0.6)
    seen = []
    async with serving(Behaviour(first_token_s=0.4, token_s=0.05, tokens_per_chunk=2)) as server:
        result = await run(
            plan,
            server.url,
            settings=DriveSettings(drain_s=30),
            on_progress=seen.append,
            progress_every_s=0.2,
        )
    assert outcomes(result) == (["ok"] * 1000, ["finished"] * 500)
    assert max(progress.live for progress in seen) == 500
    assert seen[-1].finished == 500
    assert hit_rate(result.calls) == pytest.approx(416 / 1216)
    series = time_series(result)
    assert series.live_sessions.max() == 500
    assert series.live_sessions[-1] < 100
    assert series.working_set_tokens.max() <= 500 * 832


async def test_no_server_is_a_clear_error():
    with pytest.raises(ServerError, match=r"--url http://127.0.0.1:9.*no HTTP server answers"):
        await check_server("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="--url nonsense"):
        await check_server("nonsense")
    with pytest.raises(ServerError, match="give one with --model"):
        await served_model("http://127.0.0.1:9")
    async with serving() as server:
        await check_server(server.url)
        assert await served_model(server.url) == "tiny"


def test_events_survive_any_cut_of_the_bytes():
    stream = b'data: {"a": 1}\r\n\r\n: comment\n\nevent: x\ndata: two\ndata: lines\n\ndata:[DONE]\n\ndata: unfinished'
    for cut in range(len(stream)):
        decoder = EventDecoder()
        events = decoder.feed(stream[:cut]) + decoder.feed(stream[cut:])
        assert events == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def test_answers_refuse_what_is_not_the_protocol():
    for answer in (GenerateAnswer(), ChatAnswer()):
        with pytest.raises(ProtocolError, match="unreadable event"):
            answer.feed(b'data: {"output_ids": "x", "choices": 3}\n\n')


def test_a_failure_after_the_first_event_of_a_stream_is_kept():
    answer = GenerateAnswer()
    meta = b'"meta_info": {"prompt_tokens": 4, "completion_tokens": 1, "cached_tokens": 2}'
    assert answer.feed(b'data: {"output_ids": [7], ' + meta + b"}\n\n") == 1
    answer.feed(b'data: {"error": {"message": "gone", "code": 400}}\n\n')
    assert (answer.failure.message, answer.failure.status, answer.output_ids) == ("gone", 400, [7])


def test_chat_chunks_count_by_their_own_usage_where_they_have_it():
    answer = ChatAnswer()
    assert answer.feed(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}\n\n') == 0
    chunk = (
        b'data: {"choices": [{"delta": {"content": "ab"}}], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}\n\n'
    )
    assert answer.feed(chunk % 3) == 3
    assert answer.feed(chunk % 4) == 1
    assert answer.feed(b'data: {"choices": [{"delta": {"content": "c"}}]}\n\n') == 1
    assert answer.feed(b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\n') == 0
    assert (answer.text, answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == ("ababc", 7, 9, None)
    assert not answer.finished
