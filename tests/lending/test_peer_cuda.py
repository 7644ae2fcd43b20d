"""Mapped memory on a real GPU: a decode's process and a prefill's on one device, or on two with peer access."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_basin.lending import buffers, nvml
from sglang_basin.lending.cuda_memory import CudaDevice
from sglang_basin.lending.peer import Own, PeerReads, offer
from sglang_basin.lending.transport import Plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, PAGES, PAGE_BYTES = 4, 64, 16 * 1024
PEER = "decode:1"


def pool(device: int, seed: int | None) -> list[torch.Tensor]:
    """K of each layer, then V: of random bytes, or poison."""
    torch.cuda.set_device(device)
    if seed is None:
        return [torch.full((PAGES, PAGE_BYTES), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(2 * LAYERS)]
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, generator=generator).cuda()
        for _ in range(2 * LAYERS)
    ]


def own(pool: list[torch.Tensor]) -> list[Own]:
    return [Own(buffer.data_ptr(), PAGES, PAGE_BYTES) for buffer in pool]


def lend(device: int, channel: Any) -> None:
    """Decode's process: tells of its buffers, and lives until it is killed."""
    kept = pool(device, seed=1)
    torch.cuda.synchronize()
    channel.send_bytes(buffers.pack(offer(own(kept), CudaDevice(device))))
    channel.recv()


@pytest.mark.parametrize("device", range(min(2, torch.cuda.device_count())))
def test_pages_of_another_process_come_over_and_are_let_go_when_it_ends(device: int) -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=lend, args=(device, there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(120), "the other process has not told of its buffers"
        told = buffers.unpack([here.recv_bytes()])
        ours = pool(0, seed=None)
        generator = torch.Generator().manual_seed(1)
        wanted = [
            torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, generator=generator)
            for _ in range(2 * LAYERS)
        ]
        manager = SimpleNamespace(
            decode_kv_args_table={PEER: SimpleNamespace(lent_buffers=told)},
            kv_args=SimpleNamespace(
                kv_data_ptrs=[buffer.data_ptr() for buffer in ours],
                kv_data_lens=[PAGES * PAGE_BYTES] * len(ours),
                kv_item_lens=[PAGE_BYTES] * len(ours),
            ),
        )
        reads = PeerReads(manager, LAYERS, CudaDevice(0), reaches=nvml.unreachable)
        reads.meet(PEER)
        deadline = time.monotonic() + 120
        while "a first read by Mooncake" not in reads.choices()[PEER].why:
            assert time.monotonic() < deadline, reads.choices()
            assert "being mapped" in reads.choices()[PEER].why, reads.choices()
            time.sleep(0.01)
        first = Plan.of(PEER, np.arange(3, 20), np.arange(7, 24))
        for layer in range(LAYERS):
            for number in (layer, LAYERS + layer):  # as Mooncake would
                ours[number][7:24] = wanted[number][3:20].cuda()
            torch.cuda.synchronize()
            reads.compare(first, layer)
        reads.finish(first)
        assert reads.ready(PEER), reads.choices()
        for buffer in ours:
            buffer.fill_(0xA5)
        torch.cuda.synchronize()
        order = np.random.default_rng(2)
        from_there, to_here = order.permutation(PAGES)[:40], order.permutation(PAGES)[:40]
        plan = Plan.of(PEER, from_there, to_here)
        for layer in range(LAYERS):
            reads.read(plan, layer)
            for number in (layer, LAYERS + layer):
                assert torch.equal(ours[number].cpu()[to_here], wanted[number][from_there])
        reads.finish(plan)
        untouched = np.setdiff1d(np.arange(PAGES), to_here)
        assert all(bool((buffer.cpu()[untouched] == 0xA5).all()) for buffer in ours)
        process.kill()
        deadline = time.monotonic() + 30
        while reads.ready(PEER):
            assert time.monotonic() < deadline, "the end of the other process was not noticed"
            time.sleep(0.01)
        torch.zeros(1, device="cuda:0").add_(1).item()  # this process's own context is unharmed
    finally:
        process.kill()
        process.join(10)
