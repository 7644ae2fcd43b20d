"""Free TCP ports, claimed so that two nodes starting at once do not choose the same ones.

SGLang binds its ports half a minute after they are chosen, and its HTTP server binds with SO_REUSEPORT, so that two
engines on one port would not even notice each other. A claim is therefore a bound socket in Linux's abstract
namespace, named after the port: atomic, of the same network namespace as the port itself, gone with its process.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

LOWEST = 31000
"""Above SGLang's default and its NCCL ports (22000-29999), below Linux's usual range for outgoing connections."""


class PortError(ValueError):
    """A port is taken, or none is free: the message names it and the mend."""


class Ports:
    """Hands out ports that are free on `host` and keeps them claimed until `release`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._claims: dict[int, socket.socket] = {}

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def take(self, port: int, purpose: str) -> int:
        """Claim exactly `port`. Raises PortError when it is taken."""
        if not 0 < port < 65536:
            raise PortError(f"{purpose}: {port} is not a port")
        if not self._claim(port):
            raise PortError(f"{purpose}: port {port} on {self._host} is taken; choose another, or stop its owner")
        return port

    def find(self, *, also: Sequence[int] = ()) -> int:
        """Claim a free port, and those that many above it too."""
        for port in _candidates(max(also, default=0)):
            wanted = [port, *(port + above for above in also)]
            claimed = list(itertools.takewhile(self._claim, wanted))
            if claimed == wanted:
                return port
            for one in claimed:
                self._claims.pop(one).close()
        above = ", ".join(f"port + {one}" for one in also)
        raise PortError(f"no free port on {self._host} from {LOWEST} on" + (f" with {above} free too" if above else ""))

    def release(self) -> None:
        """Give every claim up; call it when the ports' owners have ended."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()

    def _claim(self, port: int) -> bool:
        if port in self._claims:
            return False
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0sglang-basin-port-{port}")
        except OSError:
            claim.close()
            return False
        if not is_free(self._host, port):
            claim.close()
            return False
        self._claims[port] = claim
        return True


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind `port` on `host` now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise PortError(f"--host {host}: {error.strerror}") from None
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        # As servers do: connections of an earlier server that still linger (TIME_WAIT) are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError:
            return False
    return True


def _candidates(above: int) -> Iterator[int]:
    """Ports outside the range for outgoing connections first (they stay free until bound), then the rest."""
    low, high = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    everything = range(LOWEST, 65536 - above)
    yield from (port for port in everything if not low <= port <= high)
    yield from (port for port in everything if low <= port <= high)
