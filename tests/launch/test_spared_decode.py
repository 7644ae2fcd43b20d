"""The router itself, before engines that only say how full they are: who gets the calls of a decode that is full."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from launching import until

from sglang_basin.node import Ports, health
from sglang_basin.node.plan import ROUTER_ARGUMENTS, spec_of_spared

HOST = "127.0.0.1"
NAMES = ("prefill-0", "decode-0", "decode-1")


@dataclass
class Engine:
    """A stand-in for one engine, as the router sees it; `usage` is the part of its KV pool that running calls use."""

    name: str
    port: int
    usage: float = 0.0
    server: Any = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def answer(self, path: str) -> Any:
        model = {"model_path": "/m", "tokenizer_path": "/m", "is_generation": True}
        load = {
            "dp_rank": 0,
            "num_running_reqs": 1,
            "num_waiting_reqs": 0,
            "num_total_reqs": 1,
            "num_used_tokens": int(1000 * self.usage),
            "max_total_num_tokens": 1000,
            "token_usage": self.usage,
            "gen_throughput": 10.0,
            "cache_hit_rate": 0.5,
            "utilization": self.usage,
            "max_running_requests": 64,
        }
        served = {"served_model_name": "m", "version": "0.5.23", "dp_size": 1, "tp_size": 1, "max_running_requests": 64}
        return {
            "/health": {},
            "/model_info": model,
            "/server_info": model | served | {"disaggregation_mode": self.name.partition("-")[0]},
            "/v1/loads": {"timestamp": "2026-01-01T00:00:00+00:00", "dp_rank_count": 1, "loads": [load]},
            "/generate": {"text": "x", "output_ids": [1], "meta_info": {"id": "x", "finish_reason": {"type": "stop"}}},
        }.get(path)

    def start(self) -> None:
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = engine.answer(self.path.partition("?")[0])
                body = json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer((HOST, self.port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@dataclass
class Routed:
    """The router and the engines behind it."""

    url: str
    engines: dict[str, Engine]

    def decode_of(self, session: str) -> str:
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
        answer = requests.post(self.url + "/generate", json=body, headers={"x-basin-session-id": session}, timeout=20)
        answer.raise_for_status()
        url = answer.headers["x-smg-routed-worker-id"]
        return next(engine.name for engine in self.engines.values() if engine.url == url)

    def placed(self) -> dict[str, str]:
        """Where sixteen sessions' calls go."""
        return {session: self.decode_of(session) for session in (f"session-{number}" for number in range(16))}

    def until(self, done: Callable[[dict[str, str]], bool], what: str) -> None:
        until(lambda: done(self.placed()), what, 30.0)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    with Ports(HOST) as ports, contextlib.ExitStack() as cleanup:
        engines = {name: Engine(name, ports.find()) for name in NAMES}
        port, metrics_port = ports.find(), ports.find()
        for engine in engines.values():
            engine.start()
            cleanup.callback(engine.server.shutdown)
        words = ["--pd-disaggregation", "--prefill", engines["prefill-0"].url, "9999"]
        words += ["--decode", engines["decode-0"].url, "--decode", engines["decode-1"].url]
        words += [
            "--host",
            HOST,
            "--port",
            str(port),
            "--prometheus-host",
            HOST,
            "--prometheus-port",
            str(metrics_port),
        ]
        words += [word for group, _ in ROUTER_ARGUMENTS for word in group]
        words += ["--load-monitor-interval", "1"]
        with log.open("w") as output:
            router = subprocess.Popen(
                [sys.executable, "-m", "smg", "launch", *words], stdout=output, stderr=output, env=dict(os.environ)
            )
        cleanup.callback(router.wait)
        cleanup.callback(router.kill)
        found = Routed(f"http://{HOST}:{port}", engines)
        until(lambda: _sees_all(found, router, log), "the router knows its engines", 60.0)
        yield found


def _sees_all(routed: Routed, router: subprocess.Popen[bytes], log: Path) -> bool:
    assert router.poll() is None, log.read_text()[-3000:]
    return sum(health.registered_workers(routed.url).values()) == len(NAMES)


def test_calls_leave_a_full_decode_and_come_back_and_a_full_prefill_moves_nobody(routed: Routed) -> None:
    decodes = [routed.engines[name] for name in ("decode-0", "decode-1")]
    known = health.workers(routed.url)
    for engine in decodes:
        assert health.replace_worker(routed.url, known[engine.url]["id"], spec_of_spared(engine.url, 0.9)) is None
    until(
        lambda: all(health.workers(routed.url)[engine.url].get("overload") for engine in decodes),
        "the router has taken it",
    )
    until(lambda: sum(health.registered_workers(routed.url).values()) == len(NAMES), "all are registered again")
    home = routed.placed()
    assert set(home.values()) == {"decode-0", "decode-1"}
    assert routed.placed() == home

    decodes[0].usage = 0.95
    routed.until(lambda now: set(now.values()) == {"decode-1"}, "nobody is sent to the full decode")
    decodes[0].usage = 0.5
    routed.until(lambda now: now == home, "everybody is back")

    routed.engines["prefill-0"].usage = 1.0
    time.sleep(3.0)  # the router looks every second
    assert routed.placed() == home
    routed.engines["prefill-0"].usage = 0.0

    for engine in decodes:
        engine.usage = 0.95
    routed.until(lambda now: now != home, "with both full, calls are spread")
    assert len(routed.placed()) == 16, "and served"
    for engine in decodes:
        engine.usage = 0.0
    routed.until(lambda now: now == home, "everybody is back")


def test_a_router_that_refuses_says_why(routed: Routed) -> None:
    wrong = health.replace_worker(routed.url, "no-such-id", spec_of_spared("http://x", 0.9))
    assert wrong is not None
    assert "HTTP 400" in wrong
    assert health.replace_worker("http://127.0.0.1:9", "x", {}) is not None
