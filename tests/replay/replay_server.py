"""A small aiohttp server that speaks SGLang's `/generate` and OpenAI's chat streams, with a prefix cache of its own.

It is no stand-in for the engine: it lets the tests decide when a server rejects, stalls, drops or cuts. It counts
cached tokens by really comparing each prompt with what it has seen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Behaviour:
    """What the server does to a call; `answer` decides by the request's body."""

    token_s: float = 0.0
    first_token_s: float = 0.0
    incremental: bool = False
    tokens_per_chunk: int = 1
    answer: Callable[[dict[str, Any], int], str] = lambda body, number: "ok"
    """(body, number of the request) → ok, reject, abort_503, abort, stall, drop, cut, garbage, bad_request, error."""


@dataclass
class ReplayServer:
    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open_calls: int = 0
    most_open_calls: int = 0
    url: str = ""
    _prefixes: dict[str, list[int]] = field(default_factory=dict)

    def cached_tokens(self, session_id: str, ids: list[int]) -> int:
        """The longest prefix that this session sent or received before."""
        before = self._prefixes.get(session_id, [])
        shared = 0
        for old, new in zip(before, ids, strict=False):
            if old != new:
                break
            shared += 1
        return shared

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.open_calls += 1
        self.most_open_calls = max(self.most_open_calls, self.open_calls)
        try:
            return await self._serve(request, body, self.behaviour.answer(body, number))
        finally:
            self.open_calls -= 1

    async def _serve(self, request: web.Request, body: dict[str, Any], what: str) -> web.StreamResponse:
        if what == "reject":
            error = {"error": {"message": "queue is full", "code": 503}}
            return web.json_response(error, status=503, headers={"Retry-After": "0.05"})
        if what == "bad_request":
            return web.json_response({"error": {"message": "prompt too long", "code": 400}}, status=400)
        if what == "error":
            return web.Response(text="upstream fell over", status=502)
        if what == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if what == "stall":
            await asyncio.sleep(3600)
        if what == "garbage":
            await response.write(b"data: {not json\n\n")
            return response
        if what in ("abort", "abort_503"):
            reason: dict[str, Any] = {"type": "abort", "message": "No room. Retry after 7 s. (door)"}
            if what == "abort_503":
                reason["status_code"] = 503
            await self._event(response, {"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}})
            await response.write(b"data: [DONE]\n\n")
            return response
        if "messages" in body:
            return await self._chat(response, body)
        await self._tokens(request, response, body, cut=what == "cut")
        return response

    async def _event(self, response: web.StreamResponse, value: object) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def _tokens(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], *, cut: bool
    ) -> None:
        ids = body["input_ids"]
        wanted = body["sampling_params"]["max_new_tokens"]
        cached = self.cached_tokens(body["session_id"], ids)
        output = [(sum(ids[-8:]) + step) % 400 + 16 for step in range(wanted)]
        await asyncio.sleep(self.behaviour.first_token_s)
        sent = 0
        while sent < wanted:
            now = min(wanted, sent + self.behaviour.tokens_per_chunk)
            if cut and now > wanted // 2:
                assert request.transport is not None
                request.transport.abort()
                return
            last = now == wanted
            await self._event(
                response,
                {
                    "text": "x" * now,
                    "output_ids": output[sent:now] if self.behaviour.incremental else output[:now],
                    "meta_info": {
                        "id": "1",
                        "prompt_tokens": len(ids),
                        "completion_tokens": now,
                        "cached_tokens": cached,
                        "finish_reason": {"type": "length", "length": wanted} if last else None,
                    },
                },
            )
            sent = now
            if not last:
                await asyncio.sleep(self.behaviour.token_s)
        self._prefixes[body["session_id"]] = ids + output
        await response.write(b"data: [DONE]\n\n")

    async def _chat(self, response: web.StreamResponse, body: dict[str, Any]) -> web.StreamResponse:
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        for step in range(body["max_tokens"]):
            await self._event(response, {"choices": [{"index": 0, "delta": {"content": f"w{step} "}}]})
        await self._event(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(behaviour: Behaviour | None = None) -> AsyncIterator[ReplayServer]:
    server = ReplayServer(behaviour or Behaviour())
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/v1/chat/completions", server.generate)
    app.router.add_get("/v1/models", lambda request: web.json_response({"data": [{"id": "tiny"}]}))
    app.router.add_get("/health", lambda request: web.Response(text="ok"))
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
