"""The page copy against the copy bandwidth of the machine: `python kernels/bench_page_copy.py [--json OUT]`

Copies random pages of one layer's K and V, on one GPU or, with two, from the second into the first over NVLink, by
the page copy at several numbers of programs, by torch's index copy, and by one cudaMemcpy of the same bytes (the
ceiling). With `--beside-gemm` also what a copy on a side stream costs a matrix product that runs meanwhile.
Medians of single, event-timed launches. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from basin_kernels.page_copy import PageCopy, copy_pages_reference

SHAPES = {
    "GQA, 8 heads of 128, bf16": (2, 8, 128, torch.bfloat16),
    "GQA, 1 head of 128, bf16": (2, 1, 128, torch.bfloat16),
    "MLA, 576, bf16": (1, 1, 576, torch.bfloat16),
    "MLA, 576, fp8": (1, 1, 576, torch.float8_e4m3fn),
}
"""Buffers of a layer, heads, dim and dtype."""

PEAK_GB_S = {"local": 2400.0, "peer": 450.0}
"""H200: HBM3e moves 4.8 TB/s, and a local copy reads and writes; NVLink 4 has 450 GB/s in each direction."""


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table. `programs` is 0 where it does not apply."""

    shape: str
    page_tokens: int
    how: str
    programs: int
    median_us: float
    gb_s: float
    of_peak: float


def median_us(run: Callable[[], None], repeats: int) -> float:
    """The median time on the device of one call, each timed by events of its own."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def enable_peer_access(peer: int) -> None:
    """torch enables it at the first copy in each direction; CUDA IPC does as memory is opened."""
    for here, there in ((0, peer), (peer, 0)):
        torch.zeros(1, device=f"cuda:{here}").to(f"cuda:{there}")


def make(shape: str, page_tokens: int, tokens: int, peer: int) -> tuple[PageCopy, list[int], list[int], int]:
    """A copy between pools of twice `tokens`, random pages of each, and the bytes that move."""
    buffers, heads, dim, dtype = SHAPES[shape]
    pool = (2 * tokens, heads, dim)
    pairs = [
        (
            torch.zeros(pool, dtype=torch.uint8, device=f"cuda:{peer}").repeat(1, 1, dtype.itemsize).view(dtype),
            torch.zeros(pool, dtype=torch.uint8, device="cuda:0").repeat(1, 1, dtype.itemsize).view(dtype),
        )
        for _ in range(buffers)
    ]
    copy = PageCopy([pairs], source_page_tokens=page_tokens, destination_page_tokens=page_tokens)
    copy.warm_up()
    pages = tokens // page_tokens
    source, destination = (torch.randperm(2 * pages)[:pages].tolist() for _ in range(2))
    return copy, source, destination, buffers * tokens * heads * dim * dtype.itemsize


def measure(shape: str, page_tokens: int, known: argparse.Namespace, peer: int, peak_gb_s: float) -> list[Result]:
    copy, source, destination, moved = make(shape, page_tokens, known.tokens, peer)
    placement = copy.place(source, destination)
    flat = [torch.empty(moved, dtype=torch.uint8, device=f"cuda:{device}") for device in (peer, 0)]
    ways: list[tuple[str, int, Callable[[], None]]] = [
        ("page copy", programs, lambda programs=programs: copy.launch(0, placement, programs=programs))
        for programs in known.programs
    ]
    ways.append(("torch index copy", 0, lambda: copy_pages_reference(copy, 0, placement)))
    ways.append(("cudaMemcpy", 0, lambda: flat[1].copy_(flat[0], non_blocking=True)))
    results = []
    for how, programs, run in ways:
        took_us = median_us(run, known.repeats)
        gb_s = moved / took_us / 1000
        results.append(Result(shape, page_tokens, how, programs, took_us, gb_s, gb_s / peak_gb_s))
    if not copy.intact():
        raise RuntimeError("the page copy met page ids outside its buffers")
    return results


def beside_gemm(programs: int, known: argparse.Namespace, peer: int) -> tuple[float, float]:
    """A matrix product's median time, in microseconds, alone and with copies under way on a side stream."""
    a = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    copy, source, destination, _ = make("GQA, 8 heads of 128, bf16", 64, known.tokens, peer)
    placement = copy.place(source, destination)
    side = torch.cuda.Stream()
    alone = median_us(lambda: torch.mm(a, a), known.repeats)

    def both() -> None:
        with torch.cuda.stream(side):
            for _ in range(8):
                copy.launch(0, placement, programs=programs)
        torch.mm(a, a)

    return alone, median_us(both, known.repeats)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench_page_copy.py", description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of each copy (default: %(default)s)")
    parser.add_argument("--page-tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--programs", type=int, nargs="+", default=[8, 16, 32, 64, 132])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--peak-gb-s", type=float, help="what to call the peak (default: the H200's)")
    parser.add_argument("--beside-gemm", action="store_true", help="also the cost to compute that runs meanwhile")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there too")
    known = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "bench_page_copy: needs a GPU and found none; tests/kernels checks the kernel without one", file=sys.stderr
        )
        return 2
    peer = 1 if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1) else 0
    route = "peer" if peer else "local"
    if peer:
        enable_peer_access(peer)
    peak_gb_s = known.peak_gb_s or PEAK_GB_S[route]
    print(f"{torch.cuda.get_device_name(0)}, {route} copies of {known.tokens} tokens, peak {peak_gb_s:g} GB/s")
    print(f"{'shape':<28}{'page':>5}  {'how':<18}{'programs':>8}{'median':>12}{'speed':>14}{'of peak':>9}")
    rows = []
    for shape in SHAPES:
        for page_tokens in known.page_tokens:
            for row in measure(shape, page_tokens, known, peer, peak_gb_s):
                rows.append(row)
                print(
                    f"{row.shape:<28}{row.page_tokens:>5}  {row.how:<18}{row.programs or '':>8}"
                    f"{row.median_us:>9.1f} us{row.gb_s:>9.1f} GB/s{row.of_peak:>9.1%}",
                    flush=True,
                )
    if known.beside_gemm:
        for programs in known.programs:
            alone, with_copy = beside_gemm(programs, known, peer)
            print(
                f"gemm beside {programs} programs: {alone:.0f} us alone, {with_copy:.0f} us ({with_copy / alone:.3f} x)"
            )
    if known.json:
        known.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
