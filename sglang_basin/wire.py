"""Names on the wire: how a client says which session a call belongs to, and that the session ends with it.

Where each header comes from:

- Claude Code sends `x-claude-code-session-id`, and from sub-agents the same one with `x-claude-code-agent-id` and
  `x-claude-code-parent-agent-id` (code.claude.com/docs/en/llm-gateway, version 2.1.139 on).
- Codex sends `thread-id` for one thread of work, and `session-id` for the whole tree of a thread and its sub-agents,
  with `x-codex-parent-thread-id` in the latter (github.com/openai/codex, codex-rs/core/src/responses_metadata.rs);
  older versions only `session_id` or `session-id`, one per thread. So the thread goes first.
- OpenCode sends `x-session-id`, sub-agents their own with `x-parent-session-id`; custom clients of NVIDIA Dynamo
  `x-dynamo-session-id` and `x-dynamo-parent-session-id` (docs.nvidia.com/dynamo, "Session IDs", lists all of these).
"""

from __future__ import annotations

SESSION_HEADERS: tuple[str, ...] = (
    "x-basin-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "session_id",
    "x-session-id",
)
"""Headers that name a session, best first. The router pins sessions by them and keeps them to itself."""

AGENT_HEADER = "x-claude-code-agent-id"
PARENT_AGENT_HEADER = "x-claude-code-parent-agent-id"
"""A sub-agent within the session that `x-claude-code-session-id` names, and the agent that started it, if not the
session's main one."""

PARENT_HEADERS: dict[str, str] = {
    "x-basin-session-id": "x-basin-parent-session-id",
    "x-dynamo-session-id": "x-dynamo-parent-session-id",
    "thread-id": "x-codex-parent-thread-id",
    "x-session-id": "x-parent-session-id",
}
"""By the header that names a session: the one that names the session which started it and waits for it."""

END_HEADERS: tuple[str, ...] = ("x-basin-session-end", "x-dynamo-session-final")

END_FIELD = "basin_session_end"
"""Key of a body, or of its `metadata` object, that announces a session's last call. There are two places because the
router `smg` passes all of `metadata` on but for `/v1/messages`, where it keeps `user_id` alone, and all fields of a
body but for `/v1/responses`, where it refuses those that OpenAI does not have."""

PARENT_FIELD = "basin_parent_session_id"
"""In the same two places: names the session which started this one and waits for it."""
