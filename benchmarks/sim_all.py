"""Runs every simulated benchmark, in the order of the page, and makes the page of their results.

    .venv/bin/python benchmarks/sim_all.py [--quick] [--jobs 2]

A quarter of an hour on two cores; interrupted, it goes on where it was. Flags are passed on to each script.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = (
    "surge",
    "intervention",
    "knee",
    "limits",
    "hysteresis",
    "recovery",
    "scenarios",
    "decode_first",
    "ablation",
    "law",
    "speed",
)


def main() -> int:
    folder, flags = Path(__file__).parent, sys.argv[1:]
    if {"-h", "--help"} & set(flags):
        print(__doc__)
        return 0
    for name in SCRIPTS:
        started_s = time.monotonic()
        print(f"== {name}", flush=True)
        ended = subprocess.run([sys.executable, str(folder / f"sim_{name}.py"), *flags], check=False)
        if ended.returncode:
            print(f"sim_{name}.py ended with {ended.returncode}", file=sys.stderr)
            return ended.returncode
        print(f"   {time.monotonic() - started_s:.0f} s\n", flush=True)
    return 0 if "--quick" in flags else subprocess.run([sys.executable, str(folder / "sim_readme.py")]).returncode


if __name__ == "__main__":
    sys.exit(main())
