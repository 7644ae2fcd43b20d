"""The example patches of these tests and the installed file that they change."""

from __future__ import annotations

from pathlib import Path

from sglang_basin.patching.series import sglang_root

FOLDER = Path(__file__).parent / "patches"
FILE = "sglang/srt/managers/kv_hints.py"
MODULE = "sglang.srt.managers.kv_hints"


def copied(into: Path) -> Path:
    """A copy of the file in a tree of its own; returns the tree's root."""
    target = into / FILE
    target.parent.mkdir(parents=True)
    target.write_bytes((sglang_root() / FILE).read_bytes())
    return into
