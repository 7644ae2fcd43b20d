"""What does a session that prefill has evicted and decode has kept get back, what is read for that, and does the
forward follow the layers?

    .venv/bin/python benchmarks/lending_evicted.py --sessions 10 --out out/lending_evicted.json

A real CPU node: one prefill with a small pool, two decodes. Sessions make one call, are evicted on prefill by others,
and make a second one, on the decode that keeps them or, by a lease, on the other one; or they are not evicted, and only
their answer is missing on prefill. Counted at prefill. Then the same over a link on which each layer takes 40 ms: when
did layers come, and when did the forward go on to compute with them? Exit code 1 if less than 95 % of a prefix came
back, if other bytes were read than those of the missing part, if an answer was not a cold run's, or if no forward
computed layer 0 before the last layer had come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lending_frozen import CONTEXT_TOKENS, ids
from lending_sessions import call, counter, found_tokens, lending_node, pins

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node
from sglang_basin.platforms.tiny_model import ModelSpec

PAGE = 16
LAYER_MS = 40
MODEL = ModelSpec(hidden=128, layers=4, vocab=2048, dtype="float32", seed=7)
SLOW_READS = Path(__file__).parent.parent / "tests" / "lending" / "faulty"
"""Slows reads down and writes when layers come and are computed with; see there."""

CASES = {"evicted": (True, 0), "evicted, on the other decode": (True, 1), "not evicted": (False, 0)}
"""Whether others evict the session on prefill, and on which decode its second call lands; the first is on decode 0."""

ANSWER_TOKENS = 40


def lent(prefill: str) -> tuple[int, int]:
    return int(counter(prefill, "basin_lent_tokens_total")), int(counter(prefill, "basin_lent_bytes_total"))


def second_call(node: Node, pinned: list[str], name: str, *, evicted: bool, decode: int, reads: Path, how: str) -> Any:
    """A session's two calls, reads of the second one going as `how` says. What prefill had of it afterwards, in
    tokens, and what came back for that."""
    prefill = node.plan.of("prefill")[0].url
    first = call(node.url, ids(CONTEXT_TOKENS, name), ANSWER_TOKENS, session=name, pin=pinned[0])
    for number in range(3 if evicted else 0):
        call(node.url, ids(1_400, f"{name}-{number}"), 1, session=f"{name}-{number}", pin=pinned[1])
    prompt = ids(CONTEXT_TOKENS, name) + first.ids + [7]
    (tokens, lent_bytes), found = lent(prefill), found_tokens(prefill)
    reads.write_text(how)
    again = call(node.url, prompt, 4, session=name, pin=pinned[decode])
    reads.write_text("")
    got, read = (after - before for after, before in zip(lent(prefill), (tokens, lent_bytes), strict=True))
    have = found_tokens(prefill) - found
    cold = call(node.url, prompt, 4, salt=f"cold-{name}", pin=pinned[1])
    known = (CONTEXT_TOKENS + len(first.ids) - 1) // PAGE * PAGE
    return {"known": known, "found": have, "came_back": got, "bytes": read, "equal": again.ids == cold.ids}


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    known, found, got, read = (sum(row[name] for row in rows) for name in ("known", "found", "came_back", "bytes"))
    held = found - got  # what prefill had already
    return {
        "sessions": len(rows),
        "known_tokens": known,
        "held_tokens": held,
        "came_back_tokens": got,
        "found_part": round(found / known, 4),
        "bytes_read": read,
        "missing_bytes": (known - held) * MODEL.kv_bytes_per_token,
        "unequal_answers": sum(not row["equal"] for row in rows),
    }


def leads_ms(timeline: Path) -> list[float]:
    """Of each call that a forward computed while its part was on its way: how long before the last layer's arrival it
    went on to layer 0."""
    seen: dict[str, dict[str, dict[int, float]]] = {}
    for line in timeline.read_text().splitlines():
        what, layer, room, at_s = line.split()
        seen.setdefault(room, {"arrived": {}, "computes": {}})[what].setdefault(int(layer), float(at_s))
    return [
        1e3 * (layers["arrived"][MODEL.layers - 1] - layers["computes"][0])
        for layers in seen.values()
        if layers["computes"] and len(layers["arrived"]) == MODEL.layers
    ]


def measure(sessions: int, logs: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        reads = Path(folder) / "how"
        reads.write_text("")
        paths = os.pathsep.join(filter(None, [str(SLOW_READS), os.environ.get("PYTHONPATH", "")]))
        with lending_node(
            model=MODEL,
            decode=2,
            config=BasinConfig(admission="off", lending="on"),
            environment={"BASIN_TEST_READS": str(reads), "PYTHONPATH": paths},
            logs=logs,
        ) as node:
            pinned = pins(node)
            shown: dict[str, Any] = {}
            for case, (evicted, decode) in CASES.items():
                rows = []
                for number in range(sessions):
                    name = f"{case}-{number}"
                    rows.append(second_call(node, pinned, name, evicted=evicted, decode=decode, reads=reads, how=""))
                shown[case] = summed(rows)
                print(json.dumps({case: shown[case]}), flush=True)
            timeline = reads.with_suffix(".timeline")
            for case, (evicted, decode) in list(CASES.items())[:2]:
                timeline.write_text("")
                for number in range(sessions):
                    name, how = f"{case}-slow-{number}", f"slow {LAYER_MS}"
                    second_call(node, pinned, name, evicted=evicted, decode=decode, reads=reads, how=how)
                leads = leads_ms(timeline)
                shown[case] |= {
                    "overlapped": f"{len(leads)} of {sessions}",
                    "layer_0_before_last_layer_ms": [
                        round(f(leads), 1) for f in (min, statistics.median, max) if leads
                    ],
                }
                print(json.dumps({case: shown[case]}), flush=True)
    return shown


def holds(result: dict[str, Any]) -> bool:
    """Whether a case kept what is promised."""
    lead = result.get("layer_0_before_last_layer_ms")
    exact = result["bytes_read"] == result["came_back_tokens"] * MODEL.kv_bytes_per_token <= result["missing_bytes"]
    return result["found_part"] >= 0.95 and exact and not result["unequal_answers"] and (lead is None or lead[:1] > [0])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10, help="in each case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args(argv)
    shown = measure(options.sessions, options.logs)
    if options.out:
        options.out.write_text(json.dumps(shown, indent=2) + "\n")
    return 0 if all(map(holds, shown.values())) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
