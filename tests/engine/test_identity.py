"""Who is a session: the order of sources, and what malformed names and hostile bodies come to."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.config import ENVIRONMENT_VARIABLE, BasinConfig
from sglang_basin.engine import identity
from sglang_basin.engine.identity import (
    ACTION_TYPE,
    INFERRED_PREFIX,
    MAX_NAME_CHARACTERS,
    NO_STAMP,
    Claim,
    Stamp,
    claim,
    read_fields,
    stamp_of,
    stamp_request,
)
from sglang_basin.predictor.model_file import default_model_path, load_text_score
from sglang_basin.predictor.payload import task_payload
from sglang_basin.wire import PARENT_HEADERS, SESSION_HEADERS


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "input_ids": list(range(50)), **fields}).encode()


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_each_header_names_the_session(header: str) -> None:
    assert claim({header: "s1"}, b"{}") == Claim("s1", header, False)


def test_the_explicit_header_beats_the_body_which_beats_clients_headers() -> None:
    sent = body(session_id="from-body")
    assert claim({"x-basin-session-id": "mine", "x-session-id": "theirs"}, sent).session_id == "mine"
    assert claim({"x-session-id": "theirs"}, sent) == Claim("from-body", "body.session_id", False)
    assert claim({"x-session-id": "theirs"}, body(prompt_cache_key="key")).session_id == "theirs"


def test_the_engines_own_field_counts_as_the_bodys() -> None:
    assert claim({}, b"", session_id="s") == Claim("s", "body.session_id", False)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_0a1b_account__session_550e8400-e29b-41d4-a716-446655440000", "550e8400-e29b-41d4-a716-446655440000"),
        ('{"device_id": "d", "session_id": "550e8400-e29b"}', "550e8400-e29b"),
        ("somebody@example.org", None),
        ("{not json", None),
        (17, None),
    ],
)
def test_anthropics_metadata_names_a_session_only_by_its_session_part(user_id: object, session: str | None) -> None:
    found = claim({}, body(metadata={"user_id": user_id}))
    assert (found.session_id if found else None) == session


def test_the_plain_user_field_never_names_a_session() -> None:
    assert claim({}, body(user="alice")) is None


def test_the_routing_key_comes_last() -> None:
    assert claim({}, body(prompt_cache_key="key"), routing_key="route").session_id == "key"
    assert claim({}, body(), routing_key="route") == Claim("route", "routing_key", False)


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-basin-session-end": "true"}, {}),
        ({"x-dynamo-session-final": "1"}, {}),
        ({}, {"metadata": {"basin_session_end": "true"}}),
        ({}, {"metadata": {"basin_session_end": True}}),
        ({}, {"basin_session_end": "true"}),
        ({}, {"basin_session_end": True}),
    ],
)
def test_the_last_call_can_be_announced(headers: dict, fields: dict) -> None:
    assert claim(headers, body(session_id="s", **fields)).ends_session
    assert not claim(headers={}, body=body(session_id="s", basin_session_end="no")).ends_session
    assert not claim({}, body(session_id="s", metadata={"basin_session_end": "no"})).ends_session


@pytest.mark.parametrize(
    "name",
    [
        *("", "x" * (MAX_NAME_CHARACTERS + 1), "a\nb", "a\x00b", 17, ["s"], {"id": "s"}, f"{INFERRED_PREFIX}1"),
        pytest.param("x" * 10_000_000, id="ten megabytes"),
        json.loads("[" * 300 + "]" * 300),
    ],
)
def test_a_malformed_name_is_reported_and_the_next_source_is_taken(name: object) -> None:
    reported: list[str] = []
    found = claim({"x-session-id": "good"}, body(session_id=name), on_malformed=reported.append)
    assert found == Claim("good", "x-session-id", False)
    assert reported == ["body.session_id"]


@given(st.binary(max_size=300))
def test_no_body_whatever_raises(junk: bytes) -> None:
    assert claim({"x-basin-session-id": "s"}, junk).session_id == "s"


def test_a_deeply_nested_value_is_malformed_and_no_more() -> None:
    reported: list[str] = []
    sent = b'{"session_id": ' + b"[" * 900 + b"]" * 900 + b', "prompt_cache_key": "key"}'
    assert claim({}, sent, on_malformed=reported.append) == Claim("key", "body.prompt_cache_key", False)
    assert reported == ["body.session_id"]


def test_a_deeply_nested_body_is_reported_not_followed() -> None:
    reported: list[str] = []
    assert claim({}, b'{"metadata":' * 100_000, on_malformed=reported.append) is None
    assert reported == ["body"]


# ---- Sub-agents ----------------------------------------------------------------------------------------------------

CLAUDE = {"x-claude-code-session-id": "s"}


def test_claude_codes_sub_agents_are_sessions_of_their_own() -> None:
    agent = {**CLAUDE, "x-claude-code-agent-id": "a1"}
    assert claim(CLAUDE, b"{}") == Claim("s", "x-claude-code-session-id", False)
    assert claim(agent, b"{}") == Claim("s/a1", "x-claude-code-agent-id", False, "s")
    nested = {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
    assert claim(nested, b"{}") == Claim("s/a2", "x-claude-code-agent-id", False, "s/a1")


def test_a_sub_agent_is_known_where_only_the_body_names_its_session() -> None:
    sent = body(metadata={"user_id": json.dumps({"session_id": "s"})})
    assert claim({"x-claude-code-agent-id": "a1"}, sent) == Claim("s/a1", "x-claude-code-agent-id", False, "s")


def test_a_malformed_agent_leaves_the_call_to_its_session() -> None:
    reported: list[str] = []
    found = claim({**CLAUDE, "x-claude-code-agent-id": "a" * 300}, b"", on_malformed=reported.append)
    assert found == Claim("s", "x-claude-code-session-id", False)
    assert reported == ["x-claude-code-agent-id"]


def test_codexs_threads_are_sessions_not_the_tree_they_belong_to() -> None:
    tree = {"session-id": "tree", "x-codex-parent-thread-id": "root"}
    assert claim({**tree, "thread-id": "child"}, b"") == Claim("child", "thread-id", False, "root")
    assert claim({"session-id": "tree", "thread-id": "tree"}, b"") == Claim("tree", "thread-id", False)
    in_body = body(prompt_cache_key="tree", client_metadata={"session_id": "tree", "thread_id": "child"})
    assert claim({}, in_body) == Claim("child", "body.client_metadata.thread_id", False)


@pytest.mark.parametrize(("header", "parent"), PARENT_HEADERS.items())
def test_a_parent_is_named_beside_the_child(header: str, parent: str) -> None:
    assert claim({header: "child", parent: "above"}, b"").parent_id == "above"
    assert claim({header: "self", parent: "self"}, b"").parent_id is None
    reported: list[str] = []
    assert claim({header: "child", parent: "a\x00"}, b"", on_malformed=reported.append).parent_id is None
    assert reported == ["parent"]


def test_a_parent_can_be_named_in_the_body() -> None:
    assert claim({}, body(session_id="child", metadata={"basin_parent_session_id": "above"})).parent_id == "above"


# ---- What travels to the scheduler ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "offered"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({"tools": None}, False),
        ({"tools": "yes"}, False),
        ({}, False),
    ],
)
def test_whether_tools_are_offered(sent: dict[str, Any], offered: bool) -> None:
    assert read_fields(body(**sent)).offers_tools() is offered
    assert read_fields(json.dumps(sent, indent=2).encode()).offers_tools() is offered


TOOLS = [{"type": "function", "function": {"name": "f"}}]
ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "r"}]


@pytest.mark.parametrize(
    ("sent", "starts"),
    [
        ({"messages": ASKED, "tools": TOOLS}, True),
        ({"messages": ASKED, "tools": TOOLS, "tool_choice": "auto"}, True),
        ({"messages": ASKED, "tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, True),
        ({"input": "q", "tools": TOOLS}, True),
        ({"input": [{"type": "message", "role": "user", "content": "q"}], "tools": TOOLS}, True),
        ({"messages": CALLED, "tools": TOOLS}, False),
        ({"input": [{"role": "user", "content": "q"}, {"type": "function_call", "name": "f"}], "tools": TOOLS}, False),
        ({"input": "q", "tools": TOOLS, "previous_response_id": "r1"}, False),
        ({"messages": ASKED, "tools": TOOLS, "tool_choice": "required"}, False),
        ({"messages": ASKED, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"messages": ASKED, "tools": TOOLS, "n": 1}, True),
        ({"messages": ASKED, "tools": TOOLS, "n": 4}, False),
        ({"messages": ASKED}, False),
        ({"messages": ASKED, "tools": []}, False),
        ({"messages": {"odd": 1}, "tools": TOOLS}, True),
        ({"messages": ["odd"], "tools": TOOLS}, True),
        ({"input_ids": [1, 2]}, False),
    ],
)
def test_what_looks_like_an_agents_first_call(sent: dict[str, Any], starts: bool) -> None:
    assert read_fields(json.dumps(sent).encode()).starts_agent() is starts


MANAGER = SimpleNamespace(disaggregation_mode=SimpleNamespace(value="prefill"))


def through_the_http_process(sent: bytes, *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """What the tokenizer's object carries once `stamp_request` has seen it."""
    request = SimpleNamespace(headers=headers or {}, _body=sent)
    obj = SimpleNamespace(**{"session_id": None, "routing_key": None, "input_ids": [1, 2], "kv_hints": None, **fields})
    return stamp_request(lambda self, obj, request: obj, MANAGER, obj, request)


