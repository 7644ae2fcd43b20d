"""The words of the control channel between a decode gate and the door on prefill: msgpack, typed, bounded.

Decode asks and reports, prefill answers and tells. A message that does not decode into one of these types within
`MAX_MESSAGE_BYTES` is dropped and counted; nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglang_basin.engine.identity import MAX_NAME_CHARACTERS
from sglang_basin.policy.decisions import Reason

MAX_MESSAGE_BYTES = 64 * 1024
ROOMS_PER_MESSAGE = 4096

Room = int
"""SGLang's bootstrap room: what both legs of a call have in common. msgpack carries 64 bits of it."""

SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """Decode holds the call of `room`: may it go on? Asked again while it waits, for a sign of life. All that is to be
    known about the call comes to prefill with its own leg; a room that prefill does not know gets no answer."""

    room: Room


class Left(msgspec.Struct, tag="left", array_like=True, frozen=True):
    """The call of `room` has left decode, however it ended, with so many tokens of output; `answered` if it came to its
    end, `final` if it did so without calling one of the tools it was offered."""

    room: Room
    output_tokens: Tokens
    final: bool = False
    answered: bool = False


class Running(msgspec.Struct, tag="running", array_like=True, frozen=True):
    """These calls still run on decode; their sessions are not idle."""

    rooms: Annotated[list[Room], msgspec.Meta(max_length=ROOMS_PER_MESSAGE)]


class Enter(msgspec.Struct, tag="enter", array_like=True, frozen=True):
    """Prefill lets the call of `room` go on; its session has entered, and goes by this priority from now on. Of a call
    that named none, `session_id` is the one that prefill infers from its prompt, if any."""

    room: Room
    priority_ms: Milliseconds
    session_id: SessionId | None = None


class Reorder(msgspec.Struct, tag="reorder", array_like=True, frozen=True):
    """Further calls of this session, whose call has just left decode, go by this priority: its prediction is newer."""

    session_id: SessionId
    priority_ms: Milliseconds


class Wait(msgspec.Struct, tag="wait", array_like=True, frozen=True):
    """Prefill holds the call of `room` at the door."""

    room: Room


class Turned(msgspec.Struct, tag="turned", array_like=True, frozen=True):
    """Prefill turned the call of `room` away; decode answers its leg the same."""

    room: Room
    reason: Reason
    retry_after_s: Seconds


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """These sessions have ended: a further call of theirs must ask again."""

    session_ids: Annotated[list[SessionId], msgspec.Meta(max_length=64)]


class Lends(msgspec.Struct, tag="lends", array_like=True, frozen=True):
    """Finished calls may keep so many tokens of KV on this decode for this prefill, as busy as it is now."""

    tokens: Tokens


FromDecode = Ask | Left | Running | Lends
FromPrefill = Enter | Reorder | Wait | Turned | Ended

encode = msgspec.msgpack.Encoder().encode
decode_from_decode = msgspec.msgpack.Decoder(FromDecode).decode
decode_from_prefill = msgspec.msgpack.Decoder(FromPrefill).decode
