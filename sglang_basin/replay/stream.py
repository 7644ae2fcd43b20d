"""What comes back from a server: server-sent events, and the two answer formats that the replay understands.

`GenerateAnswer` reads SGLang's native `/generate` stream: each event holds `output_ids` (all tokens so far, or with
`--incremental-streaming-output` only the new ones) and `meta_info` with the token counts, the cached tokens and at
the end `finish_reason`; an abort is a `finish_reason` of type abort inside a 200 answer. `ChatAnswer` reads OpenAI
chat chunks. Both are fed one network read at a time, because that is how finely a client can tell tokens apart.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_EVENT_BYTES = 256 * 2**20


class ProtocolError(Exception):
    """The server sent something that is not the protocol."""


class EventDecoder:
    """Splits a byte stream into the data of its server-sent events."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that `chunk` completes. Raises ProtocolError when one exceeds MAX_EVENT_BYTES."""
        buffer = self._pending + chunk if self._pending else chunk
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._pending = buffer.split(b"\n\n")
        if len(self._pending) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event longer than {MAX_EVENT_BYTES:,} bytes")
        decoded = []
        for event in events:
            lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                decoded.append(b"\n".join(lines))
        return decoded


class Failure(msgspec.Struct, frozen=True):
    """Why an answer ended badly, as far as the server told."""

    message: str
    status: int | None = None
    retry_after_s: float | None = None
    aborted: bool = False


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | str | None = None


class _GenerateEvent(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _MetaInfo | None = None
    error: Any = None


_decode_generate = msgspec.json.Decoder(_GenerateEvent).decode


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def failure_of(error: Any, default_status: int | None = None) -> Failure:
    """Read an error body: `{"message", "code"}`, `{"error": {...}}`, SGLang's finish_reason, or plain text."""
    if isinstance(error, dict) and isinstance(error.get("error"), dict | str):
        error = error["error"]
    if not isinstance(error, dict):
        return Failure(str(error)[:500], default_status)
    message = str(error.get("message") or error.get("detail") or error)[:500]
    # A refusal inside a stream has no header to carry Retry-After: Basin says it in the message.
    told = re.search(r"[Rr]etry after (\d+(?:\.\d+)?) ?s", message)
    status = _number(error.get("status_code")) or _number(error.get("code")) or default_status
    return Failure(
        message=message,
        status=int(status) if status is not None else None,
        retry_after_s=float(told[1]) if told else None,
        aborted=error.get("type") == "abort",
    )


class GenerateAnswer:
    """The state of one `/generate` answer."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.failure: Failure | None = None
        self.finished = False
        self._events = EventDecoder()

    @property
    def output_tokens(self) -> int:
        return len(self.output_ids)

    def feed(self, chunk: bytes) -> int:
        """Take in one network read; the number of tokens that came with it. Raises ProtocolError."""
        before = len(self.output_ids)
        for data in self._events.feed(chunk):
            if data == b"[DONE]":
                continue
            try:
                event = _decode_generate(data)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"unreadable event {data[:200]!r}: {error}") from None
            self._take(event)
        return max(0, len(self.output_ids) - before)

    def _take(self, event: _GenerateEvent) -> None:
        if event.error is not None:
            self.failure = failure_of(event.error)
            return
        meta = event.meta_info
        if meta is None:
            return
        reason = meta.finish_reason
        if isinstance(reason, dict) and reason.get("type") == "abort":
            self.failure = failure_of(reason)
            return  # an abort repeats earlier tokens and carries no usage
        # All tokens so far, or only the new ones? Sent cumulatively the list is never shorter than the count.
        ids = event.output_ids or []
        self.output_ids = ids if len(ids) >= meta.completion_tokens else self.output_ids + ids
        self.prompt_tokens = meta.prompt_tokens if meta.prompt_tokens is not None else self.prompt_tokens
        self.cached_tokens = meta.cached_tokens if meta.cached_tokens is not None else self.cached_tokens
        self.finished = self.finished or reason is not None


class _CachedDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _ChatEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chat = msgspec.json.Decoder(_ChatEvent).decode


class ChatAnswer:
    """The state of one streamed chat completion.

    A chunk with text counts as one token, unless it carries usage itself (`continuous_usage_stats`). The usage at the
    end corrects the total; it comes with no token, so it is no decode step.
    """

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens = 0
        self.failure: Failure | None = None
        self.finished = False
        self._streamed_tokens = 0
        self._pieces: list[str] = []
        self._events = EventDecoder()

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, chunk: bytes) -> int:
        """Take in one network read; the number of tokens that came with it. Raises ProtocolError."""
        before = self._streamed_tokens
        for data in self._events.feed(chunk):
            if data == b"[DONE]":
                continue
            try:
                event = _decode_chat(data)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"unreadable event {data[:200]!r}: {error}") from None
            self._take(event)
        self.output_tokens = max(self.output_tokens, self._streamed_tokens)
        return self._streamed_tokens - before

    def _take(self, event: _ChatEvent) -> None:
        if event.error is not None:
            self.failure = failure_of(event.error)
            return
        piece = None
        for choice in event.choices[:1]:
            if choice.delta is not None:
                piece = choice.delta.content or choice.delta.reasoning_content
            if choice.finish_reason == "abort":
                self.failure = Failure("the server aborted the call", aborted=True)
            self.finished = self.finished or choice.finish_reason is not None
        if piece:
            self._pieces.append(piece)
            counted = event.usage.completion_tokens if event.usage is not None else None
            self._streamed_tokens = max(self._streamed_tokens + (counted is None), counted or 0)
        if (usage := event.usage) is not None:
            self.prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else self.prompt_tokens
            self.output_tokens = max(self.output_tokens, usage.completion_tokens or 0)
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
