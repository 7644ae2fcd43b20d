"""A gate's parts as the figures of `/basin/status`. Bounded: the sessions with the largest reservations are listed, the
others counted; so are the peers that have been silent for longest."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.policy.door import Door
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.recording import RecordedDoor
from sglang_basin.policy.sessions import Session
from sglang_basin.status import (
    MAX_PEERS,
    TOP_SESSIONS,
    CacheFigures,
    ControlFigures,
    DoorFigures,
    PeerFigures,
    SessionFigures,
)


def door_figures(door: Door | RecordedDoor, now_s: float) -> DoorFigures:
    """The door's state and its largest sessions."""
    state = door.state()
    largest = heapq.nlargest(TOP_SESSIONS, door.sessions(), key=_reserved)
    return DoorFigures(
        rule=f"{door.law.name} reservation" if door.settings.enabled else "admission off",
        armed=state.armed,
        live_sessions=state.live_sessions,
        queued_sessions=state.queued_sessions,
        paused_sessions=state.paused_sessions,
        held_calls=state.held_calls,
        tickets=state.tickets,
        head_wait_s=round(state.head_wait_s, 3),
        working_set_tokens=state.working_set_tokens,
        distinct_tokens=state.distinct_tokens,
        reserved_tokens=state.reserved_tokens,
        budget_tokens=state.budget_tokens,
        reference_tokens=state.reference_tokens,
        sessions=[_session(session, now_s) for session in largest],
    )


def _session(session: Session, now_s: float) -> SessionFigures:
    predicted = None if session.prediction is None else round(session.predicted_peak(0.5))
    return SessionFigures(
        session_id=session.session_id,
        state=_state(session),
        context_tokens=session.context_tokens,
        reserved_tokens=round(_reserved(session)),
        predicted_peak_tokens=predicted,
        calls_seen=session.calls_seen,
        calls_open=len(session.calls),
        priority_s=round(session.priority, 3),
        arrived_s=round(session.arrived_s, 3),
        idle_s=round(max(0.0, now_s - session.last_active_s), 3),
    )


def _state(session: Session) -> str:
    if session.live:
        return "live"
    return "paused" if session.paused else "waiting" if session.calls else "away"


def _reserved(session: Session) -> float:
    return session.reserved_tokens if session.live else session.law_tokens


def cache_figures(view: EngineView, high_hit_ratio: float | None = None) -> CacheFigures:
    return CacheFigures(
        pool_tokens=view.cache_tokens,
        used_ratio=round(view.cache_used_share, 4),
        host_tokens=view.host_tokens,
        lent_tokens=view.lent_tokens,
        hit_ratio=None if view.hit_rate is None else round(view.hit_rate, 4),
        high_hit_ratio=None if high_hit_ratio is None else round(high_hit_ratio, 4),
    )


def control_figures(
    address: str | None, heard_s: Mapping[str, float | None], unanswered: int, now_s: float
) -> ControlFigures:
    """`heard_s` says when each peer's last message came, None for one that has said nothing."""
    silent_first = heapq.nsmallest(MAX_PEERS, heard_s.items(), key=lambda item: -1.0 if item[1] is None else item[1])
    peers = [
        PeerFigures(name=name, heard_ago_s=None if at is None else round(max(0.0, now_s - at), 3))
        for name, at in silent_first
    ]
    return ControlFigures(
        address=address,
        peers=peers,
        unanswered=unanswered,
        dropped=counts(metrics().control_dropped),
    )
