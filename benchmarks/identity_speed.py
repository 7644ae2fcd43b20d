"""What it costs to tell whose call it is: by its prompt, with ten thousand sessions live, and by its body.

    .venv/bin/python benchmarks/identity_speed.py

All sessions share a system prompt of 13,000 tokens, as those of one coding agent do. For each prompt length, calls of
that length go on with a live session; the time covers all that the gate does with an unnamed call: fingerprints of
the prompt, the look-up, and noting the new context. The bound in the project's terms: 1 ms for a prompt of 100,000
tokens, and well under 2 KB a session. The second table is what the HTTP process does with a chat request's body before
SGLang takes over, without the predictor's share (`predictor.payload` says what that is).
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
from types import SimpleNamespace

import numpy as np

from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.engine.identity import stamp_of, stamp_request
from sglang_basin.policy.lineage import Lineage, Placement

SYSTEM_TOKENS = 13_000
LENGTHS = (1_000, 13_500, 25_000, 50_000, 100_000, 200_000)
BODY_BYTES = (10_000, 100_000, 1_000_000, 10_000_000)


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


def stamp_times_s(body_bytes: int, calls: int) -> list[float]:
    """Time to look at a body of about this size, of an agent that names no session and to which 40 tools belong."""
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 40 * (body_bytes // 10_000)}}
    message = {"role": "assistant", "content": 'It says: "no such file".\n' * 20}
    body = json.dumps(
        {"model": "m", "tools": [tool] * 40, "messages": [message] * max(1, int(0.8 * body_bytes / 620))}
    ).encode()
    request = SimpleNamespace(headers={}, _body=body)
    manager = SimpleNamespace(disaggregation_mode=SimpleNamespace(value="decode"))
    taken = []
    for _ in range(1 + calls):
        obj = SimpleNamespace(session_id=None, routing_key=None, input_ids=None, kv_hints=None)
        start = time.perf_counter()
        stamp_request(lambda self, obj, request: obj, manager, obj, request)
        taken.append(time.perf_counter() - start)
        assert stamp_of(obj).tools
    return taken[1:]  # the first one imports SGLang


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Time to infer a call's session from its prompt.")
    parser.add_argument("--sessions", type=int, default=10_000, help="live sessions (default: 10,000)")
    parser.add_argument("--calls", type=int, default=400, help="calls timed per prompt length (default: 400)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/identity_speed"))
    options = parser.parse_args(argv)
    bench = Bench(options.sessions, options.seed)
    rows = [{"tokens": tokens, **judge(bench.times_s(tokens, options.calls))} for tokens in LENGTHS]
    bodies = [{"bytes": size, **judge(stamp_times_s(size, max(10, options.calls // 10)))} for size in BODY_BYTES]
    result = {
        "sessions": len(bench.lineage),
        "bytes_per_session": bench.bytes_per_session,
        "lengths": rows,
        "bodies": bodies,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"command": ["benchmarks/identity_speed.py", *argv], "seed": options.seed, **result}
    (options.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{options.sessions} sessions, {bench.bytes_per_session:.0f} bytes each")
    for name, key, table in (("prompt tokens", "tokens", rows), ("body bytes", "bytes", bodies)):
        print(f"{name:>13} {'p50 ms':>8} {'p99 ms':>8}")
        for row in table:
            print(f"{row[key]:13} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}")
    return 0


def judge(taken_s: list[float]) -> dict[str, float]:
    taken_ms = 1e3 * np.array(taken_s)
    return {"p50_ms": float(np.median(taken_ms)), "p99_ms": float(np.quantile(taken_ms, 0.99))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
