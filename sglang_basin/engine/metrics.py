"""Counts and gauges on the engine's `/metrics`, and the log-once rule for Basin's own faults.

SGLang's processes share one Prometheus multiprocess directory, set up before prometheus_client is first imported;
hence the late import here. Without `--enable-metrics` the same objects count in memory only.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

from sglang_basin.policy.door import DoorState

log = logging.getLogger("sglang.basin")
"""Under SGLang's own logger, so that its level and format apply."""

SHOW_EVERY_S = 1.0
"""How often gauges are written."""

_seen_faults: set[str] = set()


@functools.cache
def metrics() -> SimpleNamespace:
    """The process's metric objects, made at the first use."""
    from prometheus_client import Counter, Gauge, Histogram

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(name, text, multiprocess_mode="mostrecent")

    return SimpleNamespace(
        identity=Counter("basin_identity_total", "Calls by where their session's name came from.", ["source"]),
        malformed_identity=Counter(
            "basin_malformed_identity_total", "Session names ignored because they are malformed.", ["source"]
        ),
        decisions=Counter(
            "basin_decisions_total", "Calls at the gate, by decision and reason.", ["decision", "reason"]
        ),
        control_dropped=Counter(
            "basin_control_dropped_total", "Control messages not delivered or not read.", ["cause"]
        ),
        faults=Counter("basin_faults_total", "Failures inside Basin, after which stock behaviour went on.", ["part"]),
        door_wait=Histogram(
            "basin_door_wait_seconds",
            "Time that calls spent at the door, of those that waited.",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 60, 120, 240, 480, 900),
        ),
        live_sessions=gauge("basin_live_sessions", "Sessions that have entered and not ended."),
        queued_sessions=gauge("basin_queued_sessions", "Sessions waiting at the door."),
        held_calls=gauge("basin_held_calls", "Calls waiting at the door."),
        rooms=gauge("basin_rooms", "Entries in prefill's table of transfers under way (its first rank's)."),
        working_set=gauge("basin_working_set_tokens", "Total current context of live sessions."),
        reserved=gauge("basin_reserved_tokens", "Tokens reserved by live sessions under the admission law."),
        budget=gauge("basin_budget_tokens", "Budget that reservations are held against."),
    )


def show_door(state: DoorState) -> None:
    """Put a snapshot of the door on the gauges."""
    shown = metrics()
    shown.live_sessions.set(state.live_sessions)
    shown.queued_sessions.set(state.queued_sessions)
    shown.held_calls.set(state.held_calls)
    shown.working_set.set(state.working_set_tokens)
    shown.reserved.set(state.reserved_tokens)
    shown.budget.set(state.budget_tokens)


def fault(part: str, message: str) -> None:
    """A part of Basin failed and stock behaviour goes on: count it, log the first one of each part with its trace."""
    metrics().faults.labels(part).inc()
    if part not in _seen_faults:
        _seen_faults.add(part)
        log.exception("Basin: %s (%s; further ones are only counted, in basin_faults_total)", message, part)
