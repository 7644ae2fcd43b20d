"""A child process of the node: started under a keeper, its output carried line by line, ended for good.

The keeper (`keeper.py`) owns the promise that nothing is left behind; this module is the launcher's end of it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

KEEPER = Path(__file__).with_name("keeper.py")
TAIL_LINES = 30

Echo = Callable[[str, str], None]
"""Called with a child's name and one line of its output, from that child's reader thread."""


class Child:
    """One child. `environment` is its whole environment; `log` gets its output unless None.

    `start` returns once the process runs. Afterwards `pid` is the child's own (not the keeper's).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None = None,
        echo: Echo | None = None,
        grace_s: float = 15.0,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.pid: int | None = None
        self._environment = dict(environment)
        self._echo = echo
        self._grace_s = grace_s
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._keeper: subprocess.Popen[str] | None = None
        self._lifeline: int | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        lifeline_read, self._lifeline = os.pipe()
        report_read, report_write = os.pipe()
        words = [str(lifeline_read), str(report_write), str(self._grace_s), "--", *self.command]
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lifeline_read, report_write),
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
            text=True,
            errors="replace",
        )
        os.close(lifeline_read)
        os.close(report_write)
        self._reader = threading.Thread(target=self._carry, name=f"log-{self.name}", daemon=True)
        self._reader.start()
        with os.fdopen(report_read) as report:
            pid = report.read()  # ends when the keeper closes it: the child runs, or could not be started
        self.pid = int(pid) if pid else None

    def exit_code(self) -> int | None:
        """The child's exit code (128 + n after signal n), None while it runs."""
        return None if self._keeper is None else self._keeper.poll()

    def tail(self) -> list[str]:
        """The last lines of its output, complete once it has ended."""
        if self.exit_code() is not None and self._reader is not None:
            self._reader.join(timeout=2.0)
        return list(self._tail)

    def ask_to_stop(self) -> None:
        """Let go: the keeper asks the child to end, waits for the grace period, then kills all of it. At once."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def stop(self) -> None:
        """Ask, and return when nothing of the child is left."""
        self.ask_to_stop()
        if self._keeper is not None:
            self._keeper.wait()
        if self._reader is not None:
            self._reader.join()

    def pin(self, cores: Sequence[int]) -> None:
        """Confine every thread of the child and of its descendants to `cores`. Threads started later inherit it."""
        if self.pid is None:
            return
        for _ in range(2):  # twice: a thread may start another one between the listing and its own turn
            for task in _tasks(self.pid):
                try:
                    os.sched_setaffinity(task, cores)
                except ProcessLookupError:
                    continue

    def memory_bytes(self) -> int:
        """Proportional set size of the child and its descendants: shared pages count once. 0 when it is gone."""
        return sum(_pss(process) for process in _tree(self.pid)) if self.pid else 0

    def _carry(self) -> None:
        """Reader thread: the child's output to its log file, the tail and the echo."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(self.log, "w", buffering=1, encoding="utf-8")) if self.log else None
            for line in self._keeper.stdout:
                if file:
                    file.write(line)
                self._tail.append(line.rstrip("\n"))
                if self._echo:
                    self._echo(self.name, line.rstrip("\n"))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _tasks(pid: int) -> list[int]:
    found = []
    for process in _tree(pid):
        try:
            found += [thread.id for thread in process.threads()]
        except psutil.NoSuchProcess:
            continue
    return found


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0
