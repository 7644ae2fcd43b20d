import json
import re

import pytest
from msgspec.structs import replace

from sglang_basin.replay import report
from sglang_basin.replay.records import (
    CallRecord,
    OpenedRecord,
    RecordError,
    RecordWriter,
    RunRecord,
    SessionRecord,
    read_records,
)
from sglang_basin.replay.summary import first_waits, summarize, time_series, timeline

RUN = RunRecord(
    trace="t",
    seed=1,
    process="fixed",
    rate_per_s=0.1,
    duration_s=300.0,
    surge=(2.5, 60.0, 120.0),
    planned_sessions=30,
)


def call(uid, number, start, *, ttft=0.5, prompt=1000, cached=900, output=11, step=0.02, outcome="ok"):
    answered = outcome == "ok"
    return CallRecord(
        uid=uid,
        call=number,
        due_at_s=start,
        sent_at_s=start,
        first_token_at_s=start + ttft if answered else None,
        end_at_s=start + ttft + (output - 1) * step,
        planned_prompt_tokens=prompt,
        planned_cached_tokens=cached,
        planned_output_tokens=output,
        prompt_tokens=prompt if answered else None,
        cached_tokens=cached if answered else None,
        output_tokens=output if answered else 0,
        steps=[(1, step)] * (output - 1) if answered else [],
        outcome=outcome,
    )


def record(path=None, *, healthy=True, ended=True, interrupted=False):
    """30 sessions, one every ten seconds; after the surge an unhealthy server loses its cache and answers no more."""
    with RecordWriter(RUN, path) as writer:
        for number in range(30):
            at, uid = 10.0 * number, f"u{number}"
            opened = OpenedRecord(
                uid=uid,
                trace_id=f"trace-{number}",
                arrival_at_s=at,
                calls_planned=2,
                peak_tokens=2011,
                unloaded_s=2.0,
            )
            writer.opened(opened)
            fine = healthy or at < 120
            writer.call(
                call(uid, 0, at, cached=0, outcome="ok" if fine else "cancelled", ttft=0.5 if fine else 300 - at)
            )
            if fine:
                writer.call(call(uid, 1, at + 2, prompt=2000, cached=1800 if at < 200 else 1900))
            if fine:
                writer.session(opened.ended(at + 3, "finished", 2))
            else:
                writer.session(opened.ended(300.0, "unfinished", 0))
        if ended:
            writer.end(150.0 if interrupted else 300.0, interrupted)
    return writer.result


def test_the_summary_counts_what_happened():
    healthy, stuck = summarize(record()), summarize(record(healthy=False))
    assert (healthy.goodput_per_hour, healthy.offered_per_hour, healthy.completed_share) == (360, 360, 1)
    assert healthy.hit_rate_before_surge == pytest.approx(1800 / 3000)
    assert healthy.hit_rate_last_third == pytest.approx(1900 / 3000)
    assert (healthy.arrived_after_surge, healthy.finished_after_surge) == (18, 18)
    assert healthy.first_call_wait_p50_s == pytest.approx(0.5)
    assert healthy.tpot_p50_s == pytest.approx(0.02)
    assert healthy.stretch_p50 == pytest.approx(1.5)
    assert stuck.completed_share == pytest.approx(12 / 30)
    assert stuck.goodput_per_hour == pytest.approx(144)
    assert stuck.hit_rate_last_third is None
    assert (stuck.arrived_after_surge, stuck.finished_after_surge) == (18, 0)
    assert stuck.first_call_wait_p50_s > 10
    assert stuck.session_outcomes == {"unfinished": 18, "finished": 12}
    assert stuck.call_outcomes == {"ok": 24, "cancelled": 18}


def test_the_last_third_is_that_of_the_time_under_load():
    result = record()
    result.run = replace(RUN, duration_s=200.0, tail_s=100.0)
    assert summarize(result).hit_rate_last_third == pytest.approx(1900 / 3000)
    result.run = replace(RUN, duration_s=100.0)  # what follows is the drain
    assert summarize(result).hit_rate_last_third == pytest.approx(1800 / 3000)


def test_slow_decode_steps_fail_the_target():
    result = record()
    result.calls = [
        call(c.uid, c.call, c.due_at_s, prompt=c.prompt_tokens, cached=c.cached_tokens, step=0.06) for c in result.calls
    ]
    summary = summarize(result)
    assert summary.within_target_sessions == 0
    assert summary.steps_on_time_share == 0


def test_goodput_is_not_guessed_without_unloaded_times():
    result = record()
    result.sessions = [
        SessionRecord(**{f: getattr(s, f) for f in s.__struct_fields__ if f != "unloaded_s"}) for s in result.sessions
    ]
    summary = summarize(result)
    assert summary.goodput_per_hour is None
    assert summary.unloaded_sessions == 0
    assert "--measure-unloaded" in report.text_table({"run": summary})
    given = summarize(result, unloaded_s={f"trace-{n}": 2.0 for n in range(30)})
    assert given.goodput_per_hour == 360


