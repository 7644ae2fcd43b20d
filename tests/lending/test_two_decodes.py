"""Sessions whose calls land on another decode than the one that keeps their copy, and what a decode that stops or dies
costs: the real engines, one prefill with a small pool, two decodes, the router."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests
from conftest import DECODE_TOKENS, spoiled_by, timeline
from lending_sessions import MODEL, Answer, call, counter, found_tokens, lending_node, outcomes, pins, play
from stack import LOGS

from sglang_basin.config import BasinConfig
from sglang_basin.lending.worth import FRESH_S
from sglang_basin.node import Node

pytestmark = pytest.mark.stack

PAGE = 16
PATIENCE_S = 2.0
FULL = 0.2
"""Part of a decode's pool in use by running calls from which on the router spares it; in service it is 0.95."""


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

    def processes(self, decode: int) -> list[psutil.Process]:
        root = psutil.Process(self.node.child(f"decode-{decode}").pid)
        return [root, *root.children(recursive=True)]


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
        spare_decode_at=FULL,
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


def test_a_copy_that_its_decode_has_dropped_is_not_asked_for(sound: Two) -> None:
    """Its decode says so; the call is computed without a question."""
    context = sound.kept_by(0, "dropped")
    for number in range(22):  # more than the half of its pool that it keeps
        sound.call(ids(1_000, f"newer-{number}"), 1, f"newer-{number}", decode=0)
    time.sleep(3.0)  # it says so once a second
    answers = sound.leases()
    prompt = [*context, 9]
    again = sound.call(prompt, 4, "dropped", decode=1)
    assert sound.leases() == answers
    assert again.ids == sound.cold(prompt, 4)


def test_the_first_layer_of_a_lease_is_computed_before_the_last_one_has_come(sound: Two) -> None:
    """Over a link on which a layer takes 60 ms. The call's own decode lacks these tokens: were it sent what prefill
    has cached before the forward, as SGLang does, the answer would be another one."""
    for number in range(10):
        context = sound.kept_by(0, f"timeline-{number}")
        known = set(timeline(sound.reads))
        sound.reads.write_text("slow 60")
        again = sound.call([*context, 7], 6, f"timeline-{number}", decode=1)
        sound.reads.write_text("")
        assert again.ids == sound.cold([*context, 7], 6)
        seen = [layers for room, layers in timeline(sound.reads).items() if room not in known]
        if seen and seen[-1]["computes"]:
            break
    else:
        pytest.fail("no call was computed while its lease was being read")
    arrived, computes = seen[-1]["arrived"], seen[-1]["computes"]
    assert computes[0] < arrived[MODEL.layers - 1]
    assert all(arrived[layer] <= computes[layer] for layer in range(MODEL.layers))
    assert sound.leases().get("lent", 0) > 0


def unpinned_sessions_answer_as_cold(node: Node, seed: int) -> None:
    """Random sessions that any decode may get, some hung up on; some of their KV comes by leases, and none in vain."""
    turns = play(
        node,
        sessions=8,
        turns=4,
        page_size=PAGE,
        most_tokens=1_400,
        concurrency=3,
        disconnects=8,
        seed=seed,
        pinned=False,
    )
    assert [turn for turn in turns if not turn.equal] == []
    prefill = node.plan.of("prefill")[0].url
    assert outcomes(prefill).get("leased", 0) > 0
    assert outcomes(prefill).get("failed", 0) == 0


def test_random_sessions_that_nobody_pins_answer_as_they_would_cold(sound: Two) -> None:
    unpinned_sessions_answer_as_cold(sound.node, seed=21)


def occupy(two: Two, number: int, over: threading.Event) -> None:
    """A call that runs on the first decode until `over`, or for thousands of tokens."""
    body = {
        "input_ids": ids(1_400, f"long-{number}"),
        "session_id": f"long-{number}",
        "stream": True,
        "sampling_params": {"max_new_tokens": 8_000, "temperature": 0, "ignore_eos": True},
    }
    headers = {"x-basin-session-id": two.pins[0]}
    with requests.post(two.node.url + "/generate", json=body, headers=headers, stream=True, timeout=60) as answer:
        for _ in answer.iter_lines():
            if over.is_set():
                return


