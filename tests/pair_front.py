"""A front without opinions: each request goes to both engines of one pair, decode's answer goes back untouched.

What the router changes in an answer (status, headers, when bytes pass) is not changed here, so tests can tell the
engines' own behaviour from the router's. It also sees every attempt of a client that retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import getrandbits
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

DROPPED_HEADERS = {"transfer-encoding", "content-length", "date", "server", "connection"}


@dataclass(slots=True)
class Attempt:
    """One request as the front saw it; times of `time.monotonic`."""

    path: str
    arrived_s: float
    status: int | None = None
    answered_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)


class PairFront:
    """Serves on a port of its own, in a thread of its own."""

    def __init__(self, prefill_url: str, bootstrap_port: int, decode_url: str) -> None:
        self.attempts: list[Attempt] = []
        self.url = ""
        self._engines = (prefill_url, decode_url)
        self._bootstrap = {"bootstrap_host": urlsplit(prefill_url).hostname, "bootstrap_port": bootstrap_port}

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        attempt = Attempt(request.path, time.monotonic())
        self.attempts.append(attempt)
        body = {**await request.json(), **self._bootstrap, "bootstrap_room": getrandbits(62)}
        headers = {name: value for name, value in request.headers.items() if name.lower().startswith("x-")}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            prefill_url, decode_url = self._engines
            prefill = asyncio.ensure_future(self._prefill(session, prefill_url + request.path, body, headers))
            try:
                async with session.post(decode_url + request.path, json=body, headers=headers) as answer:
                    attempt.status, attempt.answered_s = answer.status, time.monotonic()
                    attempt.headers = {name.lower(): value for name, value in answer.headers.items()}
                    kept = {
                        name: value for name, value in answer.headers.items() if name.lower() not in DROPPED_HEADERS
                    }
                    response = web.StreamResponse(status=answer.status, headers=kept)
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                    await prefill
                    return response
            finally:
                prefill.cancel()

    @staticmethod
    async def _prefill(session: aiohttp.ClientSession, url: str, body: object, headers: dict[str, str]) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(url, json=body, headers=headers) as answer:
                await answer.read()

    async def _run(self, started: threading.Event, stop: asyncio.Event) -> None:
        application = web.Application()
        application.router.add_post("/{path:.*}", self._serve)
        # a client that leaves cancels its handler, as in the engines' own servers
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()


@contextlib.contextmanager
def pair_front(prefill_url: str, bootstrap_port: int, decode_url: str) -> Iterator[PairFront]:
    front = PairFront(prefill_url, bootstrap_port, decode_url)
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(front._run(started, stop),))
    thread.start()
    assert started.wait(10)
    try:
        yield front
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
