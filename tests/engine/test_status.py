"""/basin/status without an engine: bounded and quick to make; one question at a time, none lost, none that hangs."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_basin import status
from sglang_basin.engine import gate, http_app
from sglang_basin.engine.figures import control_figures, door_figures
from sglang_basin.engine.http_app import Reporter
from sglang_basin.engine.metrics import counts, metrics
from sglang_basin.engine.status import report_state, status_of
from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.pausing import PauseSettings
from sglang_basin.policy.prediction import PeaksSeen
from sglang_basin.policy.reservation import CurrentContext, PartialPeak


class Scheduler:
    """Answers questions when told to; counts them."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()

    async def ask(self) -> list[Any]:
        self.asked += 1
        number = self.asked
        await self.may_answer.wait()
        return [{"number": number}]


def numbers(response: Any) -> list[int]:
    assert response.status_code == 200
    return [state["number"] for state in json.loads(response.body)["states"]]


def test_all_who_ask_meanwhile_share_one_question_and_a_fresh_answer_serves_the_next() -> None:
    async def run() -> None:
        scheduler, now_s = Scheduler(), 100.0
        reporter = Reporter(scheduler.ask, clock=lambda: now_s)
        asking = [asyncio.create_task(reporter.respond()) for _ in range(50)]
        await asyncio.sleep(0)
        scheduler.may_answer.set()
        assert {tuple(numbers(answer)) for answer in await asyncio.gather(*asking)} == {(1,)}
        assert numbers(await reporter.respond()) == [1]
        now_s += http_app.FRESH_S + 0.1
        assert numbers(await reporter.respond()) == [2]
        assert scheduler.asked == 2

    asyncio.run(run())


def test_a_silent_scheduler_is_told_of_and_its_late_answer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "ANSWER_WITHIN_S", 0.05)

    async def run() -> None:
        scheduler = Scheduler()
        reporter = Reporter(scheduler.ask)
        for _ in range(3):
            late = await reporter.respond()
            assert late.status_code == 503
            assert "has not answered within 0.05 s" in json.loads(late.body)["error"]["message"]
        assert scheduler.asked == 1, "SGLang's channel takes one question at a time"
        scheduler.may_answer.set()
        assert numbers(await reporter.respond()) == [1]

    asyncio.run(run())


def test_a_client_that_leaves_takes_no_question_with_it() -> None:
    async def run() -> None:
        scheduler = Scheduler()
        reporter = Reporter(scheduler.ask)
        leaving, staying = (asyncio.create_task(reporter.respond()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        scheduler.may_answer.set()
        assert numbers(await staying) == [1]

    asyncio.run(run())


def test_a_report_of_ten_thousand_sessions_is_small() -> None:
    door = Door(
        DoorSettings(idle_timeout_s=10_000, hold_limit_s=10_000, ticket_grace_s=60),
        law=PartialPeak(0.5),
        budget=Budget(BudgetSettings(fixed_tokens=6_000_000), 1),
        predictor=PeaksSeen(),
    )
    for number in range(10_000):
        door.call(f"{number}", f"{number:0>256}", 1_000 + number % 997, now_s=number / 100)
    door.abandon("9999", 100.0)
    figures = door_figures(door, 101.0)
    assert figures.live_sessions + figures.queued_sessions == 10_000
    assert figures.queued_sessions > 1_000
    assert (figures.tickets, len(figures.sessions)) == (1, status.TOP_SESSIONS)
    reserved = [one.reserved_tokens for one in figures.sessions]
    assert reserved == sorted(reserved, reverse=True)
    assert len(msgspec.json.encode(figures)) < status.MAX_BYTES / 10


def test_peers_are_bounded_and_the_silent_ones_come_first() -> None:
    heard_s = {f"peer-{number}": float(number) for number in range(1_000)}
    figures = control_figures("tcp://a:1", {**heard_s, "mute": None}, 3, now_s=1_000.0)
    assert len(figures.peers) == status.MAX_PEERS
    assert [(peer.name, peer.heard_ago_s) for peer in figures.peers[:2]] == [("mute", None), ("peer-0", 1_000.0)]


def test_a_gate_that_cannot_tell_costs_the_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def describe(self, filled: status.Status) -> None:
            raise RuntimeError("injected")

    monkeypatch.setattr(gate, "_here", gate._Attached(Broken(), None))
    before = counts(metrics().faults).get("status", 0)
    state = status_of("prefill")
    assert (state.role, state.gate, state.door) == ("prefill", "on", None)
    assert counts(metrics().faults)["status"] == before + 1


def test_other_questions_get_what_sglang_says() -> None:
    asked = SimpleNamespace(rid=None)
    assert report_state(lambda scheduler, question: (scheduler, question), "scheduler", asked) == ("scheduler", asked)


def test_a_paused_session_is_shown_as_such() -> None:
    door = Door(
        DoorSettings(idle_timeout_s=60, hold_limit_s=30),
        law=CurrentContext(),
        budget=Budget(BudgetSettings(fixed_tokens=100), capacity_tokens=1),
        pausing=PauseSettings(),
    )
    door.call("1", "a", 30, 0.0)
    door.finish("1", 1, 0.0)
    door.call("2", "b", 90, 0.0)
    door.poll(1.0)
    shown = msgspec.json.decode(msgspec.json.encode(door_figures(door, 1.0)), type=status.DoorFigures)
    assert {session.session_id: session.state for session in shown.sessions} == {"a": "paused", "b": "live"}
    assert (shown.live_sessions, shown.paused_sessions) == (1, 1)
