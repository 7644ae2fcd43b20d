"""Every place in SGLang that Basin touches, in one table; the second part of it (`LENDING`) only if that is on.

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
from sglang_basin.config import BasinConfig

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
        target="sglang.srt.managers.data_parallel_controller.DataParallelController.dispatching_with_trace",
        kind="before",
        function="sglang_basin.engine.ranks:keep_on_rank",
        parameters=("self", "req", "refresh_load_budget"),
        why="every call passes here on its way to a data-parallel rank; no load balance method keeps sessions together",
    ),
    Hook(
        target="sglang.srt.disaggregation.common.conn.CommonKVSender._register_prefill_dp_rank",
        kind="around",
        function="sglang_basin.engine.ranks:register_rank",
        parameters=("self",),
        why="upstream registers rank 0 for the calls of each replica, and has the scheduler wait meanwhile",
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

_BOOTSTRAP = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
_ON_PREFILL = "sglang_basin.lending.prefill"
_ON_DECODE = "sglang_basin.lending.decode"

LENDING: tuple[Hook, ...] = (
    Hook(
        target=f"{_SCHEDULER}.init_request_receiver",
        kind="after",
        function="sglang_basin.lending.attach:attach",
        parameters=("self",),
        why="pools, tree and queues exist from here on; no call has come yet",
    ),
    Hook(
        target=f"{_RECEIVER}.recv_requests",
        kind="after",
        function="sglang_basin.lending.attach:hear",
        parameters=("self", "local_reqs"),
        why="on every rank, behind the broadcast: leases are asked for, granted and returned in one order on all ranks",
    ),
    Hook(
        target=f"{_TREE}.on_release",
        kind="after",
        function=f"{_ON_DECODE}:trim",
        parameters=("self", "req"),
        why="a finished call's KV has just become evictable; no flag caps how much of it stays",
    ),
    Hook(
        target=f"{_TREE}._evict_device_leaf",
        kind="before",
        function=f"{_ON_DECODE}:note_dropped",
        parameters=("self", "node_id", "tracker"),
        why="whose copy becomes shorter; the tree's core is native and its events name no sessions",
    ),
    Hook(
        target="sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata",
        kind="around",
        function=f"{_ON_DECODE}:tell_pages",
        parameters=("self", "decode_req", "kv_indices", "page_size", "state_indices"),
        why="the call's prefix is matched and locked, and prefill is about to be told of it",
    ),
    Hook(
        target=f"{_MOONCAKE}.MooncakeKVManager.build_receiver_metadata_message",
        kind="around",
        function=f"{_ON_DECODE}:append_pages",
        parameters=("self", "bootstrap_room"),
        why="the message that goes to prefill anyway; readers ignore fields they do not know",
    ),
    Hook(
        target=f"{_MOONCAKE}.TransferInfo.from_zmq",
        kind="after",
        function=f"{_ON_PREFILL}:read_pages",
        parameters=("msg",),
        why="the same message on prefill",
    ),
    Hook(
        target=f"{_MOONCAKE}.MooncakeKVManager.build_receiver_registration_message",
        kind="around",
        function=f"{_ON_DECODE}:append_buffers",
        parameters=("self",),
        why="the message in which decode tells prefill of its KV buffers anyway",
    ),
    Hook(
        target=f"{_MOONCAKE}.KVArgsRegisterInfo.from_zmq",
        kind="after",
        function=f"{_ON_PREFILL}:read_buffers",
        parameters=("msg",),
        why="the same message on prefill",
    ),
    Hook(
        target=f"{_BOOTSTRAP}.pop_bootstrapped",
        kind="before",
        function=f"{_ON_PREFILL}:settle",
        parameters=("self",),
        why="once a turn, on all ranks, before calls go on to the waiting queue",
    ),
    Hook(
        target=f"{_BOOTSTRAP}.finalize_bootstrap",
        kind="around",
        function=f"{_ON_PREFILL}:finalize",
        parameters=("self", "req"),
        why="decode's message is here, the call is in no batch yet, and False keeps it waiting",
    ),
    Hook(
        target=f"{_TREE}._finalize_match_result",
        kind="around",
        function=f"{_ON_PREFILL}:match",
        parameters=("self", "params", "result"),
        why="what a call is told it has cached; SGLang's linker sits here too, but it excludes HiCache",
    ),
    Hook(
        target=f"{_TREE}.prefix_device_indices",
        kind="around",
        function=f"{_ON_PREFILL}:prefix_slots",
        parameters=("self", "req"),
        why="a part on its way is not in the tree, where this looks",
    ),
    Hook(
        target=f"{_SCHEDULER}.run_batch",
        kind="around",
        function=f"{_ON_PREFILL}:run_batch",
        parameters=("self", "batch"),
        why="a forward must know which parts its layers wait for, and its result whether they came",
    ),
    Hook(
        target=f"{_SCHEDULER}.maybe_send_cached_prefix_chunk",
        kind="around",
        function=f"{_ON_PREFILL}:send_cached",
        parameters=("self", "req", "allow_send"),
        why="decode may lack tokens of a lease: they may go there once they have come; HiCache's loads wait here too",
    ),
    Hook(
        target=f"{_SCHEDULER}.process_batch_result_disagg_prefill",
        kind="after",
        function=f"{_ON_PREFILL}:measure",
        parameters=("self", "batch", "result"),
        why="a batch is through: how long computing takes, to compare a pull with",
    ),
    Hook(
        target="sglang.srt.disaggregation.prefill.should_force_retry",
        kind="around",
        function=f"{_ON_PREFILL}:run_again",
        parameters=("req",),
        why="SGLang's way to void a forward and queue its call again, else taken by optimistic prefill only",
    ),
    Hook(
        target="sglang.srt.disaggregation.common.conn.CommonKVManager._maybe_ack_drained_abort",
        kind="around",
        function=f"{_ON_PREFILL}:hold_abort_ack",
        parameters=("self", "room"),
        why="decode frees an aborted call's pages on this acknowledgement, which must wait for our reads too",
    ),
    Hook(
        target=f"{_SCHEDULER}.flush_cache",
        kind="around",
        function=f"{_ON_PREFILL}:refuse_flush",
        parameters=("self",),
        why="it would hand out slots that are being written to",
    ),
    Hook(
        target=f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker._check_all_pools",
        kind="around",
        function=f"{_ON_PREFILL}:count_private",
        parameters=("self", "ps", "uncached"),
        why="slots on their way are neither free nor in the tree, and would be reported as leaked",
    ),
)


def needed(config: BasinConfig) -> tuple[Hook, ...]:
    """The hooks that a configuration takes."""
    return HOOKS + LENDING if config.lending == "on" else HOOKS


def mismatches(hooks: Iterable[Hook]) -> list[Mismatch]:
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


def register(hooks: Iterable[Hook]) -> None:
    """Hand the table to SGLang's registry. Call inside a plugin's entry point only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, _load(hook.function), HookType(hook.kind))


def unapplied(hooks: Iterable[Hook]) -> list[Mismatch]:
    """Hooks that SGLang was given but did not apply in this process; empty once all are in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        Mismatch(hook.target, "SGLang did not apply the hook", "see the log above for SGLang's own error")
        for hook in hooks
        if hook.target not in HookRegistry._patched
    ]


def _load(function: str) -> Callable[..., Any]:
    return pkgutil.resolve_name(function)