def test_a_full_decode_is_spared_and_its_sessions_take_their_kv_along(sound: Two) -> None:
    def lands_on(pin: str) -> str:
        return call(sound.node.url, [3, 5, 7], 1, pin=pin).decode

    until(lambda: lands_on(sound.pins[0]) == sound.decode_urls[0], "it is not full from the tests before", 60)
    context = sound.kept_by(0, "spared")
    over = threading.Event()
    calls = [threading.Thread(target=occupy, args=(sound, number, over)) for number in range(7)]
    for long in calls:
        long.start()
    try:
        until(lambda: lands_on(sound.pins[0]) == sound.decode_urls[1], "the router spares the full decode", 60)
        time.sleep(FRESH_S)  # whatever reads from it took before, the next one is tried
        leased = outcomes(sound.prefill_url).get("leased", 0)
        answer = call(sound.node.url, [*context, 5], 4, session="spared", pin=sound.pins[0])
        assert answer.decode == sound.decode_urls[1]
        until(lambda: outcomes(sound.prefill_url).get("leased", 0) == leased + 1, "its KV came from the full decode")
    finally:
        over.set()
        for long in calls:
            long.join(60)
    until(lambda: lands_on(sound.pins[0]) == sound.decode_urls[0], "it is used again", 60)


@pytest.fixture
def stopping(sound: Two) -> Iterator[list[psutil.Process]]:
    """The first decode's processes; if a test stops them, they go on after it."""
    tree = sound.processes(0)
    yield tree
    for process in tree:
        process.send_signal(signal.SIGCONT)


def recovered(two: Two) -> bool:
    """Whether the first decode is asked and read again: the breakers try it now and then."""
    name = f"recovery-{time.monotonic()}"
    context = two.kept_by(0, name, 600)
    before = outcomes(two.prefill_url).get("leased", 0)
    two.call([*context, 5], 1, name, decode=1)
    time.sleep(1.0)
    return outcomes(two.prefill_url).get("leased", 0) > before


@pytest.mark.parametrize("when", ["before it is asked", "while it is read"])
def test_a_holder_that_stops_is_done_without(sound: Two, stopping: list[psutil.Process], when: str) -> None:
    """The call is computed and answered, and so are others meanwhile; the holder is asked again when it goes on."""
    name = f"stopped {when}"
    context = sound.kept_by(0, name)
    prompt = [*context, 9]
    wanted = sound.cold(prompt, 4)
    found: list[Answer] = []
    own = threading.Thread(target=lambda: found.append(sound.call(prompt, 4, name, decode=1)))
    if when == "while it is read":
        sound.reads.write_text("stall 0")
        own.start()
        time.sleep(0.5)
    for process in stopping:
        process.send_signal(signal.SIGSTOP)
    sound.reads.write_text("")
    if when == "before it is asked":
        own.start()
    for number in range(5):
        assert len(sound.call(ids(300, "other") + ids(20, number), 4, "other", decode=1).ids) == 4
    own.join(60)
    assert [answer.ids for answer in found] == [wanted]
    for process in stopping:
        process.send_signal(signal.SIGCONT)
    until(lambda: recovered(sound), "the decode is asked again", 90)


def test_nothing_is_left_behind(sound: Two) -> None:
    """No slot, no transfer, no lease; SGLang looks for leaks itself when it is idle."""
    for url in sound.decode_urls:
        until(lambda url=url: counter(url, "basin_leased_tokens") == 0, "no lease is left")
    until(lambda: counter(sound.prefill_url, "basin_rooms") == 0, "no transfer is left on prefill")
    time.sleep(1.5)
    for name in ("prefill-0", "decode-0", "decode-1"):
        log = (LOGS / "lending-two" / f"{name}.log").read_text()
        assert "leak" not in log
        assert "Traceback" not in log
    for url in (sound.prefill_url, *sound.decode_urls):
        flushed = requests.post(url + "/flush_cache", timeout=20)
        assert flushed.ok, flushed.text


def test_a_holder_that_is_killed_is_done_without(sound: Two) -> None:
    """The last test: the node is not whole after it."""
    context = sound.kept_by(0, "killed")
    prompt = [*context, 9]
    wanted = sound.cold(prompt, 4)
    for process in sound.processes(0):
        os.kill(process.pid, signal.SIGKILL)
    answer = sound.call(prompt, 4, "killed", decode=1)
    assert answer.ids == wanted
    found = found_tokens(sound.prefill_url)
    sound.call([*prompt, *answer.ids, 5], 4, "killed", decode=1)
    assert found_tokens(sound.prefill_url) - found >= known_tokens(prompt), "prefill has computed and kept it"
