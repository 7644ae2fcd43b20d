"""Which limit is met first, cache or decode memory: the article's test against 36 simulated deployments.

    .venv/bin/python benchmarks/sim_limits.py [--quick] [--seeds 1]

Each deployment's load is raised in steps under stock until one of the two gives: the hit rate leaves its high
stretch, or calls wait for decode memory, for five minutes on end. The test is that of `sglang_basin.policy.capacity`.
Article: of 36, all 17 cache-first ones are flagged and 8 of the 19 decode-first ones wrongly so (78 % correct).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    CODE_SMALL,
    Case,
    Figure,
    Finding,
    Table,
    Workload,
    case,
    holds,
    parse,
    publish,
    run_all,
    save_plot,
)

from sglang_basin.policy.capacity import KNEE, Deployment, limits
from sglang_basin.replay.trace import Session
from sglang_basin.simulator.profile import HardwareProfile

STEP_S, STEP_LIVES = 600.0, 1.5
"""A step of the ramp lasts this long, and at least as many unloaded sessions."""
WINDOW = 10
"""Samples (half minutes) over which a limit must be met: a minute of few calls says little."""
FALLEN = 0.1
"""The hit rate has left its high stretch. Waiting for more would take effects for causes: with fewer hits prefill is
slower, calls hold their decode memory for longer, and others wait for it."""
OWN_KNEE = {CODE_SMALL.name: 1.8}
"""As `sim_knee.py` measures it."""
LEVELS = tuple(0.3 + 0.2 * n for n in range(12))
"""Of the load at which the smaller limit would be met."""
POOLS = (168_000 // 64 * 64, 336_000, 672_000)
DECODES = (65_536, 131_072, 262_144)
TOOL_FACTORS = (1.0, 3.0, 6.0, 12.0)


@dataclasses.dataclass(frozen=True)
class Site:
    workload: Workload
    pool_tokens: int
    decode_tokens: int
    tool_factor: float

    @property
    def changes(self) -> dict[str, str]:
        return {"prefill.pool_tokens": str(self.pool_tokens), "decode.pool_tokens": str(self.decode_tokens)}

    @property
    def loaded(self) -> Workload:
        scaling = dataclasses.replace(self.workload.scaling, time=self.tool_factor)
        return dataclasses.replace(self.workload, scaling=scaling)

    def case(self, seed: int, rates_per_min: Sequence[float], step_s: float = STEP_S) -> Case:
        return case(
            self.loaded,
            profile="h100-1p1d",
            policy="stock",
            changes=self.changes,
            seed=seed,
            counted_s=step_s * len(rates_per_min),
            tail_s=0.0,
            steps_per_min=[(n * step_s, rate) for n, rate in enumerate(rates_per_min)],
        )


SITES = tuple(itertools.starmap(Site, itertools.product((CODE_SMALL,), POOLS, DECODES, TOOL_FACTORS)))


def describe(sessions: Sequence[Session], hardware: HardwareProfile, knee: float) -> tuple[Deployment, float]:
    """The deployment by means, and a session's unloaded seconds. Contexts are averaged over time."""
    calls = new_tokens = output_tokens = 0
    context_s = life_s = tool_s = 0.0
    for session in sessions:
        before = session.shared_prefix_tokens
        for index, call in enumerate(session.calls):
            cached = min(call.cached_prefix_tokens if index else before, call.prompt_tokens - 1)
            taken_s = hardware.call_s(call.prompt_tokens, cached, call.output_tokens) + call.tool_s
            calls += 1
            new_tokens += call.prompt_tokens - cached
            output_tokens += call.output_tokens
            context_s += taken_s * call.prompt_tokens
            life_s += taken_s
            tool_s += call.tool_s
    context = context_s / life_s
    prefill, decode = hardware.prefill, hardware.decode
    described = Deployment(
        cache_tokens=prefill.pool_tokens,
        mean_context_tokens=context,
        calls_per_session=calls / len(sessions),
        new_tokens_per_call=new_tokens / calls,
        output_tokens_per_call=output_tokens / calls,
        tool_s=tool_s / calls,
        prefill_new_token_s=prefill.per_token_s + prefill.attention_s * context,
        prefill_fixed_s=prefill.fixed_s,
        decode_step_s=decode.step_s + 4 * (decode.per_sequence_s + decode.per_context_token_s * context),
        decode_tokens=decode.pool_tokens,
        rest_s=hardware.link.fixed_s,
        shared_tokens=min(statistics.fmean(s.shared_prefix_tokens for s in sessions), context - new_tokens / calls),
        knee=knee,
    )
    return described, life_s / len(sessions)


