"""What a gate needs to know about the messages that SGLang's tokenizer sends to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import (
    AbortReq,
    CloseSessionReqInput,
    TokenizedGenerateReqInput,
)

from sglang_basin.engine.identity import INFERRED_PREFIX

__all__ = [
    "AbortReq",
    "CloseSessionReqInput",
    "TokenizedGenerateReqInput",
    "aborts",
    "call_id",
    "failed",
    "has_room",
    "peers",
    "radix_sessions",
]

MAX_ROOM = 2**63 - 1
"""The routers' largest bootstrap room. A client that talks to an engine itself may send anything."""


def call_id(request: TokenizedGenerateReqInput) -> str:
    """What both legs of a call have in common: its bootstrap room; without disaggregation the request's own id."""
    return request.rid if request.bootstrap_room is None else str(request.bootstrap_room)


def has_room(request: TokenizedGenerateReqInput) -> bool:
    """Whether a call has a bootstrap room, as every call has that came through a router."""
    room = request.bootstrap_room
    return isinstance(room, int) and 0 <= room <= MAX_ROOM


def peers(request: TokenizedGenerateReqInput) -> bool:
    """Whether a prefill instance really has the other leg: not so for warm-up and health checks."""
    return has_room(request) and request.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST)


def aborts(abort: AbortReq, rid: str) -> bool:
    """Whether `abort` means the request `rid`, by SGLang's own rule (a prefix, so that batches go together)."""
    return abort.abort_all or rid.startswith(abort.rid)


def radix_sessions(scheduler: Any) -> Callable[[str], bool]:
    """Whether a session's name may stand in SGLang's session radix cache (`--enable-session-radix-cache`), which holds
    on to what the calls of a body's `session_id` have cached until `CloseSessionReqInput`. A session that its client
    has opened itself (`/open_session`) is the client's to close."""

    def may_stand(session_id: str) -> bool:
        if not scheduler.enable_session_radix_cache or session_id.startswith(INFERRED_PREFIX):
            return False
        return session_id not in scheduler.session_controller

    return may_stand


def failed(request: Any) -> bool:
    """Whether a request that has left SGLang was aborted or failed, rather than handed over or answered to its end."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = getattr(request, "finished_reason", None)
    return reason is None or isinstance(reason, FINISH_ABORT)
