"""A session's unloaded time: what it takes on an idle server, the yardstick of goodput.

`measure_unloaded` replays sessions one at a time, without their tool waits; the waits are added as recorded. Sessions
that were not measured get their time from a linear cost model of one call, fitted to all measured calls:

    seconds = fixed + per_uncached · uncached tokens + per_cached · cached tokens + per_output · output tokens

Cached and uncached are the plan's counts (what an idle server can reuse), in the fit as in its use: what a server
recomputes although it was sent before, such as a partial page, is then part of the coefficients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.driver import Driver, DriveSettings, describe_run
from sglang_basin.replay.plan import Plan, PlannedSession
from sglang_basin.replay.records import RecordWriter
from sglang_basin.replay.trace import Call, Scaling, Session

MIN_FITTED_CALLS = 8
MAX_FILE_BYTES = 256 * 2**20


class UnloadedError(RuntimeError):
    """Unloaded times that cannot be measured, read or used; the message says why."""


class MeasuredCall(msgspec.Struct, frozen=True):
    """One call on the idle server."""

    trace_id: str
    call: int
    uncached_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float


class UnloadedFile(msgspec.Struct, frozen=True):
    """What `--measure-unloaded` writes: the measured calls and the setting in which they mean something."""

    trace: str
    endpoint: str
    scaling: dict[str, float | int | None]
    sessions: list[str]
    """Measured from their first to their last call."""
    calls: list[MeasuredCall]
    kind: str = "basin-unloaded-1"


@dataclass(frozen=True)
class CostModel:
    """Seconds of one call on an idle server, and how well that fits the measured calls."""

    fixed_s: float
    per_uncached_token_s: float
    per_cached_token_s: float
    per_output_token_s: float
    fitted_calls: int
    rms_residual_s: float
    median_relative_residual: float
    explained_share: float
    """R²: the share of the calls' variance that the model explains."""

    def call_s(self, uncached_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        return (
            self.fixed_s
            + self.per_uncached_token_s * uncached_tokens
            + self.per_cached_token_s * cached_tokens
            + self.per_output_token_s * output_tokens
        )

    def session_s(self, session: Session) -> float:
        """All calls of a session, without its tool waits."""
        return sum(
            self.call_s(call.prompt_tokens - cached, cached, call.output_tokens)
            for call, cached in zip(session.calls, _reusable_tokens(session), strict=True)
        )


def _reusable_tokens(session: Session) -> list[int]:
    """Per call, the prompt's tokens that an idle server has in its cache."""
    first, *later = session.calls
    return [min(session.shared_prefix_tokens, first.prompt_tokens), *(call.cached_prefix_tokens for call in later)]


def fit_cost_model(calls: Sequence[MeasuredCall]) -> CostModel:
    """Least squares with coefficients of at least zero. Raises UnloadedError on too few calls."""
    if len(calls) < MIN_FITTED_CALLS:
        raise UnloadedError(f"a cost model needs at least {MIN_FITTED_CALLS} measured calls, got {len(calls)}")
    rows = np.array([(1, c.uncached_tokens, c.cached_tokens, c.output_tokens) for c in calls], dtype=np.float64)
    seconds = np.array([c.seconds for c in calls])
    kept = [0, 1, 2, 3]
    coefficients = np.zeros(4)
    while kept:
        solved, *_ = np.linalg.lstsq(rows[:, kept], seconds, rcond=None)
        coefficients[:] = 0
        coefficients[kept] = solved
        if solved.min() >= 0:
            break
        kept.pop(int(solved.argmin()))  # noise made a cost negative: it is zero, fit the others again
    residuals = seconds - rows @ coefficients
    variance = float(np.var(seconds))
    return CostModel(
        fixed_s=float(coefficients[0]),
        per_uncached_token_s=float(coefficients[1]),
        per_cached_token_s=float(coefficients[2]),
        per_output_token_s=float(coefficients[3]),
        fitted_calls=len(calls),
        rms_residual_s=float(np.sqrt(np.mean(residuals**2))),
        median_relative_residual=float(np.median(np.abs(residuals) / np.maximum(seconds, 1e-9))),
        explained_share=1 - float(np.mean(residuals**2)) / variance if variance else 1.0,
    )


class UnloadedTimes:
    """Unloaded times of any session of the measured trace: measured ones, the others from the model."""

    def __init__(self, file: UnloadedFile) -> None:
        self.file = file
        self.model = fit_cost_model(file.calls)
        complete = set(file.sessions)
        self._measured_s: dict[str, float] = dict.fromkeys(complete, 0.0)
        for call in file.calls:
            if call.trace_id in complete:
                self._measured_s[call.trace_id] += call.seconds

    def is_measured(self, session: Session) -> bool:
        return session.trace_id in self._measured_s

    def session_s(self, session: Session) -> float:
        """Seconds from the first call to the end of the last one, tool waits included."""
        calls_s = self._measured_s.get(session.trace_id)
        return (calls_s if calls_s is not None else self.model.session_s(session)) + session.tool_s

    def of(self, sessions: Iterable[Session]) -> dict[str, float]:
        """Unloaded time by trace session id, as `run` takes it."""
        return {session.trace_id: round(self.session_s(session), 4) for session in sessions}

    def check(self, trace_name: str, scaling: Scaling, endpoint: str) -> None:
        """Raise UnloadedError unless the times were measured for this very trace, scaling and endpoint."""
        given = {"trace": trace_name, "endpoint": endpoint, **dataclasses.asdict(scaling)}
        measured = {"trace": self.file.trace, "endpoint": self.file.endpoint, **self.file.scaling}
        for name, value in given.items():
            # The tool cap only changes the waits, which are added as recorded.
            if name not in ("tool_cap_s", "time") and measured.get(name) != value:
                raise UnloadedError(
                    f"unloaded times were measured with {name} = {measured.get(name)!r}, this run has {value!r}; "
                    "measure again with this run's settings"
                )

    def describe(self) -> str:
        model = self.model
        return (
            f"{len(self._measured_s)} sessions measured; model of {model.fitted_calls} calls: "
            f"{1e3 * model.fixed_s:.1f} ms + {1e6 * model.per_uncached_token_s:.1f} µs/uncached token + "
            f"{1e6 * model.per_cached_token_s:.2f} µs/cached token + {1e3 * model.per_output_token_s:.2f} ms/output "
            f"token; residual {1e3 * model.rms_residual_s:.1f} ms rms, {model.median_relative_residual:.0%} median, "
            f"R² {model.explained_share:.3f}"
        )


def write_unloaded(path: Path, file: UnloadedFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


def read_unloaded(path: Path) -> UnloadedTimes:
    """Raises UnloadedError with the file's name."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnloadedError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
        file = msgspec.json.decode(path.read_bytes(), type=UnloadedFile)
    except OSError as error:
        raise UnloadedError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnloadedError(f"{path}: not a file of --measure-unloaded ({error})") from None
    try:
        return UnloadedTimes(file)
    except UnloadedError as error:
        raise UnloadedError(f"{path}: {error}") from None


async def measure_unloaded(
    sessions: Sequence[Session],
    url: str,
    *,
    seed: int,
    trace_name: str,
    scaling: Scaling,
    settings: DriveSettings | None = None,
    on_session: Callable[[int, int], None] | None = None,
) -> UnloadedFile:
    """Replay sessions one at a time against an idle server.

    The prompts differ from those of any run with the same seed, so that a run after this finds nothing of them in the
    cache. One warm-up session goes first and is not recorded. Raises UnloadedError when a call fails.
    """
    if not sessions:
        raise UnloadedError("no session to measure")
    settings = settings or DriveSettings()
    profile = ArrivalProfile(rate_per_s=1.0, duration_s=1.0)
    run = describe_run(Plan(trace_name, seed, profile, ()), settings)
    calls: list[MeasuredCall] = []
    for index, session in enumerate([_warm_up(sessions[0]), *sessions]):
        with RecordWriter(run) as writer:
            async with Driver(url, settings, writer, seed=seed, trace_name=trace_name) as driver:
                planned = PlannedSession(f"unloaded-{seed}-{index:05d}", 0.0, session, counted=True)
                ended = await driver.replay(planned, skip_tools=True)
        if ended.outcome != "finished":
            last = writer.result.calls[-1]
            why = last.error or last.outcome
            raise UnloadedError(
                f"session {session.trace_id}: call {last.call} {last.outcome} on an idle server ({why})"
            )
        if index == 0:
            continue
        for record, cached in zip(writer.result.calls, _reusable_tokens(session), strict=True):
            uncached = record.planned_prompt_tokens - cached
            seconds = round(record.end_at_s - record.sent_at_s, 5)
            calls.append(MeasuredCall(session.trace_id, record.call, uncached, cached, record.output_tokens, seconds))
        if on_session:
            on_session(index, len(sessions))
    return UnloadedFile(
        trace=trace_name,
        endpoint=settings.endpoint,
        scaling=dataclasses.asdict(scaling),
        sessions=[session.trace_id for session in sessions],
        calls=calls,
    )


def _warm_up(session: Session) -> Session:
    """Its first three calls: they load code paths and, where the trace has one, the shared system prompt."""
    *calls, last = session.calls[:3]
    ended = Call(last.prompt_tokens, last.cached_prefix_tokens, last.output_tokens, tool_s=0.0)
    return Session(f"{session.trace_id} (warm-up)", (*calls, ended), session.shared_prefix_tokens)
