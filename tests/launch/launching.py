"""What the launcher tests share: the command lines as a user runs them, with stand-ins for SGLang and smg."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

STAND_INS = Path(__file__).parent / "stand_ins"


def run_module(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments…` with variables on top of the test's own; stand-ins where PYTHONPATH says so."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BASIN", "SGLANG"))}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def until(done: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    """Those of `pids` that still run; zombies, which only wait for their parent, do not count."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def tree(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]
