"""What a lending decode that stops, or dies, in mid-traffic costs the calls on the other one.

    .venv/bin/python benchmarks/lending_frozen.py --signal STOP --rounds 3
    .venv/bin/python benchmarks/lending_frozen.py --signal KILL

A real CPU node with two decodes. One of them, the victim, keeps copies of sessions: prefill reads from it for calls
that land there too, and asks it for leases for calls that land on the other one. Beside that, calls of a session that
has nothing to do with the victim are timed: alone, beside that traffic, and from the signal on, while calls still come
whose copy is on the victim. Prints, and writes as JSON, these times. Exit code 1 if the slowest uninvolved call took
over 0.2 s longer than beside sound traffic, if a call on the other decode whose copy is on the victim took longer than
the patience and twice the longest time before, if a call on the other decode failed, or if Basin counted a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests
from lending_sessions import call, counter, lending_node, outcomes, pins

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node

TIMED_CALLS = 60
CONTEXT_TOKENS = 1_200
MAY_LOSE_S = 0.2


def ids(tokens: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randint(3, 2000) for _ in range(tokens)]


def processes(node: Node, name: str) -> list[psutil.Process]:
    """All processes of one engine."""
    root = psutil.Process(node.child(name).pid)
    return [root, *root.children(recursive=True)]


def uninvolved(node: Node, pin: str, seed: object) -> list[float]:
    """The times of calls that need nothing from the victim, in seconds."""
    times = []
    for number in range(TIMED_CALLS):
        start = time.perf_counter()
        call(node.url, ids(300, pin) + ids(30, f"{seed}-{number}"), 4, session=f"uninvolved-{pin}", pin=pin)
        times.append(time.perf_counter() - start)
    return times


class Traffic:
    """Sessions that evict each other on prefill and whose copies the victim keeps. One thread makes calls that stay on
    the victim; another has sessions whose second call lands on the other decode, four of them under way."""

    def __init__(self, node: Node, victim: str, other: str, seed: object) -> None:
        self._node, self._victim, self._other, self._seed = node, victim, other, seed
        self._over = threading.Event()
        self._first = threading.Lock()  # held during a first call
        self.second_s: list[tuple[float, float]] = []
        """Of each second call: when it began, and what it took, in seconds."""
        self.failed: list[str] = []
        """What second calls failed with."""
        self._leaving = threading.Thread(target=self._leave, daemon=True)
        self._leaving.start()
        threading.Thread(target=self._stay, daemon=True).start()

    @contextlib.contextmanager
    def without_first_calls(self) -> Iterator[None]:
        """In the block no call is under way that a signal to the victim would keep from ever ending, but the ones that
        stay there."""
        with self._first:
            yield

    def end(self) -> None:
        self._over.set()
        self._leaving.join(60)

    def _stay(self) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            name = f"stays-{self._seed}-{turn % 3}"
            body = {"input_ids": ids(CONTEXT_TOKENS, name) + ids(20, turn), "session_id": name}
            body["sampling_params"] = {"max_new_tokens": 2, "temperature": 0}
            headers = {"x-basin-session-id": self._victim}
            try:
                requests.post(self._node.url + "/generate", json=body, headers=headers, timeout=10).raise_for_status()
            except requests.RequestException:
                return  # the victim has had its signal

    def _leave(self) -> None:
        turn = 0
        waiting: list[str] = []
        while not self._over.is_set():
            if len(waiting) < 4 and self._first.acquire(blocking=False):
                turn += 1
                name = f"leaves-{self._seed}-{turn}"
                try:
                    call(self._node.url, ids(CONTEXT_TOKENS, name), 2, session=name, pin=self._victim)
                finally:
                    self._first.release()
                waiting.append(name)
            elif waiting:
                name = waiting.pop(0)
                start = time.perf_counter()
                try:
                    prompt = ids(CONTEXT_TOKENS, name) + ids(20, "more")
                    call(self._node.url, prompt, 2, session=name, pin=self._other)
                except requests.RequestException as error:
                    self.failed.append(repr(error)[:200])
                self.second_s.append((start, time.perf_counter() - start))
            else:
                self._over.wait(0.05)


def play(node: Node, number: int, name: str) -> dict[str, Any]:
    """One round: the signal in the middle of traffic."""
    prefill = node.plan.of("prefill")[0].url
    victim, other = pins(node)
    alone = uninvolved(node, other, f"alone-{number}")
    traffic = Traffic(node, victim, other, number)
    time.sleep(2.0)
    beside = uninvolved(node, other, f"beside-{number}")
    hit = processes(node, "decode-0")
    with traffic.without_first_calls():
        signalled_s = time.perf_counter()
        for process in hit:
            os.kill(process.pid, getattr(signal, f"SIG{name}"))
        try:
            after = uninvolved(node, other, f"after-{number}")
            traffic.end()
        finally:
            if name == "STOP":
                for process in hit:
                    os.kill(process.pid, signal.SIGCONT)
    before_s = [took_s for start_s, took_s in traffic.second_s if start_s + took_s < signalled_s]
    during_s = [took_s for start_s, took_s in traffic.second_s if start_s + took_s >= signalled_s]
    time.sleep(1.5)
    return {
        "uninvolved": {
            label: {"median_s": round(statistics.median(times), 4), "max_s": round(max(times), 4)}
            for label, times in (("alone", alone), ("beside_sound_traffic", beside), ("from_the_signal_on", after))
        },
        "involved": {
            "before_max_s": round(max(before_s, default=0.0), 4),
            "from_the_signal_on_s": [round(took_s, 4) for took_s in during_s],
        },
        "failed": traffic.failed,
        "outcomes": outcomes(prefill),
        "leases": outcomes(prefill, "basin_leases_total", "answer"),
    }


def holds(shown: dict[str, Any], patience_s: float) -> bool:
    """Whether a round kept what is promised."""
    beside, after = (shown["uninvolved"][label]["max_s"] for label in ("beside_sound_traffic", "from_the_signal_on"))
    involved = shown["involved"]
    slowest_s = max(involved["from_the_signal_on_s"], default=0.0)
    within = slowest_s <= patience_s + 2 * involved["before_max_s"]
    return after - beside <= MAY_LOSE_S and within and not shown["failed"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=("STOP", "KILL"), default="STOP")
    parser.add_argument("--rounds", type=int, default=1, help="of stopping and going on; a killed decode stays dead")
    parser.add_argument("--patience", type=float, default=2.0, help="Basin's --basin-lending-patience-s")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args(argv)
    rounds = []
    config = BasinConfig(admission="off", lending="on", lending_patience_s=options.patience)
    with lending_node(decode=2, config=config, logs=options.logs) as node:
        for number in range(options.rounds if options.signal == "STOP" else 1):
            rounds.append(play(node, number, options.signal))
            print(json.dumps(rounds[-1]), flush=True)
            time.sleep(8.0)  # the breakers try the peer again
        faults = counter(node.plan.of("prefill")[0].url, "basin_faults_total")
    shown = {"signal": options.signal, "patience_s": options.patience, "rounds": rounds, "faults": faults}
    text = json.dumps(shown, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if all(holds(shown, options.patience) for shown in rounds) and not faults else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
