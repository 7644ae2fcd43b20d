"""What a gate needs to know about the messages that SGLang's tokenizer sends to the scheduler."""

from __future__ import annotations

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import (
    AbortReq,
    CloseSessionReqInput,
    TokenizedGenerateReqInput,
)

__all__ = ["AbortReq", "CloseSessionReqInput", "TokenizedGenerateReqInput", "aborts", "call_id", "peers"]


def call_id(request: TokenizedGenerateReqInput) -> str:
    """What both legs of a call have in common: its bootstrap room; without disaggregation the request's own id."""
    return request.rid if request.bootstrap_room is None else str(request.bootstrap_room)


def peers(request: TokenizedGenerateReqInput) -> bool:
    """Whether a prefill instance really has the other leg: not so for warm-up and health checks."""
    return request.bootstrap_room is not None and request.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST)


def aborts(abort: AbortReq, rid: str) -> bool:
    """Whether `abort` means the request `rid`, by SGLang's own rule (a prefix, so that batches go together)."""
    return abort.abort_all or rid.startswith(abort.rid)
