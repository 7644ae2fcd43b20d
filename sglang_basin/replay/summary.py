"""The numbers of a run: one summary, and the time series behind its plots. Pure.

Where a session still waited when it was cut off, its wait so far stands in for the wait: medians of first-call waits
are then lower bounds. Hit rates are token hit rates: cached tokens over prompt tokens, as the server counted both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.replay.goodput import ServedSession, Target, count_steps, goodput
from sglang_basin.replay.records import CallRecord, RunResult, SessionRecord

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers. None where nothing was measured. Field order is the table's order."""

    goodput_per_hour: float | None
    """Offered sessions an hour served within target; None without unloaded times."""
    offered_per_hour: float
    completed_share: float | None
    """The share of offered sessions that finished within target; None without unloaded times."""
    hit_rate_before_surge: float | None
    hit_rate_last_third: float | None
    first_call_wait_p50_s: float | None
    first_call_wait_p99_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    call_latency_p50_s: float | None
    steps_on_time_share: float | None
    stretch_p50: float | None
    """Median of total / unloaded time over the finished sessions."""
    offered_sessions: int
    finished_sessions: int
    within_target_sessions: int | None
    arrived_after_surge: int | None
    finished_after_surge: int | None
    """Of the sessions that arrived after the surge."""
    session_outcomes: dict[str, int]
    call_outcomes: dict[str, int]
    unloaded_sessions: int
    """Offered sessions whose unloaded time is known."""
    duration_s: float
    elapsed_s: float
    interrupted: bool
    target: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def hit_rate(calls: Iterable[CallRecord], from_s: float = 0.0, to_s: float = math.inf) -> float | None:
    """Token hit rate of the calls whose first token came within [from_s, to_s)."""
    prompt_tokens = cached_tokens = 0
    for call in calls:
        if call.first_token_at_s is None or not from_s <= call.first_token_at_s < to_s:
            continue
        if call.prompt_tokens and call.cached_tokens is not None:
            prompt_tokens += call.prompt_tokens
            cached_tokens += call.cached_tokens
    return cached_tokens / prompt_tokens if prompt_tokens else None


@dataclass(frozen=True, slots=True)
class FirstWait:
    """How long a session waited for the first token of its first call. `answered`: False for a lower bound."""

    arrival_s: float
    wait_s: float
    answered: bool


def first_waits(result: RunResult, *, counted_only: bool = True) -> list[FirstWait]:
    """Of each session, in arrival order."""
    first_token_at_s = {
        call.uid: call.first_token_at_s for call in result.calls if call.call == 0 and call.first_token_at_s is not None
    }
    waits = []
    for session in sorted(result.sessions, key=lambda session: session.arrival_at_s):
        if counted_only and not session.counted:
            continue
        at_s = first_token_at_s.get(session.uid)
        until_s = session.end_at_s if at_s is None else at_s
        waits.append(FirstWait(session.arrival_at_s, until_s - session.arrival_at_s, at_s is not None))
    return waits


def _served(
    sessions: Sequence[SessionRecord], calls: Iterable[CallRecord], unloaded_s: Mapping[str, float], tpot_s: float
) -> list[ServedSession]:
    steps: Counter[str] = Counter()
    on_time: Counter[str] = Counter()
    for call in calls:
        some, met = count_steps(call.steps, tpot_s)
        steps[call.uid] += some
        on_time[call.uid] += met
    return [
        ServedSession(
            finished=session.outcome == "finished",
            total_s=session.total_s,
            unloaded_s=unloaded_s[session.uid],
            steps=steps[session.uid],
            steps_on_time=on_time[session.uid],
        )
        for session in sessions
    ]


