"""Ending a call that is still at the gate: the answer its client gets, through SGLang's own way for aborted calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_basin.engine.refusals import finish_reason
from sglang_basin.policy.decisions import Reason

Answer = Callable[[Any, str, Mapping[str, str | int] | None], None]
"""(request, message, SGLang's finish reason or None): tell the tokenizer that the request is over."""

_TEXTS = {
    Reason.HELD_TOO_LONG: "The server is at capacity and this new session could not be admitted in time.",
    Reason.SHED: "The server is over its capacity for long, and this new session was dropped.",
    Reason.QUEUE_FULL: "The server is at capacity and too many sessions wait already.",
    Reason.CLIENT_LEFT: "The client left while this call waited to be admitted.",
    Reason.SESSION_ENDED: "The session was ended while this call waited to be admitted.",
}


def refusal(reason: Reason, retry_after_s: float) -> str:
    """What a turned-away client reads."""
    return f"{_TEXTS[reason]} Retry after {retry_after_s:.0f} s. ({reason.value})"


def refuse(answer: Answer, request: Any, reason: Reason, retry_after_s: float) -> None:
    """Answer a held request 503."""
    message = refusal(reason, retry_after_s)
    answer(request, message, finish_reason(message, reason, retry_after_s))


def drop(answer: Answer, request: Any) -> None:
    """End a held request whose client has left or aborted it; nobody reads the text."""
    answer(request, "Aborted while waiting to be admitted.", None)


def scheduler_answer(scheduler: Any) -> Answer:
    """The answer function of a live scheduler."""
    from sglang.srt.managers.io_struct import AbortReq

    def answer(request: Any, message: str, reason: Mapping[str, str | int] | None) -> None:
        scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=reason, abort_message=message), request)

    return answer