def action(action_type: str = ACTION_TYPE, **payload: Any) -> dict[str, Any]:
    return {"action_id": "1", "action_type": action_type, "action_version": "1", "payload": payload}


def hints(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)}


def test_a_stamp_arrives_as_it_was_made() -> None:
    headers = {**CLAUDE, "x-claude-code-agent-id": "a1", "x-basin-session-end": "1"}
    obj = through_the_http_process(body(tools=[{"name": "f"}]), headers=headers)
    assert stamp_of(obj) == Stamp("s/a1", "s", ends_session=True, tools=True)


@pytest.mark.parametrize(
    ("mode", "predictor", "expected"),
    [("prefill", "trained", True), ("null", "trained", True), ("decode", "trained", False), ("prefill", "seen", False)],
)
def test_the_task_travels_to_where_a_predictor_reads_it(
    monkeypatch: pytest.MonkeyPatch, mode: str, predictor: str, expected: bool
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, BasinConfig(predictor=predictor).to_json())
    monkeypatch.setattr(MANAGER, "disaggregation_mode", SimpleNamespace(value=mode))
    identity._wanted.cache_clear()
    sent = body(messages=[{"role": "user", "content": "Mend the parser so that it reads dates."}])
    task = stamp_of(through_the_http_process(sent)).task
    identity._wanted.cache_clear()
    text_score = load_text_score(default_model_path())
    assert task == (task_payload(sent, text_score=text_score) if expected else None)


