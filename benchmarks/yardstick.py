"""How fast this machine runs Python, beside what is measured on it: a bound in microseconds holds on one machine and
not on another."""

from __future__ import annotations

import statistics
import time

STEPS = 2_000_000


def step_ns() -> float:
    """What a step of the simplest loop takes, in ns of CPU: the median of seven."""
    return statistics.median(_one() for _ in range(7))


def _one() -> float:
    total, started_ns = 0, time.thread_time_ns()
    for number in range(STEPS):
        total += number & 7
    return (time.thread_time_ns() - started_ns) / STEPS


def told() -> str:
    return f"A step of the simplest Python loop, a sum, takes {step_ns():.0f} ns on this machine."
