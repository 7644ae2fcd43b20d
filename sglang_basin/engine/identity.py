"""Who is calling: from headers and body to a session's name, in the HTTP process; and back out of the request later.

What is found travels to the scheduler as one action in SGLang's own `kv_hints` envelope, a field of the tokenized
request that components without interest in it ignore. SGLang's `session_id` stays as the client sent it: with the
session radix cache on it means more than identity. A client's own `kv_hints` pass, except for actions of this type.

The module imports sglang only where it stamps, so that the rules can be read and tested without an engine.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from sglang_basin.config import BasinConfig
from sglang_basin.engine.metrics import fault, metrics
from sglang_basin.engine.openings import served_openings
from sglang_basin.predictor.model_file import ModelFileError, load_text_score, named_model_path
from sglang_basin.predictor.payload import Body, task_payload
from sglang_basin.predictor.text import TextScore
from sglang_basin.wire import (
    AGENT_HEADER,
    END_FIELD,
    END_HEADERS,
    PARENT_AGENT_HEADER,
    PARENT_FIELD,
    PARENT_HEADERS,
    SESSION_HEADERS,
)

MAX_NAME_CHARACTERS = 256
MAX_BODY_BYTES = 64 * 2**20
"""A larger body is not searched for a name; headers still are."""

INFERRED_PREFIX = "prompt~"
"""What the ids of sessions start with that prefill's gate infers from prompts; no client's name may."""

ACTION_TYPE = "basin.session"
ACTION_VERSION = "2"

_ANTHROPIC_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")
_TRUE = frozenset(("1", "true", "yes"))
_MAX_FIELD_BYTES = 16 * 1024
_MAX_METADATA_BYTES = 2**20

Malformed = Callable[[str], None]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class Stamp(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the HTTP process knows of a call and the scheduler cannot: the payload of a `basin.session` action."""

    session_id: Name | None = None
    parent_id: Name | None = None
    """The session that started this one and waits for it."""
    ends_session: bool = False
    tools: bool = False
    """The client offers the model tools."""
    starts_agent: bool = False
    """By its looks the first of an agent's calls; only said of calls that name no session."""
    tail_tokens: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """Tokens at the prompt's end that may read differently once the answer is history (`openings`)."""
    task: dict[str, Any] | None = None
    """What the predictor may know of the session (`predictor.payload`), on prefill where a predictor uses it."""


NO_STAMP = Stamp()
"""Of a call that no HTTP process has looked at, such as the engine's own warm-up."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A call's claim to belong to a session: the name, where it came from, and whether it is the last call."""

    session_id: str
    source: str
    ends_session: bool
    parent_id: str | None = None


class Fields(Body):
    """The fields of a request body that identity and the predictor look at, undecoded; everything else is skipped
    unparsed."""

    session_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    client_metadata: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    end: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name=END_FIELD)
    parent_id: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name=PARENT_FIELD)

    def offers_tools(self) -> bool:
        """Whether the model may call a tool: chat, messages and responses all have a `tools` list."""
        listed = bytes(self.tools).strip()
        return listed[:1] == b"[" and listed[1:-1].strip() != b"" and bytes(self.tool_choice) != b'"none"'

    def starts_agent(self) -> bool:
        """Whether this looks like an agent's first call: it offers tools and leaves it to the model which to use if any
        (a forced one makes a single call of structured output), asks for one answer, and has none of the model's yet.
        """
        choice = _value(self.tool_choice)
        is_free = choice in (None, "auto") or (isinstance(choice, dict) and choice.get("type") == "auto")
        return self.offers_tools() and is_free and _value(self.n) in (None, 1) and not self._has_history()

    def _has_history(self) -> bool:
        if _value(self.previous_response_id) is not None:
            return True
        listed = self.messages or self.input
        if memoryview(listed)[:1] != b"[":
            return False  # one question, as a text
        try:
            items = _decode_items(listed)
        except (msgspec.DecodeError, RecursionError):
            return False
        return any(item.role in ("assistant", "tool") or item.type not in (None, "message") for item in items)


class _Item(msgspec.Struct):
    """Of a message, or of an item of `/v1/responses`."""

    role: Any = None
    type: Any = None


class Metadata(msgspec.Struct):
    """Of `metadata` and Codex's `client_metadata`."""

    user_id: Any = None
    thread_id: Any = None
    end: Any = msgspec.field(default=None, name=END_FIELD)
    parent_id: Any = msgspec.field(default=None, name=PARENT_FIELD)


