"""Both gates over a real control channel: verdicts, refusals, disconnects, lost peers, garbage.

The requests are SGLang's own message types; the scheduler is not there, so answers are collected in a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from tokenized import tokenized

from sglang_basin.config import ConfigError
from sglang_basin.engine import decode_gate, doors, gate, messages
from sglang_basin.engine.answers import Answer
from sglang_basin.engine.control import ControlError, DecodeEnd, PrefillEnd, address
from sglang_basin.engine.decision_log import DecisionLog
from sglang_basin.engine.decode_gate import DecodeGate
from sglang_basin.engine.door import recording
from sglang_basin.engine.finals import FinalAnswers
from sglang_basin.engine.identity import Stamp
from sglang_basin.engine.metrics import metrics
from sglang_basin.engine.prefill_gate import REMEMBER_FOR_S, PrefillGate
from sglang_basin.engine.prompt_sessions import PromptSessions
from sglang_basin.engine.ranks import Rank
from sglang_basin.engine.rooms import DroppedRooms
from sglang_basin.lending.copies import Copies, Copy
from sglang_basin.lending.ranks import ForRanks, Kept
from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.pausing import PauseSettings
from sglang_basin.policy.priority import SizeAwareOrder
from sglang_basin.policy.recording import RecordedDoor
from sglang_basin.policy.reservation import CurrentContext
from sglang_basin.policy.shedding import SheddingSettings
from sglang_basin.predictor.deployed import DeployedPredictor
from sglang_basin.predictor.seen import SeenPredictor

HOST = "127.0.0.1"
OFFSET = 7


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def small_door(max_queued: int | None = None) -> Door:
    """With a budget of 100 tokens."""
    return Door(
        DoorSettings(idle_timeout_s=60, hold_limit_s=30, max_sessions=100, max_queued=max_queued),
        law=CurrentContext(),
        budget=Budget(BudgetSettings(fixed_tokens=100), capacity_tokens=1),
    )


def two_free_ports() -> int:
    """The first of two in a row: the doors of two ranks listen there."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind((HOST, 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind((HOST, port + 1))
                return port


class Pair:
    """A prefill and a decode gate with a real channel between them."""

    def __init__(
        self, max_queued: int | None = None, *, prefill_infers: bool = False, decode_asks: bool = False
    ) -> None:
        self.clock = Clock()
        self.answers: dict[str, list[tuple[str, int | None]]] = {"prefill": [], "decode": []}
        self.shortened: list[tuple[tuple[str, str], int]] = []
        self.port = two_free_ports()
        self.channel = PrefillEnd(HOST, self.port)
        door = small_door(max_queued)
        by_prompt = PromptSessions(100, door.runs) if prefill_infers else None
        self.prefill = PrefillGate(
            door, self.channel, self._answer("prefill"), by_prompt=by_prompt, copies=Copies(100), clock=self.clock
        )
        self.decode = DecodeGate(
            DecodeEnd(),
            self._answer("decode"),
            default_bootstrap_port=1,
            control_port_offset=OFFSET,
            idle_timeout_s=60,
            max_sessions=100,
            finals=FinalAnswers(None, None),
            by_prompt=PromptSessions(100) if decode_asks else None,
            kept=lambda request, owner: getattr(request, "kept_tokens", 0),
            shortened=lambda most: [self.shortened.pop() for _ in range(min(most, len(self.shortened)))],
            clock=self.clock,
        )

    def _answer(self, side: str) -> Answer:
        return lambda request, message, reason: self.answers[side].append(
            (request.rid, None if reason is None else reason["status_code"])
        )

    def call(
        self,
        session: str | None,
        room: int,
        tokens: int = 10,
        *,
        side: str = "d",
        ends: bool = False,
        prompt: list[int] | None = None,
        starts_agent: bool = False,
    ) -> Any:
        stamp = Stamp(session_id=session, ends_session=ends, starts_agent=starts_agent)
        return tokenized(
            stamp,
            range(tokens) if prompt is None else prompt,
            host=HOST,
            room=room,
            rid=f"{side}{room}",
            port=self.port - OFFSET,
        )

    def until(self, done: Callable[[list[Any], list[Any]], bool], **first: list[Any]) -> tuple[list[Any], list[Any]]:
        """Turn both loops, as their schedulers would, until `done(prefill's output, decode's output)`."""
        prefill_out, decode_out = [], []
        deadline = time.monotonic() + 10
        prefill_in, decode_in = first.get("prefill", []), first.get("decode", [])
        while True:
            prefill_out += self.prefill.pass_on(prefill_in)
            decode_out += self.decode.pass_on(decode_in)
            prefill_in, decode_in = [], []
            if done(prefill_out, decode_out):
                return prefill_out, decode_out
            assert time.monotonic() < deadline, f"nothing came: {prefill_out}, {decode_out}, {self.answers}"
            time.sleep(0.002)

    def unnamed(self, room: int, prompt: list[int], *, starts_agent: bool = True) -> dict[str, list[Any]]:
        """Both legs of a call that names no session."""
        return {
            "prefill": [self.call(None, room, side="p", prompt=prompt, starts_agent=starts_agent)],
            "decode": [self.call(None, room, prompt=prompt, starts_agent=starts_agent)],
        }

    def pass_unnamed(self, room: int, prompt: list[int], *, starts_agent: bool = True) -> None:
        """Such a call, which goes on at once on both sides and is answered with three tokens."""
        legs = self.unnamed(room, prompt, starts_agent=starts_agent)
        prefill_out, decode_out = self.until(lambda p, d: len(p) == len(d) == 1, **legs)
        assert prefill_out[0].priority == decode_out[0].priority
        self.leave(room, FINISH_LENGTH(3))

    def leave(self, room: int, reason: Any) -> None:
        """A call leaves prefill for decode, and decode for this reason."""
        handed_over = SimpleNamespace(rid=f"p{room}", output_ids=[1], finished_reason=FINISH_LENGTH(1), cached_tokens=0)
        self.prefill.left(handed_over)
        self.decode.left(SimpleNamespace(rid=f"d{room}", output_ids=[1, 2, 3], finished_reason=reason))
        by_prompt = self.prefill._by_prompt
        assert by_prompt is not None
        self.until(lambda p, d: self.prefill.door.session_of(str(room)) is None and str(room) not in by_prompt._calls)

    def enter(self, session: str, room: int, tokens: int) -> None:
        legs = {"prefill": [self.call(session, room, tokens, side="p")], "decode": [self.call(session, room, tokens)]}
        self.until(lambda p, d: len(p) == len(d) == 1, **legs)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.prefill.let_go()
    pair.decode.let_go()


def rids(requests: list[Any]) -> list[str]:
    return [request.rid for request in requests]


def broken(*whatever: Any, **options: Any) -> Any:
    raise RuntimeError("injected")


def test_the_first_call_passes_on_both_sides_and_the_next_one_without_a_question(pair: Pair) -> None:
    pair.enter("a", 1, 60)
    assert rids(pair.decode.pass_on([pair.call("a", 2)])) == ["d2"]
    assert rids(pair.prefill.pass_on([pair.call("a", 2, side="p")])) == ["p2"]


