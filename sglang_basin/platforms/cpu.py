"""The reference CPU platform: SGLang unmodified on any x86-64 CPU, PD over Mooncake's TCP transport included.

Selected by `SGLANG_PLATFORM=basin_cpu`, otherwise absent: SGLang then finds its own platform as if Basin were not
installed. For development, tests and the demo, not for speed. (SGLang's own CPU engine needs kernels that no wheel
ships.) Flags and variables that go with it: `profiles.CPU`.

SGLang loads this module in each of its processes. `activate` and `register` are its two entry points; everything that
only the process with the model needs happens in `ReferenceCpu.post_load_model`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_basin.platforms import attention
from sglang_basin.platforms.profiles import CPU_PLATFORM, parse_cores

logger = logging.getLogger(__name__)


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's class when it is selected, else None."""
    return f"{__name__}:ReferenceCpu" if _selected() else None


def register() -> None:
    """Entry point `sglang.srt.plugins`: registers `HOOKS` when the platform is selected, else nothing."""
    if _selected():
        for hook in HOOKS:
            HookRegistry.register(hook.target, hook.function, hook.kind)


def _selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


class ReferenceCpu(CpuDeviceMixin, SRTPlatform):
    """SGLang's plain CPU device, announced as out of tree so that no in-tree CPU kernel is looked for."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def post_load_model(self, model: torch.nn.Module) -> None:
        """In the process with the model, before KV pools and transfers exist: make what is missing, check the rest.

        Raises RuntimeError, which ends the server, when a hook did not take: SGLang itself only logs that.
        """
        if missing := missing_hooks():
            raise RuntimeError(
                "the CPU platform's hooks did not apply; this SGLang is not the version they are written for: "
                + ", ".join(missing)
            )
        _send_page_indices_from_host()
        _host_tier_in_plain_memory()
        _checksums_in_python()
        _pin_to_cores()


def _extend(
    original: Callable[..., torch.Tensor], backend: Any, query: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    if not _plain(options, causal=True) or len(rest) != 9 or rest[8] is not None:
        return original(backend, query, *rest, **options)
    output, k_cache, v_cache, req_to_token, req_pool_indices, _seq_lens, prefix_lens, new_lens, _encoder_lens = rest
    return attention.extend(
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, prefix_lens, new_lens, options["scaling"]
    )


def _decode(
    original: Callable[..., torch.Tensor], backend: Any, query: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    if not _plain(options, causal=False) or len(rest) != 7 or rest[6] is not None:
        return original(backend, query, *rest, **options)
    output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, _encoder_lens = rest
    return attention.decode(
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, options["scaling"]
    )


def _plain(options: dict[str, Any], *, causal: bool) -> bool:
    """Whether a call is ordinary self-attention of a decoder; encoders and sliding windows keep the original."""
    return (
        options.keys() == {"scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size"}
        and options["causal"] is causal
        and not options["is_cross_attn"]
        and options["sliding_window_size"] is None
    )


IDLE_POLL_MS = 100


class _Waiting:
    """A watchdog that is fed once something has come to `socket`, or now and then."""

    def __init__(self, watchdog: Any, socket: Any) -> None:
        self._watchdog = watchdog
        self._socket = socket

    def feed(self) -> None:
        self._socket.poll(IDLE_POLL_MS)
        self._watchdog.feed()


def _wait_for_requests(original: Callable[[Any], None], controller: Any) -> None:
    """The data-parallel controller feeds its watchdog before each look at its socket, which is where it can wait."""
    controller.soft_watchdog = _Waiting(controller.soft_watchdog, controller.recv_from_tokenizer)
    original(controller)


@dataclass(frozen=True)
class Hook:
    """One function put around an upstream one, and why no flag or extension point reaches it."""

    target: str
    function: Callable[..., Any]
    kind: HookType
    why: str


_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

HOOKS: Sequence[Hook] = (
    Hook(
        f"{_BACKEND}._run_sdpa_forward_extend",
        _extend,
        HookType.AROUND,
        "attends cached rows too, so a prefix hit saves no attention; a platform can name a backend, not supply one",
    ),
    Hook(
        f"{_BACKEND}._run_sdpa_forward_decode",
        _decode,
        HookType.AROUND,
        "copies each KV head once per query head, most of a decode step's time",
    ),
    Hook(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        _wait_for_requests,
        HookType.AROUND,
        "spins on a whole core, which the ranks' own processes need; --sleep-on-idle is for these only",
    ),
)


def missing_hooks() -> list[str]:
    """Targets of `HOOKS` that SGLang has not patched in this process. For after its plugins have loaded."""
    return [hook.target for hook in HOOKS if hook.target not in HookRegistry._patched]


def _send_page_indices_from_host() -> None:
    """Let Mooncake's sender take page indices that are on the CPU already.

    With `supports_host_tensor_indices` SGLang's prefill copies them through pinned memory and a CUDA event; without
    it takes the path of the other transfers, plain numpy.
    """
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_mode == "null":
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def _host_tier_in_plain_memory() -> None:
    """Give the host tier (HiCache) the two things that only CUDA builds bring: an allocator and a copy.

    Serves `--hicache-io-backend direct --hicache-mem-layout layer_first`.
    """
    from sglang.srt.mem_cache.pool_host import common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned
    mha.transfer_kv_direct = _copy_pages


def _allocate_unpinned(
    dims: Any,
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """SGLang's allocator without the pinning: its host pools ask for that whatever the platform says."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def _copy_pages(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """sgl_kernel's `transfer_kv_direct`: copy the rows of `src_indices` to `dst_indices`, in each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target.index_copy_(0, dst_indices, source.index_select(0, src_indices))


def _checksums_in_python() -> None:
    """Let `--disaggregation-enable-kv-checksum` work: SGLang's Adler-32 is a CUDA kernel."""
    from sglang.srt.disaggregation.checksum import KvChecksumComputer

    KvChecksumComputer.compute = _checksum


def _checksum(self: Any, pages: torch.Tensor, states: torch.Tensor | None = None) -> int:
    """Of the given pages of every KV buffer, then of the given items of every state buffer: the kernel's own order."""
    checksum = 1
    for addresses, items_bytes, indices in (
        (self._kv_data_ptrs, self._kv_item_lens, pages),
        (self._state_data_ptrs, self._state_item_lens, states),
    ):
        numbers = [] if indices is None else indices.tolist()
        for address, item_bytes in zip(addresses, items_bytes, strict=True):
            item = ctypes.c_char * item_bytes
            for number in numbers:
                checksum = zlib.adler32(item.from_address(address + number * item_bytes), checksum)
    return checksum


def _pin_to_cores() -> None:
    """Keep every thread of this process on the cores that SGLANG_CPU_OMP_THREADS_BIND gives its rank.

    SGLang reads that variable too, but binds threads with a kernel that only AMX builds have. HTTP and detokenizer
    are other processes and stay free.
    """
    from sglang.srt.runtime_context import get_device

    binding = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all")
    if binding == "all":
        return
    ranks = binding.split("|")
    rank = get_device().gpu_id
    if rank >= len(ranks):
        raise RuntimeError(
            f"SGLANG_CPU_OMP_THREADS_BIND={binding!r} names cores for {len(ranks)} rank(s); rank {rank} needs its own"
        )
    cores = parse_cores(ranks[rank])
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # the thread ended meanwhile
        except OSError as error:
            raise RuntimeError(f"SGLANG_CPU_OMP_THREADS_BIND: cannot run on cores {ranks[rank]}: {error}") from error
    logger.info("Model runs on CPU cores %s with %d thread(s)", ranks[rank], torch.get_num_threads())
