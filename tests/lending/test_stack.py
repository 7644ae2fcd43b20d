"""Lending in the real engines: one prefill with a small pool, one decode, the router, over Mooncake TCP."""

from __future__ import annotations

import concurrent.futures
import random
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import requests
from conftest import DECODE_TOKENS, PATIENCE_S, Lending, timeline
from lending_sessions import MODEL, Answer, call, counter, found_tokens, outcomes, play
from stack import LOGS

pytestmark = pytest.mark.stack

PAGE = 16


def ids(tokens: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randint(3, 2000) for _ in range(tokens)]


@pytest.fixture
def sound(lending: Lending) -> Iterator[Lending]:
    """Reads work before and after, and Basin had no fault."""
    lending.spoil("")
    yield lending
    lending.spoil("")
    for url in (lending.prefill_url, lending.decode_url):
        assert counter(url, "basin_faults_total") == 0
        assert counter(url, "basin_lending_up") == 1


def lent(lending: Lending) -> tuple[float, float]:
    """Tokens that came back so far, and bytes read for them."""
    return counter(lending.prefill_url, "basin_lent_tokens_total"), counter(
        lending.prefill_url, "basin_lent_bytes_total"
    )


def until(done: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)


def evicted_session(lending: Lending, name: str, tokens: int = 1_200) -> list[int]:
    """A session's context that decode holds and prefill has lost to others."""
    prompt = ids(tokens, name)
    first = call(lending.url, prompt, 8, session=name)
    for number in range(3):
        call(lending.url, ids(1_400, (name, number)), 1)
    return prompt + first.ids


def known_tokens(context: list[int]) -> int:
    """Whole pages of it whose KV exists: that of the last token is computed with the next call."""
    return (len(context) - 1) // PAGE * PAGE


def timed(lending: Lending, prompt: list[int], **options: str) -> tuple[float, Answer]:
    start = time.perf_counter()
    answer = call(lending.url, prompt, 4, **options)
    return time.perf_counter() - start, answer


@pytest.mark.parametrize("number", range(3))
def test_an_evicted_session_gets_its_prefix_back_and_no_more_is_read(sound: Lending, number: int) -> None:
    context = evicted_session(sound, f"evicted-{number}")
    tokens, read = lent(sound)
    prompt = context + ids(40, "next")
    again = call(sound.url, prompt, 8)
    assert again.cached_tokens == known_tokens(context)
    assert again.ids == call(sound.url, prompt, 8, salt=f"cold-{number}").ids
    got, bytes_read = (after - before for after, before in zip(lent(sound), (tokens, read), strict=True))
    assert got == again.cached_tokens, "all of it was missing, and nothing else was read"
    assert bytes_read == got * MODEL.kv_bytes_per_token


def test_a_session_that_prefill_still_holds_gets_its_answer_back_at_most(sound: Lending) -> None:
    prompt = ids(800, "held")
    first = call(sound.url, prompt, 40)
    (tokens, _), before = lent(sound), found_tokens(sound.prefill_url)
    call(sound.url, prompt + first.ids + ids(20, "more"), 4)
    found = found_tokens(sound.prefill_url) - before
    assert found >= 800 // PAGE * PAGE
    assert lent(sound)[0] - tokens == found - 800 // PAGE * PAGE


def test_random_sessions_answer_as_they_would_cold(sound: Lending) -> None:
    """Evictions, chunked prompts, overlapping calls, clients that hang up."""
    found = found_tokens(sound.prefill_url)
    turns = play(
        sound.node, sessions=8, turns=4, page_size=PAGE, most_tokens=1_400, concurrency=3, disconnects=8, seed=11
    )
    assert [turn for turn in turns if not turn.equal] == []
    known = sum(turn.known_tokens for turn in turns)
    assert found_tokens(sound.prefill_url) - found >= 0.95 * known
    came = outcomes(sound.prefill_url)
    assert came.get("landed", 0) + came.get("overlapped", 0) > 0
    assert came.get("failed", 0) == 0


def test_decode_keeps_no_more_than_its_share(sound: Lending) -> None:
    assert 0 < counter(sound.decode_url, "basin_lent_kept_tokens") <= DECODE_TOKENS // 2


def recovered(lending: Lending) -> bool:
    """Whether pulls work again: the breaker tries the peer now and then."""
    context = evicted_session(lending, f"recovery-{time.monotonic()}", 600)
    before, _ = lent(lending)
    call(lending.url, [*context, 5], 1)
    return lent(lending)[0] - before == known_tokens(context)


