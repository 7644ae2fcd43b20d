"""From a request's body to what the predictor may know of its session, small enough to travel to the scheduler.

`task_payload` runs in the HTTP process on the raw body of any endpoint: chat, messages, responses, completions and
generate. It gives JSON-able fingerprints and what the model's text score makes of the task: one number, so that the
scheduler need not read words. Without a text score, or for a session log, hashed word counts travel, too: at most a
few KB, and no text unless asked to. The scheduler turns it back with `TaskFeatures.from_payload`, which trusts none of
it.

Agent and model are seen as a server sees them: by the start of the system prompt (which sessions of one agent share,
numbers such as dates and versions aside) and the model's name.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import itertools
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from sglang_basin.predictor.recorded import kin_of
from sglang_basin.predictor.text import (
    BUCKETS,
    MAX_CHARACTERS,
    MAX_MESSAGES,
    Task,
    TextScore,
    content_text,
    read_task,
    task_text,
)

MAX_BODY_BYTES = 16 * 2**20
"""A larger body is not looked into: its session is predicted from its numbers alone."""
MAX_TERMS = 1024
"""Hashed words that travel; of a text with more of them the most frequent."""
MAX_SCORE = 20.0
"""Of a text, to either side: no task's sessions get e^20 times as long as another's."""

_KIN_CHARACTERS = 512
_MODEL_CHARACTERS = 256
_NUMBERS = re.compile(r"\d+")
_BILLING_NOTE = "x-anthropic-billing-header"
"""How a system block of Claude Code starts that differs from session to session."""


class Body(msgspec.Struct):
    """The fields of a request body that tell of the task, undecoded; the rest is skipped unparsed."""

    model: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()


_decode_body = msgspec.json.Decoder(Body).decode
_decode_element = json.JSONDecoder().raw_decode


def task_payload(
    body: bytes | Body | Mapping[str, Any],
    *,
    text_score: TextScore | None = None,
    keep_terms: bool = False,
    keep_text: bool = False,
) -> dict[str, Any] | None:
    """What a body (raw, its fields, or parsed) says of its session; None where it says nothing or cannot be read. Never
    raises.

    About a millisecond for a task text of 8,000 characters, some ten microseconds when the text was seen lately, as on
    a session's later calls; besides, a millisecond or two per MB of body. `text_score` is the model's; `keep_terms`
    sends the words along with it, for a session log, and `keep_text` the text's start itself, where its owner asked for
    texts.
    """
    try:
        found = _fields(body)
        if found is None:
            return None
        messages, system, model = found
        text = task_text(messages)
        kin = kin_of(_agent(system, messages), model)
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    payload: dict[str, Any] = {}
    if kin is not None:
        payload["kin"] = f"{kin:016x}"
    if text and (task := _task(head := text[:MAX_CHARACTERS])) is not None:
        payload["task"], payload["characters"] = f"{task.fingerprint:016x}", len(text)
        if text_score is not None:
            payload["score"] = _score(head, text_score)
        if text_score is None or keep_terms:
            payload["terms"] = _terms(head)
        if keep_text:
            payload["text"] = text[:MAX_CHARACTERS].encode("utf-8", "replace").decode()
    return payload or None


def _fields(body: bytes | Body | Mapping[str, Any]) -> tuple[Any, Any, str | None] | None:
    """(messages or a bare text, system prompt, model's name) of a body, whatever their forms."""
    if isinstance(body, bytes):
        if not 0 < len(body) <= MAX_BODY_BYTES:
            return None
        body = _decode_body(body)
    names = Body.__struct_fields__
    if isinstance(body, Body):
        raw = {name: memoryview(getattr(body, name)) for name in names}
        if sum(map(len, raw.values())) > MAX_BODY_BYTES:
            return None
        found = {name: _leading(value) for name, value in raw.items()}
    else:
        found = {name: _until_task(body.get(name)) for name in names}
    messages = next((found[name] for name in ("messages", "input", "prompt", "text") if found[name]), None)
    if isinstance(messages, list) and messages and all(isinstance(one, str) for one in messages):
        messages = messages[0]  # completions and generate take a list of prompts
    system = found["system"] or found["instructions"]
    model = found["model"]
    return messages, system, model[:_MODEL_CHARACTERS] if isinstance(model, str) else None


def _leading(raw: memoryview) -> Any:
    """A JSON value; of a list only the elements up to the first user message are decoded."""
    text = str(raw, "utf-8", "replace").lstrip()
    if text.startswith("["):
        return _until_task(_elements(text))
    return _until_task(json.loads(text)) if text else None


def _elements(text: str) -> Iterator[Any]:
    at = _after_space(text, 1)
    while text[at] != "]":
        element, at = _decode_element(text, at)
        yield element
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)


