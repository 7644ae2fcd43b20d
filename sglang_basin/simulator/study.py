"""One simulated run from settings to JSON: what the command, sweeps and benchmarks share.

The load is made by `replay`'s own code (trace, scaling, arrivals, plan), so that a simulated and a real run with the
same flags offer the very same sessions at the very same times.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

import sglang_basin
from sglang_basin.replay.arrivals import ArrivalProfile, Surge
from sglang_basin.replay.goodput import Target
from sglang_basin.replay.plan import Plan, build_plan
from sglang_basin.replay.trace import Scaling, Session, find_trace, read_trace, scale_trace
from sglang_basin.simulator.policies import policy_factory
from sglang_basin.simulator.profile import HardwareProfile, read_profile
from sglang_basin.simulator.records import Log, rounded, summarize
from sglang_basin.simulator.simulation import ClientSettings, simulate


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Everything that decides a run's result. Times in seconds."""

    trace: str
    """A file or the bare name of a shipped trace."""
    profile: str
    """A file or the name of a shipped profile."""
    policy: str
    rate_per_s: float
    duration_s: float
    tail_s: float = 0.0
    surge: Surge | None = None
    process: Literal["poisson", "fixed"] = "poisson"
    order: Literal["shuffle", "recorded"] = "shuffle"
    seed: int = 1
    scaling: Scaling = field(default_factory=Scaling)
    shared_prefix_tokens: int | None = None
    """What all sessions share of their first prompts, before scaling; None leaves that to the trace. Traces that do
    not tell it leave it at 0, although an agent's system prompt and tools are the same text in every session."""
    client: ClientSettings = field(default_factory=ClientSettings)
    target: Target = field(default_factory=Target)
    policy_options: dict[str, str] = field(default_factory=dict)
    profile_changes: dict[str, str] = field(default_factory=dict)
    sample_s: float = 30.0

    def plan(self) -> Plan:
        """The offered load. Raises TraceError or ArrivalError."""
        path = find_trace(self.trace)
        arrivals = ArrivalProfile(
            rate_per_s=self.rate_per_s,
            duration_s=self.duration_s,
            tail_s=self.tail_s,
            surge=self.surge,
            process=self.process,
        )
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        sessions = _sessions(path, self.scaling, self.shared_prefix_tokens)
        return build_plan(sessions, arrivals, self.seed, trace_name=name, order=self.order)

    def hardware(self) -> HardwareProfile:
        """The profile with its changes. Raises ProfileError."""
        return read_profile(self.profile).changed(self.profile_changes)

    def as_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made

    def key(self) -> str:
        """Of the settings and all that they point to: trace, profile and the code that simulates."""
        told = self.as_dict() | {
            "trace_content": _content(find_trace(self.trace)),
            "hardware": msgspec.to_builtins(self.hardware()),
            "code": code_digest(),
        }
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=12).hexdigest()


@functools.lru_cache(maxsize=4)
def _sessions(path: Path, scaling: Scaling, shared_tokens: int | None) -> list[Session]:
    sessions = read_trace(path)
    if shared_tokens is not None:
        sessions = [
            dataclasses.replace(session, shared_prefix_tokens=min(shared_tokens, session.calls[0].prompt_tokens))
            for session in sessions
        ]
    return scale_trace(sessions, scaling)


@functools.lru_cache(maxsize=16)
def _content(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


@functools.cache
def code_digest() -> str:
    """Of policies, predictor (its shipped model too) and simulator: other code's results do not count as its own."""
    made = hashlib.blake2b(digest_size=12)
    root = Path(sglang_basin.__file__).parent
    for package in ("policy", "predictor", "simulator"):
        for path in sorted([*(root / package).rglob("*.py"), *(root / package).rglob("*.npz")]):
            made.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return made.hexdigest()


@dataclass(frozen=True)
class Study:
    """A run and what it cost to simulate."""

    settings: StudySettings
    hardware: HardwareProfile
    log: Log
    wall_s: float
    cpu_s: float

    @functools.cached_property
    def unloaded_s(self) -> dict[str, float]:
        """By trace session, from the profile's own costs."""
        distinct = {planned.session.trace_id: planned.session for planned in self.log.plan.sessions}
        return {trace_id: self.hardware.unloaded_s(session) for trace_id, session in distinct.items()}

    def result(self) -> dict[str, Any]:
        """The deterministic part: same settings, same bytes."""
        log = self.log
        made = {
            "settings": self.settings.as_dict(),
            "summary": dataclasses.asdict(summarize(log, self.unloaded_s, self.settings.target)),
            "totals": log.totals,
            "decisions": dict(sorted(log.reasons.items())),
            "series": log.series(),
            "digest": log.digest(),
        }
        rounded_result: dict[str, Any] = rounded(made)
        return rounded_result

    def cost(self) -> dict[str, Any]:
        """What it took on this machine. `wall_s` covers the events alone, not the reading of the trace."""
        calls = len(self.log.call_session)
        return {
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "times_real_time": round(self.log.elapsed_s / self.wall_s) if self.wall_s else None,
            "cpu_us_per_call": round(1e6 * self.cpu_s / calls, 1) if calls else None,
            "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }


def run_study(settings: StudySettings) -> Study:
    """Simulate. Raises TraceError, ArrivalError, ProfileError or PolicyError for what cannot be run."""
    plan, hardware = settings.plan(), settings.hardware()
    factory = policy_factory(settings.policy, settings.policy_options, plan, hardware)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    log = simulate(plan, hardware, factory, client=settings.client, target=settings.target, sample_s=settings.sample_s)
    return Study(settings, hardware, log, time.perf_counter() - wall_s, time.process_time() - cpu_s)


def to_json(result: dict[str, Any], cost: dict[str, Any]) -> str:
    """The file: the deterministic part first, what it cost after it."""
    return json.dumps({"result": result, "cost": cost}, indent=1) + "\n"
