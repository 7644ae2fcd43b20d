"""What NVML knows of this machine's GPUs, those hidden by CUDA_VISIBLE_DEVICES included. Starts no CUDA context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    name: str


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[Gpu]:
    """This machine's GPUs; empty without an NVIDIA driver."""
    try:
        with _nvml() as nvml:
            found = []
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(Gpu(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)))
            return found
    except Exception:  # noqa: BLE001 - no driver, no library, no permission: no GPU that could be used
        return []


def unreachable(here: str, there: str) -> str | None:
    """Why the GPU with UUID `here` cannot read memory of the one with UUID `there`, or None if it can."""
    try:
        with _nvml() as nvml:
            ours, theirs = (nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in (here, there))
            status = nvml.nvmlDeviceGetP2PStatus(ours, theirs, nvml.NVML_P2P_CAPS_INDEX_READ)
            return None if status == nvml.NVML_P2P_STATUS_OK else f"no peer access between the two (NVML: {status})"
    except Exception as error:  # noqa: BLE001 - one that NVML does not know, such as a slice of a GPU
        return f"NVML does not know: {error}"
