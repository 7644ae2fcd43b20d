"""The patches and how they stand: `python -m sglang_basin.patching [--show MODULE]`

Exit code 1 when a patch does not fit the installed SGLang, is malformed, or is not listed in `series`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_basin.patching.patch import Patch, PatchError
from sglang_basin.patching.series import (
    Standing,
    by_module,
    patched_text,
    patches_folder,
    read_series,
    sglang_root,
    standings,
    unlisted,
)

STATES = {
    "applicable": "fits, applied in memory at import",
    "in file": "in the installed file already",
    "mismatch": "DOES NOT FIT",
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.patching", description="Lists Basin's patches of SGLang and checks them."
    )
    parser.add_argument("--check", action="store_true", help="what it does anyway; reads well in a script")
    parser.add_argument("--show", metavar="MODULE", help="print this module's source as the engine runs it")
    known = parser.parse_args(argv)
    folder = patches_folder()
    try:
        patches = read_series(folder)
        root = sglang_root()
        found = standings(patches, root)
        if known.show:
            return _show(known.show, found, root)
    except PatchError as error:
        print(f"FAIL {error}")
        return 1
    for patch in patches:
        _describe(patch, found)
    if not patches:
        print("no patches: everything is done by hooks")
    forgotten = unlisted(folder, patches)
    if forgotten:
        print(f"FAIL not in series: {', '.join(forgotten)}; mend: list them in {folder / 'series'}")
    return 1 if forgotten or any(standing.state == "mismatch" for standing in found) else 0


def _describe(patch: Patch, found: Sequence[Standing]) -> None:
    print(patch.name)
    for name, value in patch.header.items():
        print(f"  {name}: {value}")
    touched = {change.path for change in patch.changes}
    for standing in found:
        if standing.path in touched:
            print(f"  {standing.path}: {STATES[standing.state]}")
            if standing.state == "mismatch":
                print(f"    {standing.detail}; mend: {standing.mend}")


def _show(module: str, found: Sequence[Standing], root: Path) -> int:
    standing = by_module(found).get(module)
    if standing is None:
        raise PatchError(f"{module}: no patch of the series changes it in memory")
    print(patched_text(standing.changes, root / standing.path), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
