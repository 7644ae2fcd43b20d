"""Ports are free, stay claimed, and two nodes at once do not get the same ones."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from sglang_basin.node.ports import PortError, Ports, is_free


def listening(port: int = 0) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_found_ports_are_free_and_different() -> None:
    with Ports("127.0.0.1") as ports:
        found = [ports.find() for _ in range(20)]
        assert len(set(found)) == 20
        assert all(is_free("127.0.0.1", port) for port in found)


def test_a_taken_port_is_not_found_and_cannot_be_taken() -> None:
    with Ports("127.0.0.1") as ports:
        expected = ports.find()
    with listening(expected), Ports("127.0.0.1") as ports:
        assert ports.find() != expected
        with pytest.raises(PortError, match=f"--port: port {expected} on 127.0.0.1 is taken"):
            ports.take(expected, "--port")


def test_a_pair_needs_both_ends_free() -> None:
    with Ports("127.0.0.1") as ports:
        first = ports.find(also=[100])
    with listening(first + 100), Ports("127.0.0.1") as ports:
        second = ports.find(also=[100])
        assert second != first
        assert is_free("127.0.0.1", second + 100)
        with pytest.raises(PortError):
            ports.take(second + 100, "claimed with its pair")


def test_a_search_that_fails_halfway_leaves_earlier_claims_alone() -> None:
    with Ports("127.0.0.1") as ports:
        first = ports.find()
        ports.take(first + 7, "in the way of the next search")
        assert ports.find(also=[1, 6, 7]) != first + 1
        with Ports("127.0.0.1") as others, pytest.raises(PortError):
            others.take(first + 7, "still claimed")


def test_another_process_sees_the_claim_until_its_owner_is_gone() -> None:
    script = (
        "from sglang_basin.node.ports import Ports\n"
        "ports = Ports('127.0.0.1')\nprint(ports.find(), flush=True)\ninput()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = int(other.stdout.readline())
    with Ports("127.0.0.1") as ports:
        assert ports.find() != theirs
        other.kill()
        other.communicate()
        assert ports.take(theirs, "after its owner was killed") == theirs


def test_nonsense_is_refused() -> None:
    with Ports("127.0.0.1") as ports, pytest.raises(PortError, match="70000 is not a port"):
        ports.take(70000, "--port")
    with Ports("no such host") as ports, pytest.raises(PortError, match="--host no such host"):
        ports.find()
