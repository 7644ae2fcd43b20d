"""What the gate costs a call that it lets in at once: median TTFT through the router, Basin against stock.

    .venv/bin/python benchmarks/gate_overhead.py --pairs 300                       # admission off: it only watches
    .venv/bin/python benchmarks/gate_overhead.py --pairs 300 --admission partial   # later calls of live sessions
    .venv/bin/python benchmarks/gate_overhead.py --pairs 300 --admission partial --sessions 100000   # first calls

Two nodes (one prefill, one decode each) run side by side on the same cores. Calls alternate between them, one at a
time, in random order within each pair and with the same prompt, so that drift of the machine hits both arms alike.
Every call names a session in its body, hence goes through identity, door and both gates; with `--unnamed` none does, so
that prefill infers sessions from prompts and decode asks about every call. Prints medians, the paired
ratio with a bootstrap interval, and writes JSON. The bounds: within 2 % of stock with admission off, at most 1 ms more
for the call of an admitted session.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import requests

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node, NodeOptions, running_node
from sglang_basin.platforms.tiny_model import ModelSpec, build

MODEL = ModelSpec(hidden=256, layers=4, vocab=2048, dtype="bfloat16", seed=7)


def running(name: str, config: BasinConfig | None, logs: Path) -> AbstractContextManager[Node]:
    return running_node(
        NodeOptions(
            model_path=str(build(MODEL)),
            config=config,
            engine_arguments=("--max-total-tokens", "60000", "--page-size", "16"),
            port=0,
            log_dir=logs / name,
        )
    )


def ttft_s(client: requests.Session, url: str, ids: list[int], session: str | None) -> float:
    """Seconds from sending a call to its first token."""
    body = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
    }
    if session is not None:
        body["session_id"] = session
    start = time.perf_counter()
    with client.post(url + "/generate", json=body, stream=True, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                first_s = time.perf_counter() - start
                break
        else:
            raise RuntimeError(f"{url}: the answer ended before its first token")
        for _ in response.iter_lines():
            pass
    return first_s


def paired(urls: dict[str, str], pairs: int, tokens: int, sessions: int, seed: int) -> dict[str, list[float]]:
    """TTFTs of both arms, call by call. The first tenth of the pairs warms up and is left out. With no `sessions` the
    calls name none."""
    draw = random.Random(seed)
    clients = {name: requests.Session() for name in urls}
    taken: dict[str, list[float]] = {name: [] for name in urls}
    for pair in range(-(pairs // 10), pairs):
        ids = [draw.randrange(16, 2000) for _ in range(tokens)]
        order = list(urls)
        draw.shuffle(order)
        for name in order:
            seconds = ttft_s(clients[name], urls[name], ids, f"overhead-{pair % sessions}" if sessions else None)
            if pair >= 0:
                taken[name].append(seconds)
    return taken


def judge(taken: dict[str, list[float]], seed: int) -> dict[str, float]:
    stock, basin = (np.array(taken[name]) for name in ("stock", "basin"))
    random_state = np.random.default_rng(seed)
    rows = random_state.integers(0, len(stock), size=(2000, len(stock)))
    ratios = np.median(basin[rows], axis=1) / np.median(stock[rows], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return {
        "pairs": len(stock),
        "stock_ttft_p50_ms": 1e3 * float(np.median(stock)),
        "basin_ttft_p50_ms": 1e3 * float(np.median(basin)),
        "difference_p50_ms": 1e3 * float(np.median(basin - stock)),
        "ratio_of_medians": float(np.median(basin) / np.median(stock)),
        "ratio_low_95": float(low),
        "ratio_high_95": float(high),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Median TTFT with the gate (admission off) against stock SGLang.")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200, help="prompt length (default: 200)")
    parser.add_argument("--sessions", type=int, default=20, help="how many session names take turns (default: 20)")
    parser.add_argument("--admission", default="off", help="Basin's --basin-admission (default: off)")
    parser.add_argument("--unnamed", action="store_true", help="calls name no session")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/gate_overhead"))
    options = parser.parse_args(argv)
    with (
        running("stock", None, options.out / "logs") as stock,
        running("basin", BasinConfig(admission=options.admission, budget_tokens=10**9), options.out / "logs") as basin,
    ):
        urls = {"stock": stock.url, "basin": basin.url}
        sessions = 0 if options.unnamed else options.sessions
        taken = paired(urls, options.pairs, options.tokens, sessions, options.seed)
    result = judge(taken, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"command": ["benchmarks/gate_overhead.py", *argv], "seed": options.seed, **result, "ttft_s": taken}
    (options.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, value in result.items():
        print(f"{name:20} {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
