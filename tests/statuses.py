"""What `/basin/status` says of a gate, for tests of those who read it."""

from __future__ import annotations

from typing import Any

from sglang_basin.status import Status


def bare_status(role: str, **others: Any) -> Status:
    """A gate with no door, cache or channel to tell of."""
    nothing: dict[str, Any] = {
        "gate": "on",
        "uptime_s": 1.0,
        "door": None,
        "held_calls": 0,
        "entered_sessions": 0,
        "cache": None,
        "control": None,
        "decisions": {},
        "faults": {},
    }
    return Status(role=role, **nothing | others)
