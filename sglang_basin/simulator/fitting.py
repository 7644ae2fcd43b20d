"""A hardware profile's costs from a measured run: what its calls took, not what the machine should be able to do.

Prefill, from calls whose wait for the first token overlaps no other call's, so that none of it is queueing:

    TTFT = overhead + per_token · new + attention · new · (cached + new / 2)

Decode, from the time between received tokens, with the running calls spread evenly over the decode instances:

    step = step + per_sequence · running calls / instances + per_context · their contexts / instances

Both by least absolute deviations (a stack on a shared machine has outliers), with costs of at least zero.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_basin.replay.records import CallRecord, RunResult
from sglang_basin.simulator.profile import HardwareProfile

Floats = npt.NDArray[np.float64]

MIN_LONE_CALLS = 20
MIN_STEPS = 100


class FitError(ValueError):
    """Too little was measured; the message says of what."""


@dataclass(frozen=True)
class Fit:
    """The profile with fitted costs, and on how much they stand."""

    profile: HardwareProfile
    lone_calls: int
    ttft_error: float
    """Median of |fitted - measured| / measured TTFT of the lone calls."""
    steps: int
    step_error: float


def _least_absolute(rows: Floats, values: Floats) -> Floats:
    """Coefficients of at least zero that minimise Σ |rows · x - values|, by reweighted least squares."""
    kept = list(range(rows.shape[1]))
    found = np.zeros(rows.shape[1])
    while kept:
        weights = np.ones(len(values))
        for _ in range(40):
            scaled = rows[:, kept] * weights[:, None]
            solved, *_ = np.linalg.lstsq(scaled, values * weights, rcond=None)
            weights = 1 / np.sqrt(np.maximum(np.abs(values - rows[:, kept] @ solved), 1e-5))
        found[:] = 0
        found[kept] = solved
        if solved.min() >= 0:
            break
        kept.pop(int(solved.argmin()))
    return found


def _error(rows: Floats, found: Floats, values: Floats) -> float:
    return float(np.median(np.abs(rows @ found - values) / np.maximum(values, 1e-9)))


def _lone(calls: list[CallRecord]) -> tuple[Floats, Floats]:
    """(1, new tokens, pairs) and TTFT of calls whose wait for a token overlaps no other's."""
    spans = sorted((call.sent_at_s, call.first_token_at_s or 0.0, index) for index, call in enumerate(calls))
    overlapped = set()
    latest_s, latest = -1.0, -1
    for sent_s, first_s, index in spans:
        if sent_s < latest_s:
            overlapped |= {index, latest}
        if first_s > latest_s:
            latest_s, latest = first_s, index
    rows, values = [], []
    for index, call in enumerate(calls):
        if index in overlapped or call.prompt_tokens is None or call.first_token_at_s is None:
            continue
        cached = call.cached_tokens or 0
        new = call.prompt_tokens - cached
        rows.append((1.0, new, new * (cached + 0.5 * new)))
        values.append(call.first_token_at_s - call.sent_at_s)
    return np.array(rows, dtype=np.float64).reshape(-1, 3), np.array(values, dtype=np.float64)


def _decode_steps(calls: list[CallRecord], instances: int) -> tuple[Floats, Floats]:
    """(1, running calls, their contexts), per instance, and the seconds of a step."""
    changes = sorted(
        change
        for call in calls
        for change in (
            (call.first_token_at_s or 0.0, 1, call.prompt_tokens or 0),
            (call.end_at_s, -1, -(call.prompt_tokens or 0)),
        )
    )
    times = [at_s for at_s, _, _ in changes]
    running = list(itertools.accumulate(number for _, number, _ in changes))
    contexts = list(itertools.accumulate(tokens for _, _, tokens in changes))
    rows, values = [], []
    for call in calls:
        at_s = call.first_token_at_s or 0.0
        for tokens, seconds in call.steps:
            here = bisect.bisect_right(times, at_s + seconds / 2) - 1
            at_s += seconds
            if running[here] > 0:
                own = max(1.0, running[here] / instances)
                rows.append((1.0, own, contexts[here] / running[here] * own))
                values.append(seconds / tokens)
    return np.array(rows, dtype=np.float64).reshape(-1, 3), np.array(values, dtype=np.float64)


def fit_profile(measured: RunResult, profile: HardwareProfile, name: str) -> Fit:
    """`profile` with the costs of the measured run; pools and counts stay. Raises FitError."""
    calls = [call for call in measured.calls if call.outcome == "ok" and call.first_token_at_s is not None]
    rows, ttft = _lone(calls)
    if len(rows) < MIN_LONE_CALLS:
        raise FitError(f"only {len(rows)} calls had prefill to themselves, a fit needs {MIN_LONE_CALLS}")
    step_rows, steps = _decode_steps(calls, profile.decode.instances)
    if len(step_rows) < MIN_STEPS:
        raise FitError(f"only {len(step_rows)} decode steps were measured, a fit needs {MIN_STEPS}")
    found, step = _least_absolute(rows, ttft), _least_absolute(step_rows, steps)
    overhead_s = float(found[0])
    fixed_s = min(profile.prefill.fixed_s, overhead_s)
    replace = msgspec.structs.replace
    fitted = replace(
        profile,
        name=name,
        derivation=f"{profile.name} with costs fitted to a measured run of {len(calls)} calls",
        prefill=replace(profile.prefill, fixed_s=fixed_s, per_token_s=float(found[1]), attention_s=float(found[2])),
        decode=replace(
            profile.decode,
            step_s=max(1e-6, float(step[0])),
            per_sequence_s=float(step[1]),
            per_context_token_s=float(step[2]),
        ),
        link=replace(profile.link, fixed_s=overhead_s - fixed_s),
    )
    return Fit(fitted, len(rows), _error(rows, found, ttft), len(step_rows), _error(step_rows, step, steps))


def as_toml(profile: HardwareProfile) -> str:
    """The profile as a file that `read_profile` reads back as it is."""
    raw = msgspec.to_builtins(profile)
    plain = [f"{key} = {_value(value)}" for key, value in raw.items() if not isinstance(value, dict)]
    lines = list(plain)
    for section, fields in raw.items():
        if isinstance(fields, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_value(value)}" for key, value in fields.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
