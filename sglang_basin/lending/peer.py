"""Lent pages of a decode on the same machine: its KV buffers mapped through CUDA IPC, copied by a Triton kernel on a
side stream of prefill's GPU. No NIC, no staging, nothing for decode to do.

A peer is met at its first call: a thread of its own maps its buffers, compiles the kernel, then waits for the end of
that process, to unmap them: else a decode that was killed would leave its GPU's memory taken. That a mapping succeeds
does not say that reading through it brings the right bytes (an IOMMU between two GPUs, for one, may see to that). So
while a first pull is read by Mooncake, some of its pages of every layer are copied aside too, and only if they are the
same is anything read this way into the pool. Until then, and wherever that cannot be, `Nearest` reads by Mooncake.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from basin_kernels.page_copy import PageCopy, Placement

from sglang_basin.engine.metrics import log, metrics
from sglang_basin.lending import places
from sglang_basin.lending.buffers import Allocation, Buffer, Buffers
from sglang_basin.lending.places import Choice, Place
from sglang_basin.lending.transport import MooncakeReads, Plan, TransferFailed

PROBED_PAGES = 8
"""Of a first pull, so many pages of each layer are compared with what Mooncake brought."""

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

    def empty(self, size_bytes: int) -> torch.Tensor: ...

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
    numbers: dict[int, int] = {}  # by the allocation's own address
    allocations: list[Allocation] = []
    buffers = []
    for buffer in own:
        handle, size, offset = device.driver.share(buffer.address)
        number = numbers.setdefault(buffer.address - offset, len(allocations))
        if number == len(allocations):
            allocations.append(Allocation(handle, size))
        buffers.append(Buffer(number, offset, buffer.pages, buffer.page_bytes))
    return Buffers(
        machine=here.machine,
        processes=here.processes,
        process=os.getpid(),
        device=device.uuid,
        allocations=tuple(allocations),
        buffers=tuple(buffers),
    )


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A peer's buffers: to be copied into ours, or, to see whether they are what they should be, aside."""

    copy: PageCopy
    probe: PageCopy


@dataclass(slots=True)
class _Met:
    """One decode rank. `mapped` and `readers` change under the lock of `PeerReads`."""

    registered: object
    told: Buffers | None
    why: str
    """Why it is read the way it is."""
    usable: bool = False
    """Mapped, and no copy has failed."""
    proven: bool = False
    """What was copied has been what Mooncake read."""
    mapped: _Mapped | None = None
    readers: int = 0


@dataclass(slots=True)
class _UnderWay:
    """One pull: what has been launched of it."""

    met: _Met
    mapped: _Mapped
    placement: Placement
    events: list[Event] = field(default_factory=list)


