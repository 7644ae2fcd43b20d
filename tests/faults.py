"""Ways to hurt a running stack, and to tell when it has got over it."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from random import getrandbits
from typing import Any

import psutil
import requests
from calls import at_the_door, calls_inside, live_sessions
from stack import Stack

LEFT_AFTER_S = 20.0
"""SGLang looks for clients that left every 4 s; the rest is the end of a place's grace and a busy machine."""


def body(session: str, ids: list[int], *, tokens: int = 4, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "session_id": session, "sampling_params": sampling, **more}


@contextlib.contextmanager
def open_call(url: str, payload: dict[str, Any]) -> Iterator[socket.socket]:
    """A call as bare bytes on a socket of its own; leaving the block is the client's leaving."""
    host, port = url.removeprefix("http://").split(":")
    data = requests.Request("POST", url + "/generate", json=payload).prepare()
    head = "".join(f"{name}: {value}\r\n" for name, value in data.headers.items())
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST /generate HTTP/1.1\r\nHost: {host}\r\n{head}\r\n".encode() + data.body)
        yield connection


def half(stack: Stack, payload: dict[str, Any]) -> dict[str, Any]:
    """The call as the router would hand it to one engine, for a test that sends one leg only."""
    prefill = stack.node.plan.of("prefill")[0]
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
    return {**payload, **where, "bootstrap_room": getrandbits(62)}


def until_gone(stack: Stack, others: int, live: int) -> float:
    """Wait until the engines hold no more calls than the `others` make and `live` sessions; returns the seconds."""
    start = time.monotonic()

    def gone() -> bool:
        return max(calls_inside(stack)) <= others and at_the_door(stack) == 0 and live_sessions(stack) <= live

    # the others pause between two calls, so one look may miss a call too many
    stack.until(lambda: all(gone() for _ in range(4)), "the abandoned calls are gone", LEFT_AFTER_S)
    return time.monotonic() - start


def processes(stack: Stack, name: str) -> list[psutil.Process]:
    """All processes of one engine."""
    root = psutil.Process(stack.node.child(name).pid)
    return [root, *root.children(recursive=True)]


@contextlib.contextmanager
def frozen(stack: Stack, name: str) -> Iterator[None]:
    """One engine stopped (SIGSTOP) during the block."""
    tree = processes(stack, name)
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in tree:
            process.send_signal(signal.SIGCONT)


def kill(stack: Stack, name: str) -> None:
    """End one engine at once (SIGKILL)."""
    for process in processes(stack, name):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
