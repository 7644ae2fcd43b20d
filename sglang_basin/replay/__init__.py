"""Replay recorded agent sessions against a live server, and judge how they were served.

As a command: `python -m sglang_basin.replay --help`. As a library:

    sessions = scale_trace(read_trace(find_trace("swe_bench")), Scaling(tokens=1 / 20, max_calls=24))
    profile = ArrivalProfile(rate_per_s=11 / 60, duration_s=420, surge=Surge(2.5, 60, 120), process="fixed")
    plan = build_plan(sessions, profile, seed=1, trace_name="swe_bench")
    result = await run(plan, "http://127.0.0.1:8000", on_progress=print)
    summary = summarize(result, unloaded_s=...)
    write_page(Path("page.html"), {"stock": result})

Read on: `trace` (the recordings), `arrivals` and `plan` (the load), `prompts` (what is sent), `driver` (the closed
loop), `records` (what is kept), `goodput`, `unloaded` and `summary` (how it is judged), `report` (how it is shown).
The modules with the numbers are pure; only `driver` talks to a server.
"""

from sglang_basin.replay.arrivals import ArrivalError, ArrivalProfile, Surge, arrival_times
from sglang_basin.replay.driver import DriveSettings, Progress, ServerError, check_server, run
from sglang_basin.replay.goodput import Target
from sglang_basin.replay.plan import Plan, PlannedSession, build_plan
from sglang_basin.replay.records import CallRecord, RecordError, RunRecord, RunResult, SessionRecord, read_records
from sglang_basin.replay.summary import Summary, summarize, time_series
from sglang_basin.replay.trace import (
    Call,
    Scaling,
    Session,
    TraceError,
    find_trace,
    read_trace,
    scale_trace,
    shipped_traces,
)
from sglang_basin.replay.unloaded import (
    UnloadedError,
    UnloadedTimes,
    measure_unloaded,
    read_unloaded,
    write_unloaded,
)

__all__ = [
    "ArrivalError",
    "ArrivalProfile",
    "Call",
    "CallRecord",
    "DriveSettings",
    "Plan",
    "PlannedSession",
    "Progress",
    "RecordError",
    "RunRecord",
    "RunResult",
    "Scaling",
    "ServerError",
    "Session",
    "SessionRecord",
    "Summary",
    "Surge",
    "Target",
    "TraceError",
    "UnloadedError",
    "UnloadedTimes",
    "arrival_times",
    "build_plan",
    "check_server",
    "find_trace",
    "measure_unloaded",
    "read_records",
    "read_trace",
    "read_unloaded",
    "run",
    "scale_trace",
    "shipped_traces",
    "summarize",
    "text_table",
    "time_series",
    "write_json",
    "write_page",
    "write_png",
    "write_unloaded",
]


def __getattr__(name: str) -> object:
    """`report` brings matplotlib: load it only for those who draw."""
    if name in ("text_table", "write_json", "write_page", "write_png"):
        from sglang_basin.replay import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
