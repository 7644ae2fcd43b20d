"""Lent pages of a decode on the same machine: its KV buffers mapped through CUDA IPC, copied by a Triton kernel on a
side stream of prefill's GPU. No NIC, no staging, nothing for decode to do.

A peer is met at its first call: a thread of its own maps its buffers, compiles the kernel, then waits for the end of
that process, to unmap them: else a decode that was killed would leave its GPU's memory taken. Until they are mapped,
and wherever they cannot be, `Nearest` reads by Mooncake.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from basin_kernels.page_copy import PageCopy, Placement

from sglang_basin.engine.metrics import log
from sglang_basin.lending import places
from sglang_basin.lending.buffers import Allocation, Buffer, Buffers
from sglang_basin.lending.places import Choice, Place
from sglang_basin.lending.transport import MooncakeReads, Plan, TransferFailed

LAYERS_AHEAD = 2
"""Layers that are launched before the one that is waited for has come: hides the launches, bounds what giving up waits
for."""


class Event(Protocol):
    def synchronize(self) -> None: ...


class Driver(Protocol):
    """`cuda_memory.Driver`."""

    def share(self, address: int) -> tuple[bytes, int, int]: ...

    def open(self, handle: bytes) -> tuple[int, int]: ...

    def close(self, address: int) -> None: ...


class Device(Protocol):
    """`cuda_memory.CudaDevice`."""

    uuid: str
    driver: Driver

    def view(self, address: int, size_bytes: int) -> torch.Tensor: ...

    def aside(self) -> AbstractContextManager[None]: ...

    def mark(self) -> Event: ...


@dataclass(frozen=True, slots=True)
class Own:
    """One of this process's KV buffers: dense pages from an address on."""

    address: int
    pages: int
    page_bytes: int

    @classmethod
    def all_of(cls, kv_args: Any) -> list[Own]:
        """SGLang's `KVArgs`: K of every layer, then V; or one for each layer."""
        return [
            cls(address, length // item, item)
            for address, length, item in zip(
                kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens, strict=True
            )
        ]


def offer(own: Sequence[Own], device: Device) -> Buffers:
    """What decode tells of its buffers. Raises RuntimeError where the driver does not share them."""
    here = Place.here(device.uuid)
    allocations: dict[bytes, int] = {}
    sizes: list[int] = []
    buffers = []
    for buffer in own:
        handle, size, offset = device.driver.share(buffer.address)
        if handle not in allocations:
            allocations[handle] = len(sizes)
            sizes.append(size)
        buffers.append(Buffer(allocations[handle], offset, buffer.pages, buffer.page_bytes))
    return Buffers(
        machine=here.machine,
        processes=here.processes,
        process=os.getpid(),
        device=device.uuid,
        allocations=tuple(Allocation(handle, size) for handle, size in zip(allocations, sizes, strict=True)),
        buffers=tuple(buffers),
    )


@dataclass(slots=True)
class _Met:
    """One decode rank. `mapped` and `readers` change under the lock of `PeerReads`."""

    registered: object
    told: Buffers | None
    why: str
    """Why it is read the way it is."""
    usable: bool = False
    """Mapped, and no copy has failed."""
    mapped: PageCopy | None = None
    readers: int = 0


@dataclass(slots=True)
class _UnderWay:
    """One pull: what has been launched of it."""

    met: _Met
    copy: PageCopy
    placement: Placement
    events: list[Event] = field(default_factory=list)


class PeerReads:
    """Reads from decodes of this machine, as `transport.Transport` says; `meet` stands where that has `mismatch`."""

    def __init__(
        self,
        kv_manager: Any,
        layers: int,
        device: Device,
        *,
        reaches: Callable[[str, str], str | None],
    ) -> None:
        """`kv_manager` as for `MooncakeReads`; `reaches` as for `places.choose`. Raises OSError without /proc."""
        self.layers = layers
        self.own = Own.all_of(kv_manager.kv_args)
        self.page_bytes = sum(buffer.page_bytes for buffer in self.own)
        self._manager = kv_manager
        self._device = device
        self._place = Place.here(device.uuid)
        self._reaches = reaches
        self._met: dict[str, _Met] = {}
        self._changed = threading.Condition()
        self._launching = threading.Lock()
        self._under_way: dict[Plan, _UnderWay] = {}

    def meet(self, peer: str) -> None:
        """Begin to map a peer's buffers if it is new. Asked by the scheduler's thread alone; does not wait."""
        registered = self._manager.decode_kv_args_table.get(peer)
        met = self._met.get(peer)
        if met is not None and met.registered is registered:
            return
        told: Buffers | None = getattr(registered, "lent_buffers", None)
        if met is not None and told is not None and met.told == told:
            met.registered = registered  # the same process again: what is mapped stays mapped
            return
        met = self._met[peer] = _Met(registered, told, "its memory is being mapped")
        threading.Thread(target=self._serve, args=(peer, met), name=f"basin-peer-{peer}", daemon=True).start()

    def ready(self, peer: str) -> bool:
        """Whether its pages can be read now."""
        return (met := self._met.get(peer)) is not None and met.usable

    def choices(self) -> dict[str, Choice]:
        """By peer: how it is read now, and why."""
        return {
            peer: Choice(places.PEER if met.usable else places.MOONCAKE, met.why)
            for peer, met in list(self._met.items())
        }

    def read(self, plan: Plan, layer: int) -> None:
        """Layers in order from 0; `finish` ends what the first one begins. Raises TransferFailed."""
        try:
            pull = self._begin(plan) if layer == 0 else self._under_way[plan]
            with self._device.aside():
                for ahead in range(len(pull.events), min(layer + 1 + LAYERS_AHEAD, self.layers)):
                    with self._launching:
                        pull.copy.launch(ahead, pull.placement)
                    pull.events.append(self._device.mark())
            pull.events[layer].synchronize()
        except TransferFailed:
            raise
        except Exception as error:
            met = self._met[plan.peer]
            met.usable, met.why = False, f"a copy from its memory failed: {error}"
            raise TransferFailed(f"{met.why} ({plan.peer}; Mooncake reads from now on)") from error

    def finish(self, plan: Plan) -> None:
        """Waits for the copies that were launched."""
        if (pull := self._under_way.pop(plan, None)) is None:
            return
        try:
            for event in pull.events:
                event.synchronize()
        finally:
            self._left(pull.met)

    def has_begun(self, plan: Plan) -> bool:
        return plan in self._under_way

    def _begin(self, plan: Plan) -> _UnderWay:
        met = self._met[plan.peer]
        with self._changed:
            if (copy := met.mapped) is None:
                raise TransferFailed(f"{plan.peer}: {met.why}")
            met.readers += 1
        try:
            theirs, ours = plan.page_ids()
            with self._device.aside():
                placement = copy.place(torch.from_numpy(theirs), torch.from_numpy(ours))
        except BaseException:
            self._left(met)
            raise
        pull = self._under_way[plan] = _UnderWay(met, copy, placement)
        return pull

    def _left(self, met: _Met) -> None:
        with self._changed:
            met.readers -= 1
            self._changed.notify_all()

    def _choose(self, told: Buffers | None) -> Choice:
        there = None if told is None else Place(told.machine, told.processes, told.device)
        choice = places.choose(self._place, there, self._reaches)
        if told is not None and choice.transport == places.PEER:
            ours, theirs = ([buffer.page_bytes for buffer in side] for side in (self.own, told.buffers))
            if ours != theirs:
                return Choice(places.MOONCAKE, f"its {len(theirs)} KV buffers are not like prefill's {len(ours)}")
        return choice

    def _serve(self, peer: str, met: _Met) -> None:
        """A peer's thread, from the choice of its transport to the end of its process, when it unmaps the buffers."""
        opened: list[int] = []
        ended = -1
        try:
            told, choice = met.told, self._choose(met.told)
            if told is None or choice.transport != places.PEER:
                met.why = choice.why
                log.info("Basin reads what %s lends by %s", peer, choice)
                return
            ended = os.pidfd_open(told.process)  # before mapping: that succeeds only while this very process lives
            met.mapped = self._map(told, opened)
            met.why, met.usable = choice.why, True
            log.info("Basin reads what %s lends by peer: %s", peer, met.why)
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll()
            met.why = "its process has ended"
        except Exception as error:  # noqa: BLE001 - whatever it was, Mooncake reads instead
            met.why = f"its memory could not be mapped: {error}"
            log.warning("Basin reads what %s lends by mooncake: %s", peer, met.why)
        finally:
            if ended >= 0:
                os.close(ended)
            met.usable = False
            with self._changed:
                met.mapped = None
                self._changed.wait_for(lambda: met.readers == 0)
            for address in opened:
                try:
                    self._device.driver.close(address)
                except RuntimeError as error:
                    log.warning("Basin could not unmap the memory of %s: %s", peer, error)

    def _map(self, told: Buffers, opened: list[int]) -> PageCopy:
        """`opened` receives what is to be closed, also if this raises."""
        bases = []
        for allocation in told.allocations:
            address, size = self._device.driver.open(allocation.handle)
            opened.append(address)
            if size < allocation.size_bytes:
                raise ValueError(f"an allocation has {size} bytes, {allocation.size_bytes} were told")
            bases.append(address)
        with self._device.aside():
            copy = PageCopy(
                [
                    [
                        (
                            self._pages(bases[there.allocation] + there.offset_bytes, there.pages, there.page_bytes),
                            self._pages(here.address, here.pages, here.page_bytes),
                        )
                        for here, there in list(zip(self.own, told.buffers, strict=True))[layer :: self.layers]
                    ]
                    for layer in range(self.layers)
                ],
                source_page_tokens=1,
                destination_page_tokens=1,
            )
            copy.warm_up()
        return copy

    def _pages(self, address: int, pages: int, page_bytes: int) -> torch.Tensor:
        """A page is a row of bytes: its tokens, heads and dtype do not matter here."""
        return self._device.view(address, pages * page_bytes).view(pages, 1, page_bytes)


class Nearest:
    """A transport that reads by `peer` where it can and by `mooncake` elsewhere; a pull keeps what it began with."""

    def __init__(self, peer: PeerReads, mooncake: MooncakeReads) -> None:
        self.peer = peer
        self.mooncake = mooncake
        self.layers = mooncake.layers
        self.page_bytes = mooncake.page_bytes

    def mismatch(self, peer: str) -> str | None:
        """What neither can read, Mooncake cannot: buffers of another shape or another TP."""
        if wrong := self.mooncake.mismatch(peer):
            return wrong
        self.peer.meet(peer)
        return None

    def name_of(self, peer: str) -> places.Name:
        return places.PEER if self.peer.ready(peer) else places.MOONCAKE

    def choices(self) -> dict[str, Choice]:
        return self.peer.choices()

    def read(self, plan: Plan, layer: int) -> None:
        by_peer = self.peer.ready(plan.peer) if layer == 0 else self.peer.has_begun(plan)
        (self.peer if by_peer else self.mooncake).read(plan, layer)

    def finish(self, plan: Plan) -> None:
        self.peer.finish(plan)
