"""A node from start to end through its command line; engines and router are stand-ins with stubborn children."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import STAND_INS, alive, tree, until

from sglang_basin.node import ChildDied, Node, NodeOptions, NotReady, Ports, make_plan

Start = Callable[..., "subprocess.Popen[str]"]
STAND_IN = {"PYTHONPATH": str(STAND_INS)}


@pytest.fixture
def launcher() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `launch_node` on the stand-ins; kills what a failing test left."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sglang_basin.launch_node", "--platform", "cpu", "--port", "0", *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(STAND_INS), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_ready(path: Path, launcher: subprocess.Popen[str]) -> dict:
    until(lambda: path.exists() or launcher.poll() is not None, "the ready file is there")
    assert launcher.poll() is None, launcher.communicate()[0]
    return json.loads(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_file_then_a_clean_stop(launcher: Start, tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready.json"
    logs = tmp_path / "logs"
    process = launcher(
        *["--model-path", "m", "--decode", "2", "--ready-file", str(ready), "--log-dir", str(logs)],
        *["--basin-budget-tokens", "1000"],
    )
    told = wait_ready(ready, process)
    assert [entry["name"] for entry in told["decode"]] == ["decode-0", "decode-1"]
    assert all(entry["bootstrap_port"] for entry in told["prefill"])
    engines = [entry["pid"] for entry in told["prefill"] + told["decode"]]
    assert alive([told["router_pid"], *engines]) == [told["router_pid"], *engines]
    family = tree(process.pid)
    assert len(family) == 4 * 2 + 3  # keeper and child four times, a stubborn grandchild an engine
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert alive(family) == []
    assert not ready.exists()
    assert re.search(r"^launch_node: \[ .*\] ready: http://127.0.0.1:\d+$", output, re.MULTILINE)
    assert re.search(r"^decode-1  \| basin: set --enable-priority-scheduling", output, re.MULTILINE)
    assert "\033[" not in output  # no colours into a pipe
    assert {path.name for path in logs.iterdir()} == {"prefill-0.log", "decode-0.log", "decode-1.log", "router.log"}


def test_death_of_a_child_ends_the_node_and_shows_its_log(launcher: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = launcher("--model-path", "m", "--ready-file", str(ready), STAND_IN="die:decode")
    wait_ready(ready, process)
    family = tree(process.pid)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "decode-0 ended with exit code 3" in output
    shown = output[output.index("decode-0 ended") :]
    assert shown.count("before the end") == 30
    assert "line 39 before the end" in shown
    assert alive(family) == []


def test_death_during_the_start_ends_it_at_once(launcher: Start) -> None:
    process = launcher("--model-path", "m", "--schedule-policy", "lpm", "--basin-admission", "off")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended with exit code 2" in output
    assert "--schedule-policy lpm conflicts with --enable-priority-scheduling" in output


def test_a_killed_launcher_leaves_no_process(launcher: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = launcher("--model-path", "m", "--ready-file", str(ready))
    wait_ready(ready, process)
    family = tree(process.pid)
    process.kill()
    process.wait()
    until(lambda: alive(family) == [], "nothing is left")


def test_a_stop_during_the_start_is_clean(launcher: Start) -> None:
    process = launcher("--model-path", "m")
    until(lambda: len(tree(process.pid)) >= 4, "engines are starting")
    family = tree(process.pid)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert alive(family) == []


def test_a_taken_port_is_refused_before_anything_starts(launcher: Start) -> None:
    with Ports("127.0.0.1") as ports:
        process = launcher("--model-path", "m", "--port", str(ports.find()))
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert re.fullmatch(r"launch_node: --port \(the router\): port \d+ on 127.0.0.1 is taken.*\n", output)


def test_library_use() -> None:
    with Ports("127.0.0.1") as ports:
        options = NodeOptions(model_path="m", port=0, environment=STAND_IN)
        plan = make_plan(options, ports, sorted(os.sched_getaffinity(0)))
        os.environ["PYTHONPATH"] = str(STAND_INS)  # the router's stand-in; engines get theirs from the options
        try:
            said: list[str] = []
            with Node(plan, progress=lambda elapsed_s, line: said.append(line), grace_s=0.5) as node:
                assert node.started_in_s is not None
                assert node.describe()["url"] == node.url
                node.check()
                victim = node.child("decode-0")
                family = [child["pid"] for child in node.describe()["prefill"] + node.describe()["decode"]]
                os.kill(victim.pid or 0, signal.SIGKILL)
                with pytest.raises(ChildDied, match="decode-0 ended with exit code 137"):
                    node.wait()
        finally:
            del os.environ["PYTHONPATH"]
        assert said[-1] == f"ready: {node.url}"
        assert alive(family) == []


def test_a_node_that_does_not_come_up_says_what_is_missing() -> None:
    """With the real SGLang in the engines' place nothing can be up after half a second."""
    with Ports("127.0.0.1") as ports:
        plan = make_plan(NodeOptions(model_path="m", port=0), ports, [])
        begin = time.monotonic()
        with pytest.raises(NotReady, match=r"not ready after 0.5 s: waiting for prefill-0, decode-0"):
            Node(plan, ready_timeout_s=0.5, grace_s=0.5).start()
        assert time.monotonic() - begin < 10