def test_a_session_log_wants_the_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MANAGER, "disaggregation_mode", SimpleNamespace(value="prefill"))
    sent = body(messages=[{"role": "user", "content": "Mend the parser so that it reads dates."}])
    for predictor, parts in (("trained", {"score", "terms"}), ("seen", {"terms"})):
        config = BasinConfig(predictor=predictor, session_log="log")
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, config.to_json())
        identity._wanted.cache_clear()
        task = stamp_of(through_the_http_process(sent)).task
        assert task is not None
        assert task.keys() & {"score", "terms"} == parts
    identity._wanted.cache_clear()


def test_a_model_that_cannot_be_read_costs_its_score_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MANAGER, "disaggregation_mode", SimpleNamespace(value="prefill"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, BasinConfig(predictor="missing.npz").to_json())
    identity._wanted.cache_clear()
    sent = body(messages=[{"role": "user", "content": "Mend the parser so that it reads dates."}])
    task = stamp_of(through_the_http_process(sent)).task
    identity._wanted.cache_clear()
    assert task == task_payload(sent)


def test_a_call_without_a_name_is_stamped_too() -> None:
    assert stamp_of(through_the_http_process(body(tools=[{"name": "f"}]))) == Stamp(tools=True, starts_agent=True)
    last = through_the_http_process(body(metadata={"basin_session_end": "true"}))
    assert stamp_of(last) == Stamp(ends_session=True)


@pytest.mark.parametrize("named", [True, False])
def test_a_stamp_that_the_client_made_is_dropped_and_its_other_hints_stay(named: bool) -> None:
    forged, other = action(session_id="victim", ends_session=True), action("pin", ttl_s=5)
    obj = through_the_http_process(body(session_id="s") if named else body(), kv_hints=hints(forged, other, forged))
    assert stamp_of(obj).session_id == ("s" if named else None)
    assert not stamp_of(obj).ends_session
    assert [(kept.action_type, kept.payload) for kept in obj.kv_hints.actions if kept.action_type != ACTION_TYPE] == [
        ("pin", {"ttl_s": 5})
    ]


def test_forged_stamps_of_a_batch_are_dropped_prompt_by_prompt() -> None:
    batch = [hints(action(session_id="victim")), None, hints(action("pin"))]
    obj = through_the_http_process(body(session_id="s"), kv_hints=batch, input_ids=[[1], [2], [3]])
    assert [stamp_of(SimpleNamespace(kv_hints=one)).session_id for one in obj.kv_hints] == ["s", "s", "s"]


def test_a_forged_stamp_is_dropped_when_the_request_cannot_be_read() -> None:
    class Broken:
        @property
        def headers(self) -> dict[str, str]:
            raise RuntimeError("no headers")

    obj = SimpleNamespace(kv_hints=hints(action(session_id="victim")))
    stamp_request(lambda self, obj, request: obj, MANAGER, obj, Broken())
    assert stamp_of(obj) is NO_STAMP


@pytest.mark.parametrize("malformed", [{"actions": 5}, "text", {"protocol_version": "1"}, 17])
def test_malformed_hints_are_left_for_sglang_to_refuse(malformed: Any) -> None:
    assert through_the_http_process(body(session_id="s"), kv_hints=malformed).kv_hints == malformed


@pytest.mark.parametrize(
    "payload",
    [{"session_id": 5}, {"session_id": ""}, {"session_id": "x" * 300}, {"tail_tokens": -1}, {"tools": "yes"}],
)
def test_a_stamp_that_is_not_well_formed_is_no_stamp(payload: dict[str, Any]) -> None:
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    assert stamp_of(SimpleNamespace(kv_hints=decode_kv_hints_envelope(hints(action(**payload))))) is NO_STAMP


@pytest.mark.parametrize(
    "sent",
    [
        body(messages=[{"role": "user", "content": "text " * 100}] * 20_000, session_id="s"),
        body(session_id="s", metadata={"junk": {str(number): [number] for number in range(500_000)}}),
        body(session_id="s", tools=[{"name": "f", "description": "d" * 1000}] * 9_000),
    ],
    ids=["messages", "metadata", "tools"],
)
def test_a_ten_megabyte_body_is_read(sent: bytes) -> None:
    assert len(sent) > 8_000_000
    assert stamp_of(through_the_http_process(sent)).session_id == "s"
