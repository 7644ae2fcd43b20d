"""The decision log: what a line says, and that a disk in trouble costs lines and nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_basin.config import ConfigError
from sglang_basin.engine.decision_log import DecisionLog, hashed
from sglang_basin.engine.metrics import metrics
from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Admit, Queue, Reason, Refuse
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.reservation import CurrentContext

STATE = Door(
    DoorSettings(idle_timeout_s=10, hold_limit_s=10), law=CurrentContext(), budget=Budget(BudgetSettings(), 1_000)
).state()


def lines(path: Path) -> list[dict[str, Any]]:
    first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {"basin_decision_log": 1}
    return rest


def lost(cause: str) -> float:
    return metrics().log_dropped.labels(cause)._value.get()


def test_each_kind_of_decision_is_a_line_with_its_numbers(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", wall_clock=lambda: 1_700_000_000.12345)
    log.note(Admit("11", Reason.FITS, waited_s=3.25), "name", STATE, priority_ms=7, need_tokens=90)
    log.note(Queue("12", Reason.NO_HEADROOM, need_tokens=50, free_tokens=20, ahead=2), "name", STATE, priority_ms=8)
    log.note(Refuse("13", Reason.SHED, waited_s=9.0, retry_after_s=30.0), None, STATE)
    log.close()
    admit, queued, refused = lines(tmp_path / "log")
    assert admit == {
        "time": 1_700_000_000.123,
        "call": "11",
        "session": hashed("name"),
        "decision": "admit",
        "reason": "fits",
        "waited_s": 3.25,
        "priority_ms": 7,
        "need_tokens": 90,
        "free_tokens": 1_000,
        "ahead": None,
        "budget_tokens": 1_000,
        "reserved_tokens": 0,
        "working_set_tokens": 0,
    }
    assert (queued["decision"], queued["need_tokens"], queued["free_tokens"], queued["ahead"]) == ("queue", 50, 20, 2)
    assert (refused["decision"], refused["reason"], refused["session"]) == ("refuse", "shed", None)


def test_a_session_is_named_as_sha256sum_names_it(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    log.note(Admit("1", Reason.FITS), "user-4711@example.org", STATE)
    log.close()
    text = (tmp_path / "log").read_text()
    assert "4711" not in text
    assert '"session":"c13fa4b28faeb8ff"' in text  # printf %s user-4711@example.org | sha256sum | cut -c1-16


def test_it_stays_within_its_bound(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", max_bytes=50_000, kept_files=3)
    for number in range(1_000):
        log.note(Admit(str(number), Reason.LIVE_SESSION), "s", STATE)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 50_000 + 100 for file in files)
    assert lines(files[0])[-1]["call"] == "999"


def test_a_full_disk_costs_the_lines_and_they_are_counted() -> None:
    before = lost("disk")
    log = DecisionLog(Path("/dev/full"))
    for number in range(50):
        log.note(Admit(str(number), Reason.FITS), "s", STATE)
    log.close()
    assert lost("disk") == before + 50


def test_noting_never_waits_for_the_disk_and_more_than_the_queue_holds_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DecisionLog(tmp_path / "log", queued_lines=100)
    monkeypatch.setattr(log._file, "append", lambda data: time.sleep(0.2))  # a disk that hangs for a while
    before = lost("queue")
    start_s = time.perf_counter()
    for number in range(10_000):
        log.note(Admit(str(number), Reason.FITS), "s", STATE)
    took_s = time.perf_counter() - start_s
    log.close()
    assert lost("queue") > before
    assert took_s < 10, "waiting for the disk would have taken 20 s"


@pytest.mark.parametrize("path", ["/nowhere/log", "/"])
def test_a_log_that_cannot_be_opened_is_named_at_the_start(path: str) -> None:
    with pytest.raises(ConfigError, match=f"--basin-decision-log {path}: "):
        DecisionLog(Path(path))
