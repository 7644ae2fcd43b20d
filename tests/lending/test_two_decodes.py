"""Sessions whose calls land on another decode than the one that keeps their copy: the real engines, one prefill with a
small pool, two decodes, the router."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import DECODE_TOKENS, spoiled_by
from lending_sessions import MODEL, Answer, call, counter, lending_node, outcomes, pins, play
from stack import LOGS

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node

pytestmark = pytest.mark.stack

PAGE = 16
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Two:
    """The node, what pins a call to each of its decodes, and how the reads of its prefill are made to go wrong."""

    node: Node
    pins: list[str]
    reads: Path

    @property
    def prefill_url(self) -> str:
        return self.node.plan.of("prefill")[0].url

    @property
    def decode_urls(self) -> list[str]:
        return [engine.url for engine in self.node.plan.of("decode")]

    def call(self, prompt: list[int], tokens: int, session: str, decode: int) -> Answer:
        answer = call(self.node.url, prompt, tokens, session=session, pin=self.pins[decode])
        assert answer.decode == self.decode_urls[decode]
        return answer

    def cold(self, prompt: list[int], tokens: int, decode: int = 1) -> list[int]:
        """What a call answers for which nothing is cached."""
        salt = f"cold-{time.monotonic()}"
        return call(self.node.url, prompt, tokens, salt=salt, session=salt, pin=self.pins[decode]).ids

    def kept_by(self, decode: int, name: str, tokens: int = 1_200) -> list[int]:
        """The context of a session that this decode keeps and prefill has lost to others."""
        prompt = ids(tokens, name)
        first = self.call(prompt, 8, name, decode)
        for number in range(3):
            other = f"{name}-{number}"
            self.call(ids(1_400, other), 1, other, decode=1)
        return prompt + first.ids

    def lent(self) -> tuple[int, int]:
        names = ("basin_lent_tokens_total", "basin_lent_bytes_total")
        tokens, lent_bytes = (int(counter(self.prefill_url, name)) for name in names)
        return tokens, lent_bytes

    def leases(self) -> dict[str, int]:
        return outcomes(self.prefill_url, "basin_leases_total", "answer")


def ids(tokens: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randint(3, 2000) for _ in range(tokens)]


def known_tokens(context: list[int]) -> int:
    """Whole pages of it whose KV exists: that of the last token is computed with the next call."""
    return (len(context) - 1) // PAGE * PAGE


def until(done: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    reads = tmp_path_factory.mktemp("reads") / "how"
    with lending_node(
        decode=2,
        decode_tokens=DECODE_TOKENS,
        engine_arguments=("--chunked-prefill-size", "512"),
        config=BasinConfig(admission="off", lending="on", lending_patience_s=PATIENCE_S),
        environment=spoiled_by(reads),
        logs=LOGS / "lending-two",
    ) as node:
        yield Two(node, pins(node), reads)


@pytest.fixture
def sound(two: Two) -> Iterator[Two]:
    """Reads work before and after, and Basin had no fault."""
    two.reads.write_text("")
    yield two
    two.reads.write_text("")
    for url in (two.prefill_url, two.decode_urls[1]):
        assert counter(url, "basin_faults_total") == 0
        assert counter(url, "basin_lending_up") == 1


@pytest.mark.parametrize("number", range(3))
def test_a_session_that_lands_on_the_other_decode_gets_its_prefix_back(sound: Two, number: int) -> None:
    name = f"wandering-{number}"
    context = sound.kept_by(0, name)
    tokens, lent_bytes = sound.lent()
    lent = sound.leases().get("lent", 0)
    prompt = context + ids(40, "next")
    again = sound.call(prompt, 8, name, decode=1)
    assert again.ids == sound.cold(prompt, 8)
    until(lambda: sound.leases().get("lent", 0) == lent + 1, "a lease was granted")
    got, read = (after - before for after, before in zip(sound.lent(), (tokens, lent_bytes), strict=True))
    assert got >= 0.95 * known_tokens(context)
    assert read == got * MODEL.kv_bytes_per_token
    until(lambda: counter(sound.decode_urls[0], "basin_leased_tokens") == 0, "the lease was given back")


def test_random_sessions_that_nobody_pins_answer_as_they_would_cold(sound: Two) -> None:
    turns = play(
        sound.node,
        sessions=8,
        turns=4,
        page_size=PAGE,
        most_tokens=1_400,
        concurrency=3,
        disconnects=8,
        seed=21,
        pinned=False,
    )
    assert [turn for turn in turns if not turn.equal] == []
    assert outcomes(sound.prefill_url).get("leased", 0) > 0
    assert outcomes(sound.prefill_url).get("failed", 0) == 0
