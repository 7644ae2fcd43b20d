"""What `launch_node` promises of a running node, on the shared real stack."""

from __future__ import annotations

import json
import os

import psutil
import pytest
import requests
from stack import Stack

pytestmark = pytest.mark.stack


def test_chat_streams_through_the_router_with_a_session(basin: Stack) -> None:
    model = requests.get(basin.url + "/v1/models", timeout=20).json()["data"][0]["id"]
    body = {
        "model": model,
        "session_id": "launch-chat",
        "messages": [{"role": "user", "content": "Which file holds the entry point?"}],
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = requests.post(basin.url + "/v1/chat/completions", json=body, timeout=60, stream=True)
    lines = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0  # --enable-cache-report is on
    assert len([chunk for chunk in chunks if chunk["choices"]]) >= 3


def test_every_thread_of_an_engine_stays_on_its_cores(basin: Stack) -> None:
    for engine in basin.node.plan.engines:
        if not engine.cores:
            pytest.skip("one core only: nothing to pin")
        root = psutil.Process(basin.node.child(engine.name).pid)
        processes = [root, *root.children(recursive=True)]
        assert len(processes) >= 3  # HTTP server, scheduler, detokenizer
        for process in processes:
            for thread in process.threads():
                assert os.sched_getaffinity(thread.id) == set(engine.cores)


def test_sockets_are_bound_to_the_host_alone(basin: Stack) -> None:
    """Router, its metrics, the engines' HTTP servers and prefill's bootstrap server."""
    ports = {int(url.rsplit(":", 1)[1]) for url in (basin.url, basin.prefill_url, basin.decode_url)}
    ports |= {basin.node.plan.of("prefill")[0].bootstrap_port or 0}
    words = basin.node.plan.router.command
    ports.add(int(words[words.index("--prometheus-port") + 1]))
    bound: dict[int, set[str]] = {}
    for name in ("router", "prefill-0", "decode-0"):
        root = psutil.Process(basin.node.child(name).pid)
        for process in [root, *root.children(recursive=True)]:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    bound.setdefault(connection.laddr.port, set()).add(connection.laddr.ip)
    assert {port: bound.get(port) for port in ports} == {port: {"127.0.0.1"} for port in ports}