class _UserId(msgspec.Struct):
    session_id: Any = None


_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_items = msgspec.json.Decoder(list[_Item]).decode
_decode_metadata = msgspec.json.Decoder(Metadata).decode
_decode_user_id = msgspec.json.Decoder(_UserId).decode


def read_fields(body: bytes, on_malformed: Malformed = lambda source: None) -> Fields:
    """What a JSON body says to identity. Nothing of one over `MAX_BODY_BYTES`, or that is no JSON object."""
    if not body or len(body) > MAX_BODY_BYTES:
        return Fields()
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, RecursionError):
        on_malformed("body")
        return Fields()


def claim(
    headers: Mapping[str, str],
    body: bytes | Fields,
    *,
    session_id: object = None,
    routing_key: object = None,
    on_malformed: Malformed = lambda source: None,
) -> Claim | None:
    """Find a call's session in DESIGN's order of explicit sources, or None when nothing names one.

    `session_id` and `routing_key` are SGLang's own fields, already parsed by the endpoint. A malformed name (not a
    string, empty, over 256 characters, with unprintable ones, or like an inferred one) is reported to `on_malformed`
    by source and passed over: the next source may still do.
    """
    fields = body if isinstance(body, Fields) else read_fields(body, on_malformed)
    metadata = _metadata(fields.metadata)
    ends = ends_session(headers, fields, metadata)
    named_parent = metadata.parent_id or _value(fields.parent_id)
    for source, value in _names(headers, fields, metadata, session_id, routing_key):
        if value is None:
            continue
        if (name := _name(value)) is None:
            on_malformed(source)
            continue
        parent = named_parent or headers.get(PARENT_HEADERS.get(source, ""))
        if source in ("x-claude-code-session-id", "body.metadata.user_id") and AGENT_HEADER in headers:
            if (agent := _name(f"{name}/{headers[AGENT_HEADER]}")) is not None:
                above = headers.get(PARENT_AGENT_HEADER)
                name, source, parent = agent, AGENT_HEADER, f"{name}/{above}" if above else name
            else:
                on_malformed(AGENT_HEADER)
        parent_id = _name(parent)
        if parent is not None and parent_id is None:
            on_malformed("parent")
        return Claim(name, source, ends, parent_id if parent_id != name else None)
    return None


def ends_session(headers: Mapping[str, str], fields: Fields, metadata: Metadata) -> bool:
    """Whether the client announces its session's last call; it need not name the session for that."""
    said = (*map(headers.get, END_HEADERS), metadata.end, _value(fields.end))
    return any(map(_is_true, said))


def _names(
    headers: Mapping[str, str], fields: Fields, metadata: Metadata, session_id: object, routing_key: object
) -> Iterator[tuple[str, object]]:
    yield SESSION_HEADERS[0], headers.get(SESSION_HEADERS[0])
    yield "body.session_id", session_id if session_id is not None else _value(fields.session_id)
    for header in SESSION_HEADERS[1:]:
        yield header, headers.get(header)
    yield "body.client_metadata.thread_id", _metadata(fields.client_metadata).thread_id
    yield "body.prompt_cache_key", _value(fields.prompt_cache_key)
    yield "body.metadata.user_id", _anthropic_session(metadata.user_id)
    yield "routing_key", routing_key


def _name(value: object) -> str | None:
    """The value if it can name a session."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS or not value.isprintable():
        return None
    return None if value.startswith(INFERRED_PREFIX) else value


def _is_true(value: object) -> bool:
    return str(value).lower() in _TRUE


def _value(field: msgspec.Raw) -> object:
    """A field's value; None where it is absent or null, and no name where it is too long or strange for one."""
    if not field:
        return None
    if len(bytes(field)) > _MAX_FIELD_BYTES:
        return b""
    try:
        return msgspec.json.decode(field)
    except RecursionError:
        return b""


def _metadata(field: msgspec.Raw) -> Metadata:
    if not field or len(bytes(field)) > _MAX_METADATA_BYTES:
        return Metadata()
    try:
        return _decode_metadata(field)
    except (msgspec.DecodeError, RecursionError):
        return Metadata()


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
            return _decode_user_id(user_id).session_id
        except (msgspec.DecodeError, RecursionError):
            return None
    return None


