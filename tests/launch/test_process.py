"""Children end for good: with stubborn offspring, when the launcher is killed, when their keeper is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import alive, tree, until

from sglang_basin.node.process import Child

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
nap = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", nap])
subprocess.Popen([sys.executable, "-S", "-c", nap], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""
"""A child that ignores SIGTERM, with two children that do too, one in a session of its own."""


def child_of(script: str, **options) -> Child:
    return Child("it", [sys.executable, "-S", "-c", script], environment=dict(os.environ), **options)


@pytest.fixture
def stubborn() -> Iterator[Child]:
    child = child_of(STUBBORN, grace_s=0.5)
    child.start()
    until(lambda: child.tail() == ["up"], "the child is up")
    yield child
    child.stop()


def test_stop_leaves_nothing_of_a_stubborn_family(stubborn: Child) -> None:
    assert stubborn.pid is not None
    family = [stubborn.pid, *tree(stubborn.pid)]
    assert len(family) == 3
    begin = time.monotonic()
    stubborn.stop()
    assert time.monotonic() - begin < 5
    assert alive(family) == []
    assert stubborn.exit_code() == 128 + signal.SIGKILL


def test_a_polite_child_ends_at_once_and_is_not_killed() -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(7)))\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    child = child_of(script, grace_s=30)
    child.start()
    until(lambda: child.tail() == ["up"], "the child is up")
    child.stop()
    assert child.exit_code() == 7
    assert child.tail() == ["up", "bye"]


def test_offspring_of_a_child_that_ends_by_itself_is_ended_too() -> None:
    nap = "import time; time.sleep(601)"
    child = child_of(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-S', '-c', {nap!r}], start_new_session=True)"
    )
    child.start()
    until(lambda: child.exit_code() is not None, "the child has ended")
    assert child.exit_code() == 0
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if nap in (p.info["cmdline"] or [])] == []


def test_a_killed_launcher_leaves_nothing() -> None:
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sglang_basin.node.process import Child
child = Child("it", [sys.executable, "-S", "-c", {STUBBORN!r}], environment=dict(os.environ), grace_s=0.5)
child.start()
while not child.tail(): time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    family = tree(launcher.pid)
    assert len(family) == 4  # keeper, child, two grandchildren
    launcher.kill()
    launcher.wait()
    until(lambda: alive(family) == [], "keeper and family are gone")


def test_a_killed_keeper_takes_the_child_with_it(stubborn: Child) -> None:
    assert stubborn.pid is not None
    pid = stubborn.pid
    family = tree(pid)
    psutil.Process(pid).parent().kill()
    until(lambda: alive([pid]) == [], "the child is gone")
    for orphan in family:  # SGLang's own subprocesses watch their parent; these do not
        psutil.Process(orphan).kill()


def test_output_reaches_log_echo_and_tail(tmp_path: Path) -> None:
    echoed: list[tuple[str, str]] = []
    script = (
        "import sys\nfor i in range(100): print('line', i)\nsys.stdout.flush()\n"
        "sys.stdout.buffer.write(b'not utf-8: \\xe9\\n')"
    )
    child = child_of(script, log=tmp_path / "it.log", echo=lambda name, line: echoed.append((name, line)))
    child.start()
    until(lambda: child.exit_code() is not None, "the child has ended")
    assert len(child.tail()) == 30
    child.stop()
    lines = (tmp_path / "it.log").read_text().splitlines()
    assert lines[:100] == [f"line {i}" for i in range(100)]
    assert echoed == [("it", line) for line in lines]
    assert child.tail() == lines[-30:]


def test_a_command_that_does_not_exist_says_so() -> None:
    child = Child("it", ["/no/such/program"], environment=dict(os.environ))
    child.start()
    until(lambda: child.exit_code() is not None, "the keeper has ended")
    assert child.exit_code() == 127
    assert child.tail() == ["cannot start /no/such/program: No such file or directory"]


def test_pinning_reaches_threads_and_offspring(stubborn: Child) -> None:
    assert stubborn.pid is not None
    core = sorted(os.sched_getaffinity(0))[-1]
    stubborn.pin([core])
    for pid in [stubborn.pid, *tree(stubborn.pid)]:
        assert os.sched_getaffinity(pid) == {core}


def test_memory_counts_the_whole_family(stubborn: Child) -> None:
    assert 5e6 < stubborn.memory_bytes() < 200e6
    stubborn.stop()
    assert stubborn.memory_bytes() == 0
