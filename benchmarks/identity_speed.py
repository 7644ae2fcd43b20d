"""What it costs to tell by its prompt whose call it is, with ten thousand sessions live.

    .venv/bin/python benchmarks/identity_speed.py

All sessions share a system prompt of 13,000 tokens, as those of one coding agent do. For each prompt length, calls of
that length go on with a live session; the time covers all that the gate does with an unnamed call: fingerprints of
the prompt, the look-up, and noting the new context. The bound in the project's terms: 1 ms for a prompt of 100,000
tokens, and well under 2 KB a session.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.policy.lineage import Lineage, Placement

SYSTEM_TOKENS = 13_000
LENGTHS = (1_000, 13_500, 25_000, 50_000, 100_000, 200_000)


class Bench:
    def __init__(self, sessions: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._fingerprints = Fingerprints(seed)
        self.lineage = Lineage(max_sessions=2 * sessions, prefix="prompt~0000-")
        self.system = self._text(SYSTEM_TOKENS)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for session in range(sessions):
            task = self.system + array("q", [session // 1000, session % 1000]) + self._text(60 + session % 400)
            assert self.call(task) == self.call(task + self._text(500))
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.bytes_per_session = (after - before) / sessions

    def _text(self, tokens: int) -> array[int]:
        return array("q", self._random.integers(0, 150_000, tokens).tolist())

    def call(self, prompt: array[int]) -> Placement | None:
        return self.lineage.place(self._fingerprints.of(prompt), lambda session_id: False)

    def times_s(self, tokens: int, calls: int) -> list[float]:
        """Each call goes on with the same session, once its context has about this length."""
        context = (self.system + self._text(max(0, tokens - SYSTEM_TOKENS)))[: tokens - calls]
        session = self.call(context)
        taken = []
        for _ in range(calls):
            context.append(7)
            start = time.perf_counter()
            found = self.call(context)
            taken.append(time.perf_counter() - start)
            assert found == session
        return taken


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Time to infer a call's session from its prompt.")
    parser.add_argument("--sessions", type=int, default=10_000, help="live sessions (default: 10,000)")
    parser.add_argument("--calls", type=int, default=400, help="calls timed per prompt length (default: 400)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/identity_speed"))
    options = parser.parse_args(argv)
    bench = Bench(options.sessions, options.seed)
    rows = []
    for tokens in LENGTHS:
        taken_ms = 1e3 * np.array(bench.times_s(tokens, options.calls))
        rows.append({"tokens": tokens, "p50_ms": np.median(taken_ms), "p99_ms": np.quantile(taken_ms, 0.99)})
    result = {"sessions": len(bench.lineage), "bytes_per_session": bench.bytes_per_session, "lengths": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"command": ["benchmarks/identity_speed.py", *argv], "seed": options.seed, **result}
    (options.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{options.sessions} sessions, {bench.bytes_per_session:.0f} bytes each")
    print(f"{'prompt tokens':>13} {'p50 ms':>8} {'p99 ms':>8}")
    for row in rows:
        print(f"{row['tokens']:13} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
