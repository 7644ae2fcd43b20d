"""What the spawned process of test_importer runs. Imports SGLang only where the patches should be in force."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def report(sender: Any) -> None:
    seen: dict[str, object] = {"finder": any(type(finder).__name__ == "PatchFinder" for finder in sys.meta_path)}
    if seen["finder"]:
        seen["patched_by"] = importlib.import_module("sglang.srt.managers.kv_hints").PATCHED_BY
    sender.send(seen)