def summarize(
    result: RunResult, *, unloaded_s: Mapping[str, float] | None = None, target: Target | None = None
) -> Summary:
    """Judge a run. `unloaded_s` gives unloaded times by trace session id; those stamped on the records fill in.

    Sessions of the profile's tail are not judged. "The last third" is that of the time under load: the tail belongs to
    it, the drain does not. An interrupted run is judged over the time it had, and the rates are per hour of that time.
    Goodput needs every offered session's unloaded time and is None otherwise.
    """
    target = target or Target()
    offered = [session for session in result.sessions if session.counted]
    cut_s = result.elapsed_s if result.interrupted else math.inf
    span_s = min(result.run.duration_s, cut_s)
    loaded_s = min(result.run.duration_s + result.run.tail_s, cut_s)
    known_s = {
        session.uid: seconds
        for session in offered
        if (seconds := (unloaded_s or {}).get(session.trace_id, session.unloaded_s)) is not None
    }
    judged = None
    if offered and len(known_s) == len(offered) and span_s > 0:
        judged = goodput(_served(offered, result.calls, known_s, target.tpot_s), span_s, target)

    answered = [call for call in result.calls if call.first_token_at_s is not None]
    final = [call for call in result.calls if not call.retried]
    waits = [wait.wait_s for wait in first_waits(result)]
    ttfts = [call.ttft_s for call in answered if call.ttft_s is not None]
    gaps = [(seconds / tokens, tokens) for call in answered for tokens, seconds in call.steps]
    steps = [count_steps(call.steps, target.tpot_s) for call in answered]
    all_steps = sum(some for some, _ in steps)
    surge = result.run.surge
    after = [session for session in offered if surge is not None and session.arrival_at_s >= surge[2]]
    finished = [session for session in offered if session.outcome == "finished"]
    return Summary(
        goodput_per_hour=judged.per_hour if judged else None,
        offered_per_hour=3600 * len(offered) / span_s if span_s > 0 else 0.0,
        completed_share=judged.completed_share if judged else None,
        hit_rate_before_surge=hit_rate(answered, to_s=surge[1]) if surge else None,
        hit_rate_last_third=hit_rate(answered, from_s=loaded_s * 2 / 3, to_s=loaded_s),
        first_call_wait_p50_s=_quantile(waits, 0.5),
        first_call_wait_p99_s=_quantile(waits, 0.99),
        ttft_p50_s=_quantile(ttfts, 0.5),
        ttft_p99_s=_quantile(ttfts, 0.99),
        tpot_p50_s=_quantile([gap for gap, tokens in gaps for _ in range(tokens)], 0.5),
        call_latency_p50_s=_quantile([call.end_at_s - call.due_at_s for call in final if call.outcome == "ok"], 0.5),
        steps_on_time_share=sum(met for _, met in steps) / all_steps if all_steps else None,
        stretch_p50=_quantile(
            [s.total_s / known_s[s.uid] for s in finished if known_s.get(s.uid, 0.0) > 0],
            0.5,
        ),
        offered_sessions=len(offered),
        finished_sessions=len(finished),
        within_target_sessions=judged.within if judged else None,
        arrived_after_surge=len(after) if surge else None,
        finished_after_surge=sum(session.outcome == "finished" for session in after) if surge else None,
        session_outcomes=dict(Counter(session.outcome for session in offered).most_common()),
        call_outcomes=dict(Counter(call.outcome for call in final).most_common()),
        unloaded_sessions=len(known_s),
        duration_s=result.run.duration_s,
        elapsed_s=result.elapsed_s,
        interrupted=result.interrupted,
        target=asdict(target),
    )


