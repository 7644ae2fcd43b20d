"""How lent pages come over: one-sided reads through SGLang's own Mooncake engine, which needs no thread on decode.

RDMA between nodes, TCP where there is none; `peer` has the other transport, for a decode of the same machine. A
transport is given one `Plan` per pull and then reads layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_basin.lending import places
from sglang_basin.lending.pages import Pages


class TransferFailed(RuntimeError):
    """A read did not bring the pages; what is in the slots is undefined."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to read: for each run of pages that is contiguous on both sides, its first page there and here. Stands for
    one pull: two plans are never equal."""

    peer: str
    theirs: npt.NDArray[np.int64]
    ours: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]

    @classmethod
    def of(cls, peer: str, theirs: Pages, ours: Pages) -> Plan:
        """`theirs[i]` goes to `ours[i]`; equal lengths, not empty."""
        if len(theirs) != len(ours) or len(theirs) == 0:
            raise ValueError(f"{len(theirs)} pages there, {len(ours)} here")
        starts = np.flatnonzero(np.r_[True, (np.diff(theirs) != 1) | (np.diff(ours) != 1)])
        return cls(peer, theirs[starts], ours[starts], np.diff(np.r_[starts, len(theirs)]))

    @property
    def total_pages(self) -> int:
        return int(self.pages.sum())

    def page_ids(self) -> tuple[Pages, Pages]:
        """Every page there and here, one by one."""
        within = np.arange(self.total_pages) - np.repeat(np.cumsum(self.pages) - self.pages, self.pages)
        return np.repeat(self.theirs, self.pages) + within, np.repeat(self.ours, self.pages) + within


class Transport(Protocol):
    """`read` and `finish` run in a pull's thread, everything else in the scheduler's."""

    layers: int
    page_bytes: int
    """Of one page in all layers."""

    def mismatch(self, peer: str) -> str | None:
        """Why nothing can be read from this peer, or None."""

    def read(self, plan: Plan, layer: int) -> None:
        """Bring one layer of the plan's pages, in order from layer 0 on. Raises TransferFailed. May block for as long
        as the peer does."""

    def finish(self, plan: Plan) -> None:
        """Called once behind a plan's last `read`, however that ended: when it returns, nothing is written to the
        plan's pages any more."""

    def name_of(self, peer: str) -> places.Name:
        """Which transport reads from this peer now."""

    def choices(self) -> dict[str, places.Choice]:
        """By peer that has been asked for: how it is read now, and why."""


class MooncakeReads:
    """Reads through the transfer engine that SGLang's KV manager (`MooncakeKVManager`, prefill's) already has, between
    buffers that both sides have registered with it for the ordinary transfer."""

    def __init__(self, kv_manager: Any, layers: int, why: str = "no other way to read was asked for") -> None:
        """`why`: what `choices` says. Raises ValueError if the pool's buffers are not one (MLA) or two (K, V) per
        layer."""
        arguments = kv_manager.kv_args
        self.layers = layers
        self._manager = kv_manager
        self._why = why
        self._asked: set[str] = set()
        self._bases: list[int] = list(arguments.kv_data_ptrs)
        self._item_bytes: list[int] = list(arguments.kv_item_lens)
        if len(self._bases) not in (layers, 2 * layers):
            raise ValueError(f"{len(self._bases)} KV buffers for {layers} layers")
        self.page_bytes = sum(self._item_bytes)

    def mismatch(self, peer: str) -> str | None:
        self._asked.add(peer)
        registered = self._manager.decode_kv_args_table.get(peer)
        if registered is None:
            return "it has not registered its buffers"
        if len(registered.dst_kv_ptrs) != len(self._bases):
            return f"it has {len(registered.dst_kv_ptrs)} KV buffers, prefill {len(self._bases)}"
        if registered.dst_kv_item_len != self._item_bytes[0]:
            return f"its pages have {registered.dst_kv_item_len} bytes a layer, prefill's {self._item_bytes[0]}"
        if registered.dst_attn_tp_size != self._manager.attn_tp_size:
            return f"it has TP {registered.dst_attn_tp_size}, prefill {self._manager.attn_tp_size}"
        return None

    def read(self, plan: Plan, layer: int) -> None:
        remote = self._manager.decode_kv_args_table[plan.peer].dst_kv_ptrs
        ours: list[int] = []
        theirs: list[int] = []
        lengths: list[int] = []
        for buffer in range(layer, len(self._bases), self.layers):
            item = self._item_bytes[buffer]
            ours += (self._bases[buffer] + plan.ours * item).tolist()
            theirs += (remote[buffer] + plan.theirs * item).tolist()
            lengths += (plan.pages * item).tolist()
        status = self._manager.engine.engine.batch_transfer_sync_read(plan.peer, ours, theirs, lengths)
        if status != 0:
            raise TransferFailed(f"Mooncake answered {status} to a read of {sum(lengths)} bytes from {plan.peer}")

    def finish(self, plan: Plan) -> None:
        """A read that has returned is through."""

    def name_of(self, peer: str) -> places.Name:
        return places.MOONCAKE

    def choices(self) -> dict[str, places.Choice]:
        return {peer: places.Choice(places.MOONCAKE, self._why) for peer in sorted(self._asked)}
