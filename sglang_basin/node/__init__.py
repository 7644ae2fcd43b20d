"""A PD node on one machine: engines and router as child processes, from start to an end that leaves nothing behind.

    with running_node(NodeOptions(model_path=..., decode=2, port=0)) as node:
        requests.post(node.url + "/generate", ...)

`plan` decides what runs (pure), `process` and `keeper` run it, `health` watches it come up, `ports` finds ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_basin.config import ENVIRONMENT_VARIABLE
from sglang_basin.node import health
from sglang_basin.node.plan import NodeOptions, Plan, PlanError, Process, make_plan, spec_of_spared
from sglang_basin.node.ports import PortError, Ports
from sglang_basin.node.process import Child, Echo

__all__ = [
    "ChildDied",
    "Node",
    "NodeOptions",
    "NotReady",
    "Plan",
    "PlanError",
    "PortError",
    "Ports",
    "make_plan",
    "running_node",
]

POLL_S = 0.25
PROGRESS_EVERY_S = 10.0
SPARE_TIMEOUT_S = 15.0

Progress = Callable[[float, str], None]
"""Called with the seconds since the start and a line on how far the node has come."""


class ChildDied(RuntimeError):
    """A process of the node ended by itself. The message has its name, exit code and the end of its log."""

    def __init__(self, child: Child) -> None:
        code = child.exit_code()
        self.name = child.name
        self.exit_code = code
        lines = "\n".join(f"  {line}" for line in child.tail())
        where = f" (whole log: {child.log})" if child.log else ""
        super().__init__(f"{child.name} ended with exit code {code}; its last lines{where}:\n{lines}")


class NotReady(TimeoutError):
    """The node did not come up in time. The message says what was missing."""


class Node:
    """Runs a plan. `start` returns when a request went through the router; `stop` when no process is left.

    `echo` gets every line of every child, `progress` the steps of the start. Not thread-safe: one owner.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        echo: Echo | None = None,
        progress: Progress | None = None,
        ready_timeout_s: float = 900.0,
        grace_s: float = 15.0,
    ) -> None:
        self.plan = plan
        self.started_in_s: float | None = None
        self._echo = echo
        self._progress = progress or (lambda elapsed_s, line: None)
        self._ready_timeout_s = ready_timeout_s
        self._grace_s = grace_s
        self._children: dict[str, Child] = {}
        self._start = 0.0

    @property
    def url(self) -> str:
        return self.plan.url

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until it routes. On any failure, stops what was started and raises.

        Engines start at the same time and unpinned: importing takes most of the start and keeps every core busy.
        """
        self._start = time.monotonic()
        try:
            self._start_engines(self.plan.engines)
            self._launch(self.plan.router)
            self._wait_for_router()
        except BaseException:
            self.stop()
            raise
        self.started_in_s = time.monotonic() - self._start
        self._progress(self.started_in_s, f"ready: {self.url}")

    def start_again(self, name: str) -> None:
        """Start an engine that has ended by itself anew, as the plan says. Returns when it is up."""
        self._start = time.monotonic()
        self._children[name].stop()
        self._start_engines([engine for engine in self.plan.engines if engine.name == name])

    def stop(self) -> None:
        """End every process. Returns when all are gone, within the grace period and a little. May be called again."""
        for child in self._children.values():
            child.ask_to_stop()
        for child in self._children.values():
            child.stop()

    def check(self) -> None:
        """Raises ChildDied when a process has ended by itself."""
        for child in self._children.values():
            if child.exit_code() is not None:
                raise ChildDied(child)

    def wait(self) -> None:
        """Block until a process ends by itself, then raise ChildDied."""
        while True:
            self.check()
            time.sleep(POLL_S)

    def child(self, name: str) -> Child:
        """The child named in the plan, for instance "prefill-0" or "router"."""
        return self._children[name]

    def describe(self) -> dict[str, Any]:
        """Addresses, process ids and logs, as JSON-able data (the content of the ready file)."""

        def entry(process: Process) -> dict[str, Any]:
            return {
                "name": process.name,
                "url": process.url,
                **({"bootstrap_port": process.bootstrap_port} if process.role == "prefill" else {}),
                "pid": self._children[process.name].pid,
                "log": str(process.log) if process.log else None,
            }

        return {
            "url": self.url,
            "router_pid": self._children["router"].pid,
            "router_log": entry(self.plan.router)["log"],
            "prefill": [entry(process) for process in self.plan.of("prefill")],
            "decode": [entry(process) for process in self.plan.of("decode")],
        }

    def write_ready_file(self, path: Path) -> None:
        """Write `describe()` to `path` in one step: whoever sees the file sees all of it."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(self.describe(), file, indent=2)
        os.replace(temporary, path)

    def _launch(self, process: Process) -> None:
        if process.log:
            process.log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
        child = Child(
            process.name,
            process.command,
            environment={**inherited, "PYTHONUNBUFFERED": "1", **process.environment},
            log=process.log,
            echo=self._echo,
            grace_s=self._grace_s,
        )
        self._children[process.name] = child
        child.start()

    def _start_engines(self, engines: Sequence[Process]) -> None:
        for engine in engines:
            self._launch(engine)
        self._wait_for_engines(engines)
        for engine in engines:
            if engine.cores:
                self._children[engine.name].pin(engine.cores)

    def _wait_for_engines(self, engines: Sequence[Process]) -> None:
        waiting = {engine.name: engine.url for engine in engines}
        told = self._say(f"starting {', '.join(waiting)}")
        # SGLang takes a second for each of these answers, so ask for all of them at once.
        with ThreadPoolExecutor(len(waiting), thread_name_prefix="health") as pool:
            while waiting:
                self._sleep(f"waiting for {', '.join(waiting)}")
                up = [
                    name
                    for name, ok in zip(waiting, pool.map(health.engine_is_up, waiting.values()), strict=True)
                    if ok
                ]
                for name in up:
                    del waiting[name]
                if up or time.monotonic() - told > PROGRESS_EVERY_S:
                    news = [f"{', '.join(up)} up"] if up else []
                    news += [f"waiting for {', '.join(waiting)}"] if waiting else []
                    told = self._say("; ".join(news))

    def _wait_for_router(self) -> None:
        engines = {engine.url for engine in self.plan.engines}
        self._say("starting the router")
        missing = engines
        while missing:
            self._sleep(f"the router has not registered {', '.join(sorted(missing))}")
            missing = engines - {url for url, healthy in health.registered_workers(self.url).items() if healthy}
        if self.plan.spare_decode_at is not None:
            self._spare_full_decodes(self.plan.spare_decode_at)
        self._say("the router knows every engine; sending a first request")
        wrong = health.generate_one_token(self.url)
        while wrong is not None:
            self._sleep(f"the router does not route yet: {wrong}")
            wrong = health.generate_one_token(self.url)

    def _spare_full_decodes(self, at: float) -> None:
        """Tell the router from when on a decode is full. Where it does not take that, it stays as it is: calls then
        wait for the decode that their session is pinned to."""
        urls = {engine.url for engine in self.plan.of("decode")}
        known = health.workers(self.url)
        wrong = [
            health.replace_worker(self.url, str(known.get(url, {}).get("id")), spec_of_spared(url, at))
            for url in sorted(urls)
        ]
        give_up_s = time.monotonic() + SPARE_TIMEOUT_S
        told: set[str] = set()
        while not any(wrong) and told < urls and time.monotonic() < give_up_s:
            self._sleep("the router has not taken when a decode is full")
            told = {url for url, worker in health.workers(self.url).items() if worker.get("overload")}
        if not told >= urls:
            why = next(filter(None, wrong), f"{', '.join(sorted(urls - told))} unchanged after {SPARE_TIMEOUT_S:g} s")
            self._say(f"the router will not spare a full decode: {why}")

    def _say(self, line: str) -> float:
        now = time.monotonic()
        self._progress(now - self._start, line)
        return now

    def _sleep(self, missing: str) -> None:
        """One step of a wait. Raises ChildDied, or NotReady with what is `missing` when the time is up."""
        self.check()
        if time.monotonic() - self._start > self._ready_timeout_s:
            raise NotReady(f"the node is not ready after {self._ready_timeout_s:g} s: {missing}")
        time.sleep(POLL_S)


@contextlib.contextmanager
def running_node(
    options: NodeOptions, *, progress: Progress | None = None, ready_timeout_s: float = 900.0
) -> Iterator[Node]:
    """A node from its options, on ports found now and the cores this process may use, until the block ends."""
    with Ports(options.host) as ports:
        plan = make_plan(options, ports, sorted(os.sched_getaffinity(0)))
        with Node(plan, progress=progress, ready_timeout_s=ready_timeout_s) as node:
            yield node
