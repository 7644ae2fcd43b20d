"""Who is calling: from headers and body to a session's name, in the HTTP process; and back out of the request later.

The name travels to the scheduler as one action in SGLang's own `kv_hints` envelope, a field of the tokenized request
that components without interest in it ignore. SGLang's `session_id` stays as the client sent it: with the session
radix cache on it means more than identity.

The module imports sglang only where it stamps, so that the rules can be read and tested without an engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_basin.engine.metrics import fault, metrics
from sglang_basin.wire import END_HEADERS, END_METADATA_KEY, SESSION_HEADERS

MAX_NAME_CHARACTERS = 256
MAX_BODY_BYTES = 64 * 2**20
"""A larger body is not searched for a name; headers still are."""

ACTION_TYPE = "basin.session"
ACTION_VERSION = "1"

_ANTHROPIC_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")
_TRUE = frozenset(("1", "true", "yes"))


@dataclass(frozen=True, slots=True)
class Claim:
    """A call's claim to belong to a session: the name, where it came from, and whether it is the last call."""

    session_id: str
    source: str
    ends_session: bool


class _Body(msgspec.Struct):
    """The fields of a request body that can name a session; everything else is skipped unparsed."""

    session_id: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None


_decode_body = msgspec.json.Decoder(_Body).decode


def claim(
    headers: Mapping[str, str],
    body: bytes,
    *,
    session_id: object = None,
    routing_key: object = None,
    on_malformed: Callable[[str], None] = lambda source: None,
) -> Claim | None:
    """Find a call's session in DESIGN's order of explicit sources, or None when nothing names one.

    `session_id` and `routing_key` are SGLang's own fields, already parsed by the endpoint. A malformed name (not a
    string, empty, over 256 characters or with unprintable ones) is reported to `on_malformed` by source and passed
    over: the next source may still do.
    """
    fields = _read_body(body, on_malformed)
    metadata = fields.metadata if isinstance(fields.metadata, dict) else {}
    ends = any(str(headers.get(name, "")).lower() in _TRUE for name in END_HEADERS)
    ends = ends or str(metadata.get(END_METADATA_KEY, "")).lower() in _TRUE

    for source, name in _names(headers, fields, metadata, session_id, routing_key):
        if name is None:
            continue
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable():
            return Claim(name, source, ends)
        on_malformed(source)
    return None


def _names(
    headers: Mapping[str, str], body: _Body, metadata: Mapping[str, Any], session_id: object, routing_key: object
) -> Iterator[tuple[str, object]]:
    yield SESSION_HEADERS[0], headers.get(SESSION_HEADERS[0])
    yield "body.session_id", session_id if session_id is not None else body.session_id
    for header in SESSION_HEADERS[1:]:
        yield header, headers.get(header)
    yield "body.prompt_cache_key", body.prompt_cache_key
    yield "body.metadata.user_id", _anthropic_session(metadata.get("user_id"))
    yield "routing_key", routing_key


def _anthropic_session(user_id: object) -> object:
    """The session part of Anthropic's `metadata.user_id`: its tail `_session_<id>`, or `session_id` of a JSON text.

    None where there is neither: the plain user field never names a session.
    """
    if not isinstance(user_id, str) or len(user_id) > 4096:
        return None
    if found := _ANTHROPIC_SESSION.search(user_id):
        return found.group(1)
    if user_id.startswith("{"):
        try:
            return _decode_body(user_id).session_id
        except msgspec.DecodeError:
            return None
    return None


def _read_body(body: bytes, on_malformed: Callable[[str], None]) -> _Body:
    if not body or len(body) > MAX_BODY_BYTES:
        return _Body()
    try:
        return _decode_body(body)
    except (msgspec.DecodeError, RecursionError):
        on_malformed("body")
        return _Body()


def stamp_request(original: Callable[..., Any], self: Any, obj: Any, request: Any = None) -> Any:
    """Around `TokenizerManager.generate_request`: put the claim into `obj.kv_hints`, then go on as always."""
    try:
        if request is not None and hasattr(obj, "kv_hints"):
            _stamp(obj, request)
    except Exception:  # noqa: BLE001 - identity must never cost a call
        fault("identity", "could not read a call's session; it is served without one")
    return original(self, obj, request)


def _stamp(obj: Any, request: Any) -> None:
    from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope, decode_kv_hints_envelope

    counts = metrics()
    found = claim(
        request.headers,
        getattr(request, "_body", b""),
        session_id=getattr(obj, "session_id", None),
        routing_key=getattr(obj, "routing_key", None),
        on_malformed=lambda source: counts.malformed_identity.labels(source).inc(),
    )
    counts.identity.labels(found.source if found else "none").inc()
    sent = obj.kv_hints
    if found is None and sent is None:
        return
    envelope = None if sent is None else decode_kv_hints_envelope(sent)
    others = [action for action in (envelope.actions if envelope else ()) if action.action_type != ACTION_TYPE]
    if found is not None:
        payload = {"session_id": found.session_id, "ends_session": found.ends_session}
        others.append(
            KvHintAction(action_id="basin", action_type=ACTION_TYPE, action_version=ACTION_VERSION, payload=payload)
        )
    obj.kv_hints = KvHintsEnvelope(
        protocol_version=envelope.protocol_version if envelope else "1",
        message_id=envelope.message_id if envelope else "basin",
        actions=others,
    )


def stamped(request: Any) -> tuple[str, bool] | None:
    """(session id, whether the call ends it) of a tokenized request, or None for a call without identity."""
    hints = request.kv_hints
    if hints is None:
        return None
    for action in hints.actions:
        if action.action_type == ACTION_TYPE:
            return action.payload["session_id"], bool(action.payload["ends_session"])
    return None


def offers_tools(request: Any) -> bool:
    """Whether the client offered the model tools with this tokenized request."""
    hints = request.kv_hints
    actions = hints.actions if hints is not None else ()
    return any(action.action_type == ACTION_TYPE and bool(action.payload.get("tools")) for action in actions)
