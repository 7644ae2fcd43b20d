"""A simulated run beside a measured one: the same plan, both judged by `replay`'s own summary and timeline."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sglang_basin.replay.arrivals import Surge
from sglang_basin.replay.plan import Plan
from sglang_basin.replay.records import CallRecord, RunRecord, RunResult, SessionRecord, read_records
from sglang_basin.simulator.records import CALL_NAMES, SESSION_NAMES, Log, Outcome
from sglang_basin.simulator.study import StudySettings


class MeasuredError(ValueError):
    """A measured run that is not the run of these settings; the message says where they differ."""


def settings_of(measured: RunResult, settings: StudySettings) -> StudySettings:
    """The settings with the measured run's seed and arrivals."""
    run = measured.run
    return dataclasses.replace(
        settings,
        seed=run.seed,
        rate_per_s=run.rate_per_s,
        duration_s=run.duration_s,
        tail_s=run.tail_s,
        surge=Surge(*run.surge) if run.surge else None,
        process="fixed" if run.process == "fixed" else "poisson",
    )


def read_measured(path: Path, settings: StudySettings) -> tuple[RunResult, StudySettings]:
    """A run of `replay` and the settings to simulate it with. Raises RecordError, or MeasuredError when the plan that
    these settings make is not what was replayed (another trace or scaling)."""
    measured = read_records(path)
    settings = settings_of(measured, settings)
    plan = settings.plan()
    planned = {planned.uid: planned.session.calls for planned in plan.sessions}
    for call in measured.calls:
        calls = planned.get(call.uid)
        if calls is None or call.call >= len(calls):
            raise MeasuredError(f"{path}: call {call.call} of {call.uid} is not in the plan of these settings")
        if calls[call.call].prompt_tokens != call.planned_prompt_tokens:
            raise MeasuredError(
                f"{path}: call {call.call} of {call.uid} had a prompt of {call.planned_prompt_tokens} tokens, the plan "
                f"of these settings has {calls[call.call].prompt_tokens}: give the trace and scaling of that run"
            )
    return measured, settings


def as_run_result(log: Log, unloaded_s: dict[str, float], tpot_target_s: float = 0.05) -> RunResult:
    """A simulated run in the form of a replayed one, for `replay`'s summary, timeline, page and plots.

    Of a call's decode steps only the sum of their times and the number of late ones are known: they become one entry
    of steps on time and one of late ones.
    """
    plan = log.plan
    result = RunResult(describe(plan), elapsed_s=log.elapsed_s)
    for row, number in enumerate(log.call_session):
        planned = plan.sessions[number]
        index = log.call_index[row]
        call = planned.session.calls[index]
        first_s, end_s = log.call_first_token_s[row], log.call_end_s[row]
        began = first_s >= 0
        steps, on_time = log.call_steps[row], log.call_steps_on_time[row]
        decode_s = end_s - first_s if began else 0.0
        on_time_s = on_time * min(decode_s / steps, 0.999 * tpot_target_s) if steps else 0.0
        chunks = [(on_time, on_time_s), (steps - on_time, decode_s - on_time_s)]
        outcome = Outcome(log.call_outcome[row])
        result.calls.append(
            CallRecord(
                uid=planned.uid,
                call=index,
                retried=bool(log.call_retried[row]),
                due_at_s=log.call_due_s[row],
                sent_at_s=log.call_due_s[row],
                first_token_at_s=first_s if began else None,
                end_at_s=end_s,
                planned_prompt_tokens=call.prompt_tokens,
                planned_cached_tokens=call.cached_prefix_tokens,
                planned_output_tokens=call.output_tokens,
                prompt_tokens=log.call_prompt_tokens[row] if began else None,
                cached_tokens=log.call_cached_tokens[row] if began else None,
                output_tokens=steps + 1 if began else 0,
                steps=[chunk for chunk in chunks if chunk[0]],
                outcome=CALL_NAMES[outcome],
            )
        )
    for number in range(log.opened_sessions):
        planned = plan.sessions[number]
        result.sessions.append(
            SessionRecord(
                uid=planned.uid,
                trace_id=planned.session.trace_id,
                arrival_at_s=planned.arrival_s,
                end_at_s=log.session_end_s[number],
                outcome=SESSION_NAMES[Outcome(log.session_outcome[number])],
                counted=planned.counted,
                calls_done=log.session_calls_done[number],
                calls_planned=len(planned.session.calls),
                peak_tokens=planned.session.peak_tokens,
                unloaded_s=unloaded_s.get(planned.session.trace_id),
            )
        )
    return result


def describe(plan: Plan) -> RunRecord:
    profile = plan.profile
    return RunRecord(
        trace=plan.trace_name,
        seed=plan.seed,
        process=profile.process,
        rate_per_s=profile.rate_per_s,
        duration_s=profile.duration_s,
        tail_s=profile.tail_s,
        surge=dataclasses.astuple(profile.surge) if profile.surge else None,
        endpoint="simulated",
        planned_sessions=len(plan.sessions),
    )
