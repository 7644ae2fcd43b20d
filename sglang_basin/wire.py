"""Names on the wire: how a client says which session a call belongs to, and that the session ends with it."""

from __future__ import annotations

SESSION_HEADERS: tuple[str, ...] = (
    "x-basin-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "session-id",  # Codex, old and new spelling
    "session_id",
    "thread-id",
    "x-session-id",
)
"""Headers that name a session, best first. The router pins sessions by them and keeps them to itself."""

END_HEADERS: tuple[str, ...] = ("x-basin-session-end", "x-dynamo-session-final")

END_METADATA_KEY = "basin_session_end"
"""Key in a body's `metadata` object that announces a session's last call; the router forwards `metadata`."""