@pytest.mark.parametrize("layer", range(MODEL.layers))
def test_a_read_that_fails_is_computed(sound: Lending, layer: int) -> None:
    """Before the call is scheduled, or in the middle of its forward: no 503, and the answer is right."""
    context = evicted_session(sound, f"failing-{layer}")
    before = outcomes(sound.prefill_url)
    sound.spoil(f"fail {layer}")
    again = call(sound.url, [*context, 7], 6)
    assert again.ids == call(sound.url, [*context, 7], 6, salt=f"failing-{layer}").ids
    after = outcomes(sound.prefill_url)
    assert after.get("failed", 0) + after.get("breaker", 0) > before.get("failed", 0) + before.get("breaker", 0)
    sound.spoil("")
    until(lambda: recovered(sound), "the peer is tried again", 30)


@pytest.mark.slow  # it judges times
@pytest.mark.parametrize("layer", range(MODEL.layers))
def test_a_peer_that_stops_costs_its_call_the_patience_and_others_nothing(sound: Lending, layer: int) -> None:
    """Layer 0: the call waits outside any batch. A later one: it may be in its forward already, which gives up soon."""
    # The others' prompts are all new: what one had from the peer it would wait for, too.
    quiet = [timed(sound, ids(320, f"quiet-{layer}-{number}"))[0] for number in range(10)]
    context = evicted_session(sound, f"stopped-{layer}")
    cold_s, _ = timed(sound, [*context, 8], salt=f"before-{layer}")
    before = outcomes(sound.prefill_url)
    sound.spoil(f"stall {layer}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        own = pool.submit(timed, sound, [*context, 9])
        beside = [timed(sound, ids(320, f"beside-{layer}-{number}"))[0] for number in range(10)]
        own_s, answer = own.result(timeout=30)
    report = f"layer {layer}: own {own_s:.3f} s (cold {cold_s:.3f}), others alone {quiet}, beside it {beside}"
    with (LOGS / "lending" / "stopped.txt").open("a") as log:
        log.write(report + "\n")
    assert outcomes(sound.prefill_url).get("late", 0) == before.get("late", 0) + 1, report
    assert answer.ids == call(sound.url, [*context, 9], 4, salt=f"stopped-{layer}").ids
    assert own_s <= PATIENCE_S + cold_s + 0.5, report
    assert max(beside) <= max(quiet) + cold_s + 0.5, report
    assert statistics.median(beside) <= statistics.median(quiet) + 0.2, report
    sound.spoil("")
    until(lambda: recovered(sound), "the peer is tried again", 30)


def test_the_first_layer_is_computed_before_the_last_one_has_come(sound: Lending) -> None:
    """Over a link on which a layer takes 60 ms: the forward begins while layers are on their way, and each waits for
    its own. (Should the part land before the call is scheduled, on a busy machine, there is another one.)"""
    last = MODEL.layers - 1
    for number in range(10):
        context = evicted_session(sound, f"timeline-{number}")
        before = outcomes(sound.prefill_url)
        sound.spoil("slow 60")
        again = call(sound.url, [*context, 7], 6)
        sound.spoil("")
        assert again.ids == call(sound.url, [*context, 7], 6, salt=f"timeline-{number}").ids
        if outcomes(sound.prefill_url).get("overlapped", 0) > before.get("overlapped", 0):
            break
    else:
        pytest.fail(f"no call was computed while its part was on its way: {outcomes(sound.prefill_url)}")
    seen = list(timeline(sound.reads).values())[-1]
    arrived, computes = seen["arrived"], seen["computes"]
    assert computes[0] < arrived[last]
    assert all(arrived[layer] <= computes[layer] for layer in range(MODEL.layers))
    with (LOGS / "lending" / "timeline.txt").open("a") as log:
        log.write(f"{seen}\n")


def test_nothing_is_left_behind(sound: Lending) -> None:
    """No slot, no transfer, no lock; SGLang looks for leaks itself when it is idle."""
    queues = ("num_queue_reqs", "num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs")
    until(lambda: all(counter(sound.prefill_url, f"sglang:{name}") == 0 for name in queues), "prefill is idle")
    until(lambda: counter(sound.prefill_url, "basin_rooms") == 0, "no transfer is left on prefill")
    time.sleep(1.5)
    for name in ("prefill-0", "decode-0"):
        log = (LOGS / "lending" / f"{name}.log").read_text()
        assert "leak" not in log
        assert "Traceback" not in log
    flushed = requests.post(sound.prefill_url + "/flush_cache", timeout=20)
    assert flushed.ok, flushed.text