def test_a_session_that_does_not_fit_waits_on_both_sides_until_another_ends(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    waiting = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    prefill_out, decode_out = pair.until(lambda p, d: pair.prefill._askers != {}, **waiting)
    assert prefill_out == decode_out == []
    ending = CloseSessionReqInput(session_id="a")
    prefill_out, decode_out = pair.until(lambda p, d: len(p) == 2 and len(d) == 1, prefill=[ending])
    assert prefill_out[0] is ending
    assert (rids(prefill_out[1:]), rids(decode_out)) == (["p2"], ["d2"])


def test_decodes_report_of_the_last_calls_end_lets_the_next_session_in(pair: Pair) -> None:
    last = {"prefill": [pair.call("a", 1, 101, side="p", ends=True)], "decode": [pair.call("a", 1, 101, ends=True)]}
    pair.until(lambda p, d: len(p) == len(d) == 1, **last)
    waiting = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    pair.until(lambda p, d: pair.prefill._askers != {}, **waiting)
    pair.decode.left(SimpleNamespace(rid="d1", output_ids=[1, 2, 3]))
    prefill_out, decode_out = pair.until(lambda p, d: p and d)
    assert (rids(prefill_out), rids(decode_out)) == (["p2"], ["d2"])


def test_a_paused_sessions_next_call_waits_on_both_sides_until_it_fits_again(pair: Pair) -> None:
    pair.prefill.door = Door(
        DoorSettings(idle_timeout_s=60, hold_limit_s=30, max_sessions=100),
        law=CurrentContext(),
        budget=Budget(BudgetSettings(fixed_tokens=100), capacity_tokens=1),
        pausing=PauseSettings(),
    )
    pair.enter("small", 1, 30)
    pair.enter("large", 2, 90)  # the two outgrow the budget: the small one leaves after its call
    pair.clock.now_s += 1.0
    pair.until(lambda p, d: [session for _, session in pair.decode._entered] == ["large"])
    pair.decode.left(SimpleNamespace(rid="d1", output_ids=[1, 2, 3], finished_reason=FINISH_LENGTH(3)))
    pair.until(lambda p, d: pair.prefill.door.state().paused_sessions == 1)
    legs = {"prefill": [pair.call("small", 3, 40, side="p")], "decode": [pair.call("small", 3, 40)]}
    prefill_out, decode_out = pair.until(lambda p, d: pair.decode._held[3].unanswered_s is None, **legs)
    assert prefill_out == decode_out == []
    pair.clock.now_s += 1.0
    ending = CloseSessionReqInput(session_id="large")
    prefill_out, decode_out = pair.until(lambda p, d: len(p) == 2 and len(d) == 1, prefill=[ending])
    assert (rids(prefill_out[1:]), rids(decode_out)) == (["p3"], ["d3"])


def test_all_ranks_hear_who_keeps_a_sessions_copy_until_it_ends(pair: Pair) -> None:
    pair.enter("a", 1, 60)
    left = SimpleNamespace(rid="d1", output_ids=[1], finished_reason=FINISH_LENGTH(1), kept_tokens=48)
    pair.decode.left(left)
    pair.until(lambda p, d: pair.prefill.door.session_of("1") is None)
    told, request = pair.prefill.pass_on([pair.call("a", 2, side="p")])
    assert (told.message, request.rid) == (Kept(2, 48), "p2")
    holder = told.peer
    assert rids(pair.prefill.pass_on([pair.call("other", 3, side="p")])) == ["p3"]
    pair.clock.now_s += 30.0
    assert rids(pair.prefill.pass_on([pair.call("a", 4, side="p")])) == ["p4"], "that decode has been silent"
    pair.until(lambda p, d: pair.prefill._gates[holder] == 30.0, decode=[pair.call("b", 5)])
    told, _ = pair.prefill.pass_on([pair.call("a", 6, side="p")])
    assert told == ForRanks(holder, Kept(6, 48))
    pair.prefill.pass_on([CloseSessionReqInput(session_id="a")])
    assert len(pair.prefill._copies) == 0


def test_a_lease_is_asked_granted_corrected_and_returned(pair: Pair) -> None:
    pair.enter("a", 1, 60)
    pair.decode.left(SimpleNamespace(rid="d1", output_ids=[1], finished_reason=FINISH_LENGTH(1), kept_tokens=48))
    pair.until(lambda p, d: pair.prefill.door.session_of("1") is None)
    told, _ = pair.prefill.pass_on([pair.call("a", 2, side="p")])
    ask = messages.Borrow(2, bytes(messages.MAX_PROMPT_BYTES), 2.0, None, "salt")
    assert pair.prefill.post(told.peer, ask)
    _, decode_out = pair.until(lambda p, d: d)
    (asked,) = decode_out
    assert asked == ForRanks(next(iter(pair.decode._control.peers)), ask)
    for lease, known in (
        (messages.Lease(2, busy=True), 48),
        (messages.Lease(2, 32, bytes(4 * messages.MAX_LEASED_PAGES), ("x" * 128,) * messages.MAX_RANKS), 32),
        (messages.Lease(2), 0),
    ):
        assert pair.decode.post(asked.peer, lease)
        prefill_out, _ = pair.until(lambda p, d: p)
        assert prefill_out == [ForRanks(told.peer, lease)]
        copy = pair.prefill._copies.longest("a", frozenset([told.peer]))
        assert (0 if copy is None else copy.tokens) == known
    assert pair.prefill.post(told.peer, messages.Return(2))
    _, decode_out = pair.until(lambda p, d: d)
    assert decode_out == [ForRanks(asked.peer, messages.Return(2))]


def test_prefill_forgets_a_copy_that_decode_has_dropped(pair: Pair) -> None:
    """In one message after the other, and none makes a copy longer or names a session that prefill does not know."""
    for room, session in enumerate(("a", "b", "c"), 1):
        pair.enter(session, room, 10)
        left = SimpleNamespace(rid=f"d{room}", output_ids=[1], finished_reason=FINISH_LENGTH(1), kept_tokens=48)
        pair.decode.left(left)
    pair.until(lambda p, d: len(pair.prefill._copies) == 3)
    (holder,) = pair.prefill._gates
    (door,) = pair.decode._control.peers
    pair.shortened = [((door, "a"), 32), ((door, "b"), 0), ((door, "c"), 64)]
    pair.shortened += [((door, f"unknown-{number}"), 16) for number in range(200)]
    pair.clock.now_s += 1.1
    pair.until(lambda p, d: pair.prefill._copies.longest("b", frozenset([holder])) is None)
    pair.until(lambda p, d: pair.prefill._copies.longest("a", frozenset([holder])) == Copy(holder, 32))
    assert pair.prefill._copies.longest("c", frozenset([holder])) == Copy(holder, 48)
    assert len(pair.prefill._copies) == 2
    assert pair.shortened == []


def test_a_decode_that_is_gone_is_answered_for(pair: Pair) -> None:
    pair.prefill._gates[b"gone"] = 0.0
    pair.prefill._copies.note("a", b"gone", 48)
    assert not pair.prefill.post(b"gone", messages.Borrow(7, b"", 2.0))
    assert pair.prefill.pass_on([]) == [ForRanks(b"gone", messages.Lease(7))]
    assert len(pair.prefill._copies) == 0
    assert not pair.prefill.post(b"gone", messages.Return(7))
    assert pair.prefill.pass_on([]) == []


def test_a_call_held_too_long_is_answered_503_on_both_sides_and_its_room_is_dropped(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    waiting = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    pair.until(lambda p, d: pair.decode._held[2].unanswered_s is None, **waiting)
    pair.clock.now_s = 31.0
    prefill_out, decode_out = pair.until(lambda p, d: all(pair.answers.values()))
    assert pair.answers == {"prefill": [("p2", 503)], "decode": [("d2", 503)]}
    assert prefill_out == [DroppedRooms((2,))]
    assert decode_out == []
    assert pair.prefill.door.state().held_calls == 0


def test_a_disconnect_while_held_releases_both_sides(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    waiting = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    pair.until(lambda p, d: pair.prefill._askers != {}, **waiting)
    pair.until(lambda p, d: p and d, prefill=[AbortReq(rid="p2")], decode=[AbortReq(rid="d2")])
    assert pair.answers["prefill"] == [("p2", None)]
    assert [rid for rid, _ in pair.answers["decode"]] == ["d2"]  # by its own abort or by prefill's word, once
    assert pair.prefill.door.state().queued_sessions == 0
    assert (pair.prefill._held, pair.decode._held, pair.prefill._askers) == ({}, {}, {})


def test_decodes_disconnect_alone_releases_prefills_leg_too(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    waiting = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    pair.until(lambda p, d: pair.prefill._askers != {}, **waiting)
    prefill_out, _ = pair.until(lambda p, d: pair.answers["prefill"] and p, decode=[AbortReq(rid="d2")])
    assert pair.answers["prefill"] == [("p2", None)]
    assert prefill_out == [DroppedRooms((2,))]
    assert pair.prefill.door.state().queued_sessions == 0


@pytest.mark.parametrize("tokens", [10, 200])
def test_decode_may_ask_before_prefills_own_leg_has_come(pair: Pair, tokens: int) -> None:
    pair.enter("a", 1, 101)
    pair.until(lambda p, d: pair.prefill._early != {}, decode=[pair.call("b", 2)])
    assert not pair.prefill.door.holds_any, "the door judges what prefill itself has seen"
    pair.until(lambda p, d: pair.decode._held[2].unanswered_s is None, prefill=[pair.call("b", 2, tokens, side="p")])
    assert pair.prefill._early == {}
    pair.prefill.door.end("a", 0.0)
    prefill_out, decode_out = pair.until(lambda p, d: p and d, prefill=[CloseSessionReqInput(session_id="a")])
    assert "p2" in [request.rid for request in prefill_out if hasattr(request, "bootstrap_room")]
    assert rids(decode_out) == ["d2"]


def test_questions_about_calls_that_never_come_are_forgotten(pair: Pair) -> None:
    pair.until(lambda p, d: pair.prefill._early != {}, decode=[pair.call("b", 2)])
    pair.clock.now_s = REMEMBER_FOR_S + 1
    pair.until(lambda p, d: pair.prefill._early == {})


def test_decode_orders_later_calls_by_the_sessions_latest_prediction(pair: Pair) -> None:
    """As prefill does: both legs of a call go by one priority, however the prediction has changed meanwhile."""
    pair.prefill.door = Door(
        DoorSettings(idle_timeout_s=60, hold_limit_s=30),
        law=CurrentContext(),
        budget=Budget(BudgetSettings(fixed_tokens=10_000), capacity_tokens=1),
        order=SizeAwareOrder(10.0),
    )
    first = pair.call("a", 1, 100)
    pair.until(lambda p, d: bool(p and d), prefill=[pair.call("a", 1, 100, side="p")], decode=[first])
    pair.decode.left(SimpleNamespace(rid="d1", output_ids=[0] * 900, finished_reason=None))
    entered = pair.decode._entered[next(iter(pair.decode._entered))]
    pair.until(lambda p, d: entered.priority_ms > first.priority)
    prefill_leg, decode_leg = pair.call("a", 2, 1_000, side="p"), pair.call("a", 2, 1_000)
    pair.until(lambda p, d: bool(p and d), prefill=[prefill_leg], decode=[decode_leg])
    assert prefill_leg.priority == decode_leg.priority == first.priority + 90_000


def test_decode_hears_of_a_sessions_order_only_when_it_has_changed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    send = pair.channel.send
    monkeypatch.setattr(pair.channel, "send", lambda peer, message: told.append(message) or send(peer, message))

    def served(room: int, output_tokens: int) -> list[Any]:
        told.clear()
        legs = {"prefill": [pair.call("a", room, 100, side="p")], "decode": [pair.call("a", room, 100)]}
        pair.until(lambda p, d: bool(p and d), **legs)
        pair.decode.left(SimpleNamespace(rid=f"d{room}", output_ids=[0] * output_tokens, finished_reason=None))
        pair.until(lambda p, d: not pair.prefill.door.runs("a"))
        orders = [message for message in told if isinstance(message, messages.Reorder)]
        (entered,) = pair.decode._entered.values()
        pair.until(lambda p, d: not orders or entered.priority_ms == orders[-1].priority_ms)
        return orders

    assert served(1, 500) == []  # by arrival
    pair.prefill.door._by = SizeAwareOrder(10.0)
    (reorder,) = served(2, 500)
    assert served(3, 500) == []
    (later,) = served(4, 700)
    assert later.priority_ms - reorder.priority_ms == 20_000


def test_both_legs_of_all_calls_of_a_session_carry_its_fixed_priority(pair: Pair) -> None:
    def legs(session: str, room: int) -> list[Any]:
        both = {"prefill": [pair.call(session, room, side="p")], "decode": [pair.call(session, room)]}
        prefill_out, decode_out = pair.until(lambda p, d: len(p) == len(d) == 1, **both)
        return [*prefill_out, *decode_out]

    pair.prefill.door = Door(
        DoorSettings(idle_timeout_s=60, hold_limit_s=30),
        law=CurrentContext(),
        budget=Budget(BudgetSettings(fixed_tokens=1_000), capacity_tokens=1),
        order=SizeAwareOrder(2.0),
    )
    first = legs("a", 1)
    pair.clock.now_s = 3.0
    later, small = legs("a", 2), legs("b", 3)
    assert len({call.priority for call in first + later}) == 1
    assert small[0].priority - first[0].priority == pytest.approx(3_000, abs=1)


def test_calls_without_identity_pass_both_gates(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    assert rids(pair.prefill.pass_on([pair.call(None, 5, side="p")])) == ["p5"]
    assert rids(pair.decode.pass_on([pair.call(None, 5)])) == ["d5"]


def test_the_end_of_a_session_makes_decode_ask_again(pair: Pair) -> None:
    pair.enter("a", 1, 60)
    pair.until(lambda p, d: not pair.decode._entered, prefill=[CloseSessionReqInput(session_id="a")])
    assert pair.decode.pass_on([pair.call("a", 2)]) == []


def test_a_silent_prefill_costs_the_patience_and_then_its_calls_go_on(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [pair.call("b", 2), pair.call("c", 3)]
    for call in calls:
        call.bootstrap_port = 9  # nobody listens there
    assert pair.decode.pass_on(calls) == []
    pair.clock.now_s = decode_gate.PATIENCE_S + 1
    assert rids(pair.decode.pass_on([])) == ["d2", "d3"]
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["2"]


def test_the_patience_is_lost_once_and_questions_wait_again_when_prefill_is_heard(pair: Pair) -> None:
    pair.channel.close()
    assert pair.decode.pass_on([pair.call("b", 2)]) == []
    pair.clock.now_s = decode_gate.PATIENCE_S + 1
    assert rids(pair.decode.pass_on([])) == ["d2"]
    assert rids(pair.decode.pass_on([pair.call("c", 3)])) == ["d3"]

    pair.prefill.control = PrefillEnd(HOST, pair.port)
    pair.until(lambda p, d: not pair.decode._silent, prefill=[pair.call("c", 3, side="p")])
    assert pair.decode.pass_on([pair.call("e", 4)]) == []
    pair.until(lambda p, d: rids(d) == ["d4"], prefill=[pair.call("e", 4, side="p")])


def test_a_waiting_call_is_not_let_go_while_prefill_still_answers(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    waiting = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    pair.until(lambda p, d: pair.prefill._askers != {}, **waiting)
    for now_s in range(0, 28, 6):
        pair.clock.now_s = float(now_s)
        pair.until(lambda p, d: pair.decode._held[2].unanswered_s is None)
        assert pair.decode._held[2].asked_s == now_s


def test_a_missing_bootstrap_port_means_the_default_one(pair: Pair) -> None:
    call = pair.call("b", 2)
    call.bootstrap_port = None
    pair.decode.pass_on([call])
    assert pair.decode._held[2].instance == address(HOST, 1 + OFFSET)


def test_garbage_on_the_channel_is_counted_and_otherwise_ignored(pair: Pair) -> None:
    dropped = metrics().control_dropped.labels("garbage")
    before = dropped._value.get()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as rogue:
        rogue.setsockopt(zmq.LINGER, 1000)
        rogue.connect(pair.channel.address)
        rogue.send(b"\x00\xff garbage")
        rogue.send(messages.encode(messages.Enter(3, 0)))  # a word that only prefill may say
        rogue.send_multipart([b"too", b"many", b"frames"])
        rogue.send(b'["ask", 1, ' + b"[" * 5000)
        deadline = time.monotonic() + 10
        while dropped._value.get() < before + 4:
            assert pair.prefill.pass_on([]) == []
            assert time.monotonic() < deadline
            time.sleep(0.005)
        rogue.send(b"x" * (messages.MAX_MESSAGE_BYTES + 1))  # ZeroMQ cuts such a connection
    context.term()
    pair.enter("a", 1, 60)


def test_a_taken_port_is_an_error_that_names_the_mend(pair: Pair) -> None:
    with pytest.raises(ControlError, match="control-port-offset"):
        PrefillEnd(HOST, pair.port)


def test_letting_go_returns_every_held_request(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    pair.prefill.pass_on([pair.call("b", 2, side="p"), pair.call("c", 3, side="p")])
    assert rids(pair.prefill.let_go()) == ["p2", "p3"]


def test_an_odd_request_goes_on_and_the_gate_stays(pair: Pair) -> None:
    odd = pair.call("b", 2, side="p")
    odd.kv_hints = 17
    assert pair.prefill.pass_on([odd]) == [odd]
    pair.enter("a", 1, 60)


def test_decode_that_asks_after_the_refusal_gets_it_too(pair: Pair) -> None:
    """Regression: the verdict was told to those who had asked, and a later question found no such call."""
    full = Pair(max_queued=0)
    full.enter("a", 1, 101)
    assert full.prefill.pass_on([full.call("b", 2, side="p")]) == [DroppedRooms((2,))]
    full.until(lambda p, d: bool(full.answers["decode"]), decode=[full.call("b", 2)])
    assert full.answers == {"prefill": [("p2", 503)], "decode": [("d2", 503)]}
    full.prefill.let_go()
    full.decode.let_go()


def test_decode_that_asks_after_the_session_was_closed_gets_the_verdict(pair: Pair) -> None:
    """Regression: the door had dropped the session's running call, and decode waited out its patience."""
    pair.prefill.pass_on([pair.call("a", 1, side="p"), CloseSessionReqInput(session_id="a")])
    _, decode_out = pair.until(lambda p, d: bool(d), decode=[pair.call("a", 1)])
    assert rids(decode_out) == ["d1"]


FORGETFUL = """
import gc, types
from sglang_basin.engine import messages
from sglang_basin.engine.control import DecodeEnd

for _ in range(30):
    holder = types.SimpleNamespace(end=DecodeEnd())
    holder.end.send("tcp://127.0.0.1:1", messages.Ask(1))
    holder.sockets, holder.itself = list(holder.end._sockets.values()), holder
    del holder
    gc.collect()
"""


def test_ends_that_nobody_closes_do_not_stop_the_garbage_collector() -> None:
    """Regression: it came to a context before the sockets in it, and waited for them for ever."""
    subprocess.run([sys.executable, "-c", FORGETFUL], check=True, timeout=60)


def test_a_full_queue_turns_both_legs_away_at_once(pair: Pair) -> None:
    full = Pair(max_queued=0)
    full.enter("a", 1, 101)
    arriving = {"prefill": [full.call("b", 2, side="p")], "decode": [full.call("b", 2)]}
    full.until(lambda p, d: all(full.answers.values()), **arriving)
    assert full.answers == {"prefill": [("p2", 503)], "decode": [("d2", 503)]}
    full.prefill.let_go()
    full.decode.let_go()


def test_a_gate_that_fails_in_mid_turn_loses_no_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came in, what was held and what was just freed all go on, each once."""
    pair.enter("a", 1, 101)
    pair.prefill.pass_on([pair.call("b", 2, side="p"), pair.call("c", 3, side="p")])

    monkeypatch.setattr(pair.prefill, "_tell_ended", broken)
    monkeypatch.setattr(gate, "_here", gate._Attached(pair.prefill, None))
    pair.prefill.door.end("a", 0.0)  # frees b; the gate then fails on its way to tell decode about it
    coming = [pair.call("a", 4, side="p"), pair.call(None, 5, side="p")]
    going_on = gate.pull(lambda self: coming, None)
    assert sorted(rids(going_on)) == ["p2", "p3", "p4", "p5"]
    assert gate.pull(lambda self: [7], None) == [7], "from then on SGLang is left alone"


@pytest.mark.parametrize("failing", ["rooms", "gate"])
def test_an_end_that_cannot_be_noted_does_not_reach_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    part = SimpleNamespace(end=broken, left=broken)
    rooms, own = (part, None) if failing == "rooms" else (None, part)
    monkeypatch.setattr(gate, "_here", gate._Attached(own, rooms))
    faults: list[str] = []
    monkeypatch.setattr(gate, "fault", lambda where, what: faults.append(where))
    ended = SimpleNamespace(finished_reason="length", bootstrap_room=5)
    gate.calls_left(None, None, [ended, SimpleNamespace(finished_reason=None)])
    gate.call_aborted(None, None, None, ended)
    assert faults == ["left", "left"]


@pytest.mark.parametrize("failing", ["_tell_copy", "_answer"])
def test_a_gate_that_fails_as_it_lets_a_call_go_loses_it_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Regression: the call was held no more and had not gone on yet; its client waited for ever."""
    pair.enter("a", 1, 101)
    pair.prefill.pass_on([pair.call("b", 2, side="p"), pair.call("c", 3, side="p")])
    monkeypatch.setattr(pair.prefill, failing, broken)
    monkeypatch.setattr(gate, "_here", gate._Attached(pair.prefill, None))
    if failing == "_tell_copy":
        pair.prefill.door.end("a", 0.0)
        pair.clock.now_s = 2.0  # b and c enter
    else:
        pair.clock.now_s = 31.0  # they are refused
    assert sorted(rids(gate.pull(lambda self: [], None))) == ["p2", "p3"]


def test_a_call_that_cannot_be_judged_to_the_end_goes_on_and_the_door_forgets_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the door let it in later on, the gate did not know it, and admission gave up."""
    pair.enter("a", 1, 101)
    odd = pair.call("b", 2, side="p")
    with monkeypatch.context() as failing:
        failing.setattr(pair.prefill, "_note", broken)
        assert pair.prefill.pass_on([odd]) == [odd]
    state = pair.prefill.door.state()
    assert (state.held_calls, state.queued_sessions, pair.prefill._held) == (0, 0, {})
    pair.prefill.pass_on([CloseSessionReqInput(session_id="a")])
    pair.enter("c", 3, 60)


def test_a_closed_end_wakes_the_scheduler_no_more() -> None:
    """Regression: to a poller a closed socket is file 0, and after a fault of the gate the idle scheduler span."""
    poller = zmq.Poller()
    prefill, decode = PrefillEnd(HOST, two_free_ports(), poller), DecodeEnd(poller)
    assert decode.send(prefill.address, messages.Ask(1))
    assert decode.send("tcp://127.0.0.1:9", messages.Ask(1))
    assert len(poller.sockets) == 3
    decode.forget("tcp://127.0.0.1:9")
    assert len(poller.sockets) == 2
    decode.close()
    prefill.close()
    assert poller.sockets == []


def test_waiting_calls_are_looked_at_now_and_then(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: decode looked at each of them in every turn of its loop, between two tokens of those that run."""
    looks = []
    monkeypatch.setattr(pair.decode, "_ask_again", looks.append)
    pair.decode.pass_on([pair.call("b", 2)])
    for _ in range(100):
        pair.decode.pass_on([])
        pair.clock.now_s += 0.01
    assert looks == pytest.approx([0.0, 0.5], abs=0.02)


def test_decode_forgets_a_prefill_that_is_gone_and_keeps_one_that_is_idle(pair: Pair) -> None:
    """Regression: each prefill ever named, also one that never was, kept a connection that is tried for ever."""
    pair.enter("a", 1, 10)
    pair.decode.left(SimpleNamespace(rid="d1", output_ids=[1], finished_reason=FINISH_LENGTH(1)))
    gone = pair.call("b", 2)
    gone.bootstrap_port = 9
    pair.decode.pass_on([gone])
    pair.clock.now_s = decode_gate.PATIENCE_S + 1
    assert rids(pair.decode.pass_on([])) == ["d2"]
    here, there = address(HOST, pair.port), address(HOST, 9 + OFFSET)
    assert pair.decode._control.peers == [here, there]
    pair.clock.now_s += 100.0
    pair.decode.pass_on([])
    assert pair.decode._control.peers == [here, there], "a call of it is still inside"
    pair.decode.left(SimpleNamespace(rid="d2", output_ids=[], finished_reason=FINISH_ABORT("no such prefill")))
    pair.clock.now_s += decode_gate.REPORT_RUNNING_S + 1
    pair.decode.pass_on([])
    assert pair.decode._control.peers == list(pair.decode._doors._of) == [here]
    assert pair.decode._silent == set()
    pair.enter("c", 3, 10)
    pair.channel.close()
    pair.prefill.control = None
    pair.clock.now_s += 100.0
    pair.until(lambda p, d: not pair.decode._control.stands(here))
    pair.decode.left(SimpleNamespace(rid="d3", output_ids=[1], finished_reason=FINISH_LENGTH(1)))
    pair.clock.now_s += decode_gate.REPORT_RUNNING_S + 1
    pair.decode.pass_on([])
    assert pair.decode._control.peers == list(pair.decode._doors._of) == []
    assert pair.decode._entered == {}


def test_calls_of_more_prefills_than_there_can_be_pass_unasked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MAX_INSTANCES", 1)
    pair.enter("a", 1, 10)
    one_too_many = pair.call("b", 2)
    one_too_many.bootstrap_port = 9
    assert pair.decode.pass_on([one_too_many]) == [one_too_many]
    pair.decode.left(SimpleNamespace(rid="d2", output_ids=[1], finished_reason=FINISH_LENGTH(1)))
    assert pair.decode._control.peers == [address(HOST, pair.port)]


def test_a_shed_session_frees_both_legs_and_those_before_it_stay(pair: Pair) -> None:
    pair.prefill.door = Door(
        DoorSettings(idle_timeout_s=600, hold_limit_s=300, max_sessions=100),
        law=CurrentContext(),
        budget=Budget(BudgetSettings(fixed_tokens=100), capacity_tokens=1),
        shedding=SheddingSettings(head_wait_s=10.0, arrival_window_s=60.0),
    )
    pair.enter("a", 1, 101)
    for room, session in ((2, "b"), (3, "c")):
        legs = {"prefill": [pair.call(session, room, side="p")], "decode": [pair.call(session, room)]}
        pair.until(lambda p, d, room=room: pair.decode._held[room].unanswered_s is None, **legs)
    pair.clock.now_s = 59.0
    pair.prefill.pass_on([])
    assert pair.answers == {"prefill": [], "decode": []}, "a surge at the start is not the long run"
    pair.clock.now_s = 60.0
    prefill_out, decode_out = pair.until(lambda p, d: all(pair.answers.values()))
    assert pair.answers == {"prefill": [("p3", 503)], "decode": [("d3", 503)]}
    assert (prefill_out, decode_out) == ([DroppedRooms((3,))], [])
    assert pair.prefill.door.state().queued_sessions == 1
    assert (list(pair.prefill._held), list(pair.decode._held)) == (["2"], [2])


def test_sglangs_own_session_is_closed_on_both_sides_when_one_ends_and_not_when_it_is_paused(pair: Pair) -> None:
    pair.prefill._has_radix_session = pair.decode._has_radix_session = lambda session_id: session_id != "opened"

    def closed(requests: list[Any]) -> list[str]:
        return [request.session_id for request in requests if isinstance(request, CloseSessionReqInput)]

    for room, session in ((1, "a"), (2, "opened")):
        legs = {
            "prefill": [pair.call(session, room, side="p", ends=True)],
            "decode": [pair.call(session, room, ends=True)],
        }
        pair.until(lambda p, d: len(p) == len(d) == 1, **legs)
        pair.decode.left(SimpleNamespace(rid=f"d{room}", output_ids=[1], finished_reason=FINISH_LENGTH(1)))
        prefill_out, decode_out = pair.until(lambda p, d: not pair.decode._entered)
        expected = ["a"] if session == "a" else []
        assert (closed(prefill_out), closed(decode_out)) == (expected, expected)
    pair.enter("b", 3, 10)
    pair.prefill.door._sent_back.append("b")
    pair.prefill._changed = True
    prefill_out, decode_out = pair.until(lambda p, d: not pair.decode._entered)
    assert closed(prefill_out + decode_out) == []


def test_a_call_that_fails_on_prefill_leaves_its_prompt_open_although_decode_says_nothing(inferring: Pair) -> None:
    """Regression: where decode was killed its conversation ran on for ever, and further calls were others'."""
    inferring.until(lambda p, d: len(p) == len(d) == 1, **inferring.unnamed(1, [*SYSTEM, 1], starts_agent=False))
    failed = SimpleNamespace(rid="p1", bootstrap_room=1, output_ids=[], finished_reason=FINISH_ABORT("decode is gone"))
    inferring.prefill.left(failed)
    assert inferring.prefill._by_prompt is not None
    assert not inferring.prefill._by_prompt._calls
    assert not inferring.prefill._by_prompt._running


def test_a_recording_on_a_full_disk_costs_its_lines_and_no_decision(pair: Pair) -> None:
    """Regression: the write's error came out of the door, and admission gave up."""
    pair.prefill.door = RecordedDoor(pair.prefill.door, recording("/dev/full"))
    faults = metrics().faults.labels("recording")
    before = faults._value.get()
    pair.enter("a", 1, 101)
    pair.prefill.pass_on([pair.call("b", 2, side="p")])
    assert pair.prefill.door.state().held_calls == 1
    assert faults._value.get() > before


def test_a_recording_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--basin-record /nowhere/door\.jsonl"):
        recording("/nowhere/door.jsonl")


@pytest.mark.parametrize("room", [None, -1, 2**63, 2**70])
def test_a_call_without_a_routers_room_passes_and_cannot_switch_the_gate_off(pair: Pair, room: int | None) -> None:
    pair.enter("a", 1, 101)
    odd = [pair.call("b", 2, side=side) for side in "pd"]
    for request in odd:
        request.bootstrap_room = room
    assert pair.prefill.pass_on([odd[0]]) == [odd[0]]
    assert pair.decode.pass_on([odd[1]]) == [odd[1]]
    pair.clock.now_s = 31  # past the hold limit, were it held
    assert pair.prefill.pass_on([]) == pair.decode.pass_on([]) == []


def test_a_second_call_with_a_held_calls_room_does_not_make_the_first_one_disappear(pair: Pair) -> None:
    pair.enter("a", 1, 101)
    legs = {"prefill": [pair.call("b", 2, side="p")], "decode": [pair.call("b", 2)]}
    pair.until(lambda p, d: pair.prefill._askers != {}, **legs)
    doubles = [pair.call("b", 2, side=side) for side in "pd"]
    assert pair.prefill.pass_on([doubles[0]]) == [doubles[0]]
    assert pair.decode.pass_on([doubles[1]]) == [doubles[1]]
    prefill_out, decode_out = pair.until(
        lambda p, d: len(p) == 2 and len(d) == 1, prefill=[CloseSessionReqInput(session_id="a")]
    )
    assert prefill_out[1] is legs["prefill"][0]
    assert decode_out[0] is legs["decode"][0]


def test_decode_asks_again_once_a_broken_connection_stands_again(pair: Pair) -> None:
    """The door may have been started anew and know nobody, or have ended sessions without decode hearing of it. As long
    as nobody is there to ask, calls of sessions that had entered go on."""
    pair.enter("a", 1, 10)
    pair.channel.close()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        pair.decode.pass_on([])
    assert rids(pair.decode.pass_on([pair.call("a", 2)])) == ["d2"]

    pair.prefill.control = PrefillEnd(HOST, pair.port)
    pair.until(lambda p, d: not pair.decode._entered)
    assert pair.decode.pass_on([pair.call("a", 3)]) == []
    pair.until(lambda p, d: rids(d) == ["d3"], prefill=[pair.call("a", 3, side="p")])


# ---- Data-parallel ranks -------------------------------------------------------------------------------------------


class Ranks(Pair):
    """The same with two data-parallel ranks on prefill; `prefill` is the first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prefill._rank = Rank(0, 2)
        self.second = self.start_second()

    def start_second(self) -> PrefillGate:
        channel = PrefillEnd(HOST, self.port + 1)
        door = small_door()
        by_prompt = PromptSessions(100, door.runs) if self.prefill._by_prompt is not None else None
        answer = self._answer("prefill")
        return PrefillGate(door, channel, answer, by_prompt=by_prompt, rank=Rank(1, 2), clock=self.clock)

    def until_ranks(
        self, done: Callable[[list[Any], list[Any]], bool], *, on: int, prefill: list[Any], decode: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """As `until`, with prefill's legs on one rank; its outputs are both ranks'."""
        second = list(prefill) if on == 1 else []
        turn = self.prefill.pass_on

        def both(requests: list[Any]) -> list[Any]:
            passed = turn(requests) + self.second.pass_on(second[:])
            second.clear()
            return passed

        self.prefill.pass_on = both  # type: ignore[method-assign]
        try:
            return self.until(done, prefill=[] if on == 1 else prefill, decode=decode)
        finally:
            self.prefill.pass_on = turn  # type: ignore[method-assign]

    def enter_on(self, rank: int, session: str | None, room: int, tokens: int = 10, **options: Any) -> Any:
        """A call whose prefill leg is on this rank goes on; returns decode's leg."""
        legs = {
            "prefill": [self.call(session, room, tokens, side="p", **options)],
            "decode": [self.call(session, room, tokens, **options)],
        }
        prefill_out, decode_out = self.until_ranks(lambda p, d: len(p) == len(d) == 1, on=rank, **legs)
        assert (rids(prefill_out), rids(decode_out)) == ([f"p{room}"], [f"d{room}"])
        return decode_out[0]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(prefill_infers=True, decode_asks=True)
    yield ranks
    ranks.prefill.let_go()
    ranks.second.let_go()
    ranks.decode.let_go()


def test_the_rank_that_has_a_call_answers_and_decode_knows_it_from_then_on(ranks: Ranks) -> None:
    assert ranks.enter_on(1, "a", 1).disagg_prefill_dp_rank == 1
    assert ranks.enter_on(0, "b", 2).disagg_prefill_dp_rank == 0
    assert ranks.enter_on(1, "c", 3).disagg_prefill_dp_rank == 1
    for session, rank in (("a", 1), ("b", 0), ("c", 1)):
        (request,) = ranks.decode.pass_on([ranks.call(session, 4 + rank)])
        assert request.disagg_prefill_dp_rank == rank
    assert (ranks.prefill.door.state().live_sessions, ranks.second.door.state().live_sessions) == (1, 2)


def test_each_rank_has_a_budget_of_its_own_and_refuses_by_itself(ranks: Ranks) -> None:
    ranks.enter_on(1, "a", 1, 101)
    waiting = {"prefill": [ranks.call("b", 2, side="p")], "decode": [ranks.call("b", 2)]}
    ranks.until_ranks(lambda p, d: ranks.decode._held[2].unanswered_s is None, on=1, **waiting)
    ranks.enter_on(0, "c", 3)
    ranks.clock.now_s = 31.0
    ranks.until_ranks(lambda p, d: all(ranks.answers.values()), on=0, prefill=[], decode=[])
    assert ranks.answers == {"prefill": [("p2", 503)], "decode": [("d2", 503)]}


def test_only_the_rank_that_let_a_session_in_ends_it(ranks: Ranks) -> None:
    ranks.enter_on(1, "a", 1)
    ranks.enter_on(0, "b", 2)
    ends = [CloseSessionReqInput(session_id="a")]
    ranks.until_ranks(lambda p, d: len(ranks.decode._entered) == 1, on=1, prefill=ends, decode=[])
    assert [session for _, session in ranks.decode._entered] == ["b"]
    ranks.decode._hear(ranks.second.control.address, messages.Ended(["b"]), 0.0)  # type: ignore[union-attr]
    assert [session for _, session in ranks.decode._entered] == ["b"]


def test_the_end_of_a_call_reaches_its_ranks_door(ranks: Ranks) -> None:
    ranks.enter_on(1, "a", 1, ends=True)
    ranks.decode.left(SimpleNamespace(rid="d1", output_ids=[1, 2, 3], finished_reason=FINISH_LENGTH(3)))
    state = ranks.second.door.state
    ranks.until_ranks(lambda p, d: state().live_sessions == 0, on=0, prefill=[], decode=[])


def test_inferred_sessions_of_two_ranks_are_told_apart(ranks: Ranks) -> None:
    for rank, room, start in ((0, 1, 100), (1, 2, 300)):
        prompt = list(range(start, start + 60))
        call = ranks.enter_on(rank, None, room, prompt=prompt, starts_agent=True)
        assert call.disagg_prefill_dp_rank == rank
    assert len(ranks.decode._entered) == 2
    further = ranks.call(None, 3, prompt=list(range(300, 380)), starts_agent=True)
    assert [request.disagg_prefill_dp_rank for request in ranks.decode.pass_on([further])] == [1]


def test_a_rank_that_the_router_names_is_asked_alone(ranks: Ranks) -> None:
    ranks.enter_on(0, "a", 1)
    call = ranks.call("a", 2)
    call.disagg_prefill_dp_rank = 1
    leg = [ranks.call("a", 2, side="p")]
    _, decode_out = ranks.until_ranks(lambda p, d: p and d, on=1, prefill=leg, decode=[call])  # type: ignore[arg-type, return-value]
    assert [request.disagg_prefill_dp_rank for request in decode_out] == [1]


def test_a_named_rank_that_does_not_exist_opens_no_connection(ranks: Ranks) -> None:
    ranks.enter_on(0, "a", 1)
    call = ranks.call("b", 2)
    call.disagg_prefill_dp_rank = 40_000
    ranks.decode.pass_on([call])
    assert len(ranks.decode._control.peers) == 2


def test_without_an_answer_sglang_finds_the_rank(ranks: Ranks) -> None:
    ranks.enter_on(0, "a", 1)
    ranks.decode.pass_on([ranks.call("b", 2)])
    ranks.clock.now_s = decode_gate.PATIENCE_S + 1
    (request,) = ranks.decode.pass_on([])
    assert (request.rid, request.disagg_prefill_dp_rank) == ("d2", None)
    ranks.decode.left(SimpleNamespace(rid="d2", output_ids=[1], finished_reason=FINISH_LENGTH(1)))


def test_a_prefill_that_comes_back_with_one_rank_is_known_anew(ranks: Ranks) -> None:
    ranks.enter_on(1, "a", 1)
    ranks.enter_on(0, "b", 2)
    for gate_ in (ranks.prefill, ranks.second):
        assert gate_.control is not None
        gate_.control.close()
    ranks.prefill.control = PrefillEnd(HOST, ranks.port)
    ranks.prefill._rank = Rank()
    ranks.until(lambda p, d: not ranks.decode._entered)
    legs = {"prefill": [ranks.call("a", 3, side="p")], "decode": [ranks.call("a", 3)]}
    _, decode_out = ranks.until(lambda p, d: len(p) == len(d) == 1, **legs)
    assert decode_out[0].disagg_prefill_dp_rank is None
    ranks.second.control = None


# ---- Calls that name no session ------------------------------------------------------------------------------------

SYSTEM = list(range(500, 560))
"""A system prompt that the sessions below have in common."""


@pytest.fixture
def inferring() -> Iterator[Pair]:
    pair = Pair(prefill_infers=True, decode_asks=True)
    yield pair
    pair.prefill.let_go()
    pair.decode.let_go()


def live(pair: Pair) -> tuple[int, int]:
    """Sessions that have entered, and the total of their contexts."""
    state = pair.prefill.door.state()
    return state.live_sessions, state.working_set_tokens


def test_an_unnamed_conversation_is_one_session(inferring: Pair) -> None:
    inferring.pass_unnamed(1, [*SYSTEM, 1])
    assert live(inferring) == (1, 64)
    inferring.pass_unnamed(2, [*SYSTEM, 1, 2, 3, 4])
    assert live(inferring) == (1, 67)


def test_unnamed_sessions_with_one_system_prompt_are_several(inferring: Pair) -> None:
    inferring.pass_unnamed(1, [*SYSTEM[:32], 1])
    inferring.pass_unnamed(2, [*SYSTEM[:32], 2])
    inferring.pass_unnamed(3, [*SYSTEM[:32], 1, 7])
    assert live(inferring) == (2, 36 + 37)


def test_decode_knows_an_unnamed_session_again_until_prefill_ends_it(inferring: Pair) -> None:
    inferring.pass_unnamed(1, [*SYSTEM, 1])
    assert rids(inferring.decode.pass_on([inferring.call(None, 2, prompt=[*SYSTEM, 1, 7])])) == ["d2"]
    inferring.until(
        lambda p, d: len(p) == 1, prefill=[inferring.call(None, 2, side="p", prompt=[*SYSTEM, 1, 7], starts_agent=True)]
    )
    inferring.leave(2, FINISH_LENGTH(3))
    (name,) = [session.session_id for session in inferring.prefill.door.sessions()]
    ending = CloseSessionReqInput(session_id=name)
    inferring.until(lambda p, d: not inferring.decode._entered, prefill=[ending])
    assert inferring.decode.pass_on([inferring.call(None, 3, prompt=[*SYSTEM, 1, 7, 8])]) == []
    inferring.until(
        lambda p, d: len(p) == len(d) == 1, prefill=[inferring.call(None, 3, side="p", prompt=[*SYSTEM, 1, 7, 8])]
    )


def test_single_calls_count_for_nothing_until_a_second_one_follows(inferring: Pair) -> None:
    for room in range(1, 5):
        inferring.pass_unnamed(room, [*SYSTEM, room], starts_agent=False)
    assert live(inferring) == (0, 0)
    inferring.pass_unnamed(5, [*SYSTEM, 2, 7, 7], starts_agent=False)
    assert live(inferring) == (1, 66)


def test_single_calls_pass_a_full_door_and_the_second_one_waits(inferring: Pair) -> None:
    inferring.pass_unnamed(1, [*SYSTEM, 1], starts_agent=False)
    inferring.enter("a", 2, 101)
    inferring.pass_unnamed(3, [*SYSTEM, 3], starts_agent=False)
    second = inferring.unnamed(4, [*SYSTEM, 1, 7], starts_agent=False)
    prefill_out, decode_out = inferring.until(lambda p, d: inferring.prefill._askers != {}, **second)
    assert prefill_out == decode_out == []


def test_single_calls_side_by_side_with_the_same_prompt_are_told_apart(inferring: Pair) -> None:
    for room in (1, 2):
        legs = inferring.unnamed(room, [*SYSTEM, 1], starts_agent=False)
        inferring.until(lambda p, d: len(p) == len(d) == 1, **legs)
    for room in (1, 2):
        inferring.leave(room, FINISH_LENGTH(3))
    for room in (3, 4):
        inferring.until(lambda p, d: len(p) == len(d) == 1, **inferring.unnamed(room, [*SYSTEM, 1, room]))
    assert live(inferring)[0] == 2


def test_an_unnamed_session_waits_at_the_door_like_any_other(inferring: Pair) -> None:
    inferring.enter("a", 1, 101)
    prefill_out, decode_out = inferring.until(
        lambda p, d: inferring.prefill._askers != {}, **inferring.unnamed(2, [*SYSTEM, 1])
    )
    assert prefill_out == decode_out == []
    ending = CloseSessionReqInput(session_id="a")
    prefill_out, decode_out = inferring.until(lambda p, d: len(p) == 2 and len(d) == 1, prefill=[ending])
    assert (rids(prefill_out[1:]), rids(decode_out)) == (["p2"], ["d2"])
    assert live(inferring) == (1, 61)


def test_an_unnamed_first_call_tried_again_finds_its_place_in_the_queue(inferring: Pair) -> None:
    inferring.prefill.door.settings = dataclasses.replace(inferring.prefill.door.settings, ticket_grace_s=60.0)
    inferring.enter("a", 1, 101)
    for room, prompt in ((2, [*SYSTEM, 1]), (3, [*SYSTEM, 2])):
        inferring.until(lambda p, d, n=room - 1: len(inferring.prefill._askers) == n, **inferring.unnamed(room, prompt))
    leaves = {"prefill": [AbortReq(rid="p2")], "decode": [AbortReq(rid="d2")]}
    inferring.until(lambda p, d: len(inferring.prefill._held) == 1, **leaves)
    inferring.until(lambda p, d: len(inferring.prefill._held) == 2, **inferring.unnamed(4, [*SYSTEM, 1]))
    assert inferring.prefill.door.state().queued_sessions == 2
    ending = CloseSessionReqInput(session_id="a")
    _, decode_out = inferring.until(lambda p, d: d, prefill=[ending])
    assert rids(decode_out) == ["d4"]  # before room 3, which came while the client was away


def test_an_aborted_answer_leaves_the_prompt_open_for_another_try(inferring: Pair) -> None:
    inferring.until(lambda p, d: len(p) == len(d) == 1, **inferring.unnamed(1, SYSTEM[:40]))
    inferring.leave(1, FINISH_ABORT("the client left"))
    inferring.pass_unnamed(2, SYSTEM[:40])
    assert live(inferring)[0] == 1
    inferring.pass_unnamed(3, SYSTEM[:40])  # answered by now: a twin
    assert live(inferring)[0] == 2


@pytest.mark.parametrize("prefill_infers", [True, False])
@pytest.mark.parametrize("decode_first", [True, False])
def test_an_unnamed_call_without_a_session_passes_on_both_sides(prefill_infers: bool, decode_first: bool) -> None:
    """One too short to tell passes without a question. Should the two sides be configured differently, prefill answers,
    be its own leg still to come or gone on already."""
    pair = Pair(prefill_infers=prefill_infers, decode_asks=True)
    try:
        legs = pair.unnamed(1, SYSTEM[:20] if prefill_infers else SYSTEM)
        first, second = ("decode", "prefill") if decode_first else ("prefill", "decode")
        before = pair.until(lambda p, d: True, **{first: legs[first]})
        after = pair.until(lambda p, d: len(before[0] + p) == len(before[1] + d) == 1, **{second: legs[second]})
        assert (rids(before[0] + after[0]), rids(before[1] + after[1])) == (["p1"], ["d1"])
        assert live(pair) == (0, 0)
    finally:
        pair.prefill.let_go()
        pair.decode.let_go()


def test_a_prompt_that_cannot_be_fingerprinted_passes_and_is_counted(inferring: Pair) -> None:
    before = metrics().faults.labels("inference")._value.get()
    odd = inferring.call(None, 1, side="p")
    odd.input_ids = ["not", "tokens"] * 40
    assert rids(inferring.prefill.pass_on([odd])) == ["p1"]
    assert metrics().faults.labels("inference")._value.get() == before + 1


def test_what_decode_can_lend_reaches_the_budget_and_leaves_it_when_decode_falls_silent(pair: Pair) -> None:
    """The budget is derived here, so that capacity moves it: both ways, and back when nobody lends any more."""
    door = pair.prefill.door
    door.budget = Budget(BudgetSettings(), capacity_tokens=1)  # type: ignore[union-attr]
    lendable = [5_000]
    pair.decode._lendable = lambda: lendable[0]
    pair.prefill._watch = SimpleNamespace(  # type: ignore[assignment]
        view=lambda now_s, lent_tokens, read_tokens_per_s: EngineView(
            cache_tokens=1_000, lent_tokens=lent_tokens, read_tokens_per_s=read_tokens_per_s
        ),
        prefilled=lambda request, now_s: None,
    )

    def budget_becomes(tokens: int) -> None:
        def turned(prefill_out: list[Any], decode_out: list[Any]) -> bool:
            pair.clock.now_s += 0.5
            return door.budget.tokens == tokens

        pair.until(turned)

    pair.enter("s", 1, 10)
    budget_becomes(6_000)
    door._pauses.note(2.0)  # type: ignore[union-attr]
    reads_per_s = [300.0]
    pair.prefill._read_tokens_per_s = lambda: reads_per_s[0]
    budget_becomes(1_600)  # what comes back while a session pauses
    reads_per_s[0] = 1e6
    budget_becomes(6_000)
    lendable[0] = 200
    budget_becomes(1_200)
    pair.decode._lendable = None
    budget_becomes(1_000)


def test_the_decision_log_names_a_session_by_its_prompt_when_it_waits_and_when_it_enters(
    inferring: Pair, tmp_path: Path
) -> None:
    inferring.prefill._decision_log = DecisionLog(tmp_path / "log")
    inferring.enter("a", 1, 101)
    inferring.until(lambda p, d: len(inferring.prefill._held) == 1, **inferring.unnamed(2, SYSTEM))
    inferring.until(lambda p, d: len(p) == 2 and len(d) == 1, prefill=[CloseSessionReqInput(session_id="a")])
    inferring.prefill._decision_log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()[1:]]
    assert [(line["call"], line["decision"]) for line in lines] == [("1", "admit"), ("2", "queue"), ("2", "admit")]
    assert lines[1]["session"] == lines[2]["session"] != lines[0]["session"]
    assert lines[1]["session"] is not None


def test_a_predictors_failures_are_faults_counted_once(pair: Pair) -> None:
    predictor = DeployedPredictor(SeenPredictor())
    pair.prefill._predictor = predictor
    before = metrics().faults.labels("predictor")._value.get()
    predictor.counts.failures += 3
    for now_s in (10.0, 20.0):
        pair.clock.now_s = now_s
        pair.prefill.pass_on([])
    assert metrics().faults.labels("predictor")._value.get() == before + 3
