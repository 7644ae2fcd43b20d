"""Counts and gauges on the engine's `/metrics`, and the log-once rule for Basin's own faults.

SGLang's processes share one Prometheus multiprocess directory, set up before prometheus_client is first imported;
hence the late import here. Without `--enable-metrics` the same objects count in memory only.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from dataclasses import dataclass
from typing import Any, Literal

from sglang_basin.policy.door import DoorState
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.sessions import Session
from sglang_basin.status import ControlFigures

log = logging.getLogger("sglang.basin")
"""Under SGLang's own logger, so that its level and format apply."""

SHOW_EVERY_S = 1.0
"""How often gauges are written."""

_seen_faults: set[str] = set()
_shown_failures: dict[str, int] = {}
_rank_labels: dict[str, str] = {}


def label_rank(rank: int) -> None:
    """This process is one of several data-parallel ranks: its gauges say which. Counters and histograms of all ranks
    add up. Call it before the first use of `metrics`."""
    _rank_labels["dp_rank"] = str(rank)


@dataclass(frozen=True, slots=True)
class _Row:
    """One metric: `make` registers it in this process."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def make(self) -> Any:
        from prometheus_client import Counter, Gauge, Histogram

        if self.kind == "counter":
            return Counter(self.name, self.text, self.labels)
        if self.kind == "gauge":
            gauge = Gauge(self.name, self.text, tuple(_rank_labels), multiprocess_mode="mostrecent")
            return gauge.labels(**_rank_labels) if _rank_labels else gauge
        return Histogram(self.name, self.text, self.labels, buckets=self.buckets)


def _counter(name: str, text: str, *labels: str) -> _Row:
    return _Row(name, "counter", text, labels)


def _gauge(name: str, text: str) -> _Row:
    return _Row(name, "gauge", text)


TABLE: dict[str, _Row] = dict(
    # calls and what the gates decide about them
    identity=_counter("basin_identity_total", "Calls by where their session's name came from.", "source"),
    malformed_identity=_counter(
        "basin_malformed_identity_total", "Session names ignored because they are malformed.", "source"
    ),
    decisions=_counter("basin_decisions_total", "Calls at the gate, by decision and reason.", "decision", "reason"),
    door_wait=_Row(
        "basin_door_wait_seconds",
        "histogram",
        "Time that calls spent at the door, of those that waited.",
        buckets=(0.1, 0.3, 1, 3, 10, 30, 60, 120, 240, 480, 900),
    ),
    http_refusals=_counter(
        "basin_http_refusals_total", "Calls that this server answered 503 for the door, by endpoint.", "endpoint"
    ),
    # the door
    gate_up=_gauge("basin_gate_up", "1 while the gate works, 0 once a fault has switched it off."),
    live_sessions=_gauge("basin_live_sessions", "Sessions that have entered and not ended."),
    queued_sessions=_gauge("basin_queued_sessions", "Sessions waiting at the door."),
    paused_sessions=_gauge("basin_paused_sessions", "Sessions that had entered and were sent back to the door."),
    held_calls=_gauge("basin_held_calls", "Calls waiting at the door."),
    tickets=_gauge("basin_tickets", "Waiting sessions whose client left: they keep their place for a while."),
    head_wait=_gauge("basin_head_wait_seconds", "How long the first session in the queue has waited."),
    working_set=_gauge("basin_working_set_tokens", "Total current context of live sessions."),
    distinct_working_set=_gauge(
        "basin_distinct_working_set_tokens", "The working set with what sessions share counted once."
    ),
    reserved=_gauge("basin_reserved_tokens", "Tokens reserved by live sessions under the admission law."),
    budget=_gauge("basin_budget_tokens", "Budget that reservations are held against."),
    reference=_gauge("basin_reference_tokens", "What the budget moves around: 0.9 of the knee, or the capacity."),
    peak_log_error=_Row(
        "basin_predicted_peak_log_error",
        "histogram",
        "log(predicted median / true peak) of sessions that ended, as of their first call and of their last.",
        labels=("call",),
        buckets=(-2.0, -1.5, -1.0, -0.7, -0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0),
    ),
    # prefill's cache
    hit_ratio=_gauge("basin_hit_ratio", "Cached over prompt tokens of the last minute's calls; NaN without any."),
    high_hit_ratio=_gauge("basin_high_hit_ratio", "The hit ratio of this deployment while all is well."),
    cache=_gauge("basin_cache_tokens", "KV pool on the device."),
    cache_used=_gauge("basin_cache_used_ratio", "Part of the KV pool that holds running calls or cached prefixes."),
    host_cache=_gauge("basin_host_cache_tokens", "What the host tier adds to the cache."),
    lent_cache=_gauge("basin_lent_cache_tokens", "What memory lent by decode adds to the cache."),
    rooms=_gauge("basin_rooms", "Entries in prefill's table of transfers under way (its first rank's)."),
    # lending
    lending_up=_gauge("basin_lending_up", "1 where KV is lent or pulled, 0 where it cannot be or a fault stopped it."),
    lent_kept=_gauge("basin_lent_kept_tokens", "KV of finished calls that this decode instance keeps."),
    lent_calls=_counter(
        "basin_lent_calls_total", "Calls at prefill by what came of KV that decode may lend them.", "outcome"
    ),
    lent_tokens=_counter("basin_lent_tokens_total", "Tokens that came back into prefill's cache."),
    lent_bytes=_counter(
        "basin_lent_bytes_total", "Bytes read from decode for them, by this server's first rank.", "transport"
    ),
    leases=_counter("basin_leases_total", "Leases of copies on other decodes that prefill asked for.", "answer"),
    leased=_gauge("basin_leased_tokens", "KV that this decode instance keeps locked for prefill to read."),
    lent_seconds=_Row(
        "basin_lent_pull_seconds",
        "histogram",
        "Time that pulls took, of those that succeeded.",
        buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
    ),
    # the control channel
    control_peers=_gauge("basin_control_peers", "Other ends of the control channel that this gate has heard of."),
    control_silence=_gauge(
        "basin_control_silence_seconds", "Age of the last message of the peer that has been silent for longest."
    ),
    control_unanswered=_gauge("basin_control_unanswered", "Questions that wait for the other side's answer."),
    control_dropped=_counter("basin_control_dropped_total", "Control messages not delivered or not read.", "cause"),
    # Basin itself
    faults=_counter("basin_faults_total", "Failures inside Basin, after which stock behaviour went on.", "part"),
    log_dropped=_counter(
        "basin_decision_log_dropped_total", "Lines that the decision log lost: queue full, or disk.", "cause"
    ),
)


class _Metrics:
    """The process's metric objects by their key in `TABLE`, each made at its first use: a process exports only what
    it knows about."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __getattr__(self, key: str) -> Any:
        if key not in TABLE:
            raise AttributeError(key)
        with self._lock:
            if key not in self.__dict__:
                self.__dict__[key] = TABLE[key].make()
            return self.__dict__[key]


