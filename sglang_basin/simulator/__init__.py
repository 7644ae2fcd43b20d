"""A discrete-event simulator of PD serving that drives the very policies that run in the engine.

As a command: `python -m sglang_basin.simulate --help`. As a library:

    plan = build_plan(read_trace(find_trace("swe_bench")), ArrivalProfile(rate_per_s=5.5 / 60, duration_s=7200), seed=1)
    profile = read_profile("h200-1p3d")
    log = simulate(plan, profile, policy_factory("basin", {}, plan, profile))
    summary = summarize(log, {s.session.trace_id: profile.unloaded_s(s.session) for s in plan.sessions})

Read on: `profile` (what a deployment costs), `cache` (pools and the prefix cache), `prefill` and `decode` (the
instances), `gate` (how a policy is driven), `simulation` (the run, and the invariants), `records` (what is kept and
how it is judged), `policies` and `oracle` (whom to run), `sweep` (many runs). No engine, no torch, no clock.
"""

from sglang_basin.simulator.policies import PolicyError, policy_factory, policy_names
from sglang_basin.simulator.profile import HardwareProfile, ProfileError, read_profile, shipped_profiles
from sglang_basin.simulator.records import Log, summarize
from sglang_basin.simulator.simulation import ClientSettings, Simulation, simulate

__all__ = [
    "ClientSettings",
    "HardwareProfile",
    "Log",
    "PolicyError",
    "ProfileError",
    "Simulation",
    "policy_factory",
    "policy_names",
    "read_profile",
    "shipped_profiles",
    "simulate",
    "summarize",
]
