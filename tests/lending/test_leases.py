"""A session whose call lands on another decode than the one that keeps its copy: asked, leased, read, given back."""

from __future__ import annotations

import random
import time
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import ELSEWHERE, HOLDER, PEER, PREFILL, World

from sglang_basin.engine import messages
from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.lending import attach, breaker, decode, prefill
from sglang_basin.lending.copies import Copies, Copy
from sglang_basin.lending.leases import MARGIN_S, Leases
from sglang_basin.lending.questions import tokens_of
from sglang_basin.lending.ranks import ForRanks, Kept

PAGES = (1, 16, 64)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 50) for _ in range(tokens)]


def whole(tokens: int, page: int) -> int:
    return tokens // page * page


def outcome(name: str) -> int:
    return counts(metrics().lent_calls).get(name, 0)


def answers(name: str) -> int:
    return counts(metrics().leases).get(name, 0)


def finish(world: World) -> None:
    """All parts have landed or failed, all leases are back, and nobody's tokens are lost."""
    world.settle_all()
    world.deliver()
    world.check()
    assert len(world.lender_elsewhere.leases) == 0
    assert world.elsewhere.tree.protected_size() == 0
    assert world.elsewhere.accounted_tokens == world.elsewhere.allocator.size


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("on_prefill", [0, 70])
@pytest.mark.parametrize("on_own_decode", [0, 100])
def test_a_copy_elsewhere_comes_back_and_only_what_is_missing_is_read(
    page: int, on_prefill: int, on_own_decode: int
) -> None:
    world = World(page)
    first = prompt(200)
    world.elsewhere.cache(first)
    world.prefill.cache(first[:on_prefill])
    world.decode.cache(first[:on_own_decode])
    req = world.arrive([*first, 1, 2, 3])
    world.tell_copy(req, whole(200, page))
    before = outcome("leased")
    assert not world.turn(req), "it waits for the answer"
    assert len(world.posted) == 1
    world.bootstrap(req)
    assert world.compute(req) == (True, whole(200, page))
    assert outcome("leased") == before + 1
    assert world.transport.read_pages == (whole(200, page) - whole(on_prefill, page)) // page
    finish(world)


