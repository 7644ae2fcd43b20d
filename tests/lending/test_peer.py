"""Reading from a decode of the same machine: what is told of its buffers, which way is chosen, and the copies.

Without a GPU: the driver's calls go to `driver_of_files.c`, in which an allocation is a file that another process can
map, and the kernel runs in Triton's interpreter. `test_peer_cuda` is the same on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from basin_kernels import page_copy
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, MooncakeKVManager
from triton.runtime.interpreter import InterpretedFunction

from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.lending import buffers, cuda_memory, decode, nvml, prefill
from sglang_basin.lending.buffers import Allocation, Buffer, Buffers
from sglang_basin.lending.cuda_memory import CudaError, Driver
from sglang_basin.lending.peer import PROBED_PAGES, Nearest, Own, PeerReads, offer
from sglang_basin.lending.places import Choice, Place, choose
from sglang_basin.lending.transport import Plan, TransferFailed

LAYERS, PAGES, PAGE_BYTES = 3, 16, 48
PEER = "decode:1"


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(page_copy, "copy_rows_kernel", InterpretedFunction(page_copy.copy_rows_kernel.fn))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("driver") / "driver_of_files.so"
    compiler = shutil.which("gcc") or "cc"
    source = Path(__file__).parent / "driver_of_files.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
    return str(built)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="basin-") as folder:  # of a short name: it goes into handles
        monkeypatch.setenv("DRIVER_OF_FILES", folder)
        yield


class Done:
    def synchronize(self) -> None:
        pass


class CpuDevice:
    """`CudaDevice` without a GPU: copies are through when they have been launched."""

    def __init__(self, library: str, uuid: str = "GPU-here") -> None:
        self.uuid = uuid
        self.driver = Driver(0, library)
        self._library = ctypes.CDLL(library)
        self.launched = 0

    def allocate(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)) == 0
        return address.value

    @property
    def mapped(self) -> int:
        return self._library.mappedAllocations()

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        return cuda_memory.view(torch.device("cpu"), address, size_bytes)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Done:
        self.launched += 1
        return Done()


def fill(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, (2 * LAYERS, PAGES, PAGE_BYTES), dtype=np.uint8)


def pool(device: CpuDevice, gap_bytes: int) -> list[Own]:
    """The buffers, two of them in an allocation, `gap_bytes` into it."""
    size = PAGES * PAGE_BYTES
    own = []
    for _ in range(LAYERS):
        base = device.allocate(gap_bytes + 2 * size)
        own += [Own(base + gap_bytes + n * size, PAGES, PAGE_BYTES) for n in range(2)]
    return own


def lend(library: str, channel: Any) -> None:
    """Decode's process: tells of its buffers, and lives until it is told to end."""
    device = CpuDevice(library)
    own = pool(device, gap_bytes=32)
    for buffer, wanted in zip(own, fill(1), strict=True):
        ctypes.memmove(buffer.address, wanted.ctypes.data, wanted.nbytes)
    channel.send_bytes(buffers.pack(offer(own, device)))
    channel.recv()


class Mooncake:
    """Reads by other means: what decode has, or, if told so, something else in one layer."""

    layers, page_bytes = LAYERS, 2 * LAYERS * PAGE_BYTES

    def __init__(self, lent: Lent) -> None:
        self._lent = lent
        self.read_layers: list[int] = []
        self.wrong_layer: int | None = None

    def mismatch(self, peer: str) -> str | None:
        return None

    def read(self, pull: Plan, layer: int) -> None:
        self.read_layers.append(layer)
        theirs, ours = (torch.from_numpy(ids) for ids in pull.page_ids())
        for buffer in (layer, LAYERS + layer):
            pages = torch.from_numpy(fill(1))[buffer, theirs]
            self._lent.pages(buffer)[ours] = pages + (buffer == self.wrong_layer)


