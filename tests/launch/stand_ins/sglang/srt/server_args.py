"""Parses the few flags that the launchers look at, abbreviations and all, as SGLang's own parser does."""

import argparse


def prepare_server_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang serve")
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tokenizer-worker-num", type=int, default=1)
    parser.add_argument("--schedule-policy", default="fcfs")
    parser.add_argument("--priority-scheduling-preemption-threshold", type=int, default=10)
    for flag in (
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        "--disable-priority-preemption",
        "--enable-cache-report",
        "--smg-grpc-mode",
        "--encoder-only",
    ):
        parser.add_argument(flag, action="store_true")
    known, _ = parser.parse_known_args(argv)
    known.argv = argv
    return known
