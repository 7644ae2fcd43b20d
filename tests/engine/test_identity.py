"""Who is a session: the order of sources, and what malformed names and hostile bodies come to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.engine.identity import MAX_NAME_CHARACTERS, Claim, claim
from sglang_basin.wire import SESSION_HEADERS


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
    ("headers", "metadata"),
    [
        ({"x-basin-session-end": "true"}, {}),
        ({"x-dynamo-session-final": "1"}, {}),
        ({}, {"basin_session_end": "true"}),
        ({}, {"basin_session_end": True}),
    ],
)
def test_the_last_call_can_be_announced(headers: dict, metadata: dict) -> None:
    assert claim(headers, body(session_id="s", metadata=metadata)).ends_session
    assert not claim({}, body(session_id="s", metadata={"basin_session_end": "no"})).ends_session


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME_CHARACTERS + 1), "a\nb", "a\x00b", 17, ["s"], {"id": "s"}])
def test_a_malformed_name_is_reported_and_the_next_source_is_taken(name: object) -> None:
    reported: list[str] = []
    found = claim({"x-session-id": "good"}, body(session_id=name), on_malformed=reported.append)
    assert found == Claim("good", "x-session-id", False)
    assert reported == ["body.session_id"]


@given(st.binary(max_size=300))
def test_no_body_whatever_raises(junk: bytes) -> None:
    assert claim({"x-basin-session-id": "s"}, junk).session_id == "s"


def test_a_deeply_nested_body_is_reported_not_followed() -> None:
    reported: list[str] = []
    assert claim({}, b'{"metadata":' * 100_000, on_malformed=reported.append) is None
    assert reported == ["body"]
