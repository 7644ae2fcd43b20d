"""The page copy compiled ahead of time for sm_90 (H100, H200): what the machine code must and must not contain."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from basin_kernels.page_copy import PageCopy, copy_rows_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"table": "*i64", "source_ids": "*i64", "destination_ids": "*i64", "skipped": "*i32"}
MOST_REGISTERS = 96
"""A copy of 8 warps then takes at most three eighths of an SM's registers, beside the kernels of prefill."""


def compiled(copy: PageCopy):
    constants = copy._constants()
    warps = constants.pop("num_warps")
    names = list(inspect.signature(copy_rows_kernel.fn).parameters)
    signature = {name: POINTERS.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS}
    source = ASTSource(fn=copy_rows_kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def resources(cubin: Path) -> dict[str, int]:
    """What ptxas gave the kernel, as cuobjdump reads it: REG, STACK (spills go there), SHARED, LOCAL."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    line = shown[shown.index("Function copy_rows_kernel") :]
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}


def pool(tokens: int, heads: int, dim: int, *, gap: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(tokens, heads * dim + gap, dtype=dtype)[:, : heads * dim].unflatten(1, (heads, dim))


@pytest.mark.parametrize(
    ("name", "source", "destination", "source_page", "destination_page"),
    [
        ("GQA, whole pages", pool(256, 8, 128), pool(256, 8, 128), 64, 64),
        ("GQA, tokens", pool(256, 8, 128), pool(256, 8, 128), 1, 1),
        ("one head of a rank, pages to slots", pool(256, 1, 128), pool(256, 1, 128), 64, 1),
        ("MLA, whole pages", pool(256, 1, 576), pool(256, 1, 576), 64, 64),
        ("MLA in fp8, tokens", *[pool(256, 1, 576, dtype=torch.float8_e4m3fn)] * 2, 1, 1),
        ("a page as one row of bytes, as lending copies", *[pool(16, 1, 16384, dtype=torch.uint8)] * 2, 1, 1),
        ("strided tokens", pool(256, 2, 128, gap=64), pool(256, 2, 128), 16, 16),
    ],
)
def test_moves_16_bytes_at_once_and_spills_nothing(
    tmp_path: Path, name: str, source: torch.Tensor, destination: torch.Tensor, source_page: int, destination_page: int
) -> None:
    copy = PageCopy([[(source, destination)]], source_page_tokens=source_page, destination_page_tokens=destination_page)
    assert copy.word_bytes == 16
    code = compiled(copy)
    ptx = code.asm["ptx"]
    loads, stores = re.findall(r"ld\.global\.cg(\S*)", ptx), re.findall(r"st\.global(\S*v\d\S*)", ptx)
    assert loads == stores == [".v4.b32"] * 8, name
    assert ptx.rindex("ld.global.cg") < ptx.index("st.global.v4"), "all loads of a turn are under way before its stores"
    assert ".local" not in ptx
    (tmp_path / "cubin").write_bytes(code.asm["cubin"])
    used = resources(tmp_path / "cubin")
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= MOST_REGISTERS


@pytest.mark.parametrize(("gap", "word_bytes", "instruction"), [(4, 8, ".v2.b32"), (2, 4, ".b32"), (1, 2, ".b16")])
def test_less_aligned_pools_move_the_widest_words_that_fit(gap: int, word_bytes: int, instruction: str) -> None:
    copy = PageCopy([[(pool(64, 1, 8, gap=gap), pool(64, 1, 8))]], source_page_tokens=1, destination_page_tokens=1)
    assert copy.word_bytes == word_bytes
    assert set(re.findall(r"ld\.global\.cg(\S*)", compiled(copy).asm["ptx"])) == {instruction}