def stamp_request(original: Callable[..., Any], self: Any, obj: Any, request: Any = None) -> Any:
    """Around `TokenizerManager.generate_request`: put a `Stamp` into `obj.kv_hints`, then go on as always."""
    if hasattr(obj, "kv_hints"):
        try:
            obj.kv_hints = _hints(obj.kv_hints, NO_STAMP)
            if request is not None:
                on_decode = self.disaggregation_mode.value == "decode"
                obj.kv_hints = _hints(obj.kv_hints, _look(obj, request, with_task=not on_decode))
        except Exception:  # noqa: BLE001 - identity must never cost a call
            fault("identity", "could not read a call's session; it is served without one")
    return original(self, obj, request)


def _look(obj: Any, request: Any, *, with_task: bool) -> Stamp:
    counts = metrics()
    body = getattr(request, "_body", b"")

    def on_malformed(source: str) -> None:
        counts.malformed_identity.labels(source).inc()

    fields = read_fields(body, on_malformed)
    found = claim(
        request.headers,
        fields,
        session_id=getattr(obj, "session_id", None),
        routing_key=getattr(obj, "routing_key", None),
        on_malformed=on_malformed,
    )
    counts.identity.labels(found.source if found else "none").inc()
    return Stamp(
        session_id=found.session_id if found else None,
        parent_id=found.parent_id if found else None,
        ends_session=found.ends_session if found else ends_session(request.headers, fields, _metadata(fields.metadata)),
        tools=fields.offers_tools(),
        starts_agent=found is None and fields.starts_agent(),
        tail_tokens=0 if found else _tail_tokens(obj, request),
        task=_task(fields) if with_task else None,
    )


def _task(fields: Fields) -> dict[str, Any] | None:
    wanted = _wanted()
    return task_payload(fields, text_score=wanted.text_score, keep_terms=wanted.terms) if wanted.tasks else None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What this engine's predictor and its session log want to know of requests."""

    tasks: bool = False
    terms: bool = False
    text_score: TextScore | None = None
    """Of the predictor's model, so that the scheduler need not read words."""


@functools.cache
def _wanted() -> _Wanted:
    config = BasinConfig.from_environment(os.environ)
    if config is None:
        return _Wanted()
    logs, model, text_score = config.session_log is not None, named_model_path(config.predictor), None
    try:
        text_score = None if model is None else load_text_score(model)
    except ModelFileError:  # which the scheduler takes for an error
        fault("identity", f"could not read the text score of {model}; the scheduler makes it from words")
    return _Wanted(model is not None or logs, logs, text_score)


def _tail_tokens(obj: Any, request: Any) -> int:
    token_ids = getattr(obj, "input_ids", None)
    chat = getattr(getattr(getattr(request, "app", None), "state", None), "openai_serving_chat", None)
    if chat is None or not isinstance(token_ids, list) or not token_ids or not isinstance(token_ids[0], int):
        return 0  # a text, which ends as it ends; or a batch of prompts
    return min(served_openings(chat).tail_tokens(token_ids), 256)


def _hints(sent: Any, stamp: Stamp) -> Any:
    """The client's `kv_hints` (an envelope, one per prompt of a batch, or None) without actions of our type, and with
    ours. Malformed ones are returned as they are: SGLang refuses them, with its own message."""
    from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope, decode_kv_hints_envelope

    if isinstance(sent, list):
        return [_hints(one, stamp) for one in sent]
    try:
        envelope = decode_kv_hints_envelope(sent) if sent else None
    except ValueError:
        return sent
    actions = [action for action in (envelope.actions if envelope else ()) if action.action_type != ACTION_TYPE]
    if stamp is not NO_STAMP:
        payload = msgspec.to_builtins(stamp)
        actions.append(
            KvHintAction(action_id="basin", action_type=ACTION_TYPE, action_version=ACTION_VERSION, payload=payload)
        )
    if envelope is None and not actions:
        return None
    return KvHintsEnvelope(
        protocol_version=envelope.protocol_version if envelope else "1",
        message_id=envelope.message_id if envelope else "basin",
        actions=actions,
    )


def stamp_of(request: Any) -> Stamp:
    """What the HTTP process stamped on a tokenized request; `NO_STAMP` if nothing, or nothing well-formed."""
    hints = request.kv_hints
    actions: Sequence[Any] = hints.actions if hints is not None else ()
    for action in actions:
        if action.action_type == ACTION_TYPE:
            try:
                return msgspec.convert(action.payload, Stamp)
            except msgspec.ValidationError:
                metrics().malformed_identity.labels("stamp").inc()
    return NO_STAMP