def met_first(result: dict[str, Any]) -> str:
    """`cache`, `decode`, or `neither` within the ramp."""
    series = result["series"]
    rates = [1.0 if rate is None else rate for rate in series["hit_rate"]]
    averaged = [statistics.fmean(rates[at : at + WINDOW]) for at in range(len(rates) - WINDOW)]
    high = statistics.median(averaged[WINDOW : len(averaged) // 3])
    for at in range(WINDOW, len(averaged)):
        if averaged[at] < high - FALLEN:
            return "cache"
        if statistics.fmean(series["decode_waiting_calls"][at : at + WINDOW]) >= 1:
            return "decode"
    return "neither"


def main() -> None:
    options = parse(__doc__, (1,))
    sites = SITES[::6] if options.quick else SITES
    cases, said, own_knee = [], [], []
    for site in sites:
        probe = site.case(1, [30.0] * len(LEVELS))
        sessions = list({p.session.trace_id: p.session for p in probe.plan().sessions}.values())
        hardware = probe.settings.hardware()
        deployment, life_s = describe(sessions, hardware, KNEE)
        found = limits(deployment)
        said.append(found)
        own_knee.append(limits(dataclasses.replace(deployment, knee=OWN_KNEE[site.workload.name])))
        step_s = max(STEP_S, STEP_LIVES * life_s)
        critical_per_min = 60 * min(found.cache_sessions, found.decode_sessions) / life_s
        cases += [site.case(seed, [level * critical_per_min for level in LEVELS], step_s) for seed in options.seeds]
    results = run_all(cases, options.jobs)
    truths: list[str] = []
    for number in range(len(sites)):
        mine = [met_first(r) for r in results[number * len(options.seeds) : (number + 1) * len(options.seeds)]]
        truths.append(statistics.mode(mine))

    def confusion(tested: Sequence[Any]) -> dict[tuple[str, str], int]:
        pairs = [(truth, test.first) for truth, test in zip(truths, tested, strict=True)]
        return {key: pairs.count(key) for key in itertools.product(("cache", "decode"), ("cache", "decode"))}

    table = confusion(said)
    judged = sum(table.values())
    right = table["cache", "cache"] + table["decode", "decode"]
    cache_first = table["cache", "cache"] + table["cache", "decode"]
    decode_first = judged - cache_first
    other = confusion(own_knee)
    other_right = other["cache", "cache"] + other["decode", "decode"]
    figures = [
        Figure(
            what="cache-first deployments that the test flags",
            article="17 of 17",
            ours=f"{table['cache', 'cache']} of {cache_first}",
            holds=holds(table["cache", "decode"] == 0, table["cache", "cache"] > table["cache", "decode"]),
        ),
        Figure(
            what="decode-first ones that it flags wrongly",
            article="8 of 19",
            ours=f"{table['decode', 'cache']} of {decode_first}",
            holds=holds(table["decode", "cache"] <= 0.5 * decode_first),
        ),
        Figure(
            what="correct",
            article="78 %",
            ours=f"{right / max(judged, 1):.0%} of {judged}",
            holds=holds(right >= 0.75 * judged, right > 0.6 * judged),
            cause=f"with the workload's own knee of {OWN_KNEE[CODE_SMALL.name]} in place of {KNEE}: "
            f"{other_right / max(judged, 1):.0%}",
        ),
    ]
    rows = [
        [
            site.workload.name,
            f"{site.pool_tokens:,}",
            f"{site.decode_tokens:,}",
            f"{site.tool_factor:g}",
            f"{test.cache_sessions:.1f}",
            f"{test.decode_sessions:.1f}",
            test.first,
            truth,
        ]
        for site, test, truth in zip(sites, said, truths, strict=True)
    ]
    plot = Plot(figsize=(5.5, 4), layout="constrained")
    axes = plot.add_subplot()
    for truth, colour in (("cache", "tab:red"), ("decode", "tab:blue"), ("neither", "0.6")):
        chosen = [test for test, true in zip(said, truths, strict=True) if true == truth]
        x, y = [test.cache_sessions for test in chosen], [test.decode_sessions for test in chosen]
        axes.plot(x, y, "o", color=colour, label=f"simulated: {truth} first", fillstyle="none")
    most = max(max(test.cache_sessions, test.decode_sessions) for test in said)
    axes.plot([1, most], [1, most], color="0.5", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("N_cache: sessions that the cache carries")
    axes.set_ylabel("N_decode: sessions that decode carries")
    axes.legend(fontsize=8)
    publish(
        Finding(
            name="limits",
            rank=4,
            title="Which limit is met first",
            method=f"{len(sites)} deployments of 1P1D: three caches, three decode memories, four lengths "
            "of tool runs. Test: cache first if N_cache < N_decode, from means alone.",
            figures=figures,
            tables=[
                Table(
                    title="Confusion",
                    columns=["simulated", "test says cache", "test says decode"],
                    rows=[[f"{t} first", str(table[t, "cache"]), str(table[t, "decode"])] for t in ("cache", "decode")],
                ),
                Table(
                    title="Deployments",
                    columns=["workload", "cache", "decode", "tool x", "N_cache", "N_decode", "test", "simulated"],
                    rows=rows,
                ),
            ],
            plots=[save_plot(plot, options, "limits")],
            numbers={"neither": truths.count("neither")},
        ),
        options,
        [CODE_SMALL],
        len(cases),
    )


if __name__ == "__main__":
    main()
