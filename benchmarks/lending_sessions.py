"""Does lending give back exactly what prefill lost? Random multi-turn sessions on a real CPU node with a small prefill
pool, so that sessions evict each other there, and a decode pool that keeps them.

    .venv/bin/python benchmarks/lending_sessions.py --sessions 16 --turns 8 --page-size 16 --chunk 512

Every call is made twice: as its session's next call, and cold, under a cache salt of its own, so that nothing cached
fits. The model is float32 and decoding greedy: the answers must be equal. Prints, and writes as JSON, how many were,
how much of the calls' known prefixes prefill had in its cache after all (its own count: an answer's `cached_tokens`
has decode's in it), and what was read for that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node, NodeOptions, running_node
from sglang_basin.platforms.tiny_model import ModelSpec, build

MODEL = ModelSpec(hidden=128, layers=2, vocab=2048, dtype="float32", seed=7)


def lending_node(
    *,
    model: ModelSpec = MODEL,
    decode: int = 1,
    prefill_tokens: int = 3_008,
    decode_tokens: int = 40_000,
    page_size: int = 16,
    engine_arguments: Sequence[str] = (),
    prefill_arguments: Sequence[str] = (),
    spare_decode_at: float = 0.0,
    config: BasinConfig | None = None,
    environment: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> AbstractContextManager[Node]:
    return running_node(
        NodeOptions(
            model_path=str(build(model)),
            decode=decode,
            config=config or BasinConfig(admission="off", lending="on"),
            engine_arguments=(
                "--dtype",
                model.dtype,
                "--page-size",
                str(page_size),
                "--enable-metrics",
                *engine_arguments,
            ),
            prefill_arguments=("--max-total-tokens", str(prefill_tokens), *prefill_arguments),
            decode_arguments=("--max-total-tokens", str(decode_tokens)),
            spare_decode_at=spare_decode_at,
            environment=environment or {},
            port=0,
            log_dir=logs,
        ),
        ready_timeout_s=280,
    )


def always_pull() -> dict[str, str]:
    """Environment of a node whose prefill reads what is lent to it whether or not that pays."""
    paths = [str(Path(__file__).parent / "always_pull"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def counter(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples on one engine that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in requests.get(url + "/metrics", timeout=20).text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(label in series for label in wanted):
            total += float(value)
    return total


def outcomes(url: str, counter: str = "basin_lent_calls_total", label: str = "outcome") -> dict[str, int]:
    """What came of lent prefixes so far."""
    found: dict[str, int] = {}
    for line in requests.get(url + "/metrics", timeout=20).text.splitlines():
        if line.startswith(counter + "{"):
            series, _, value = line.rpartition(" ")
            name = series.partition(f'{label}="')[2].partition('"')[0]
            found[name] = found.get(name, 0) + int(float(value))
    return found


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    cached_tokens: int
    decode: str = ""
    """The decode instance that served it (its URL)."""


def call(
    url: str,
    ids: list[int],
    tokens: int,
    *,
    salt: str | None = None,
    session: str | None = None,
    pin: str | None = None,
) -> Answer:
    """A greedy call. Under a `salt` it finds nothing that others cached. The router sends calls of one `pin` to one
    decode: the session's name unless it is given; "" spreads them at random."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    body |= {"cache_salt": salt} if salt else {}
    body |= {"session_id": session} if session else {}
    headers = routing(session if pin is None else pin)
    response = requests.post(url + "/generate", json=body, headers=headers, timeout=120)
    response.raise_for_status()
    answer = response.json()
    decode = response.headers.get("x-smg-routed-worker-id", "")
    return Answer(answer["output_ids"], answer["meta_info"]["cached_tokens"], decode)


def routing(session: str | None) -> dict[str, str]:
    """Headers that keep a session's calls on one decode; the router hands them to nobody."""
    return {"x-basin-session-id": session} if session else {}


def pins(node: Node) -> list[str]:
    """For each decode, in the node's order, a name that the router pins to it."""
    urls = [engine.url for engine in node.plan.of("decode")]
    found: dict[str, str] = {}
    for number in range(64):
        pin = f"pin-{number}"
        found.setdefault(call(node.url, [3, 5, 7, number], 1, pin=pin).decode, pin)
        if set(urls) <= set(found):
            return [found[url] for url in urls]
    raise RuntimeError(f"the router sent 64 names to {sorted(found)} only, of {urls}")


def abandon(url: str, ids: list[int], after_s: float, session: str | None = None) -> None:
    """Make a call and hang up on it."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}}
    with suppress(requests.exceptions.ReadTimeout):
        requests.post(url + "/generate", json=body, headers=routing(session), timeout=(5, after_s))


@dataclass
class Session:
    """One session's context and what its calls are like."""

    number: int
    seed: int
    context: list[int] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed}/{self.number}")

    def next_prompt(self, most_tokens: int) -> list[int]:
        room = most_tokens - len(self.context)
        wanted = self.random.randint(200, 700) if self.turn == 0 else self.random.randint(20, 200)
        added = max(1, min(room, wanted))
        return self.context + [self.random.randint(3, 2000) for _ in range(added)]


@dataclass(frozen=True)
class Turn:
    """What one call of a session showed."""

    session: int
    turn: int
    prompt_tokens: int
    known_tokens: int
    """Whole pages of the prompt that were in the session's last call or its answer."""
    equal: bool