class Lent:
    """A prefill in this process, a decode in another one."""

    def __init__(self, library: str) -> None:
        here, there = multiprocessing.get_context("fork").Pipe()
        self.channel = here
        self.decode = multiprocessing.get_context("fork").Process(target=lend, args=(library, there), daemon=True)
        self.decode.start()
        there.close()
        assert here.poll(30)
        self.told = buffers.unpack([here.recv_bytes()])
        self.device = CpuDevice(library)
        self.own = pool(self.device, gap_bytes=0)
        self.table: dict[str, Any] = {PEER: SimpleNamespace(lent_buffers=self.told)}
        self.manager = SimpleNamespace(
            decode_kv_args_table=self.table,
            kv_args=SimpleNamespace(
                kv_data_ptrs=[buffer.address for buffer in self.own],
                kv_data_lens=[PAGES * PAGE_BYTES] * len(self.own),
                kv_item_lens=[PAGE_BYTES] * len(self.own),
            ),
        )
        self.reads = PeerReads(self.manager, LAYERS, self.device, reaches=lambda here, there: "no link")

        self.mooncake = Mooncake(self)
        self.nearest = Nearest(self.reads, self.mooncake)  # type: ignore[arg-type]

    def pages(self, buffer: int) -> torch.Tensor:
        return self.device.view(self.own[buffer].address, PAGES * PAGE_BYTES).view(PAGES, PAGE_BYTES)

    def ours(self) -> np.ndarray:
        return np.stack([self.pages(buffer) for buffer in range(len(self.own))])

    def clear(self) -> None:
        for buffer in self.own:
            self.device.view(buffer.address, PAGES * PAGE_BYTES).zero_()

    def why(self) -> str:
        return self.reads.choices()[PEER].why

    def mapped(self) -> PeerReads:
        self.reads.meet(PEER)
        until(lambda: "a first read by Mooncake" in self.why(), "the peer is mapped")
        return self.reads

    def pull(self, pull: Plan) -> None:
        for layer in range(LAYERS):
            self.nearest.read(pull, layer)
        self.nearest.finish(pull)

    def met(self) -> PeerReads:
        """Mapped, and Mooncake has read the same once."""
        self.mapped()
        self.pull(plan([PAGES - 1], [PAGES - 1]))
        assert self.reads.ready(PEER)
        self.clear()
        return self.reads

    def end(self) -> None:
        self.decode.kill()
        self.decode.join(10)


def until(done: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)


@pytest.fixture
def lent(library: str) -> Iterator[Lent]:
    lent = Lent(library)
    yield lent
    lent.end()
    until(lambda: lent.device.mapped == 0, "nothing stays mapped when the peer has ended")


def plan(theirs: list[int], ours: list[int]) -> Plan:
    return Plan.of(PEER, np.array(theirs), np.array(ours))


ids = st.permutations(range(PAGES))


def test_a_layer_brings_its_pages_of_another_process_and_nothing_else(lent: Lent) -> None:
    reads = lent.met()
    assert lent.device.mapped == LAYERS, "each allocation once"
    theirs = fill(1)

    @settings(max_examples=25, deadline=None)
    @given(there=ids, here=ids, count=st.integers(1, PAGES))
    def moves(there: list[int], here: list[int], count: int) -> None:
        lent.clear()
        wanted = np.zeros_like(theirs)
        pull = plan(there[:count], here[:count])
        for layer in range(LAYERS):
            reads.read(pull, layer)
            for buffer in (layer, LAYERS + layer):
                wanted[buffer, here[:count]] = theirs[buffer, there[:count]]
                assert np.array_equal(lent.ours()[buffer], wanted[buffer])
        reads.finish(pull)
        assert np.array_equal(lent.ours(), wanted)

    moves()


def failures() -> float:
    return counts(metrics().faults).get("peer", 0)


@pytest.mark.parametrize("pages", [1, PROBED_PAGES, PAGES])
def test_nothing_is_copied_into_the_pool_before_it_is_known_to_be_what_mooncake_reads(lent: Lent, pages: int) -> None:
    lent.mapped()
    there, here = list(range(pages)), list(reversed(range(pages)))
    first = plan(there, here)
    for layer in range(LAYERS):
        assert lent.nearest.name_of(PEER) == "mooncake"
        lent.nearest.read(first, layer)
    assert lent.nearest.name_of(PEER) == "peer"
    assert lent.why() == "the same GPU"
    lent.nearest.finish(first)
    assert lent.mooncake.read_layers == list(range(LAYERS))
    assert np.array_equal(lent.ours()[:, here], fill(1)[:, there])
    lent.clear()
    lent.pull(plan(there, here))
    assert lent.mooncake.read_layers == list(range(LAYERS)), "Mooncake is not needed any more"
    assert np.array_equal(lent.ours()[:, here], fill(1)[:, there])


