"""A TCP proxy on the way of the control channel, which a test can cut and heal."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class ControlProxy:
    """Forwards connections until it is cut; then open ones are reset and new ones are refused until it is healed."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        self._do(self._cut())

    def heal(self) -> None:
        self._do(self._listen())

    def _do(self, action: object) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._open.add(back)
            try:
                await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
            finally:
                self._open.discard(back)
                back.transport.abort()
        except OSError:
            pass  # the other end is gone: so is this one
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError


@contextlib.contextmanager
def control_proxy(port: int, target_port: int) -> Iterator[ControlProxy]:
    """Raises OSError when `port` is taken."""
    proxy = ControlProxy(port, target_port)
    thread = threading.Thread(target=proxy._loop.run_forever, daemon=True)
    thread.start()
    try:
        proxy.heal()
        yield proxy
    finally:
        proxy.cut()
        proxy._loop.call_soon_threadsafe(proxy._loop.stop)
        thread.join(10)
        proxy._loop.close()