# ---- Time series ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """What the plots show. Arrays over `bin_s` have one value a bin (NaN where nothing happened); those over
    `grid_s` are sampled at that time."""

    bin_s: Floats
    hit_rate: Floats
    ttft_p50_s: Floats
    ttft_p90_s: Floats
    grid_s: Floats
    live_sessions: Floats
    waiting_sessions: Floats
    """Live, and without the first token of the first call: queued at the door, or stuck in front of it."""
    working_set_tokens: Floats
    """Current contexts of the live sessions that are past their first token."""
    finished_sessions: Floats
    first_waits: list[FirstWait]


def _step_function(changes: Iterable[tuple[float, float]], grid_s: Floats) -> Floats:
    """The running sum of (time, change) at each grid time."""
    ordered = np.array(sorted(changes), dtype=np.float64).reshape(-1, 2)
    sums = np.concatenate(([0.0], np.cumsum(ordered[:, 1])))
    made: Floats = sums[np.searchsorted(ordered[:, 0], grid_s, side="right")]
    return made


def _context_changes(result: RunResult) -> list[tuple[float, float]]:
    """(time, change in tokens) of the working set: a prompt counts from its first token, its output from its end."""
    context: Counter[str] = Counter()
    changes: list[tuple[float, float]] = []
    for call in sorted(result.calls, key=lambda call: call.end_at_s):
        if call.first_token_at_s is None:
            continue
        prompt_tokens = call.prompt_tokens if call.prompt_tokens is not None else call.planned_prompt_tokens
        changes.append((call.first_token_at_s, prompt_tokens - context[call.uid]))
        changes.append((call.end_at_s, call.output_tokens))
        context[call.uid] = prompt_tokens + call.output_tokens
    changes += [(session.end_at_s, -context[session.uid]) for session in result.sessions]
    return changes


def time_series(result: RunResult, *, bins: int = 60, samples: int = 480) -> Series:
    """The run over time, from its start to its end."""
    end_s = max(result.elapsed_s, 1e-3)
    edges = np.linspace(0.0, end_s, bins + 1)
    prompt = np.zeros(bins)
    cached = np.zeros(bins)
    ttfts: list[list[float]] = [[] for _ in range(bins)]
    for call in result.calls:
        if call.first_token_at_s is None or call.ttft_s is None:
            continue
        index = min(bins - 1, int(call.first_token_at_s / end_s * bins))
        ttfts[index].append(call.ttft_s)
        if call.prompt_tokens and call.cached_tokens is not None:
            prompt[index] += call.prompt_tokens
            cached[index] += call.cached_tokens
    grid_s = np.linspace(0.0, end_s, samples, endpoint=False)
    waits = first_waits(result, counted_only=False)
    opened = [(session.arrival_at_s, 1.0) for session in result.sessions]
    closed = [(session.end_at_s, -1.0) for session in result.sessions]
    asked = [(wait.arrival_s, 1.0) for wait in waits]
    answered = [(wait.arrival_s + wait.wait_s, -1.0) for wait in waits]
    return Series(
        bin_s=(edges[:-1] + edges[1:]) / 2,
        hit_rate=np.divide(cached, prompt, out=np.full(bins, np.nan), where=prompt > 0),
        ttft_p50_s=np.array([np.quantile(some, 0.5) if some else np.nan for some in ttfts]),
        ttft_p90_s=np.array([np.quantile(some, 0.9) if some else np.nan for some in ttfts]),
        grid_s=grid_s,
        live_sessions=_step_function(opened + closed, grid_s),
        waiting_sessions=_step_function(asked + answered, grid_s),
        working_set_tokens=_step_function(_context_changes(result), grid_s),
        finished_sessions=_step_function(
            [(session.end_at_s, 1.0) for session in result.sessions if session.outcome == "finished"], grid_s
        ),
        first_waits=waits,
    )


# ---- The same in a few rows ----------------------------------------------------------------------------------------

_STRIDES_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One stretch [from_s, to_s) of a run. None where nothing happened."""

    from_s: float
    to_s: float
    hit_rate: float | None
    """Of the calls whose first token came in the stretch, as is `ttft_p50_s`."""
    ttft_p50_s: float | None
    live_sessions: float
    """Mean over the stretch, as are the next two."""
    waiting_sessions: float
    working_set_tokens: float
    first_call_wait_p50_s: float | None
    """Of the sessions that arrived in the stretch."""


def timeline(result: RunResult, *, rows: int = 15) -> list[Moment]:
    """The run in about `rows` stretches of equal, round length."""
    end_s = max(result.elapsed_s, 1e-3)
    stride_s = next((float(stride) for stride in _STRIDES_S if end_s / stride <= rows), end_s / rows)
    series = time_series(result, bins=1, samples=20 * rows)
    moments = []
    for index in range(max(1, math.ceil(end_s / stride_s - 0.01))):
        from_s, to_s = index * stride_s, (index + 1) * stride_s
        if to_s > 0.99 * end_s:
            to_s = end_s  # a run ends some milliseconds after its plan: no row for those
        here = (series.grid_s >= from_s) & (series.grid_s < to_s)
        ttfts = [
            call.ttft_s
            for call in result.calls
            if call.first_token_at_s is not None and from_s <= call.first_token_at_s < to_s and call.ttft_s is not None
        ]
        waits = [wait.wait_s for wait in series.first_waits if from_s <= wait.arrival_s < to_s]
        moments.append(
            Moment(
                from_s=from_s,
                to_s=to_s,
                hit_rate=hit_rate(result.calls, from_s, to_s),
                ttft_p50_s=_quantile(ttfts, 0.5),
                live_sessions=_mean(series.live_sessions[here]),
                waiting_sessions=_mean(series.waiting_sessions[here]),
                working_set_tokens=_mean(series.working_set_tokens[here]),
                first_call_wait_p50_s=_quantile(waits, 0.5),
            )
        )
    return moments


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
