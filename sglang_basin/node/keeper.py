"""Keeps one child and everything it starts: `python -I -S keeper.py LIFELINE_FD REPORT_FD GRACE_S -- COMMAND…`

The launcher holds the write end of a pipe and the keeper reads the other end. When the launcher dies in whatever way,
even by SIGKILL, the pipe closes and the keeper takes the child down. The keeper is a *subreaper*: processes that the
child leaves behind, also those in sessions of their own, become the keeper's and die with it. Should the keeper
itself be killed, the kernel kills the child (PR_SET_PDEATHSIG) and SGLang's subprocesses follow by the same means.

It exits as the child did: with its code, or 128 + the signal's number. Standard library only, so that a start costs
some 10 ms. Linux only, as SGLang's own parent watch is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

POLL_S = 0.05
CLEAR_S = 60.0
"""A process inside a driver call dies only when that returns; GPUs take tens of seconds at worst."""


def keep(lifeline: int, report: int, grace_s: float, command: list[str]) -> int:
    """Run `command` until it ends or `lifeline` reports end of file; returns the exit code (127: it did not start).

    `lifeline` and `report` are file descriptors of pipes; the child's process id is written to `report`.
    """
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    keeper = os.getpid()

    def tie_to_keeper() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it died before the line above
            os._exit(1)

    # One thread only in this process, so code between fork and exec is safe and PDEATHSIG means the process.
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=tie_to_keeper)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    os.write(report, str(child.pid).encode())
    os.close(report)
    while child.poll() is None:
        readable, _, _ = select.select([lifeline, wake_read], [], [])
        asked = set(os.read(wake_read, 512)) if wake_read in readable else set()
        if lifeline in readable or asked - {signal.SIGCHLD}:
            _end(child, grace_s)
            break
    code = child.wait()
    _clear()
    return code if code >= 0 else 128 - code


def descendants() -> list[int]:
    """Process ids of every live descendant of this process, found through /proc (zombies are left out)."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    found, frontier = [], [os.getpid()]
    while frontier:
        frontier = [pid for parent in frontier for pid in children.get(parent, [])]
        found += frontier
    return found


def _end(child: subprocess.Popen, grace_s: float) -> None:
    """Ask the child to end and wait up to `grace_s` for it; what is left of its process group is then killed.

    Only the child itself is asked: SGLang's main process drains its scheduler, and takes the death of a scheduler
    that got the signal too for a crash.
    """
    child.terminate()
    deadline = time.monotonic() + grace_s
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _clear() -> None:
    """Kill whatever the child left behind, until nothing is left; says so when the kernel does not let something go."""
    deadline = time.monotonic() + CLEAR_S
    while left := descendants():
        if time.monotonic() > deadline:
            print(f"still there after SIGKILL and {CLEAR_S:g} s: processes {left}", file=sys.stderr)
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


if __name__ == "__main__":
    lifeline_fd, report_fd, grace, dashes, *words = sys.argv[1:]
    if dashes != "--" or not words:
        sys.exit("usage: keeper.py LIFELINE_FD REPORT_FD GRACE_S -- COMMAND…")
    sys.exit(keep(int(lifeline_fd), int(report_fd), float(grace), words))
