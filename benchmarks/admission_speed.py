"""What an admission decision costs with many live sessions, and what a session costs in memory.

The engine's own door, as `--basin-*` options describe it, filled with live sessions; then, alternating, calls of live
sessions and of new ones. A decision is what the scheduler does from knowing whose call it is to knowing what becomes of
it: the door's `call` and the `poll` after it, the prediction included. What is learned once of a new session before
that, from what the HTTP process read in its request, has a row of its own. Prints microseconds of CPU and bytes per
live session after so many calls of each (`--history`): the door's, the predictor's and, for a session whose client
names none, those by which its next prompt is known.

    .venv/bin/python benchmarks/admission_speed.py [--sessions 10000] [--calls 20000] [--history 10 50]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import tracemalloc
from array import array

import numpy as np
import yardstick

from sglang_basin.config import BasinConfig
from sglang_basin.engine.door import door_for, predictor_for
from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.engine.identity import INFERRED_PREFIX
from sglang_basin.policy.door import Door
from sglang_basin.policy.lineage import Lineage
from sglang_basin.policy.recording import RecordedDoor
from sglang_basin.predictor.deployed import DeployedPredictor
from sglang_basin.predictor.model_file import default_model_path, load_text_score
from sglang_basin.predictor.payload import task_payload

PROMPT_TOKENS = 200
"""Of an inferred session's first prompt, which of it is kept whatever its length; the last one is twice as long."""
PEAK_TOKENS = (2_000, 120_000)
WORDS = random.Random(2).choices([f"word{number}" for number in range(400)], k=300)
TASK = task_payload(
    {"model": "m", "messages": [{"role": "user", "content": " ".join(WORDS)}]},
    text_score=load_text_score(default_model_path()),
)
"""What the HTTP process reads in a task of 2,000 characters, 210 different words."""
GROWTH = 1.02
"""A live session's next prompt over its last one; medians of the recorded traces are 1.006 to 1.047."""
SECONDS_BETWEEN_CALLS = 0.01


def fill(
    config: BasinConfig, sessions: int, history: int, *, inferred: bool = False
) -> tuple[Door | RecordedDoor, DeployedPredictor, float, float]:
    """A door with live sessions, named by their clients or by their prompts; the time at it, and bytes a session."""
    rng = random.Random(1)
    fingerprints = Fingerprints(1)
    fingerprints.of(array("q", range(2 * PROMPT_TOKENS)))
    tracemalloc.start()
    predictor = predictor_for(config)
    door = door_for(config, 10**12, predictor)
    lineage = Lineage(max_sessions=2 * sessions, prefix=f"{INFERRED_PREFIX}000000-")
    gc.collect()
    before_bytes = tracemalloc.get_traced_memory()[0]
    now_s = 0.0
    for number in range(sessions):
        name = f"session-{number:028x}"
        if inferred:
            prompt = array("q", rng.choices(range(150_000), k=2 * PROMPT_TOKENS))
            for tokens in (prompt[:PROMPT_TOKENS], prompt):  # of a session the first and the last prompt are kept
                placed = lineage.place(fingerprints.of(tokens), door.runs)
                assert placed is not None
                name = placed.session_id
        predictor.describe(name, TASK)
        tokens = rng.randint(*PEAK_TOKENS) // history
        for step in range(1, history + 1):
            door.call(f"{number}-{step}", name, tokens * step, now_s, prompt_id=number if step == 1 else None)
            door.prefilled(f"{number}-{step}", now_s, cached_tokens=tokens * step // 2)
            door.finish(f"{number}-{step}", 200, now_s)
            now_s += 1e-4
    gc.collect()
    session_bytes = (tracemalloc.get_traced_memory()[0] - before_bytes) / sessions
    tracemalloc.stop()
    assert door.state().live_sessions == sessions
    return door, predictor, now_s, session_bytes


def measure(config: BasinConfig, sessions: int, calls: int, history: int) -> dict[str, float]:
    inferred_bytes = fill(config, sessions, history, inferred=True)[-1]
    door, predictor, now_s, session_bytes = fill(config, sessions, history)
    door.budget.capacity_tokens = door.state().reserved_tokens  # from here on new sessions wait

    rng = random.Random(2)
    spent_us: dict[str, list[float]] = {"live call": [], "new session": [], "what a new one tells": []}
    for number in range(calls):
        kind = "new session" if number % 2 else "live call"
        name = f"session-new-{number:024x}" if number % 2 else f"session-{rng.randrange(sessions):028x}"
        known = door.live_session(name)
        tokens = rng.randint(*PEAK_TOKENS) if known is None else round(GROWTH * known.context_tokens)
        start = time.thread_time_ns()
        if known is None:
            predictor.describe(name, TASK)
            spent_us["what a new one tells"].append((time.thread_time_ns() - start) / 1000)
            start = time.thread_time_ns()
        door.call(str(number), name, tokens, now_s, prompt_id=-number if known is None else None)
        door.poll(now_s)
        spent_us[kind].append((time.thread_time_ns() - start) / 1000)
        door.finish(str(number), 200, now_s)
        now_s += SECONDS_BETWEEN_CALLS
    result = {"bytes per live session": session_bytes, "bytes per inferred live session": inferred_bytes}
    for kind, values in spent_us.items():
        result |= {f"{kind}, {share} %, us": float(np.percentile(values, share)) for share in (50, 99)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--history", type=int, nargs="+", default=[10, 50], help="calls that each has made (10 50)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    results = {
        f"{predictor}, {history} calls": measure(
            BasinConfig(admission="partial", predictor=predictor, order="size"),
            options.sessions,
            options.calls,
            history,
        )
        for predictor in ("seen", "trained")
        for history in options.history
    }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{options.sessions} live sessions; bounds: 20 us a decision, 2,048 bytes a session. {yardstick.told()}\n")
    print(f"| | {' | '.join(results)} |\n| --- |{' --- |' * len(results)}")
    for name in next(iter(results.values())):
        print(f"| {name} | {' | '.join(f'{one[name]:.1f}' for one in results.values())} |")


if __name__ == "__main__":
    main()