class PeerReads:
    """Reads from decodes of this machine, as `transport.Transport` says; `meet` stands where that has `mismatch`.
    `compare` is what leads a peer from being met to being `ready`."""

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
        self._probes: dict[Plan, _UnderWay] = {}

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
        return (met := self._met.get(peer)) is not None and met.usable and met.proven

    def choices(self) -> dict[str, Choice]:
        """By peer: how it is read now, and why."""
        return {
            peer: Choice(places.PEER if met.usable and met.proven else places.MOONCAKE, met.why)
            for peer, met in list(self._met.items())
        }

    def read(self, plan: Plan, layer: int) -> None:
        """Layers in order from 0; `finish` ends what the first one begins. Raises TransferFailed."""
        try:
            pull = self._begin(plan) if layer == 0 else self._under_way[plan]
            if not pull.met.usable:
                raise TransferFailed(f"{plan.peer}: {pull.met.why}")
            with self._device.aside():
                for ahead in range(len(pull.events), min(layer + 1 + LAYERS_AHEAD, self.layers)):
                    with self._launching:
                        pull.mapped.copy.launch(ahead, pull.placement)
                    pull.events.append(self._device.mark())
                pull.events[layer].synchronize()
        except TransferFailed:
            raise
        except Exception as error:
            self._distrust(plan.peer, self._met[plan.peer], f"a copy from its memory failed: {error}")
            raise TransferFailed(f"a copy from the memory of {plan.peer} failed: {error}") from error

    def compare(self, plan: Plan, layer: int) -> None:
        """Mooncake has brought this layer of a plan: does a copy of its first pages bring the same? Asked for each
        layer in order, and settled by the first plan of a peer that is mapped; does nothing from then on. Does not
        raise: a copy that fails is the last one."""
        met = self._met.get(plan.peer)
        if met is None or not met.usable or met.proven:
            return
        try:
            if layer == 0:
                self._probes[plan] = self._enter(plan, PROBED_PAGES)
            if (pull := self._probes.get(plan)) is None:
                return  # mapped in the middle of it
            with self._launching, self._device.aside():
                pull.mapped.probe.launch(layer, pull.placement)
                same = _same(pull, plan, layer)
        except TransferFailed:
            return  # its process has just ended
        except Exception as error:  # noqa: BLE001 - whatever it was, Mooncake reads on
            self._distrust(plan.peer, met, f"a copy from its memory failed: {error}")
            return
        if not same:
            self._distrust(plan.peer, met, "copies of its pages are not what Mooncake reads")
        elif layer == self.layers - 1:
            met.proven, met.why = True, self._choose(met.told).why
            log.info("Basin reads what %s lends by peer: %s", plan.peer, met.why)

    def finish(self, plan: Plan) -> None:
        """Waits for the copies that were launched."""
        if (probe := self._probes.pop(plan, None)) is not None:
            self._left(probe.met)
        if (pull := self._under_way.pop(plan, None)) is None:
            return
        try:
            with self._device.aside():
                for event in pull.events:
                    event.synchronize()
        finally:
            self._left(pull.met)

    def has_begun(self, plan: Plan) -> bool:
        return plan in self._under_way

    def _begin(self, plan: Plan) -> _UnderWay:
        pull = self._under_way[plan] = self._enter(plan)
        return pull

    def _enter(self, plan: Plan, probed: int | None = None) -> _UnderWay:
        """The peer's memory stays mapped until `_left`. `probed`: copy so many of the plan's pages, and aside."""
        met = self._met[plan.peer]
        with self._changed:
            if (mapped := met.mapped) is None:
                raise TransferFailed(f"{plan.peer}: {met.why}")
            met.readers += 1
        try:
            theirs, ours = plan.page_ids()
            copy = mapped.copy
            if probed is not None:
                copy, theirs, ours = mapped.probe, theirs[:probed], np.arange(min(probed, len(ours)))
            with self._device.aside():
                placement = copy.place(torch.from_numpy(theirs), torch.from_numpy(ours))
        except BaseException:
            self._left(met)
            raise
        return _UnderWay(met, mapped, placement)

    def _distrust(self, peer: str, met: _Met, why: str) -> None:
        met.usable, met.why = False, why
        metrics().faults.labels("peer").inc()
        log.warning("Basin reads what %s lends by mooncake from now on: %s", peer, why)

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
            met.why, met.usable = "a first read by Mooncake is to show that its mapped memory holds the same", True
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll()
            met.why = "its process has ended"
        except ProcessLookupError:
            met.why = "its process has ended"
        except Exception as error:  # noqa: BLE001 - whatever it was, Mooncake reads instead
            self._distrust(peer, met, f"its memory could not be mapped: {error}")
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

    def _map(self, told: Buffers, opened: list[int]) -> _Mapped:
        """`opened` receives what is to be closed, also if this raises."""
        bases = []
        for allocation in told.allocations:
            address, size = self._device.driver.open(allocation.handle)
            opened.append(address)
            if size < allocation.size_bytes:
                raise ValueError(f"an allocation has {size} bytes, {allocation.size_bytes} were told")
            bases.append(address)
        theirs = [self._pages(bases[b.allocation] + b.offset_bytes, b.pages, b.page_bytes) for b in told.buffers]
        ours = [self._pages(b.address, b.pages, b.page_bytes) for b in self.own]
        with self._device.aside():
            sizes = [PROBED_PAGES * b.page_bytes for b in self.own]
            scratch = [self._device.empty(max(sizes)) for _ in range(len(self.own) // self.layers)]  # K's and V's
            aside = [
                _rows(scratch[number // self.layers][:size], size // PROBED_PAGES) for number, size in enumerate(sizes)
            ]
            mapped = _Mapped(self._copy(theirs, ours), self._copy(theirs, aside))
            mapped.copy.warm_up()
            mapped.probe.warm_up()
        return mapped

    def _copy(self, sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> PageCopy:
        pairs = list(zip(sources, destinations, strict=True))
        layers = [pairs[layer :: self.layers] for layer in range(self.layers)]
        return PageCopy(layers, source_page_tokens=1, destination_page_tokens=1)

    def _pages(self, address: int, pages: int, page_bytes: int) -> torch.Tensor:
        return _rows(self._device.view(address, pages * page_bytes), page_bytes)


def _same(probe: _UnderWay, plan: Plan, layer: int) -> bool:
    """Whether what has been copied aside is what lies in our pages. Waits for the copy."""
    ours = torch.from_numpy(plan.page_ids()[1][: len(probe.placement.source_ids)])
    return all(
        torch.equal(aside[: len(ours)], into.index_select(0, ours.to(into.device)))
        for (_, aside), (_, into) in zip(probe.mapped.probe.pairs[layer], probe.mapped.copy.pairs[layer], strict=True)
    )


def _rows(buffer: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """A page is a row of bytes: its tokens, heads and dtype do not matter here."""
    return buffer.view(-1, 1, page_bytes)


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
        if self.peer.ready(plan.peer) if layer == 0 else self.peer.has_begun(plan):
            self.peer.read(plan, layer)
        else:
            self.mooncake.read(plan, layer)
            self.peer.compare(plan, layer)

    def finish(self, plan: Plan) -> None:
        self.peer.finish(plan)