def _until_task(value: Any) -> Any:
    """A string or an object as it is; of a list its elements up to the first user message, None for token ids."""
    if isinstance(value, str | dict):
        return value
    if not isinstance(value, Iterable):
        return None
    elements: list[Any] = []
    for element in itertools.islice(value, MAX_MESSAGES):
        if not elements and not isinstance(element, str | dict):
            return None
        elements.append(element)
        if task_text([element]) is not None:
            break
    return elements


_space = re.compile(r"[ \t\r\n]*")


def _after_space(text: str, at: int) -> int:
    found = _space.match(text, at)
    return at if found is None else found.end()


def _agent(system: Any, messages: Any) -> str | None:
    """The start of the system prompt, given beside the messages or as the first of them."""
    if system is None and isinstance(messages, list) and messages and isinstance(messages[0], dict):
        first = messages[0]
        system = first.get("content") if first.get("role") in ("system", "developer") else None
    if isinstance(system, list):
        system = [part for part in system[:4] if not content_text([part]).startswith(_BILLING_NOTE)]
    start = content_text(system)[:_KIN_CHARACTERS].strip()
    return _NUMBERS.sub("0", start) or None


# Remembered: a session sends its task's text with every call.


@functools.lru_cache(maxsize=1024)
def _task(head: str) -> Task | None:
    """Of a text's start, with so many terms as may travel."""
    task = read_task(head)
    if task is None or len(task.terms) <= MAX_TERMS:
        return task
    kept = sorted(task.terms, key=lambda term: (-term[1], term[0]))[:MAX_TERMS]
    return dataclasses.replace(task, terms=tuple(sorted(kept)))


@functools.lru_cache(maxsize=1024)
def _score(head: str, text_score: TextScore) -> float:
    return min(max(-MAX_SCORE, text_score.score(_task(head))), MAX_SCORE)


@functools.lru_cache(maxsize=1024)
def _terms(head: str) -> str:
    task = _task(head)
    numbers = [number for term in task.terms for number in term] if task is not None else []
    return base64.b64encode(struct.pack(f"<{len(numbers)}H", *numbers)).decode()


_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class _Payload(msgspec.Struct, forbid_unknown_fields=True):
    kin: _Hash | None = None
    task: _Hash | None = None
    score: Annotated[float, msgspec.Meta(ge=-MAX_SCORE, le=MAX_SCORE)] | None = None
    terms: Annotated[str, msgspec.Meta(max_length=(4 * MAX_TERMS + 2) // 3 * 4)] = ""
    characters: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    text: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)] | None = None


@dataclass(frozen=True, slots=True)
class TaskFeatures:
    """What is known of a session beside its numbers; each part may be missing."""

    kin: int | None = None
    task: Task | None = None
    """Without terms where none came."""
    score: float | None = None
    """What the model's text score made of the task; None where it is to be made of the terms."""
    text: str | None = None

    @classmethod
    def from_payload(cls, payload: object) -> TaskFeatures:
        """Of what `task_payload` made. Raises ValueError, naming the field, for anything that it cannot have made."""
        try:
            read = msgspec.convert(payload, _Payload)
        except msgspec.ValidationError as error:
            raise ValueError(f"task payload: {error}") from None
        if read.score is not None and not math.isfinite(read.score):
            raise ValueError(f"task payload: score: must be a number, got {read.score}")
        kin = None if read.kin is None else int(read.kin, 16)
        terms = _unpacked(read.terms) if read.terms else ()
        if read.task is None:
            return cls(kin)
        return cls(kin, Task(int(read.task, 16), read.characters, terms), read.score, read.text)


def _unpacked(terms: str) -> tuple[tuple[int, int], ...]:
    try:
        data = base64.b64decode(terms, validate=True)
    except binascii.Error as error:
        raise ValueError(f"task payload: terms: {error}") from None
    if len(data) % 4:
        raise ValueError(f"task payload: terms: {len(data)} bytes are no whole number of pairs")
    numbers = struct.unpack(f"<{len(data) // 2}H", data)
    buckets, counts = numbers[::2], numbers[1::2]
    if sorted(set(buckets)) != list(buckets) or max(buckets, default=0) >= BUCKETS:
        raise ValueError(f"task payload: terms: buckets must ascend and be below {BUCKETS}")
    if 0 in counts:
        raise ValueError("task payload: terms: counts must be positive")
    return tuple(zip(buckets, counts, strict=True))
