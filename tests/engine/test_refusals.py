"""The refusal middleware, message by message: what it replaces, and that it leaves everything else as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglang_basin.engine.refusals import RefusalMiddleware, finish_reason, note_refusal
from sglang_basin.policy.decisions import Reason

Send = Callable[[dict[str, Any]], Awaitable[None]]

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
REFUSED = finish_reason("Come back later.", Reason.HELD_TOO_LONG, 29.2)


def chunk(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def gate_refuses() -> None:
    """What SGLang's tokenizer manager does when the scheduler's abort comes in."""
    note_refusal(None, {"meta_info": {"finish_reason": REFUSED}}, None, True)


def sent_by(app: Any, path: str = "/generate", method: str = "POST") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(RefusalMiddleware(app)({"type": "http", "method": method, "path": path}, receive, send))
    return sent


def assert_refused(sent: list[dict[str, Any]]) -> dict[str, Any]:
    start, body = sent
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers[b"retry-after"] == b"30"
    assert headers[b"x-should-retry"] == b"true"
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert body["more_body"] is False
    return json.loads(body["body"])


def test_a_refused_stream_becomes_a_503_although_its_200_was_ready() -> None:
    async def generate(scope: Any, receive: Any, send: Send) -> None:
        await send(HEAD)
        gate_refuses()
        await send(chunk(b'data: {"meta_info": {"finish_reason": {"type": "abort"}}}\n\n'))
        await send(chunk(b"data: [DONE]\n\n"))
        await send(chunk(b"", more=False))

    error = assert_refused(sent_by(generate))
    assert (error["message"], error["code"], error["basin_reason"]) == ("Come back later.", 503, "held_too_long")


def test_a_refused_plain_answer_is_replaced_whatever_sglang_made_of_it() -> None:
    async def responses(scope: Any, receive: Any, send: Send) -> None:
        gate_refuses()
        await send({**HEAD, "status": 400})
        await send(chunk(b'{"message": "503: Come back later."}', more=False))

    error = assert_refused(sent_by(responses, "/v1/responses"))
    assert error == {
        "error": {"message": "Come back later.", "type": "server_error", "param": None, "code": "held_too_long"}
    }


def test_messages_speak_anthropics_language() -> None:
    async def messages(scope: Any, receive: Any, send: Send) -> None:
        gate_refuses()
        await send({**HEAD, "status": 503})
        await send(chunk(b'{"error": {"message": "Internal server error"}}', more=False))

    error = assert_refused(sent_by(messages, "/root/v1/messages"))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "Come back later."}}


def test_what_responses_says_before_the_verdict_is_held_back_and_then_replaced() -> None:
    async def responses(scope: Any, receive: Any, send: Send) -> None:
        await send(HEAD)
        await send(chunk(b"event: response.created\ndata: {}\n\n"))
        await send(chunk(b"event: response.in_progress\ndata: {}\n\n"))
        gate_refuses()
        await send(chunk(b"event: response.failed\ndata: {}\n\n"))
        await send(chunk(b"", more=False))

    assert_refused(sent_by(responses, "/v1/responses"))


def test_a_verdict_in_a_task_of_the_request_counts() -> None:
    async def batch(scope: Any, receive: Any, send: Send) -> None:
        async def one_of_the_batch() -> None:
            gate_refuses()

        await asyncio.create_task(one_of_the_batch())
        await send(HEAD)
        await send(chunk(b"", more=False))

    assert_refused(sent_by(batch))


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_an_admitted_stream_passes_unchanged_and_each_piece_at_once(path: str) -> None:
    pieces = [
        chunk(b"data: 1\n\n"),
        chunk(b"event: response.created\n\n"),
        chunk(b"data: 2\n\n"),
        chunk(b"", more=False),
    ]
    seen_after: list[int] = []
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        async def stream(scope: Any, receive: Any, send: Send) -> None:
            await send(HEAD)
            for piece in pieces:
                await send(piece)
                seen_after.append(len(sent))

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {}

        await RefusalMiddleware(stream)({"type": "http", "method": "POST", "path": path}, receive, send)

    asyncio.run(run())
    assert sent == [HEAD, *pieces]
    assert seen_after == [2, 3, 4, 5], "the first token goes out with the head, the others one by one"


def test_an_abort_that_is_not_ours_stays_as_sglang_made_it() -> None:
    async def generate(scope: Any, receive: Any, send: Send) -> None:
        theirs = {"type": "abort", "status_code": 503, "message": "no room"}
        note_refusal(None, {"meta_info": {"finish_reason": theirs}}, None, False)
        await send({**HEAD, "status": 503})
        await send(chunk(b"no room", more=False))

    assert sent_by(generate) == [{**HEAD, "status": 503}, chunk(b"no room", more=False)]


def test_a_verdict_after_the_first_byte_comes_too_late() -> None:
    """One call of a batch is refused while another one's tokens are on their way: the stream stays SGLang's."""

    async def generate(scope: Any, receive: Any, send: Send) -> None:
        await send(HEAD)
        await send(chunk(b"data: token\n\n"))
        gate_refuses()
        await send(chunk(b"data: abort\n\n"))

    assert [message.get("body") for message in sent_by(generate)] == [None, b"data: token\n\n", b"data: abort\n\n"]


def test_two_requests_at_once_have_a_verdict_each() -> None:
    async def run() -> list[list[dict[str, Any]]]:
        both = asyncio.Barrier(2)

        async def app(scope: Any, receive: Any, send: Send) -> None:
            await both.wait()
            if scope["query"] == "refused":
                gate_refuses()
            await both.wait()
            await send(HEAD)
            await send(chunk(b"x", more=False))

        async def one(query: str) -> list[dict[str, Any]]:
            sent: list[dict[str, Any]] = []

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            async def receive() -> dict[str, Any]:
                return {}

            scope = {"type": "http", "method": "POST", "path": "/generate", "query": query}
            await RefusalMiddleware(app)(scope, receive, send)
            return sent

        return list(await asyncio.gather(one("refused"), one("admitted")))

    refused, admitted = asyncio.run(run())
    assert_refused(refused)
    assert admitted == [HEAD, chunk(b"x", more=False)]


def test_a_failing_endpoint_fails_as_without_us() -> None:
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        async def broken(scope: Any, receive: Any, send: Send) -> None:
            await send(HEAD)
            raise RuntimeError("in the stream")

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {}

        await RefusalMiddleware(broken)({"type": "http", "method": "POST", "path": "/generate"}, receive, send)

    with pytest.raises(RuntimeError, match="in the stream"):
        asyncio.run(run())
    assert sent == [HEAD]


@pytest.mark.parametrize(("advice_s", "header"), [(0.0, 1), (0.2, 1), (29.2, 30), (60.0, 60), (600.0, 60)])
def test_the_advice_is_whole_seconds_that_sdks_heed(advice_s: float, header: int) -> None:
    assert finish_reason("", Reason.SHED, advice_s)["retry_after_s"] == header
