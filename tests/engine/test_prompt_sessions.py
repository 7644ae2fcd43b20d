"""Names for unnamed calls: what is kept of single calls is bounded and goes with them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from sglang_basin.engine.identity import INFERRED_PREFIX, Stamp
from sglang_basin.engine.prompt_sessions import PromptSessions

AGENT, SINGLE = Stamp(starts_agent=True), Stamp()


def request(*token_ids: int) -> SimpleNamespace:
    return SimpleNamespace(input_ids=array("q", [*range(100), *token_ids]))


def test_names_cannot_be_a_clients_and_differ_between_processes() -> None:
    names = {PromptSessions(10, lambda name: False).session_of("1", request(), AGENT) for _ in range(20)}
    assert len(names) == 20
    assert all(name is not None and name.startswith(INFERRED_PREFIX) for name in names)


def test_single_calls_are_forgotten_when_they_leave_and_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_basin.engine.prompt_sessions.MAX_CALLS", 3)
    sessions = PromptSessions(10, lambda name: False)
    for call in range(6):
        assert sessions.session_of(str(call), request(call % 2), SINGLE) is None
    assert list(sessions._calls) == ["3", "4", "5"]
    assert sum(sessions._running.values()) == 3
    for call in range(6):
        sessions.left(str(call), None, answered=True)
    assert not sessions._calls
    assert not sessions._running


def test_a_call_that_is_over_twice_or_was_never_seen_changes_nothing() -> None:
    sessions = PromptSessions(10, lambda name: False)
    name = sessions.session_of("1", request(1), AGENT)
    for call in ("1", "1", "never seen"):
        sessions.left(call, None, answered=False)
    assert sessions.session_of("2", request(1), AGENT) == name  # not answered: tried again
    sessions.left("2", name, answered=True)
    assert sessions.session_of("3", request(1), AGENT) != name


def test_without_a_door_calls_are_tracked_until_they_leave() -> None:
    sessions = PromptSessions(10)
    first = sessions.session_of("1", request(1), AGENT)
    twin = sessions.session_of("2", request(1), AGENT)
    assert first != twin
    sessions.left("1", None, answered=False)
    assert sessions.session_of("3", request(1), AGENT) == first
    for call in ("2", "3"):
        sessions.left(call, None, answered=True)
    assert not sessions._calls
    assert not sessions._running


def test_a_prompt_that_is_no_token_ids_has_no_session() -> None:
    sessions = PromptSessions(10, lambda name: False)
    assert sessions.session_of("1", SimpleNamespace(input_ids=None), AGENT) is None