def test_an_interrupted_run_is_judged_over_the_time_it_had():
    result = record(interrupted=True)
    result.sessions = result.sessions[:15]
    summary = summarize(result)
    assert summary.offered_per_hour == summary.goodput_per_hour == 360
    assert "stopped after 2m30s of 5m" in report.text_table({"run": summary})


def test_series_follow_the_sessions():
    result = record(healthy=False)
    series = time_series(result)
    assert series.waiting_sessions[-1] == 18
    assert series.live_sessions[-1] == 18
    assert series.working_set_tokens[-1] == 0
    assert series.working_set_tokens.max() in (2000, 2011)
    assert series.finished_sessions[-1] == 12
    assert [wait.answered for wait in first_waits(result)] == [True] * 12 + [False] * 18


def test_records_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "calls.jsonl"
    result = record(path)
    assert read_records(path) == result
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b'"uid":"u10","call":1') + 10])  # killed in the middle of a line
    cut = read_records(path)
    assert cut.interrupted
    assert cut.calls == result.calls[:21]
    assert [session.outcome for session in cut.sessions[-2:]] == ["finished", "unfinished"]
    assert cut.sessions[:-1] == result.sessions[:10]
    assert (cut.sessions[-1].uid, cut.sessions[-1].calls_done) == ("u10", 1)
    assert 0 < cut.elapsed_s < 300


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "empty"),
        ('{"kind": "end", "elapsed_s": 1}\n', ":1: the first line must describe the run"),
        ("RUN\nRUN\n", ":2: a second run"),
        ('RUN\n{"kind": "call"}\n', ":2: "),
        ("RUN\nnonsense\n", ":2: "),
        ('RUN\n{"kind": "party"}\n', ":2: "),
    ],
)
def test_broken_records_are_named(tmp_path, content, named):
    run = '{"kind":"run","trace":"t","seed":1,"process":"fixed","rate_per_s":1,"duration_s":1}'
    path = tmp_path / "calls.jsonl"
    path.write_text(content.replace("RUN", run))
    with pytest.raises(RecordError, match=named):
        read_records(path)
    with pytest.raises(RecordError, match="No such file"):
        read_records(tmp_path / "missing.jsonl")


def test_the_page_is_one_file_with_every_arm(tmp_path):
    arms = {"stock <1>": record(healthy=False), "basin": record()}
    path = tmp_path / "new" / "page.html"
    report.write_page(path, arms, title="Surge & escape", cache_tokens=24_000)
    page = path.read_text()
    assert "stock &lt;1&gt;" in page
    assert "stock <1>" not in page
    assert "Surge &amp; escape" in page
    assert "<svg" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page.replace("xlink:href", "href").replace('href="#', "ok#"))
    assert "surge +250% from 1m to 2m" in page
    for row in report.ROWS:
        assert row.label in page
    png = tmp_path / "plots.png"
    report.write_png(png, arms)
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one arm"):
        report.write_page(path, {})


def test_the_json_has_the_demo_fields(tmp_path):
    path = tmp_path / "summary.json"
    result = record(healthy=False)
    report.write_json(path, {"stock": summarize(result)}, {"stock": result}, seed=1)
    read = json.loads(path.read_text())
    assert read["seed"] == 1
    for field in (
        "goodput_per_hour",
        "offered_per_hour",
        "completed_share",
        "hit_rate_last_third",
        "first_call_wait_p50_s",
    ):
        assert field in read["arms"]["stock"]
    moments = read["arms"]["stock"]["timeline"]
    assert [moment["from_s"] for moment in moments] == list(range(0, 300, 30))
    assert moments[-1]["waiting_sessions"] > 15
    assert (moments[0]["hit_rate"], moments[-1]["hit_rate"]) == (pytest.approx(1800 / 3000), None)


def test_the_timeline_in_text_marks_the_surge():
    lines = report.text_timeline("stock", record(healthy=False)).splitlines()
    assert lines[0] == "stock over time"
    assert [line.split("  ")[0] for line in lines[2:]] == [
        *("0s", "30s", "1m surge", "1m30s surge", "2m", "2m30s", "3m", "3m30s", "4m", "4m30s")
    ]


def test_a_run_without_any_session_can_still_be_reported(tmp_path):
    with RecordWriter(RUN) as writer:
        writer.end(0.5, True)
    table = report.text_table({"run": summarize(writer.result)})
    assert "no session was offered" in table
    report.write_page(tmp_path / "page.html", {"run": writer.result})


def test_the_milliseconds_after_the_end_get_no_row_of_their_own():
    result = record()
    result.elapsed_s = 300.004
    moments = timeline(result)
    assert [moment.from_s for moment in moments] == list(range(0, 300, 30))
    assert moments[-1].to_s == 300.004
    result.elapsed_s = 0.0
    assert len(timeline(result)) == 1
