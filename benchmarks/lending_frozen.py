"""What a decode that stops, or dies, in mid-traffic costs the calls on the other one, with lending on.

    .venv/bin/python benchmarks/lending_frozen.py --signal STOP --rounds 3
    .venv/bin/python benchmarks/lending_frozen.py --signal KILL

A real CPU node with two decodes. Evicted sessions of one decode keep prefill pulling from it; that decode gets the
signal; calls of a session on the other one are timed before, beside the traffic, and after the signal. Prints, and
writes as JSON, these times: the calls of the other decode must not wait for pulls from the one that is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import requests
from lending_sessions import call, counter, lending_node, outcomes

from sglang_basin.node import Node

TIMED_CALLS = 20


def ids(tokens: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randint(3, 2000) for _ in range(tokens)]


def homes(node: Node) -> list[str]:
    """A session for each decode, in the decodes' order: the router hashes the session's header."""
    urls = [engine.url for engine in node.plan.of("decode")]
    found: dict[int, str] = {}
    for number in range(64):
        session = f"home-{number}"
        before = [counter(url, "sglang:generation_tokens_total") for url in urls]
        call(node.url, ids(300, session), 4, session=session)
        time.sleep(0.2)
        after = [counter(url, "sglang:generation_tokens_total") for url in urls]
        grown = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
        if len(grown) == 1:
            found.setdefault(grown[0], session)
        if len(found) == len(urls):
            return [found[index] for index in range(len(urls))]
    raise RuntimeError(f"the router sent 64 sessions to decodes {sorted(found)} only")


def processes(node: Node, index: int) -> list[psutil.Process]:
    """All processes of one decode."""
    port = node.plan.of("decode")[index].url.rpartition(":")[2]
    for child in psutil.Process().children():
        if port in child.cmdline():
            return [child, *child.children(recursive=True)]
    raise RuntimeError(f"no process serves port {port}")


def timed(node: Node, session: str, seed: object) -> float:
    start = time.perf_counter()
    call(node.url, ids(300, session) + ids(30, seed), 4, session=session)
    return time.perf_counter() - start


class Traffic:
    """Sessions of one decode, evicting each other on prefill, in a few threads."""

    def __init__(self, node: Node, session: str, threads: int = 3) -> None:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(node, session, number), daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, node: Node, session: str, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            prompt = ids(1_200, f"{session}-{number}-{turn % 2}") + ids(20, turn)
            try:
                call(node.url, prompt, 2, session=session)
            except requests.RequestException:
                return

    def end(self) -> None:
        self._over.set()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=("STOP", "KILL"), default="STOP")
    parser.add_argument("--rounds", type=int, default=1, help="of stopping and going on; a killed decode stays dead")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args(argv)
    rounds = []
    with lending_node(decode=2, logs=options.logs) as node:
        prefill = node.plan.of("prefill")[0].url
        victim, other = homes(node)
        for number in range(options.rounds if options.signal == "STOP" else 1):
            alone = [timed(node, other, f"alone-{number}-{n}") for n in range(TIMED_CALLS)]
            traffic = Traffic(node, victim)
            time.sleep(1.5)
            beside = [timed(node, other, f"beside-{number}-{n}") for n in range(TIMED_CALLS)]
            hit = processes(node, 0)
            for process in hit:
                os.kill(process.pid, getattr(signal, f"SIG{options.signal}"))
            try:
                traffic.end()
                after = [timed(node, other, f"after-{number}-{n}") for n in range(TIMED_CALLS)]
            finally:
                if options.signal == "STOP":
                    for process in hit:
                        os.kill(process.pid, signal.SIGCONT)
            shown = {
                name: {"median_s": round(statistics.median(times), 4), "max_s": round(max(times), 4)}
                for name, times in (("alone", alone), ("beside_traffic", beside), ("after_the_signal", after))
            }
            rounds.append(shown | {"outcomes": outcomes(prefill)})
            print(json.dumps(rounds[-1]), flush=True)
            time.sleep(3.0)
        faults = counter(prefill, "basin_faults_total")
        text = json.dumps({"signal": options.signal, "rounds": rounds, "faults": faults}, indent=2)
        print(text)
        if options.out:
            options.out.write_text(text + "\n")
    worst = max(shown["after_the_signal"]["max_s"] - shown["beside_traffic"]["max_s"] for shown in rounds)
    return 0 if worst <= 0.2 and not faults else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
