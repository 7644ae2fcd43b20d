"""Where a process runs, and from that the transport its lent pages are read by. Shared by engines and `doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

PEER: Final = "peer"
MOONCAKE: Final = "mooncake"

Name = Literal["peer", "mooncake"]


@dataclass(frozen=True, slots=True)
class Place:
    """A process and its GPU. Two on one machine have the same `machine`, whatever containers they run in."""

    machine: str
    processes: str
    """The PID namespace."""
    device: str | None
    """The GPU's UUID as NVML writes it, None without CUDA."""

    @classmethod
    def here(cls, device: str | None) -> Self:
        """Raises OSError where there is no /proc."""
        return cls(
            machine=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            processes=os.readlink("/proc/self/ns/pid"),
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and why."""

    transport: Name
    why: str

    def __str__(self) -> str:
        return f"{self.transport}: {self.why}"


def choose(here: Place, there: Place | None, reaches: Callable[[str, str], str | None]) -> Choice:
    """How `here` reads what `there` lends. `there` is None for a peer that offers no buffers to map. `reaches` says why
    the first GPU (by UUID) cannot read the second one's memory, or None if it can."""
    if here.device is None:
        return Choice(MOONCAKE, "this process has no CUDA device")
    if there is None or there.device is None:
        return Choice(MOONCAKE, "it offers no CUDA memory to map")
    if here.machine != there.machine:
        return Choice(MOONCAKE, "it runs on another machine")
    if here.processes != there.processes:
        return Choice(MOONCAKE, "its process is in another PID namespace, so its end would not be noticed")
    if here.device == there.device:
        return Choice(PEER, "the same GPU")
    if (wrong := reaches(here.device, there.device)) is not None:
        return Choice(MOONCAKE, f"its GPU's memory cannot be read from here: {wrong}")
    return Choice(PEER, "another GPU of this machine, with peer access")
