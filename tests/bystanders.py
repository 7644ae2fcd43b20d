"""Sessions that go on while a fault is injected beside them: their answers must be those of an undisturbed run."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

import requests

PROMPTS = 4
TOKENS = 12


def prompt(tokens: int, key: int) -> list[int]:
    return [3 + (11 * i + 37 * key + i * i * (key + 2)) % 2000 for i in range(tokens)]


def post(
    url: str, session: str, ids: Sequence[int], *, tokens: int = TOKENS, timeout_s: float = 60
) -> requests.Response:
    """A call that names its session in the body, for the engines, and in a header, for the router to pin it by."""
    body = {
        "input_ids": list(ids),
        "session_id": session,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    return requests.post(url + "/generate", json=body, headers={"x-basin-session-id": session}, timeout=timeout_s)


def ask(url: str, session: str, ids: Sequence[int]) -> list[int]:
    answer = post(url, session, ids)
    answer.raise_for_status()
    return answer.json()["output_ids"]


def decode_of(url: str, session: str) -> str:
    """The decode instance (its URL) that the router pins a session to; makes a call of the session."""
    return post(url, session, prompt(20, 999)).headers["x-smg-routed-worker-id"]


class Bystander:
    """One live session that asks the same few growing prompts over and over."""

    def __init__(self, url: str, key: int, session: str | None = None) -> None:
        self.url = url
        self.session = session or f"bystander-{key}-{uuid.uuid4().hex}"
        self.calls = 0
        self.slowest_s = 0.0
        self.wrong: list[str] = []
        self._prompts = [prompt(40 + 30 * turn, key) for turn in range(PROMPTS)]
        self._expected = [ask(url, self.session, ids) for ids in self._prompts]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(70)

    def _run(self) -> None:
        while not self._stop.is_set():
            turn = self.calls % PROMPTS
            start = time.monotonic()
            try:
                got = ask(self.url, self.session, self._prompts[turn])
                if got != self._expected[turn]:
                    self.wrong.append(f"call {self.calls}: {got} instead of {self._expected[turn]}")
            except requests.RequestException as error:
                self.wrong.append(f"call {self.calls}: {error!r}")
            self.calls += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            self._stop.wait(0.05)


@contextlib.contextmanager
def bystanders(url: str, prefill_url: str, count: int = 2, *, names: Sequence[str] = ()) -> Iterator[list[Bystander]]:
    """Run `count` sessions, or those named, beside what the block does. Afterwards every answer must have been that of
    the undisturbed call before."""
    sessions = [Bystander(url, key, name) for key, name in enumerate(names or [None] * count)]
    for session in sessions:
        session.start()
    try:
        yield sessions
    finally:
        for session in sessions:
            session.stop()
            requests.post(prefill_url + "/close_session", json={"session_id": session.session}, timeout=20)
    for session in sessions:
        assert not session.wrong, session.wrong[:3]
        assert session.calls > 0, "the bystander never got to ask"
