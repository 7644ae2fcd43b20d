"""What the learned idle time-out does on recorded tool times.

The pauses of each trace go through `policy.idle.IdleTimeout`, session by session in a random order. Printed: the
time-out that results, and the shares of pauses and of sessions that it and the fixed longest one end too early.

    .venv/bin/python benchmarks/idle_timeout.py --traces DIR
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from sglang_basin.config import BasinConfig
from sglang_basin.policy.idle import IdleTimeout
from sglang_basin.replay.trace import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="directory of recorded sessions (*.jsonl.gz)")
    longest_s, shortest_s = BasinConfig().idle_timeout_s, BasinConfig().idle_floor_s
    print("| trace | pauses | time-out, s | pauses over it | sessions over it | sessions over the longest |")
    print("| --- | --- | --- | --- | --- | --- |")
    for path in sorted(parser.parse_args().traces.glob("*.jsonl.gz")):
        sessions = [[call.tool_s for call in session.calls[:-1]] for session in read_trace(path)]
        if sum(map(sum, sessions)) == 0:
            continue
        random.Random(1).shuffle(sessions)
        idle = IdleTimeout(longest_s, shortest_s)
        over, cut, cut_by_longest, timeouts_s = 0, 0, 0, []
        for pauses_s in sessions:
            over += sum(pause_s > idle.timeout_s for pause_s in pauses_s)
            cut += any(pause_s > idle.timeout_s for pause_s in pauses_s)
            cut_by_longest += any(pause_s > longest_s for pause_s in pauses_s)
            timeouts_s.append(idle.timeout_s)
            for pause_s in pauses_s:
                idle.resumed(pause_s)
        pauses = sum(map(len, sessions))
        print(
            f"| {path.name.split('.')[0]} | {pauses} | {statistics.median(timeouts_s):.0f} | {over / pauses:.3%} | "
            f"{cut / len(sessions):.1%} | {cut_by_longest / len(sessions):.1%} |"
        )


if __name__ == "__main__":
    main()
