"""Which data-parallel rank a call goes to, as chosen by the process that hands calls out, and what SGLang is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from tokenized import tokenized

from sglang_basin.config import BasinConfig
from sglang_basin.engine import ranks
from sglang_basin.engine.identity import Stamp
from sglang_basin.engine.metrics import _gauge, _rank_labels, metrics


def call(stamp: Stamp, prompt: list[int], *, host: str = "127.0.0.1", room: int = 1) -> Any:
    return tokenized(stamp, prompt, host=host, room=room)


SHARED = list(range(100, 300))
"""A system prompt that all sessions below have in common."""


def test_named_and_unnamed_sessions_stay_on_their_ranks() -> None:
    chooses = ranks.CallRanks(BasinConfig())
    first = [chooses.rank_of(call(Stamp(session_id=name), SHARED), (0, 1), 0.0) for name in "abcd"]
    assert first == [0, 1, 0, 1]
    tasks = [[*SHARED, 1000 + task, *range(40)] for task in range(4)]
    unnamed = [chooses.rank_of(call(Stamp(), task), (0, 1), 0.0) for task in tasks]
    assert sorted(unnamed) == [0, 0, 1, 1]  # type: ignore[type-var]
    for turn in range(1, 4):
        tasks = [[*task, *range(50 * turn, 50 * turn + 30)] for task in tasks]
        assert [chooses.rank_of(call(Stamp(), task), (0, 1), float(turn)) for task in tasks] == unnamed
        assert [chooses.rank_of(call(Stamp(session_id=name), SHARED), (0, 1), float(turn)) for name in "abcd"] == first
    assert [chooses.rank_of(call(Stamp(), task), (0, 1), 9.0) for task in tasks] == unnamed, "tried again"


def test_calls_that_belong_to_nobody_are_left_to_sglang() -> None:
    assert ranks.CallRanks(BasinConfig()).rank_of(call(Stamp(), [1, 2, 3]), (0, 1), 0.0) is None
    assert ranks.CallRanks(BasinConfig(infer_sessions="off")).rank_of(call(Stamp(), SHARED), (0, 1), 0.0) is None


CONTROLLER = SimpleNamespace(_active_workers=[0, 1])


@pytest.mark.parametrize(("host", "given", "named"), [("127.0.0.1", None, 0), ("127.0.0.1", 1, 1), ("::1", None, 0)])
def test_the_hook_names_the_rank_unless_somebody_has(
    monkeypatch: pytest.MonkeyPatch, host: str, given: int | None, named: int | None
) -> None:
    chooses = ranks.CallRanks(BasinConfig())
    monkeypatch.setattr(ranks, "_call_ranks", lambda: chooses)
    request = call(Stamp(session_id="a"), SHARED, host=host)
    request.routed_dp_rank = given
    ranks.keep_on_rank(CONTROLLER, request)
    assert request.routed_dp_rank == named


def test_warm_up_calls_and_failures_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    request = call(Stamp(session_id="a"), SHARED, host=FAKE_BOOTSTRAP_HOST)
    ranks.keep_on_rank(CONTROLLER, request)
    assert request.routed_dp_rank is None
    monkeypatch.setattr(ranks, "_call_ranks", lambda: None)
    faults = metrics().faults.labels("ranks")
    before = faults._value.get()
    request = call(Stamp(session_id="a"), SHARED)
    ranks.keep_on_rank(CONTROLLER, request, refresh_load_budget=False)
    assert request.routed_dp_rank is None
    assert faults._value.get() == before + 1


def test_a_replica_registers_its_own_rank_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own code sends what is registered, to a server that does not answer for now."""
    answers, posted = threading.Event(), []

    def post(url: str, json: dict[str, int], timeout: float) -> Any:
        assert answers.wait(10)
        posted.append((url, json))
        return SimpleNamespace(status_code=200)

    monkeypatch.setattr("sglang.srt.disaggregation.common.conn.requests.post", post)
    monkeypatch.setattr(ranks.Rank, "here", classmethod(lambda cls: cls(3, 4)))
    sender = SimpleNamespace(bootstrap_server_url="h:1", bootstrap_room=7, kv_mgr=SimpleNamespace(attn_dp_rank=0))
    original = getattr(
        CommonKVSender._register_prefill_dp_rank, "__wrapped__", CommonKVSender._register_prefill_dp_rank
    )
    ranks.register_rank(original, sender)
    assert posted == []
    answers.set()
    ranks._registrar().submit(lambda: None).result(timeout=10)
    assert posted == [("http://h:1/register_dp_rank", {"bootstrap_room": 7, "dp_rank": 3})]


def test_gauges_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_rank_labels, "dp_rank", "3")
    _gauge("basin_test_of_ranks", "Made by a test.").make().set(7)
    assert REGISTRY.get_sample_value("basin_test_of_ranks", {"dp_rank": "3"}) == 7


def test_files_of_ranks_do_not_collide() -> None:
    assert [ranks.Rank(own, 3).file("d.jsonl") for own in range(3)] == ["d.jsonl", "d.jsonl.dp1", "d.jsonl.dp2"]
