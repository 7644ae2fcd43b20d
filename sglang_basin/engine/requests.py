"""What a gate needs to know about the messages that SGLang's tokenizer sends to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    CloseSessionReqInput,
    TokenizedGenerateReqInput,
)

from sglang_basin.engine.identity import stamped

__all__ = ["AbortReq", "CloseSessionReqInput", "TokenizedGenerateReqInput", "aborts", "call_id", "peers", "singly"]


def singly(requests: Iterable[Any]) -> Iterator[Any]:
    """The requests, with batches in which any call names a session taken apart, so that each can wait alone."""
    for request in requests:
        if isinstance(request, BatchTokenizedGenerateReqInput) and any(stamped(call) for call in request):
            yield from request
        else:
            yield request


def call_id(request: TokenizedGenerateReqInput) -> str:
    """What both legs of a call have in common: its bootstrap room; without disaggregation the request's own id."""
    return request.rid if request.bootstrap_room is None else str(request.bootstrap_room)


def peers(request: TokenizedGenerateReqInput) -> bool:
    """Whether a prefill instance really has the other leg: not so for warm-up and health checks."""
    return request.bootstrap_room is not None and request.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST)


def aborts(abort: AbortReq, rid: str) -> bool:
    """Whether `abort` means the request `rid`, by SGLang's own rule (a prefix, so that batches go together)."""
    return abort.abort_all or rid.startswith(abort.rid)
