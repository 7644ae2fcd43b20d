"""Two tensor-parallel ranks, each with its own reads, must come to the same decisions whatever happens to either's."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pools import World

from sglang_basin.lending import breaker, decode
from sglang_basin.lending.calls import bootstrapped
from sglang_basin.lending.transport import Plan

RANKS = 2
CALLS = 60


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 50) for _ in range(tokens)]


def sessions_of(rank: int) -> tuple[str, ...]:
    """What a decode's ranks tell each other about where they can be read."""
    manager = SimpleNamespace(get_session_id=lambda: f"10.0.0.{rank}:17")
    queue = SimpleNamespace(kv_manager=manager)
    group = torch.distributed.group.WORLD
    return decode._sessions_of(SimpleNamespace(disagg_decode_prealloc_queue=queue, attn_tp_cpu_group=group))


def play(rank: int, meeting: str, outcomes: Any) -> None:
    """One rank's process: sessions over a small pool, with reads that are slow or fail on this rank alone."""
    try:
        breaker.FIRST_PAUSE_S = 0.0  # a peer that failed is tried again at once
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
        assert sessions_of(rank) == ("10.0.0.0:17", "10.0.0.1:17")
        world = World(16, patience_s=0.1, ranks=torch.distributed.group.WORLD)
        original, own = world.transport.read, random.Random(rank)

        def read(plan: Plan, layer: int) -> None:
            time.sleep(own.choice((0.0, 0.0, 0.002, 0.02)))
            world.transport.failing = layer > 0 and own.random() < 0.1
            original(plan, layer)

        world.transport.read = read  # type: ignore[method-assign]
        rng, seen = random.Random(7), []
        contexts = [prompt(rng.randint(60, 120), number) for number in range(6)]
        for _ in range(CALLS):
            number = rng.randrange(len(contexts))
            ids = [*contexts[number], *(rng.randint(1, 50) for _ in range(rng.randint(1, 20)))][:200]
            req = world.arrive(ids)
            if rng.random() < 0.3:
                world.elsewhere.cache(contexts[number])
                world.tell_copy(req, len(contexts[number]))
            turns = 0
            counted, cached = False, 0
            while not counted:
                while not world.turn(req):
                    turns += 1
                bootstrapped(req)
                counted, cached = world.compute(req)
                seen.append((turns, counted, cached))
            world.leave(req)
            world.decode.cache(ids)
            contexts[number] = ids if len(ids) < 180 else prompt(80, number)
        while world.borrower.private_tokens or world.borrower.questions:
            world.borrower.settle()
        world.deliver()
        world.check()
        assert not world.lender_elsewhere.leases
        outcomes.put((rank, seen))
    except Exception:  # noqa: BLE001 - the parent shows it
        outcomes.put((rank, traceback.format_exc()))


def test_ranks_stay_together_when_their_reads_do_not(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    outcomes = context.Queue()
    meeting = f"file://{tmp_path / 'meeting'}"
    processes = [context.Process(target=play, args=(rank, meeting, outcomes), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        seen = dict(outcomes.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for what in seen.values():
        assert isinstance(what, list), what
    assert seen[0] == seen[1]
    assert len(seen[0]) > CALLS, "no forward ran in vain, so nothing was tried"
    assert sum(cached for _, counted, cached in seen[0] if counted) > 0
