"""What a run leaves: columns of numbers for calls and sessions, samples over time, and the summary.

Columns rather than objects, since a run has tens of thousands of calls: about 60 bytes a call.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sglang_basin.replay.goodput import ServedSession, Target, goodput
from sglang_basin.replay.plan import Plan
from sglang_basin.replay.records import CallOutcome, SessionOutcome
from sglang_basin.replay.summary import Summary
from sglang_basin.simulator.decode import TPOT_BIN_S

if TYPE_CHECKING:
    from sglang_basin.simulator.calls import SimCall, SimSession
    from sglang_basin.simulator.simulation import Simulation

NOT_YET = -1.0
"""In place of a time that never came."""


class Outcome(IntEnum):
    """Of a call and of a session."""

    OK = 0
    REJECTED = 1
    TIMEOUT = 2
    ABORTED = 3
    ERROR = 4
    CANCELLED = 5


CALL_NAMES: dict[Outcome, CallOutcome] = {
    Outcome.OK: "ok",
    Outcome.REJECTED: "rejected",
    Outcome.TIMEOUT: "timeout",
    Outcome.ABORTED: "aborted",
    Outcome.ERROR: "error",
    Outcome.CANCELLED: "cancelled",
}
SESSION_NAMES: dict[Outcome, SessionOutcome] = {
    Outcome.OK: "finished",
    Outcome.REJECTED: "rejected",
    Outcome.TIMEOUT: "failed",
    Outcome.ABORTED: "failed",
    Outcome.ERROR: "failed",
    Outcome.CANCELLED: "unfinished",
}

SAMPLED = (
    "at_s",
    "hit_rate",
    "live_sessions",
    "waiting_sessions",
    "working_set_tokens",
    "held_calls",
    "prefill_waiting_calls",
    "decode_waiting_calls",
    "running_calls",
    "prefill_used_share",
    "decode_used_share",
    "lent_tokens",
    "finished_sessions",
)
"""Columns of the time series. `hit_rate` is that of the last minute, -1 where nothing was prefilled;
`waiting_sessions` are live ones whose first call has not reached decode."""


CALL_COLUMNS = {
    "call_session": "i",
    "call_index": "h",
    "call_outcome": "b",
    "call_retried": "b",
    "call_due_s": "d",
    "call_first_token_s": "d",
    "call_end_s": "d",
    "call_prompt_tokens": "i",
    "call_cached_tokens": "i",
    "call_steps": "i",
    "call_steps_on_time": "i",
}
"""By name, each with its `array` type code."""
CALL_ROW = struct.Struct("=" + "".join(CALL_COLUMNS.values()))


class Log:
    """Everything that was recorded. The columns of calls are there once the run is over."""

    def __init__(self, plan: Plan, sample_s: float) -> None:
        self.plan = plan
        self.sample_s = sample_s
        self.elapsed_s = 0.0
        self._rows = bytearray()
        """`CALL_ROW` of each call until `close`: one write a call instead of one for each of its columns."""
        self.call_session = array("i")
        self.call_index = array("h")
        self.call_outcome = array("b")
        self.call_retried = array("b")
        self.call_due_s = array("d")
        self.call_first_token_s = array("d")
        self.call_end_s = array("d")
        self.call_prompt_tokens = array("i")
        self.call_cached_tokens = array("i")
        self.call_steps = array("i")
        self.call_steps_on_time = array("i")
        sessions = len(plan.sessions)
        self.session_end_s = array("d", [NOT_YET]) * sessions
        self.session_first_token_s = array("d", [NOT_YET]) * sessions
        self.session_outcome = array("b", [Outcome.CANCELLED]) * sessions
        self.session_calls_done = array("i", [0]) * sessions
        self.session_steps = array("i", [0]) * sessions
        self.session_steps_on_time = array("i", [0]) * sessions
        self.opened_sessions = 0
        self.finished_sessions = 0
        self.samples = {name: array("d") for name in SAMPLED}
        self.tpot_bins: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.totals: dict[str, float] = {}

    # Written by the simulation.

    def call(self, call: SimCall, now_s: float, outcome: Outcome, retried: bool) -> None:
        """An attempt at a call is over; its steps count for its session."""
        session, steps, first_token_s = call.session, call.steps_before, call.first_token_s
        on_time = steps - call.extra_late_steps
        session.steps += steps
        session.steps_on_time += on_time
        index = session.call_index
        if not index and first_token_s >= 0:
            session.first_token_s = first_token_s
        self._rows += CALL_ROW.pack(
            session.number,
            index,
            outcome,
            retried,
            session.due_s,
            first_token_s,
            now_s,
            call.prompt_tokens,
            call.cached_tokens,
            steps,
            on_time,
        )

    @property
    def calls(self) -> int:
        """Recorded so far."""
        return len(self.call_session) + len(self._rows) // CALL_ROW.size

    def session(self, session: SimSession, now_s: float, outcome: Outcome) -> None:
        number = session.number
        self.session_end_s[number] = now_s
        self.session_first_token_s[number] = session.first_token_s
        self.session_outcome[number] = outcome
        self.session_calls_done[number] = session.call_index
        self.session_steps[number] = session.steps
        self.session_steps_on_time[number] = session.steps_on_time
        self.finished_sessions += outcome is Outcome.OK

    def sample(self, run: Simulation, now_s: float) -> None:
        prompt = sum(gate.recent_prompt_tokens for gate in run.gates)
        cached = sum(gate.recent_cached_tokens for gate in run.gates)
        prefill_pool = sum(prefill.cache.pool_tokens for prefill in run.prefills)
        decode_pool = sum(decode.cache.pool_tokens for decode in run.decodes)
        values = (
            now_s,
            cached / prompt if prompt else -1.0,
            len(run.live_sessions),
            run.waiting_first,
            run.working_set_tokens,
            sum(len(gate.held) for gate in run.gates),
            sum(prefill.waiting_calls for prefill in run.prefills),
            sum(decode.waiting_calls for decode in run.decodes),
            sum(decode.running_calls for decode in run.decodes),
            1 - sum(prefill.cache.free_tokens for prefill in run.prefills) / prefill_pool,
            sum(decode.held_tokens for decode in run.decodes) / decode_pool,
            sum(decode.cache.evictable_tokens for decode in run.decodes),
            self.finished_sessions,
        )
        for column, value in zip(self.samples.values(), values, strict=True):
            column.append(value)

    def close(self, run: Simulation, ended_s: float) -> None:
        self.elapsed_s = ended_s
        rows = np.frombuffer(bytes(self._rows), dtype=list(CALL_COLUMNS.items()))
        for name in CALL_COLUMNS:
            getattr(self, name).frombytes(rows[name].tobytes())
        self._rows.clear()
        self.opened_sessions = len(run.sessions)
        for decode in run.decodes:
            self.tpot_bins.update(decode.tpot_bins)
        for gate in run.gates:
            self.reasons.update(gate.reasons)
        busy_s = sum(prefill.busy_s for prefill in run.prefills)
        self.totals = {
            "calls": self.calls,
            "prefill_busy_share": busy_s / (len(run.prefills) * ended_s) if ended_s else 0.0,
            "computed_tokens": sum(prefill.computed_tokens for prefill in run.prefills),
            "loaded_back_tokens": sum(prefill.loaded_tokens for prefill in run.prefills),
            "written_back_tokens": sum(prefill.written_back_tokens for prefill in run.prefills),
            "retractions": sum(decode.retractions for decode in run.decodes),
        }

    # Read by others.

    def digest(self) -> str:
        """Of every recorded number: two runs are the same if and only if their digests are."""
        made = hashlib.blake2b(digest_size=16)
        for name, value in sorted(vars(self).items()):
            if isinstance(value, array):
                made.update(name.encode() + value.tobytes())
        for name, column in self.samples.items():
            made.update(name.encode() + column.tobytes())
        return made.hexdigest()

    def series(self) -> dict[str, list[float | None]]:
        """The samples, rounded, for JSON."""
        made: dict[str, list[float | None]] = {}
        for name, column in self.samples.items():
            made[name] = [None if name == "hit_rate" and value < 0 else round(value, 4) for value in column]
        return made


def _quantile(values: npt.NDArray[np.float64], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def _weighted_median_s(bins: Mapping[int, int]) -> float | None:
    if not bins:
        return None
    durations = np.array(sorted(bins), dtype=np.int64)
    weights = np.cumsum([bins[int(duration)] for duration in durations])
    return float(durations[np.searchsorted(weights, weights[-1] / 2)] * TPOT_BIN_S + TPOT_BIN_S / 2)


def _hit_rate(log: Log, from_s: float, to_s: float) -> float | None:
    """Token hit rate of the calls whose first token came within [from_s, to_s)."""
    first = np.frombuffer(log.call_first_token_s)
    here = (first >= max(from_s, 0.0)) & (first < to_s)
    prompt = int(np.frombuffer(log.call_prompt_tokens, dtype=np.int32)[here].sum(dtype=np.int64))
    cached = int(np.frombuffer(log.call_cached_tokens, dtype=np.int32)[here].sum(dtype=np.int64))
    return cached / prompt if prompt else None


def served_sessions(log: Log, unloaded_s: Mapping[str, float]) -> list[ServedSession]:
    """The offered sessions as `replay.goodput` judges them. `unloaded_s` is by trace session."""
    return [
        ServedSession(
            finished=log.session_outcome[number] == Outcome.OK,
            total_s=log.session_end_s[number] - planned.arrival_s,
            unloaded_s=unloaded_s[planned.session.trace_id],
            steps=log.session_steps[number],
            steps_on_time=log.session_steps_on_time[number],
        )
        for number, planned in enumerate(log.plan.sessions)
        if planned.counted
    ]


def summarize(log: Log, unloaded_s: Mapping[str, float], target: Target | None = None) -> Summary:
    """The same numbers as `replay.summary.summarize`, from the columns. A test compares both on one run."""
    target = target or Target()
    profile = log.plan.profile
    surge, span_s = profile.surge, profile.duration_s
    served = served_sessions(log, unloaded_s)
    judged = goodput(served, span_s, target)
    offered = [number for number, planned in enumerate(log.plan.sessions) if planned.counted]
    arrival = np.array([planned.arrival_s for planned in log.plan.sessions], dtype=np.float64)
    outcome = np.frombuffer(log.session_outcome, dtype=np.int8)
    ended = np.frombuffer(log.session_end_s)
    first = np.frombuffer(log.session_first_token_s)
    waits = np.where(first >= 0, first, ended) - arrival
    due, token, end = (np.frombuffer(column) for column in (log.call_due_s, log.call_first_token_s, log.call_end_s))
    answered = token >= 0
    final = np.frombuffer(log.call_retried, dtype=np.int8) == 0
    ok = np.frombuffer(log.call_outcome, dtype=np.int8) == Outcome.OK
    ttft = (token - due)[answered]
    steps, on_time = sum(log.call_steps), sum(log.call_steps_on_time)
    after = [number for number in offered if surge is not None and arrival[number] >= surge.to_s]
    stretch = np.array([s.total_s / s.unloaded_s for s in served if s.finished and s.unloaded_s > 0])
    session_outcomes = Counter(SESSION_NAMES[Outcome(log.session_outcome[number])] for number in offered)
    call_outcomes = Counter(np.frombuffer(log.call_outcome, dtype=np.int8)[final].tolist())
    named_calls = Counter({CALL_NAMES[Outcome(value)]: count for value, count in call_outcomes.items()})
    return Summary(
        goodput_per_hour=judged.per_hour,
        offered_per_hour=judged.offered_per_hour,
        completed_share=judged.completed_share,
        hit_rate_before_surge=_hit_rate(log, 0.0, surge.from_s) if surge else None,
        hit_rate_last_third=_hit_rate(log, profile.end_s * 2 / 3, profile.end_s),
        first_call_wait_p50_s=_quantile(waits[offered], 0.5),
        first_call_wait_p99_s=_quantile(waits[offered], 0.99),
        ttft_p50_s=_quantile(ttft, 0.5),
        ttft_p99_s=_quantile(ttft, 0.99),
        tpot_p50_s=_weighted_median_s(log.tpot_bins),
        call_latency_p50_s=_quantile((end - due)[final & ok], 0.5),
        steps_on_time_share=on_time / steps if steps else None,
        stretch_p50=_quantile(stretch, 0.5),
        offered_sessions=len(offered),
        finished_sessions=session_outcomes["finished"],
        within_target_sessions=judged.within,
        arrived_after_surge=len(after) if surge else None,
        finished_after_surge=int((outcome[after] == Outcome.OK).sum()) if surge else None,
        session_outcomes=dict(session_outcomes.most_common()),
        call_outcomes=dict(named_calls.most_common()),
        unloaded_sessions=len(offered),
        duration_s=profile.duration_s,
        elapsed_s=log.elapsed_s,
        interrupted=False,
        target=asdict(target),
    )


def rounded(value: Any, digits: int = 6) -> Any:
    """Numbers of a JSON tree at a fixed precision: the files stay small and equal across machines."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value