@pytest.mark.parametrize("buffer", range(2 * LAYERS))
def test_a_mapping_that_brings_something_else_is_not_used(lent: Lent, buffer: int) -> None:
    lent.mapped()
    lent.mooncake.wrong_layer, before = buffer, failures()
    for _ in range(2):
        lent.pull(plan([3, 4], [5, 6]))
    assert lent.reads.choices() == {PEER: Choice("mooncake", "copies of its pages are not what Mooncake reads")}
    assert lent.mooncake.read_layers == 2 * list(range(LAYERS))
    assert np.array_equal(lent.ours()[buffer, 5:7], fill(1)[buffer, 3:5] + 1), "what Mooncake brought stands"
    assert failures() == before + 1


def test_a_probe_that_fails_costs_the_pull_nothing(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, before = lent.mapped(), failures()

    def broken(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: invalid device function")

    monkeypatch.setattr(page_copy.PageCopy, "launch", broken)
    lent.pull(plan([3], [5]))
    assert np.array_equal(lent.ours()[:, 5], fill(1)[:, 3])
    assert "invalid device function" in lent.why()
    assert not reads.ready(PEER)
    assert failures() == before + 1


def test_a_peer_that_is_mapped_in_the_middle_of_a_pull_is_compared_at_the_next(lent: Lent) -> None:
    early = plan([1], [2])
    lent.nearest.read(early, 0)
    reads = lent.mapped()
    for layer in range(1, LAYERS):
        lent.nearest.read(early, layer)
    lent.nearest.finish(early)
    assert not reads.ready(PEER)
    lent.pull(plan([1], [2]))
    assert reads.ready(PEER)


def test_pulls_that_are_compared_at_the_same_time_do_not_disturb_each_other(lent: Lent) -> None:
    reads, failed = lent.mapped(), failures()
    pulls = [plan([there], [there]) for there in range(PAGES)]
    threads = [threading.Thread(target=lent.pull, args=(pull,)) for pull in pulls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert reads.ready(PEER)
    assert failures() == failed
    assert np.array_equal(lent.ours(), fill(1))


def test_a_peer_that_ends_while_it_is_compared_is_let_go(lent: Lent) -> None:
    reads, pull, failed = lent.mapped(), plan([1], [2]), failures()
    lent.nearest.read(pull, 0)
    lent.end()
    until(lambda: lent.why() == "its process has ended", "the end is noticed")
    assert lent.device.mapped == LAYERS, "the pull is not through"
    for layer in range(1, LAYERS):
        lent.nearest.read(pull, layer)
    lent.nearest.finish(pull)
    assert not reads.ready(PEER)
    assert failures() == failed
    assert np.array_equal(lent.ours()[:, 2], fill(1)[:, 1])


def test_layers_are_launched_ahead_but_not_all_at_once(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_basin.lending.peer.LAYERS_AHEAD", 1)
    reads, pull = lent.met(), plan([1], [2])
    launched = []
    for layer in range(LAYERS):
        reads.read(pull, layer)
        launched.append(lent.device.launched)
    reads.finish(pull)
    assert launched == [2, 3, 3]


def test_memory_stays_mapped_until_the_last_read_is_through(lent: Lent) -> None:
    reads, pull = lent.met(), plan([1, 2], [3, 4])
    reads.read(pull, 0)
    lent.end()
    until(lambda: not reads.ready(PEER), "the end is noticed")
    assert reads.choices() == {PEER: Choice("mooncake", "its process has ended")}
    for begun, layer in ((pull, 1), (plan([1], [1]), 0)):
        with pytest.raises(TransferFailed, match="its process has ended"):
            reads.read(begun, layer)
    assert lent.device.mapped == LAYERS
    reads.finish(pull)
    until(lambda: lent.device.mapped == 0, "it is unmapped")


def test_a_peer_that_registers_again_stays_mapped(lent: Lent) -> None:
    reads = lent.met()
    lent.table[PEER] = SimpleNamespace(lent_buffers=lent.told)
    reads.meet(PEER)
    assert reads.ready(PEER)
    assert lent.device.mapped == LAYERS


def test_another_process_under_the_same_name_is_met_anew(lent: Lent, library: str) -> None:
    reads = lent.met()
    other = Lent(library)
    lent.end()
    lent.table[PEER] = SimpleNamespace(lent_buffers=other.told)
    lent.met()
    until(lambda: lent.device.mapped == LAYERS, "the first one's memory is unmapped")
    pull = plan([5], [6])
    for layer in range(LAYERS):
        reads.read(pull, layer)
    reads.finish(pull)
    assert np.array_equal(lent.ours()[:, 6], fill(1)[:, 5])
    other.end()


def test_a_copy_that_fails_is_the_last_one(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, pull, later = lent.met(), plan([1], [2]), plan([1], [2])
    reads.read(pull, 0)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(lent.device, "mark", broken)
    monkeypatch.setattr("sglang_basin.lending.peer.LAYERS_AHEAD", 0)
    with pytest.raises(TransferFailed, match="illegal memory access"):
        reads.read(later, 0)
    for begun in (pull, later):
        reads.finish(begun)
    assert not reads.ready(PEER)
    assert "illegal memory access" in reads.choices()[PEER].why


def changed(told: Buffers, **fields: Any) -> Buffers:
    return msgspec.structs.replace(told, **fields)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda told: None, "it offers no CUDA memory to map"),
        (lambda told: changed(told, machine="elsewhere"), "it runs on another machine"),
        (lambda told: changed(told, processes="pid:[1]"), "another PID namespace"),
        (lambda told: changed(told, device="GPU-there"), "cannot be read from here: no link"),
        (lambda told: changed(told, buffers=told.buffers[:4]), "its 4 KV buffers are not like prefill's 6"),
        (lambda told: changed(told, process=2**30), "its process has ended"),
        (
            lambda told: changed(told, allocations=(Allocation(bytes(64), 2**20), *told.allocations[1:])),
            "could not be mapped: cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE",
        ),
        (
            lambda told: changed(
                told, allocations=tuple(Allocation(a.handle, a.size_bytes + 1) for a in told.allocations)
            ),
            f"{32 + 2 * PAGES * PAGE_BYTES + 1} were told",
        ),
    ],
)
def test_what_cannot_be_mapped_is_read_by_mooncake(lent: Lent, change: Callable[[Any], Any], why: str) -> None:
    lent.table[PEER] = SimpleNamespace(lent_buffers=change(lent.told))
    nearest = lent.nearest
    assert nearest.mismatch(PEER) is None
    until(lambda: why in nearest.choices()[PEER].why, f"the reason is told: {why}")
    assert nearest.name_of(PEER) == nearest.choices()[PEER].transport == "mooncake"
    lent.pull(plan([1], [2]))
    assert lent.mooncake.read_layers == list(range(LAYERS))
    until(lambda: lent.device.mapped == 0, "what had been mapped is unmapped")


def test_a_pull_keeps_the_transport_it_began_with(lent: Lent) -> None:
    nearest, read = lent.nearest, lent.mooncake.read_layers
    early, late = plan([1], [2]), plan([3], [4])
    nearest.read(early, 0)
    lent.met()
    read.clear()
    assert nearest.name_of(PEER) == "peer"
    nearest.read(early, 1)
    nearest.read(late, 0)
    nearest.read(late, 1)
    for pull in (early, late):
        nearest.finish(pull)
    assert read == [1]
    assert np.array_equal(lent.ours()[[0, 1, 3, 4], 4], fill(1)[[0, 1, 3, 4], 3])


def test_what_the_driver_refuses_is_named(library: str) -> None:
    driver = Driver(0, library)
    with pytest.raises(CudaError, match="cuMemGetAddressRange_v2: CUDA_ERROR_INVALID_VALUE"):
        driver.share(4096)
    with pytest.raises(CudaError, match="cannot open shared object"):
        Driver(0, "libnowhere.so.1")


@pytest.mark.parametrize(
    ("here", "there", "choice"),
    [
        (None, ("m", "p", "a"), Choice("mooncake", "this process has no CUDA device")),
        ("a", None, Choice("mooncake", "it offers no CUDA memory to map")),
        ("a", ("n", "p", "a"), Choice("mooncake", "it runs on another machine")),
        ("a", ("m", "p", "a"), Choice("peer", "the same GPU")),
        ("a", ("m", "p", "b"), Choice("peer", "another GPU of this machine, with peer access")),
        ("a", ("m", "p", "far"), Choice("mooncake", "its GPU's memory cannot be read from here: too far")),
    ],
)
def test_the_transport_goes_by_where_the_peer_is(here: str | None, there: Any, choice: Choice) -> None:
    def reaches(ours: str, theirs: str) -> str | None:
        assert ours == "a"
        return "too far" if theirs == "far" else None

    assert choose(Place("m", "p", here), None if there is None else Place(*there), reaches) == choice


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_nvml_knows_none() -> None:
    assert nvml.gpus() == []
    assert "NVML" in str(nvml.unreachable("GPU-a", "GPU-b"))


def told(**fields: Any) -> Buffers:
    plain = Buffers("m", "p", 1, "GPU-a", (Allocation(bytes(64), 4096),), (Buffer(0, 1024, 3, 1024),))
    return changed(plain, **fields)


names = st.text(min_size=1, max_size=20)


@settings(deadline=None)
@given(names, names, st.integers(1, 2**31 - 1), st.binary(min_size=64, max_size=64), st.integers(1, 100))
def test_buffers_come_out_of_the_message_as_they_went_in(
    machine: str, device: str, process: int, handle: bytes, pages: int
) -> None:
    sent = Buffers(machine, "p", process, device, (Allocation(handle, 512 * pages),), (Buffer(0, 0, pages, 512),))
    assert buffers.unpack([b"other", buffers.pack(sent)]) == sent


@pytest.mark.parametrize(
    "field",
    [
        buffers.MARK,
        buffers.MARK + b"\x93abc",
        buffers.pack(told())[:-1],
        buffers.pack(told()) + b"\x00",
        buffers.MARK + bytes(buffers.MAX_FIELD_BYTES),
        buffers.pack(told(allocations=(Allocation(bytes(63), 4096),))),
        buffers.pack(told(allocations=())),
        buffers.pack(told(process=0)),
        buffers.pack(told(buffers=(Buffer(1, 0, 1, 1),))),
        buffers.pack(told(buffers=(Buffer(0, 1025, 3, 1024),))),
        buffers.pack(told(buffers=(Buffer(0, -1, 1, 1),))),
        buffers.pack(told(buffers=(Buffer(0, 0, 2**31 - 1, 2**31 - 1),))),
    ],
)
def test_a_damaged_message_is_refused_and_prefill_goes_on(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"KV buffer|bytes of KV buffers"):
        buffers.unpack([field])
    info = SimpleNamespace(mooncake_session_id=PEER)
    prefill.read_buffers(info, KVArgsRegisterInfo, [field])
    assert info.lent_buffers is None


def test_buffers_ride_on_sglangs_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(
        local_ip="127.0.0.1",
        rank_port=1,
        get_session_id=lambda: PEER,
        attn_tp_size=1,
        dcp_size=1,
        dcp_rank=0,
        enable_staging=False,
        kv_args=SimpleNamespace(
            kv_data_ptrs=[16, 32],
            kv_item_lens=[8, 8],
            aux_data_ptrs=[],
            state_data_ptrs=[],
            state_item_lens=[],
            state_layer_ids=[],
            kv_layer_ids=[],
            engine_rank=0,
        ),
    )
    for field in (None, buffers.pack(told())):
        monkeypatch.setattr(decode, "_lender", SimpleNamespace(buffers=field))
        message = decode.append_buffers(MooncakeKVManager.build_receiver_registration_message, manager)
        info = KVArgsRegisterInfo.from_zmq(message)
        assert (info.dst_kv_ptrs, info.dst_kv_item_lens) == ([16, 32], [8, 8])
        prefill.read_buffers(info, KVArgsRegisterInfo, message)
        assert info.lent_buffers == (None if field is None else told())
