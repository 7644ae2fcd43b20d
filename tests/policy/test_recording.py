"""A recorded door, told the same again, answers the same: by hypothesis, and for a recording of the real engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.config import BasinConfig
from sglang_basin.engine.door import door_for
from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Reason
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.prediction import PeaksSeen
from sglang_basin.policy.recording import RecordedDoor, replay
from sglang_basin.policy.reservation import law_named
from sglang_basin.predictor.deployed import DeployedPredictor
from sglang_basin.predictor.seen import SeenPredictor

GOLDEN = Path(__file__).parent / "golden" / "engine_surge.jsonl.gz"
RECORDED = BasinConfig(
    admission="partial",
    reserved_growth=0.75,
    budget_tokens=6_000,
    adaptive_band=0.3,
    pausing="on",
    predictor="seen",
    order="size",
    order_tokens_per_s=10.0,
    idle_timeout_s=60.0,
    idle_floor_s=60.0,
    final_grace_s=60.0,
    hold_limit_s=900.0,
    ticket_grace_s=120.0,
    shedding="on",
    shed_wait_s=120.0,
)
"""What its engine ran with: flags, and the defaults of the time."""


def make_door(budget_tokens: int | None, law: str = "partial", **changes: object) -> Door:
    settings_ = {"idle_timeout_s": 20.0, "final_grace_s": 5.0, "hold_limit_s": 15.0, **changes}
    return Door(
        DoorSettings(**settings_),
        law=law_named(law),
        budget=Budget(BudgetSettings(fixed_tokens=budget_tokens, band=0.2), 300),
        predictor=PeaksSeen(),
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["call", "last", "prefilled", "finish", "final", "abandon", "end", "observe"]),
            st.integers(0, 7),
            st.integers(1, 150),
            st.floats(0, 9),
        ),
        max_size=60,
    ),
    st.sampled_from(["current", "partial", "peak", "multiplex"]),
)
@settings(max_examples=100, deadline=None)
def test_any_course_of_events_replays_to_the_same_answers(events: list, law: str) -> None:
    lines: list[str] = []
    door = RecordedDoor(make_door(None, law), lines.append)
    now_s = 0.0
    for number, (what, which, tokens, pause_s) in enumerate(events):
        now_s += pause_s
        call_id = f"c{which}"
        if what in ("call", "last"):
            door.call(f"c{number}", f"s{which}", tokens, now_s, ends_session=what == "last")
        elif what == "end":
            door.end(f"s{which}", now_s)
        elif what == "prefilled":
            door.prefilled(call_id, now_s, cached_tokens=None if tokens % 5 == 0 else tokens)
        elif what in ("finish", "final"):
            door.finish(call_id, tokens, now_s, final=what == "final")
        elif what == "observe":
            door.observe(EngineView(cache_tokens=2 * tokens, hit_rate=tokens / 150), now_s)
        else:
            getattr(door, what)(call_id, now_s)
        door.poll(now_s)
    assert list(replay(lines, make_door(None, law))) == []


def test_a_door_of_other_settings_is_told_apart() -> None:
    lines: list[str] = []
    door = RecordedDoor(make_door(100), lines.append)
    for number in range(5):
        door.call(str(number), f"s{number}", 60, float(number))
        door.poll(float(number))
    first = next(replay(lines, make_door(1000)))
    assert json.loads(first.told)[0] == "call"
    assert (first.recorded[0], first.replayed[0]) == ("Queue", "Admit")


@pytest.mark.parametrize("line", ["", "{}", '["jump", [], null]', '["call", [1], null]', '["poll", "x", null]'])
def test_a_line_of_something_else_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 1: not of a door's recording"):
        list(replay([line], make_door(100)))


def test_the_engines_decisions_come_out_again() -> None:
    """Golden file: a surge on a real PD stack (tests/policy/golden/README.md says how it was made)."""
    with gzip.open(GOLDEN, "rt") as lines:
        recorded = lines.readlines()
    answers = [json.loads(line)[2] for line in recorded if line.startswith('["call"')]
    assert {"Admit", "Queue"} <= {answer[0] for answer in answers}
    assert any(Reason.PAUSED.value in answer for answer in answers)
    door = door_for(RECORDED, 36_000, DeployedPredictor(SeenPredictor()))
    assert isinstance(door, Door)
    assert list(replay(recorded, door)) == []