@functools.cache
def metrics() -> Any:
    return _Metrics()


def counts(counter: Any) -> dict[str, int]:
    """A counter's values in this process by their labels, joined by "/"."""
    return {
        "/".join(sample.labels.values()): int(sample.value)
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def show_door(state: DoorState) -> None:
    """Put a snapshot of the door on the gauges."""
    shown = metrics()
    shown.live_sessions.set(state.live_sessions)
    shown.queued_sessions.set(state.queued_sessions)
    shown.paused_sessions.set(state.paused_sessions)
    shown.held_calls.set(state.held_calls)
    shown.tickets.set(state.tickets)
    shown.head_wait.set(state.head_wait_s)
    shown.working_set.set(state.working_set_tokens)
    shown.distinct_working_set.set(state.distinct_tokens)
    shown.reserved.set(state.reserved_tokens)
    shown.budget.set(state.budget_tokens)
    shown.reference.set(state.reference_tokens)
    shown.high_hit_ratio.set(state.high_hit_rate)


def show_cache(view: EngineView) -> None:
    """Put what the engine knows about its cache on the gauges."""
    shown = metrics()
    shown.hit_ratio.set(math.nan if view.hit_rate is None else view.hit_rate)
    shown.cache.set(view.cache_tokens)
    shown.cache_used.set(view.cache_used_share)
    shown.host_cache.set(view.host_tokens)
    shown.lent_cache.set(view.lent_tokens)


def show_control(control: ControlFigures) -> None:
    """Put the control channel's health on the gauges."""
    shown = metrics()
    shown.control_peers.set(len(control.peers))
    shown.control_silence.set(max((peer.heard_ago_s or 0.0 for peer in control.peers), default=0.0))
    shown.control_unanswered.set(control.unanswered)


def show_prediction(session: Session) -> None:
    """A session ended: how far off were its first and its latest predicted peak?"""
    last_tokens = None if session.prediction is None else session.prediction.at(0.5)
    for call, predicted_tokens in (("first", session.first_predicted_tokens), ("last", last_tokens)):
        if predicted_tokens is not None and session.peak_tokens > 0:
            error = math.log(max(1.0, predicted_tokens) / session.peak_tokens)
            metrics().peak_log_error.labels(call).observe(error)


def show_failures(part: str, total: int, last: str | None) -> None:
    """A part counts its own failures, `total` so far: count the new ones as faults, log the first with what it said."""
    new = total - _shown_failures.get(part, 0)
    if new <= 0:
        return
    _shown_failures[part] = total
    metrics().faults.labels(part).inc(new)
    if part not in _seen_faults:
        _seen_faults.add(part)
        log.error("Basin: %s failed: %s (further ones are only counted, in basin_faults_total)", part, last)


def fault(part: str, message: str) -> None:
    """A part of Basin failed and stock behaviour goes on: count it, log the first one of each part with its trace."""
    metrics().faults.labels(part).inc()
    if part not in _seen_faults:
        _seen_faults.add(part)
        log.exception("Basin: %s (%s; further ones are only counted, in basin_faults_total)", message, part)
