"""Small loads and deployments for the tests of the simulator."""

import random

from hypothesis import strategies as st

from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.plan import Plan, PlannedSession
from sglang_basin.replay.trace import Call, Session
from sglang_basin.simulator.profile import DecodeProfile, HardwareProfile, LinkProfile, PrefillProfile

PAGE = 16


def hardware(
    *,
    prefills: int = 1,
    decodes: int = 1,
    pool: int = 64_000,
    decode_pool: int = 64_000,
    host: int = 0,
    lend: bool = False,
    allocation: str = "early",
    max_running: int = 64,
    reserve: int = 64,
    page: int = PAGE,
) -> HardwareProfile:
    return HardwareProfile(
        name="test",
        derivation="made up",
        page_tokens=page,
        prefill=PrefillProfile(
            instances=prefills,
            pool_tokens=pool,
            chunk_tokens=512,
            fixed_s=0.01,
            per_token_s=1e-4,
            attention_s=1e-8,
            host_tokens=host,
            host_load_tokens_per_s=50_000,
        ),
        decode=DecodeProfile(
            instances=decodes,
            pool_tokens=decode_pool,
            step_s=0.02,
            per_sequence_s=0.001,
            per_context_token_s=1e-6,
            max_running=max_running,
            reserve_tokens=reserve,
            allocation=allocation,
            lend=lend,
        ),
        link=LinkProfile(fixed_s=0.005, tokens_per_s=1e6, write_back_tokens_per_s=2e5),
    )


def session(name: str, *calls: tuple[int, int, int, float], shared: int = 0) -> Session:
    """Calls as (prompt, cached prefix, output, tool seconds)."""
    made = [Call(prompt, cached, output, tool_s) for prompt, cached, output, tool_s in calls]
    made[-1] = Call(made[-1].prompt_tokens, made[-1].cached_prefix_tokens, made[-1].output_tokens, 0.0)
    return Session(name, tuple(made), shared)


def plan_of(*arrivals: tuple[float, Session], duration_s: float = 1000.0) -> Plan:
    planned = tuple(
        PlannedSession(f"s{number}", at_s, session, True) for number, (at_s, session) in enumerate(arrivals)
    )
    return Plan("made", 1, ArrivalProfile(rate_per_s=1.0, duration_s=duration_s), planned)


@st.composite
def sessions(draw: st.DrawFn, name: str = "t", shared: int = 0) -> Session:
    """A session that mostly extends its context, and sometimes replaces its tail."""
    calls = []
    context = prompt = 0
    for index in range(draw(st.integers(1, 6))):
        kept = draw(st.sampled_from((context, prompt, prompt // 2))) if index else 0
        prompt = max(1, kept + draw(st.integers(1, 1500)), shared if not index else 1)
        output = draw(st.integers(1, 120))
        calls.append((prompt, kept, output, draw(st.floats(0, 8))))
        context = prompt + output
    return session(name, *calls, shared=shared)


@st.composite
def plans(draw: st.DrawFn, max_sessions: int = 12) -> Plan:
    shared = draw(st.sampled_from((0, 0, 300)))
    arrivals = sorted(draw(st.lists(st.floats(0, 20), min_size=1, max_size=max_sessions)))
    drawn = [(at_s, draw(sessions(f"t{number}", shared))) for number, at_s in enumerate(arrivals)]
    return plan_of(*drawn, duration_s=30.0)


def crowd(seed: int, sessions_count: int = 25, shared: int = 0) -> Plan:
    """Many sessions within ten seconds: far more than the small pools of the tests hold at once."""
    dice = random.Random(seed)
    arrivals = []
    for number in range(sessions_count):
        calls, context, prompt = [], 0, 0
        for index in range(dice.randint(2, 10)):
            kept = dice.choice((context, context, prompt, prompt // 2)) if index else 0
            prompt = max(kept + dice.randint(1, 1500), shared)
            output = dice.randint(1, 150)
            calls.append((prompt, kept, output, dice.expovariate(0.3)))
            context = prompt + output
            if context > 9_000:
                break
        arrivals.append((dice.uniform(0, 10), session(f"t{number}", *calls, shared=shared)))
    return plan_of(*sorted(arrivals, key=lambda arrival: arrival[0]), duration_s=10.0)
