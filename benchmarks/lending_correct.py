"""Are answers with lending those of cold runs, whatever SGLang's settings? `lending_sessions` over a table of them.

    .venv/bin/python benchmarks/lending_correct.py --sessions 60 --turns 4 --out out/lending_correct.json

What is lent is read whether or not that pays, so that much is. Each case starts a node of its own, for two minutes;
`--cases` picks some, and `--out` keeps the others' results as they are. Fails if an answer differs, a fault was
counted, or an engine's log has an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lending_sessions import arguments, run

CASES: Mapping[str, str] = {
    "page-1": "--page-size 1",
    "page-16": "--page-size 16",
    "page-64": "--page-size 64",
    "chunked": "--page-size 16 --chunk 256",
    "tp-2": "--page-size 16 --tp 2",
    "tp-2-chunked": "--page-size 64 --tp 2 --chunk 256",
    "checksum": "--page-size 16 --chunk 512 --checksum",
    "hicache": "--page-size 64 --hicache",
    "hicache-alone": "--page-size 64 --hicache --lending off",
    "leases": "--page-size 16 --decode 2 --unpinned",
    "leases-tp-2": "--page-size 16 --tp 2 --decode 2 --unpinned",
}
"""By name, the flags of `lending_sessions`."""

TROUBLE = ("Traceback", "KV checksum mismatch", "leak")
"""What no engine's log may have."""


def troubled(logs: Path) -> list[str]:
    """Log lines that ought not to be there, with their file."""
    return [
        f"{log.name}: {line[:200]}"
        for log in sorted(logs.glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in TROUBLE)
    ]


def measure(name: str, known: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        logs = known.logs / name if known.logs else Path(folder)
        flags = [*CASES[name].split(), "--always-pull", "--logs", str(logs)]
        for option in ("sessions", "turns", "concurrency", "disconnects", "seed"):
            flags += [f"--{option}", str(getattr(known, option))]
        result = run(arguments().parse_args(flags))
        return {"flags": CASES[name]} | result | {"options": None, "log_lines": troubled(logs)}


def sound(result: Mapping[str, Any]) -> bool:
    return not (result["unequal_answers"] or result["faults"] or result["log_lines"])


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        "| case | calls | unequal | known part found | lent tokens | outcomes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        came = ", ".join(f"{what} {count}" for what, count in sorted(result["outcomes"].items()))
        rows.append(
            f"| {name} | {result['calls']} | {result['unequal_answers']} | {result['found_part']:.3f} "
            f"| {result['lent_tokens']} | {came} |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--sessions", type=int, default=60, help="in each case")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--disconnects", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs, one inside for each case")
    parser.add_argument("--out", type=Path, help="JSON by case; cases that are not run stay as they are")
    known = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(known.out.read_text()) if known.out and known.out.exists() else {}
    ran = {}
    for name in known.cases:
        ran[name] = results[name] = measure(name, known)
        print(table({name: ran[name]}).splitlines()[-1], *ran[name]["log_lines"], sep="\n", flush=True)
        if known.out:
            known.out.write_text(
                json.dumps({case: results[case] for case in CASES if case in results}, indent=2) + "\n"
            )
    print(table(ran))
    return 0 if all(map(sound, ran.values())) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