@pytest.mark.parametrize("page", PAGES)
def test_a_forward_follows_the_layers_of_a_lease(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer is computed while the last one is on its way. The call's own decode lacks these tokens: SGLang
    sends it nothing that the call has cached before the forward is through."""
    world = World(page)
    world.elsewhere.cache(prompt(150))
    world.transport.hold()
    last = world.transport.layers - 1
    req = world.arrive([*prompt(150), 1])
    world.tell_copy(req, 150)
    world.now_s = time.monotonic()
    assert not world.turn(req)
    assert not world.turn(req)
    world.transport.release(last)
    world.bootstrap(req)
    assert world.borrower.private_tokens == whole(150, page), "near, not here"
    world.now_s += 30.0  # the forward waits for its layers for longer than the test takes
    monkeypatch.setattr(prefill, "_borrower", world.borrower)
    may_send: list[bool] = []

    def send_cached() -> None:
        prefill.send_cached(lambda self, req, allow_send: may_send.append(allow_send), None, req)

    original = world.borrower.wait_for_layer

    def release_late(layer: int) -> None:
        if layer == 0:
            send_cached()
        if layer == last:
            (part,) = world.borrower._parts.values()
            assert part.pull.arrived == last, "layers 0 to last - 1 were computed before the last one came"
            world.transport.release()
        original(layer)

    world.borrower.wait_for_layer = release_late  # type: ignore[method-assign]
    before = outcome("leased")
    assert world.compute(req) == (True, whole(150, page))
    send_cached()
    assert may_send == [False, True]
    assert outcome("leased") == before + 1
    finish(world)


def test_a_lease_that_stalls_in_a_forward_is_computed_and_given_back_once_read() -> None:
    world = World(16)
    world.elsewhere.cache(prompt(150))
    world.transport.hold()
    req = world.arrive([*prompt(150), 1])
    world.tell_copy(req, 150)
    world.now_s = time.monotonic()
    world.turn(req)
    world.turn(req)
    world.transport.release(world.transport.layers - 1)
    world.bootstrap(req)
    world.now_s = None
    assert world.compute(req) == (False, 144)
    assert len(world.lender_elsewhere.leases) == 1, "the read under way may still need its pages"
    world.bootstrap(req)
    assert world.compute(req) == (True, 0)
    world.transport.release()
    finish(world)


@pytest.mark.parametrize(("on_prefill", "on_own_decode"), [(150, 0), (0, 150)])
def test_nobody_is_asked_for_what_is_nearer(on_prefill: int, on_own_decode: int) -> None:
    world = World(16)
    world.elsewhere.cache(prompt(150))
    world.prefill.cache(prompt(150)[:on_prefill])
    world.decode.cache(prompt(150)[:on_own_decode])
    req = world.arrive([*prompt(150), 1])
    world.tell_copy(req, 144)
    world.bootstrap(req)
    assert world.posted == []
    assert world.compute(req) == (True, 144)


@pytest.mark.parametrize(("kept", "answer"), [(0, "nothing"), (60, "lent")])
def test_what_the_holder_has_dropped_comes_from_the_own_decode(kept: int, answer: str) -> None:
    world = World(16)
    world.elsewhere.cache(prompt(150)[:kept])
    world.decode.cache(prompt(150)[:100])
    req = world.arrive([*prompt(150), 1])
    world.tell_copy(req, 144)
    before = answers(answer)
    world.bootstrap(req)
    assert answers(answer) == before + 1
    assert world.compute(req) == (True, 96)
    finish(world)


def test_another_prompt_of_the_session_gets_what_is_the_same() -> None:
    """An agent has dropped the end of its context."""
    world = World(16)
    world.elsewhere.cache(prompt(200))
    req = world.arrive([*prompt(200)[:100], 99, *prompt(80, 3)])
    world.tell_copy(req, 192)
    world.bootstrap(req)
    assert world.compute(req) == (True, 96)
    finish(world)


def test_the_own_decode_is_asked_no_more_once_it_is_known_to_be_the_holder() -> None:
    """Seen on the stack: prompts that leave their session's last context asked their own decode at every call."""
    world = World(16)
    world.decode.cache(prompt(200))
    for room, asked in ((1, 1), (2, 0)):
        world.prefill.forget()
        req = world.arrive([*prompt(200)[:100], 99, *prompt(80, 3)])
        world.tell_copy(req, 180)
        world.borrower.ready(req)
        assert len(world.posted) == asked
        world.posted.clear()
        if asked:
            lease = messages.Lease(room, 96, np.arange(1, 7, dtype="<i4").tobytes(), (PEER,))
            world.borrower.questions.hear(ForRanks(HOLDER, lease))
        world.bootstrap(req)
        assert world.compute(req) == (True, 96)
        world.leave(req)
    world.settle_all()
    world.check()


def test_a_holder_that_is_silent_costs_half_the_patience_once() -> None:
    world = World(16, patience_s=2.0)
    world.elsewhere.cache(prompt(150))
    world.decode.cache(prompt(150)[:100])
    world.now_s = time.monotonic()
    req = world.arrive([*prompt(150), 1])
    world.tell_copy(req, 144)
    before = answers("late")
    assert not world.borrower.ready(req)
    (holder, ask) = world.posted.pop()
    assert holder == HOLDER
    world.now_s += 0.9
    assert not world.turn(req)
    world.now_s += 0.2
    world.bootstrap(req)
    assert answers("late") == before + 1
    assert world.compute(req) == (True, 96), "the rest came from its own decode"
    other = world.arrive([*prompt(150), 2])
    world.prefill.forget()
    world.tell_copy(other, 144)
    world.posted.clear()
    world.borrower.ready(other)
    assert world.posted == [], "the breaker is open"
    late = world.lender_elsewhere.leases.grant(PREFILL, ask, 0.0)
    world.borrower.questions.hear(ForRanks(HOLDER, late))
    assert [message for _, message in world.posted] == [messages.Return(req.bootstrap_room)], "it came too late"
    finish(world)
    world.now_s += 10.0
    probe = world.arrive([*prompt(150), 3])
    world.prefill.forget()
    world.tell_copy(probe, 144)
    world.bootstrap(probe)
    assert world.compute(probe) == (True, 144)
    finish(world)


def test_what_is_read_after_the_lease_does_not_count() -> None:
    world = World(16)
    world.elsewhere.cache(prompt(150))
    req = world.arrive([*prompt(150), 1])
    world.tell_copy(req, 144)
    world.now_s = time.monotonic() - 100.0  # prefill asked so long ago, by the clock that the reads are held against
    before = outcome("failed")
    world.bootstrap(req)
    assert outcome("failed") == before + 1
    assert world.compute(req) == (True, 0)
    finish(world)


def test_a_call_that_ends_while_it_waits_leaves_nothing_behind() -> None:
    world = World(16, patience_s=2.0)
    world.elsewhere.cache(prompt(150))
    world.now_s = time.monotonic()
    asked, answered = world.arrive([*prompt(150), 1]), world.arrive([*prompt(150), 2])
    for req in (asked, answered):
        world.tell_copy(req, 144)
    assert not world.borrower.ready(answered)
    world.deliver()
    assert not world.borrower.ready(asked)
    world.deliver(answers=False)
    assert len(world.lender_elsewhere.leases) == 2
    world.now_s += 1.1
    world.borrower.settle()
    world.deliver()
    assert len(world.lender_elsewhere.leases) == 1, "no answer came, and the call is not there to ask"
    world.now_s += 1.0
    world.borrower.settle()
    world.deliver()
    assert not world.borrower.questions
    finish(world)


def test_a_call_that_waits_for_room_asks_for_no_lease_yet() -> None:
    """The lease would run out while the pool is full."""
    world = World(16, prefill_tokens=256, patience_s=6.0)
    world.elsewhere.cache(prompt(200))
    taken = world.prefill.allocate(128)
    world.scheduler.disagg_prefill_inflight_queue.append("whoever holds it")
    req = world.arrive([*prompt(200), 1])
    world.tell_copy(req, 192)
    for _ in range(3):
        assert not world.turn(req)
    assert len(world.lender_elsewhere.leases) == 0
    world.prefill.allocator.free(taken)
    world.bootstrap(req)
    assert world.compute(req) == (True, 192)
    finish(world)


def borrow(tokens: list[int], room: int = 1, seconds: float = 2.0) -> messages.Borrow:
    return messages.Borrow(room, np.asarray(tokens, dtype="<i4").tobytes(), seconds)


@pytest.mark.parametrize("page", PAGES)
def test_leased_pages_stay_until_the_lease_is_over(page: int) -> None:
    world = World(page)
    world.elsewhere.cache(prompt(200))
    leases = world.lender_elsewhere.leases
    lease = leases.grant(PREFILL, borrow(prompt(200)), now_s=10.0)
    assert lease.tokens == whole(200, page)
    assert lease.sessions == (ELSEWHERE,)
    assert len(lease.pages) == 4 * (lease.tokens // page)
    for now_s in (10.0, 12.0 + MARGIN_S - 0.1):
        leases.settle(now_s)
        world.elsewhere.forget()
        assert world.elsewhere.find(prompt(200)).device_prefix_len == lease.tokens
    leases.settle(12.0 + MARGIN_S)
    assert leases.tokens == 0
    world.elsewhere.forget()
    assert world.elsewhere.find(prompt(200)).device_prefix_len == 0


def test_a_lease_is_of_its_own_key_only() -> None:
    world = World(16)
    world.elsewhere.cache(prompt(200))
    leases = world.lender_elsewhere.leases
    ask = borrow(prompt(200))
    for other in (messages.Borrow(1, ask.prompt, 1.0, "adapter"), messages.Borrow(1, ask.prompt, 1.0, None, "salt")):
        assert leases.grant(PREFILL, other, 0.0) == messages.Lease(1)


def test_decode_leases_no_more_than_half_of_what_its_own_calls_could_have() -> None:
    world = World(16, decode_tokens=640)
    leases = world.lender_elsewhere.leases
    for number in range(3):
        world.elsewhere.cache(prompt(160, number))
    granted = [leases.grant(PREFILL, borrow(prompt(160, number), number), 0.0) for number in range(3)]
    assert [lease.tokens for lease in granted] == [160, 0, 0]
    assert [lease.busy for lease in granted] == [False, True, True]
    running = world.elsewhere.allocate(320)
    assert len(running) == 320
    leases.end(PREFILL, 0)
    assert leases.grant(PREFILL, borrow(prompt(160, 9), 9), 0.0) == messages.Lease(9)


def test_asking_again_for_the_same_call_is_one_lease() -> None:
    world = World(16)
    world.elsewhere.cache(prompt(100))
    leases = world.lender_elsewhere.leases
    for _ in range(3):
        assert leases.grant(PREFILL, borrow(prompt(100)), 0.0).tokens == 96
    assert (len(leases), leases.tokens) == (1, 96)
    leases.end(PREFILL, 1)
    leases.end(PREFILL, 1)
    assert world.elsewhere.tree.protected_size() == 0


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_wander_between_decodes_get_their_own_kv_back(
    page: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call lands on either decode; the holder drops and overwrites what it may, answers late or never, and reads
    fail and stall. What a forward runs on is checked in `World.compute`."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)  # a peer that failed is tried again at once
    rng = random.Random(1000 * page + seed)
    world = World(page, prefill_tokens=512, decode_tokens=2048, patience_s=0.2)
    contexts = [prompt(rng.randint(60, 120), 1000 * seed + number) for number in range(8)]
    leases = world.lender_elsewhere.leases
    before, inside = outcome("leased"), []
    for _ in range(150):
        leases.settle(time.monotonic())
        if rng.random() < 0.3:
            world.elsewhere.forget()
            for _ in range(rng.randint(0, 3)):
                world.elsewhere.cache(prompt(rng.randint(60, 180), rng.randrange(10**6)))
        action = rng.random()
        if action < 0.05:
            world.transport.hold()
        elif action < 0.2:
            world.transport.failing = rng.random() < 0.3
            world.transport.release(rng.choice((1, 2, 10**6)))
        elif action < 0.3:
            world.deliver(answers=rng.random() < 0.5)
        elif action < 0.65 or not inside:
            number = rng.randrange(len(contexts))
            if number in [n for n, _ in inside]:
                continue
            ids = [*contexts[number], *(rng.randint(1, 50) for _ in range(rng.randint(1, 20)))][:200]
            if rng.random() < 0.8:
                world.elsewhere.cache(contexts[number])
            req = world.arrive(ids)
            world.tell_copy(req, rng.randint(1, len(ids)))
            inside.append((number, req))
        else:
            number, req = inside.pop(rng.randrange(len(inside)))
            world.bootstrap(req)
            counted, _ = world.compute(req)
            while not counted:
                world.bootstrap(req)
                counted, _ = world.compute(req)
            world.leave(req)
            contexts[number] = req.prompt if len(req.prompt) < 180 else prompt(80, rng.randrange(10**6))
        assert world.prefill.accounted_tokens + world.borrower.private_tokens == world.prefill.allocator.size
        assert world.elsewhere.accounted_tokens == world.elsewhere.allocator.size
    world.transport.failing = False
    world.transport.release()
    for _, req in inside:
        world.bootstrap(req)
        world.leave(req)
    world.settle_all()
    world.now_s = time.monotonic() + 10.0
    world.borrower.settle()
    world.deliver()
    assert not world.borrower.questions
    leases.settle(time.monotonic() + 10.0)
    finish(world)
    assert outcome("leased") > before


def test_leases_pass_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the requests of a turn, on decode and on prefill; what answers goes out through the gate."""
    world = World(16)
    world.elsewhere.cache(prompt(100))
    posted: list[Any] = []
    monkeypatch.setattr("sglang_basin.engine.gate.post", lambda peer, message: posted.append((peer, message)) or True)
    monkeypatch.setattr(decode, "_lender", world.lender_elsewhere)
    monkeypatch.setattr(prefill, "_borrower", None)
    ask = borrow(prompt(100))
    assert attach.hear(["a", ForRanks(PREFILL, ask), "b"], None) == ["a", "b"]
    ((to, lease),) = posted
    assert (to, lease.tokens) == (PREFILL, 96)
    assert prefill.refuse_flush(lambda self: True, SimpleNamespace()) is False, "pages are being read"
    assert attach.hear([ForRanks(PREFILL, messages.Return(1))], None) == []
    assert prefill.refuse_flush(lambda self: True, SimpleNamespace()) is True
    monkeypatch.setattr(decode, "_lender", None)
    monkeypatch.setattr(prefill, "_borrower", world.borrower)
    req = world.arrive([*prompt(100), 1])
    assert attach.hear([ForRanks(HOLDER, Kept(req.bootstrap_room, 96)), req], None) == [req]
    assert not world.borrower.ready(req)
    assert world.borrower.questions.of(req.bootstrap_room) is not None
    assert attach.hear(["a"], None) is None
    assert attach.hear(None, None) is None


def test_a_decode_without_lending_says_that_it_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Any] = []
    monkeypatch.setattr("sglang_basin.engine.gate.post", lambda peer, message: posted.append((peer, message)))
    monkeypatch.setattr(decode, "_lender", None)
    decode.hear(ForRanks(PREFILL, borrow(prompt(10))))
    assert posted == [(PREFILL, messages.Lease(1))]


@pytest.mark.parametrize("pages", [b"", b"abc", b"\xff\xff\xff\xff"])
def test_a_damaged_lease_lends_nothing(pages: bytes) -> None:
    world = World(16)
    req = world.arrive([*prompt(100), 1])
    world.tell_copy(req, 96)
    assert not world.borrower.ready(req)
    world.posted.clear()
    lease = messages.Lease(req.bootstrap_room, 96, pages, (ELSEWHERE,))
    world.borrower.questions.hear(ForRanks(HOLDER, lease))
    assert world.turn(req)
    assert world.compute(req) == (True, 0)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_a_prompt_crosses_the_channel_unchanged(tokens: list[int]) -> None:
    ask = messages.decode_from_prefill(messages.encode(borrow(tokens)))
    assert tokens_of(ask.prompt) == array("q", tokens)


SESSIONS, HOLDERS = st.sampled_from(["a", "b", "c"]), st.sampled_from([b"1", b"2"])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["note", "shorten"]), SESSIONS, HOLDERS, st.integers(0, 5)),
            st.tuples(st.just("ended"), SESSIONS),
            st.tuples(st.just("gone"), HOLDERS),
        )
    )
)
def test_the_longest_copy_is_found_among_the_living(steps: list[Any]) -> None:
    copies, kept = Copies(max_sessions=10), {}
    for step in steps:
        getattr(copies, step[0])(*step[1:])
        if step[0] == "note":
            kept[step[1:3]] = step[3]
        elif step[0] == "shorten":
            kept[step[1:3]] = min(step[3], kept.get(step[1:3], 0))
        else:
            kept = {key: tokens for key, tokens in kept.items() if step[1] not in key}
        for session in "abc":
            for alive in (frozenset([b"1", b"2"]), frozenset([b"2"]), frozenset()):
                found = copies.longest(session, alive)
                longest = max((kept.get((session, holder), 0) for holder in alive), default=0)
                assert (0 if found is None else found.tokens) == longest
                assert found is None or (found.holder in alive and kept[session, found.holder] == longest)
    assert len(copies) == len({session for (session, _), tokens in kept.items() if tokens})


def test_no_more_sessions_are_remembered_than_may_be() -> None:
    copies = Copies(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        copies.note(session, b"1", 5)
    everyone = frozenset([b"1"])
    assert copies.longest("b", everyone) is None
    assert copies.longest("a", everyone) == Copy(b"1", 5)
    assert len(copies) == 2


def test_every_rank_reads_from_its_own_peer() -> None:
    from sglang_basin.lending.questions import Questions

    lease = messages.Lease(1, 16, np.array([3], dtype="<i4").tobytes(), ("rank 0", "rank 1"))
    for rank, session in ((0, "rank 0"), (1, "rank 1"), (2, None)):
        posted: list[Any] = []
        questions = Questions(lambda holder, message: posted.append(message) or True, rank, 2.0)  # noqa: B023
        req = SimpleNamespace(bootstrap_room=1, origin_input_ids=array("q", [1] * 20), extra_key=None, cache_salt=None)
        questions.ask(req, 16, HOLDER, 0.0)
        questions.hear(ForRanks(b"somebody else", lease))
        assert not questions.of(1).answered
        questions.hear(ForRanks(HOLDER, lease))
        assert questions.of(1).session == session


def test_leases_are_numbered_by_prefill_and_room() -> None:
    world = World(16)
    world.elsewhere.cache(prompt(100))
    leases: Leases = world.lender_elsewhere.leases
    leases.grant("one", borrow(prompt(100), 5), 0.0)
    leases.grant("other", borrow(prompt(100), 5), 0.0)
    leases.end("one", 5)
    assert len(leases) == 1
    world.elsewhere.forget()
    assert world.elsewhere.find(prompt(100)).device_prefix_len == 96
