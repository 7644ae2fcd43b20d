"""Every place in SGLang that Basin touches, in one table.

SGLang swallows plugin failures: a hook whose target is gone is only logged, before logging is even configured. So
Basin checks the table itself, before registering (`mismatches`) and after SGLang applied it (`unapplied`), and stops
with the whole list. This module imports sglang only inside the functions that check or register.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sglang_basin import SGLANG_VERSION

Kind = Literal["before", "after", "around"]


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook: `target` is the dotted upstream symbol, `parameters` the names that the hook relies on, in order.

    `function` is where the hook's own code lives, as "module:name"; it is imported when the hook is registered.
    """

    target: str
    kind: Kind
    function: str
    parameters: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What differs between the table and the installed SGLang, and what to do about it."""

    target: str
    problem: str
    mend: str

    def __str__(self) -> str:
        return f"{self.target}: {self.problem} ({self.mend})"


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RECEIVER = f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver"

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_TOKENIZER}.generate_request",
        kind="around",
        function="sglang_basin.engine.identity:stamp_request",
        parameters=("self", "obj", "request"),
        why="the one place where every endpoint's headers and body are still there; no flag forwards them",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="before",
        function="sglang_basin.engine.inputs:refuse_harmful",
        parameters=("self", "obj", "input_ids"),
        why="upstream's own checks of a request lack two without which a client can take the server down",
    ),
    Hook(
        target=f"{_SCHEDULER}.init_request_receiver",
        kind="after",
        function="sglang_basin.engine.gate:attach",
        parameters=("self",),
        why="pools, queues and the tokenizer's sockets exist from here on; the event loop does not run yet",
    ),
    Hook(
        target=f"{_RECEIVER}._pull_raw_reqs",
        kind="around",
        function="sglang_basin.engine.gate:pull",
        parameters=("self",),
        why="rank 0, before the broadcast: what is held here is held on all ranks, and all see one order",
    ),
    Hook(
        target=f"{_RECEIVER}.recv_requests",
        kind="after",
        function="sglang_basin.engine.gate:clear_dropped_rooms",
        parameters=("self", "local_reqs"),
        why="on every rank, behind the broadcast: transfer tables of a call dropped at the door are kept per rank",
    ),
    Hook(
        target=f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer.stream_output",
        kind="after",
        function="sglang_basin.engine.gate:calls_left",
        parameters=("self", "reqs", "return_logprob", "skip_req"),
        why="every finished call passes here, so its session's context and end are known exactly",
    ),
    Hook(
        target=f"{_SCHEDULER}.send_abort_output",
        kind="after",
        function="sglang_basin.engine.gate:call_aborted",
        parameters=("self", "abort_req", "req"),
        why="the other way a call ends: aborted while it waits in one of SGLang's queues",
    ),
    Hook(
        target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped",
        kind="around",
        function="sglang_basin.engine.priorities:sort_bootstrap_queue",
        parameters=("self",),
        why="the one queue that --enable-priority-scheduling does not sort",
    ),
    Hook(
        target="sglang.srt.observability.metrics_collector.SchedulerMetricsCollector._log_gauge_queue_count",
        kind="around",
        function="sglang_basin.engine.priorities:count_queue_as_one",
        parameters=("self", "gauge", "data"),
        why="a series per priority would grow without end; the totals stay",
    ),
    Hook(
        target=f"{_SCHEDULER}.get_internal_state",
        kind="around",
        function="sglang_basin.engine.status:report_state",
        parameters=("self", "recv_req"),
        why="SGLang's own question from the HTTP process to the scheduler; carries /basin/status, and no other answer",
    ),
    Hook(
        target=f"{_TOKENIZER}._handle_abort_finish_reason",
        kind="before",
        function="sglang_basin.engine.refusals:note_refusal",
        parameters=("self", "out", "state", "is_stream"),
        why="the one place where every endpoint's refused call passes with its reason, before the first byte",
    ),
    Hook(
        target="sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        kind="before",
        function="sglang_basin.engine.http_app:extend_app",
        parameters=("server_args", "tokenizer_manager"),
        why="the app exists, its API-key middleware and its first request do not yet; SGLang has no option for routes",
    ),
)


def mismatches(hooks: Iterable[Hook] = HOOKS) -> list[Mismatch]:
    """What of the table the installed SGLang does not have. Imports the targets' modules; registers nothing."""
    mend = f"install sglang=={SGLANG_VERSION}"
    found = []
    for hook in hooks:
        try:
            symbol = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            found.append(Mismatch(hook.target, f"not found: {error}", mend))
            continue
        if not callable(symbol):
            found.append(Mismatch(hook.target, "not a function", mend))
            continue
        names = tuple(inspect.signature(symbol).parameters)
        if names[: len(hook.parameters)] != hook.parameters:
            problem = f"takes ({', '.join(names)}), the hook expects ({', '.join(hook.parameters)})"
            found.append(Mismatch(hook.target, problem, mend))
    return found


def register(hooks: Iterable[Hook] = HOOKS) -> None:
    """Hand the table to SGLang's registry. Call inside a plugin's entry point only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, _load(hook.function), HookType(hook.kind))


def unapplied(hooks: Iterable[Hook] = HOOKS) -> list[Mismatch]:
    """Hooks that SGLang was given but did not apply in this process; empty once all are in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        Mismatch(hook.target, "SGLang did not apply the hook", "see the log above for SGLang's own error")
        for hook in hooks
        if hook.target not in HookRegistry._patched
    ]


def _load(function: str) -> Callable[..., Any]:
    return pkgutil.resolve_name(function)