def play(
    node: Node,
    *,
    sessions: int,
    turns: int,
    page_size: int,
    most_tokens: int,
    concurrency: int,
    disconnects: int,
    seed: int,
    pinned: bool = True,
) -> list[Turn]:
    """Play the sessions in random order, never two calls of one at a time; each call again under a salt, to compare.
    Unless `pinned`, each call lands on any decode."""
    rng = random.Random(seed)
    all_sessions = [Session(number, seed) for number in range(sessions)]
    order = [session for session in all_sessions for _ in range(turns)]
    rng.shuffle(order)
    busy: set[int] = set()
    changed = threading.Condition()
    hang_ups = set(rng.sample(range(len(order)), min(disconnects, len(order))))

    def one(position: int) -> Turn:
        with changed:
            session = order[position]
            changed.wait_for(lambda: session.number not in busy)
            busy.add(session.number)
        try:
            name = f"sessions-{seed}-{session.number}"
            prompt = session.next_prompt(most_tokens)
            known = max(0, len(session.context) - 1) // page_size * page_size
            tokens = session.random.randint(2, 12)
            if position in hang_ups:
                abandon(node.url, prompt, session.random.choice((0.005, 0.02, 0.05, 0.1)), name)
            warm = call(node.url, prompt, tokens, session=name, pin=name if pinned else "")
            cold = call(node.url, prompt, tokens, salt=f"{seed}-{position}")
            session.context = prompt + warm.ids
            session.turn += 1
            return Turn(session.number, session.turn, len(prompt), known, warm.ids == cold.ids)
        finally:
            with changed:
                busy.discard(session.number)
                changed.notify_all()

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, range(len(order))))


def found_tokens(prefill: str) -> int:
    """Prompt tokens that prefill did not compute, of all calls so far: cached, from its host tier, or lent."""
    return int(counter(prefill, "sglang:realtime_tokens_total", mode="prefill_cache"))


def summary(node: Node, turns: list[Turn], token_bytes: int) -> dict[str, Any]:
    prefill = next(engine.url for engine in node.plan.engines if engine.role == "prefill")
    decode = [engine.url for engine in node.plan.engines if engine.role == "decode"]
    later = [turn for turn in turns if turn.known_tokens]
    known = sum(turn.known_tokens for turn in later)
    tokens, read = counter(prefill, "basin_lent_tokens_total"), counter(prefill, "basin_lent_bytes_total")
    return {
        "calls": len(turns),
        "unequal_answers": sum(not turn.equal for turn in turns),
        "later_calls": len(later),
        "known_tokens": known,
        "found_part": found_tokens(prefill) / max(1, known),
        "lent_tokens": int(tokens),
        "lent_bytes": int(read),
        "bytes_per_lent_token": read / tokens if tokens else None,
        "token_bytes": token_bytes,
        "outcomes": outcomes(prefill),
        "leases": outcomes(prefill, "basin_leases_total", "answer"),
        "faults": sum(counter(url, "basin_faults_total") for url in (prefill, *decode)),
        "kept_tokens": [int(counter(url, "basin_lent_kept_tokens")) for url in decode],
    }


HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
)
"""A host tier of twice prefill's pool, as the CPU platform serves it."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=3_008)
    parser.add_argument("--decode-tokens", type=int, default=200_000, help="its kept half must hold the cold calls too")
    parser.add_argument("--most-tokens", type=int, default=1_400, help="longest prompt")
    parser.add_argument("--chunk", type=int, help="SGLang's --chunked-prefill-size")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--decode", type=int, default=1, help="decode instances")
    parser.add_argument("--unpinned", action="store_true", help="let each call land on any decode")
    parser.add_argument("--disconnects", type=int, default=0, help="calls that a client hangs up on before making them")
    parser.add_argument("--layers", type=int, default=MODEL.layers)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill-arguments", default="", help="more SGLang flags for prefill, in one string")
    parser.add_argument("--lending", default="on", choices=("on", "off"))
    parser.add_argument("--hicache", action="store_true", help="prefill has a host tier too")
    parser.add_argument("--always-pull", action="store_true", help="read what is lent also where computing is faster")
    parser.add_argument("--checksum", action="store_true", help="decode checks the KV that it gets")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the node that the options describe, play the sessions, and say what came of them."""
    engines = ["--tp-size", str(options.tp)]
    engines += ["--chunked-prefill-size", str(options.chunk)] if options.chunk else []
    engines += ["--disaggregation-enable-kv-checksum"] if options.checksum else []
    model = ModelSpec(hidden=128, layers=options.layers, vocab=2048, dtype="float32", seed=7)
    with lending_node(
        model=model,
        decode=options.decode,
        prefill_tokens=options.prefill_tokens,
        decode_tokens=options.decode_tokens,
        page_size=options.page_size,
        engine_arguments=engines,
        prefill_arguments=[*options.prefill_arguments.split(), *(HICACHE if options.hicache else ())],
        config=BasinConfig(admission="off", lending=options.lending),
        environment=always_pull() if options.always_pull else {},
        logs=options.logs,
    ) as node:
        start = time.perf_counter()
        turns = play(
            node,
            sessions=options.sessions,
            turns=options.turns,
            page_size=options.page_size,
            most_tokens=options.most_tokens,
            concurrency=options.concurrency,
            disconnects=options.disconnects,
            seed=options.seed,
            pinned=not options.unpinned,
        )
        shown = summary(node, turns, model.kv_bytes_per_token)
        shown["took_s"] = round(time.perf_counter() - start, 1)
    return {"options": {k: str(v) for k, v in vars(options).items()}} | shown


def main(argv: Sequence[str]) -> int:
    options = arguments().parse_args(argv)
    shown = run(options)
    text = json.dumps(shown, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if shown["unequal_answers"] or shown["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
