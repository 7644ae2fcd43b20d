"""The door outlives the connection: the real OpenAI and Anthropic SDKs against the real stack.

Their time-outs are shortened so that they give up and try again while their session waits; nothing else of them is
changed. Through the router, and at the engines' own answers through a front that changes nothing.
"""

from __future__ import annotations

import concurrent.futures
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import anthropic
import openai
import pytest
import requests
from calls import FULL, close, generate, new_session, prompt
from pair_front import PairFront, pair_front
from stack import Stack

pytestmark = pytest.mark.stack

WORDS = 1_150
"""Words of a prompt of which only one fits the budget at a time: the test model has a token for this word."""


@dataclass
class Client:
    """A session whose agent uses an SDK as it comes."""

    sdk: str
    stream: bool
    url: str
    model: str
    timeout_s: float
    retries: int = 2

    def __post_init__(self) -> None:
        self.session = str(uuid.uuid4())

    def ask(self) -> int:
        """Send a call of `WORDS` words; returns the tokens of the answer. Raises what the SDK raises."""
        text = f"{self.session} " + "count " * WORDS
        return self._openai(text) if self.sdk == "openai" else self._anthropic(text)

    def _openai(self, text: str) -> int:
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=self.timeout_s, max_retries=self.retries
        ) as client:
            answer = client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": text}],
                max_tokens=4,
                stream=self.stream,
                stream_options={"include_usage": True} if self.stream else openai.omit,
                extra_body={"session_id": self.session},
            )
            return (list(answer)[-1] if self.stream else answer).usage.completion_tokens

    def _anthropic(self, text: str) -> int:
        with anthropic.Anthropic(
            base_url=self.url, api_key="none", timeout=self.timeout_s, max_retries=self.retries
        ) as client:
            answer = client.messages.create(
                model=self.model,
                messages=[{"role": "user", "content": text}],
                max_tokens=4,
                stream=self.stream,
                metadata={"user_id": f"user_x_account__session_{self.session}"},
            )
            if not self.stream:
                return answer.usage.output_tokens
            return next(event for event in answer if event.type == "message_delta").usage.output_tokens


@pytest.fixture(scope="module")
def model(basin: Stack) -> str:
    return requests.get(basin.url + "/v1/models", timeout=20).json()["data"][0]["id"]


@pytest.fixture(scope="module")
def front(basin: Stack) -> Iterator[PairFront]:
    prefill = basin.node.plan.of("prefill")[0]
    assert prefill.bootstrap_port is not None
    with pair_front(prefill.url, prefill.bootstrap_port, basin.decode_url) as front:
        yield front


def queued(stack: Stack) -> float:
    """Calls that prefill's door made wait so far."""
    return stack.metric("prefill", "basin_decisions_total", decision="queue")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_client_that_times_out_and_tries_again_keeps_its_place(
    empty: Stack, model: str, sdk: str, stream: bool
) -> None:
    key = 1_000 + 4 * len(sdk) + 2 * stream  # prompts that no session had before: what is cached would count as shared
    blocker = new_session()
    assert generate(empty, blocker, prompt(FULL, key)).ok
    before = queued(empty)
    client = Client(sdk, stream, empty.url, model, timeout_s=4.0, retries=8)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        early = pool.submit(client.ask)
        empty.until(lambda: queued(empty) == before + 1, "the SDK's first try waits")
        late_session = new_session()
        late = pool.submit(generate, empty, late_session, prompt(WORDS, key + 1))
        empty.until(lambda: queued(empty) == before + 2, "the later session waits")
        empty.until(lambda: queued(empty) == before + 3, "the SDK has given up once and waits again")
        assert empty.metric("prefill", "basin_queued_sessions") == 2
        close(empty, blocker)
        assert early.result(timeout=30) == 4
        assert not late.done()
        close(empty, client.session)
        assert late.result(timeout=30).ok
    close(empty, late_session)


def test_a_refused_client_comes_back_in_time_and_keeps_its_place(empty: Stack, model: str, front: PairFront) -> None:
    """Every SDK, streaming and not, past the hold limit: 503, the advised pause, the old place. The router drops the
    advice from answers that do not stream; the SDKs then come back by their own shorter pauses."""
    blocker = new_session()
    assert generate(empty, blocker, prompt(FULL, 72)).ok
    clients = [
        Client(sdk, stream, front.url, model, timeout_s=60)
        for sdk in ("openai", "anthropic")
        for stream in (False, True)
    ]
    clients += [Client("openai", False, empty.url, model, timeout_s=60)]
    clients += [Client("anthropic", True, empty.url, model, timeout_s=60)]
    before = queued(empty)
    front.attempts.clear()
    with concurrent.futures.ThreadPoolExecutor(len(clients) + 1) as pool:
        waiting = []
        for number, client in enumerate(clients, 1):
            waiting.append(pool.submit(client.ask))
            empty.until(lambda n=number: queued(empty) == before + n, "one more client waits")
        assert generate(empty, blocker, prompt(FULL, 72)).ok  # or it would end by idle time-out
        empty.until(lambda: queued(empty) >= before + 2 * len(clients), "all were refused and wait again", 60)
        assert generate(empty, blocker, prompt(FULL, 72)).ok
        late_client = Client("openai", False, empty.url, model, timeout_s=60)
        late = pool.submit(late_client.ask)
        empty.until(lambda: empty.metric("prefill", "basin_queued_sessions") == len(clients) + 1, "a late one waits")
        close(empty, blocker)
        for number, client in enumerate(clients):
            assert waiting[number].result(timeout=30) == 4
            assert not any(other.done() for other in waiting[number + 1 :])
            assert not late.done()
            close(empty, client.session)
        assert late.result(timeout=30) == 4
        close(empty, late_client.session)

    refused = [attempt for attempt in front.attempts if attempt.status != 200]
    assert len(refused) == 4
    for attempt in refused:
        assert attempt.status == 503
        assert attempt.headers["x-should-retry"] == "true"
        assert 0 < float(attempt.headers["retry-after"]) <= 60
    first, second = refused[0], front.attempts[4]
    assert second.arrived_s - first.answered_s >= float(first.headers["retry-after"])
