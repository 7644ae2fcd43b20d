"""Lending on the demo's deployment and load in the simulator, over prefill's pool and how fast lent KV is read.

    .venv/bin/python benchmarks/sim_lending.py [--seeds 1,2,3] [--slower 2.4] [--rate-per-min 5] [--surge-extra 8]

Prints the sessions served within target, without lending and with it. `--slower`: computing takes so many times as long
as the profile `cpu-demo` says; 2.4 is what single requests took on the machine of the README's runs with a short pool.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from surge_demo import Demo

from sglang_basin.replay.arrivals import Surge
from sglang_basin.replay.goodput import Target
from sglang_basin.simulator.profile import read_profile
from sglang_basin.simulator.simulation import ClientSettings
from sglang_basin.simulator.study import StudySettings, run_study

POOLS = (5_008, 8_000, 11_008, 16_000, 24_000)
"""Prefill's, in tokens; a context of this load has 1,250 on average and 4,000 at most."""
READS_PER_S = (200_000, 10_000, 3_000, 1_500, 700)
"""Tokens a second. The demo's node reads some 10,000 beside all else; computing brings 1,700 at `--slower 2.4`."""


def served(demo: Demo, changes: dict[str, str], seed: int) -> float:
    """Part of the sessions that ended within target."""
    settings = StudySettings(
        trace=demo.trace,
        scaling=demo.scaling,
        profile="cpu-demo",
        profile_changes=changes,
        policy="basin",
        rate_per_s=demo.rate_per_min / 60,
        duration_s=demo.duration_s,
        tail_s=demo.tail_s,
        surge=Surge(demo.surge_extra, demo.surge_from_s, demo.surge_to_s),
        process="fixed",
        seed=seed,
        client=ClientSettings(call_timeout_s=900.0),
        target=Target(tpot_s=0.1),
    )
    return float(run_study(settings).result()["summary"]["completed_share"])


def slowed(factor: float) -> dict[str, str]:
    """Changes of the profile that make computing take so many times as long."""
    profile = read_profile("cpu-demo")
    costs = {
        "prefill": ("fixed_s", "per_token_s", "attention_s"),
        "decode": ("step_s", "per_sequence_s", "per_context_token_s"),
    }
    return {
        f"{part}.{name}": str(factor * getattr(getattr(profile, part), name))
        for part, names in costs.items()
        for name in names
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--slower", type=float, default=2.4)
    parser.add_argument("--rate-per-min", type=float, default=5.0)
    parser.add_argument("--surge-extra", type=float, default=8.0)
    options = parser.parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    demo = Demo(rate_per_min=options.rate_per_min, surge_extra=options.surge_extra)
    base = slowed(options.slower)

    def mean(changes: dict[str, str]) -> float:
        return statistics.fmean(served(demo, base | changes, seed) for seed in seeds)

    print(f"within target, {demo.rate_per_min:g}/min, +{100 * demo.surge_extra:g} %, mean of seeds {options.seeds}")
    print("pool, tokens | without | " + " | ".join(f"reads {reads:,}/s" for reads in READS_PER_S))
    for pool in POOLS:
        changes = {"prefill.pool_tokens": str(pool)}
        cells = [mean(changes)]
        for reads in READS_PER_S:
            lends = {"decode.lend": "true", "link.write_back_tokens_per_s": str(reads)}
            cells.append(mean(changes | lends))
        print(f"{pool:,} | " + " | ".join(f"{cell:.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
