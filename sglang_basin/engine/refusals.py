"""A refused call's answer over HTTP: 503 with `Retry-After` and `x-should-retry`, whatever the endpoint.

SGLang turns an abort with a status code into six different answers: 503 on `/generate` and chat, 400 on responses, a
text without the reason on messages, and, where the client streams, 200 with an event that no SDK retries. So the gate's
verdict is noted where the tokenizer takes it in (`note_refusal`), and the innermost middleware writes the answer
(`RefusalMiddleware`). It holds back a response's head until the first byte of its body, which is when the engine has
spoken; nothing waits any longer than that. Answers of other calls pass through unchanged, message by message.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from sglang_basin.engine.metrics import metrics
from sglang_basin.policy.decisions import Reason

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_RETRY_AFTER_S = 60
"""OpenAI's and Anthropic's SDKs take no notice of a longer advice."""

REASON_KEY = "basin_reason"
RETRY_KEY = "retry_after_s"

EARLY_EVENTS = (b"event: response.created\n", b"event: response.in_progress\n")
"""What SGLang sends on a responses stream before it has asked the engine for anything."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call was turned away, for its client."""

    message: str
    reason: str
    retry_after_s: int


@dataclass(slots=True)
class _Verdict:
    """What the engine said about one HTTP request so far."""

    refusal: Refusal | None = None


_verdict: ContextVar[_Verdict | None] = ContextVar("basin_verdict", default=None)
"""Set by the middleware; the endpoint's task and the tasks that it starts see the same object."""


def finish_reason(message: str, reason: Reason, retry_after_s: float) -> dict[str, str | int]:
    """The `finished_reason` of the abort that ends a refused call: SGLang's form, and what the middleware needs."""
    return {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE.value,
        "message": message,
        REASON_KEY: reason.value,
        RETRY_KEY: max(1, min(MAX_RETRY_AFTER_S, math.ceil(retry_after_s))),
    }


def note_refusal(self: Any, out: dict[str, Any], state: Any, is_stream: bool) -> None:
    """Before `TokenizerManager._handle_abort_finish_reason`, in the HTTP process: was it the gate that ended it?"""
    verdict = _verdict.get()
    reason = out["meta_info"]["finish_reason"]
    if verdict is not None and REASON_KEY in reason:
        verdict.refusal = Refusal(reason["message"], reason[REASON_KEY], reason[RETRY_KEY])


class RefusalMiddleware:
    """Innermost around SGLang's app, so that its own middlewares see the status that the client gets."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope["path"], send)
        token = _verdict.set(answer.verdict)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            await answer.pass_on()  # what SGLang had begun to answer, as it would be without us
            raise
        finally:
            _verdict.reset(token)


class _Answer:
    """One response on its way: held back, passed on, or replaced by a refusal."""

    def __init__(self, path: str, send: Send) -> None:
        self.verdict = _Verdict()
        self._path = path
        self._send = send
        self._held: list[Message] = []
        self._passing = False
        self._refused = False

    async def send(self, message: Message) -> None:
        if self._passing:
            await self._send(message)
            return
        if self._refused:
            return
        self._held.append(message)
        if self.verdict.refusal is not None:
            self._refused = True
            await self._refuse(self.verdict.refusal)
        elif message["type"] != "http.response.start" and not _is_early(message):
            await self.pass_on()

    async def pass_on(self) -> None:
        """Let what is held back go, and all that follows."""
        if self._refused:
            return
        self._passing = True
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def _refuse(self, refusal: Refusal) -> None:
        self._held.clear()
        body = _body(self._path, refusal)
        headers = (
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("retry-after", str(refusal.retry_after_s)),
            ("x-should-retry", "true"),
        )
        metrics().http_refusals.labels(_endpoint(self._path)).inc()
        await self._send(
            {
                "type": "http.response.start",
                "status": HTTPStatus.SERVICE_UNAVAILABLE.value,
                "headers": [(name.encode(), value.encode()) for name, value in headers],
            }
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _is_early(message: Message) -> bool:
    return bool(message.get("more_body")) and message.get("body", b"").startswith(EARLY_EVENTS)


_ENDPOINTS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def _endpoint(path: str) -> str:
    """The metric's label: one of a fixed few, also behind a root path."""
    return next((endpoint for endpoint in _ENDPOINTS if path.endswith(endpoint)), "other")


def _body(path: str, refusal: Refusal) -> bytes:
    """The error in the shape of the endpoint's API: Anthropic's, OpenAI's, or SGLang's own for `/generate`."""
    endpoint = _endpoint(path)
    error: dict[str, Any]
    if endpoint == "/v1/messages":
        error = {"type": "error", "error": {"type": "overloaded_error", "message": refusal.message}}
    elif endpoint == "/generate":
        status = HTTPStatus.SERVICE_UNAVAILABLE.value
        error = {
            "object": "error",
            "message": refusal.message,
            "type": str(status),
            "param": None,
            "code": status,
            REASON_KEY: refusal.reason,
            RETRY_KEY: refusal.retry_after_s,
        }
    else:
        inner = {"message": refusal.message, "type": "server_error", "param": None, "code": refusal.reason}
        error = {"error": inner}
    return msgspec.json.encode(error)
