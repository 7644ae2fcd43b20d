"""The control channel: ZeroMQ between the gates of decode instances and the door on a prefill instance.

Both ends belong to the scheduler's own thread and are polled without blocking; nothing here waits, and nothing here
is needed for a call to be served: what cannot be delivered is dropped and counted, and the gates have their patience.
Only msgpack of the types in `messages` is read; anything else is dropped and counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_basin.engine import messages
from sglang_basin.engine.metrics import metrics

T = TypeVar("T")

RECEIVE_AT_ONCE = 1024
"""Messages taken in one turn of the scheduler's loop, so that a flood cannot hold it up."""

QUEUE_MESSAGES = 10_000


_open_contexts: set[zmq.Context[Any]] = set()
"""Of ends that have not been closed. The garbage collector must meet none of them: where it comes to a context before
the context's open sockets, it waits for these for ever."""


class ControlError(RuntimeError):
    """The channel could not be opened; the message names the address and the mend."""


def address(host: str, port: int) -> str:
    """The ZeroMQ endpoint of a host and port, IPv6 literals included."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def _context() -> zmq.Context[Any]:
    context: zmq.Context[Any] = zmq.Context()
    _open_contexts.add(context)
    return context


def _terminate(context: zmq.Context[Any]) -> None:
    """Once its sockets are closed; their addresses are free then."""
    context.term()
    _open_contexts.discard(context)


def _socket(context: zmq.Context[Any], kind: int, max_message_bytes: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
    return socket


class _Wakes:
    """The sockets that the scheduler's idle sleep wakes on: each as long as it is open. To a poller a closed one is
    another file, mostly one with something to read, and the scheduler never sleeps again."""

    def __init__(self, poller: zmq.Poller | None) -> None:
        self._poller = poller

    def on(self, socket: zmq.Socket[bytes]) -> None:
        if self._poller is not None:
            self._poller.register(socket, zmq.POLLIN)

    def no_more_on(self, socket: zmq.Socket[bytes]) -> None:
        if self._poller is not None and socket in self._poller:
            self._poller.unregister(socket)


def _drop(cause: str) -> None:
    metrics().control_dropped.labels(cause).inc()


def _read(raw: bytes, decode: Callable[[bytes], T]) -> T | None:
    try:
        return decode(raw)
    except (msgspec.DecodeError, RecursionError):
        _drop("garbage")
        return None


class PrefillEnd:
    """Prefill's end: any number of decode gates, each known by the identity that ZeroMQ gave its connection."""

    def __init__(self, host: str, port: int, poller: zmq.Poller | None = None) -> None:
        """Bind. `poller` is the scheduler's idle sleep's. Raises ControlError when the port is taken or the host is not
        one of this machine's addresses."""
        self._wakes = _Wakes(poller)
        self._context = _context()
        self.socket = _socket(self._context, zmq.ROUTER, messages.MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = address(host, port)
        try:
            self.socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ControlError(
                f"Basin's control channel cannot bind to {self.address}: {error}. Choose another bootstrap port, "
                "--basin-control-port-offset or --basin-control-host"
            ) from None
        self._wakes.on(self.socket)

    def receive(self) -> list[tuple[bytes, messages.FromDecode]]:
        """What decode gates sent since the last time, with who sent it."""
        received = []
        for _ in range(RECEIVE_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 2:
                _drop("garbage")
            elif (message := _read(frames[1], messages.decode_from_decode)) is not None:
                received.append((frames[0], message))
        return received

    def send(self, peer: bytes, message: messages.FromPrefill) -> bool:
        """Whether the message is on its way; False when that gate is gone or does not read."""
        try:
            self.socket.send_multipart((peer, messages.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            _drop("undeliverable")
            return False
        return True

    def close(self) -> None:
        self._wakes.no_more_on(self.socket)
        self.socket.close(0)
        _terminate(self._context)


class DecodeEnd:
    """Decode's end: one connection for each prefill instance it has heard of."""

    def __init__(self, poller: zmq.Poller | None = None) -> None:
        """`poller` is the scheduler's idle sleep's."""
        self._wakes = _Wakes(poller)
        self._context = _context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._connected: set[str] = set()  # peers to which a connection once stood
        self._standing: set[str] = set()  # those to which one stands

    def send(self, peer: str, message: messages.FromDecode) -> bool:
        """Queue a message for the prefill instance at `peer`; False when its queue is full or the address is bad."""
        try:
            socket = self._sockets.get(peer) or self._open(peer)
            socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            _drop("undeliverable")
            return False
        return True

    @property
    def peers(self) -> list[str]:
        """The prefill instances that it has connected to."""
        return list(self._sockets)

    def receive(self) -> list[tuple[str, messages.FromPrefill]]:
        """What prefill instances sent since the last time, with which one."""
        received = []
        for peer, socket in self._sockets.items():
            for _ in range(RECEIVE_AT_ONCE):
                try:
                    raw = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if (message := _read(raw, messages.decode_from_prefill)) is not None:
                    received.append((peer, message))
        return received

    def renewed(self) -> set[str]:
        """Prefill instances to which a broken connection stands again since the last time. ZeroMQ renews it by itself,
        and delivers what was queued meanwhile."""
        renewed = set()
        for peer, monitor in self._monitors.items():
            with contextlib.suppress(zmq.Again):
                while True:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
                    if event == zmq.EVENT_DISCONNECTED:
                        self._standing.discard(peer)
                        continue
                    if peer in self._connected:
                        renewed.add(peer)
                    self._connected.add(peer)
                    self._standing.add(peer)
        return renewed

    def stands(self, peer: str) -> bool:
        """Whether the connection to `peer` stood when `renewed` last looked."""
        return peer in self._standing

    def forget(self, peer: str) -> None:
        """Close the connection to `peer`, if there is one. The next message to it opens a new one."""
        if (socket := self._sockets.pop(peer, None)) is not None:
            self._wakes.no_more_on(socket)
            socket.disable_monitor()
            socket.close(0)
            self._monitors.pop(peer).close(0)
        self._connected.discard(peer)
        self._standing.discard(peer)

    def close(self) -> None:
        for peer in self.peers:
            self.forget(peer)
        _terminate(self._context)

    def _open(self, peer: str) -> zmq.Socket[bytes]:
        socket = _socket(self._context, zmq.DEALER, messages.MAX_MESSAGE_BYTES + messages.MAX_PROMPT_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(peer)
        except zmq.ZMQError:
            socket.disable_monitor()
            socket.close(0)
            monitor.close(0)
            raise
        self._sockets[peer] = socket
        self._monitors[peer] = monitor
        self._wakes.on(socket)
        return socket
