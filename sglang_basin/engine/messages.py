"""The words of the control channel between a decode gate and the door on prefill: msgpack, typed, bounded.

Decode asks and reports, prefill answers and tells; for a lease of KV it is the other way round. A message that does not
decode into one of these types within `MAX_MESSAGE_BYTES` is dropped and counted; nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglang_basin.engine.identity import MAX_NAME_CHARACTERS
from sglang_basin.policy.decisions import Reason

MAX_MESSAGE_BYTES = 64 * 1024
MAX_PROMPT_BYTES = 4 * 1024 * 1024
"""Of a prompt, 4 bytes a token, that prefill sends to a decode which it asks for a lease; more is not asked for. Only
decode takes messages of this size, and only from the prefill that it connected to."""

MAX_LEASED_PAGES = 12_000
"""In an answer to such a question: what fits, 4 bytes a page, into a message to prefill."""

MAX_RANKS = 64
MAX_LEASE_S = 60.0
MAX_KEY_CHARACTERS = 4096
ROOMS_PER_MESSAGE = 4096
SESSIONS_PER_MESSAGE = 64

Room = int
"""SGLang's bootstrap room: what both legs of a call have in common. msgpack carries 64 bits of it."""

SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
KeyPart = Annotated[str, msgspec.Meta(max_length=MAX_KEY_CHARACTERS)]
MooncakeSession = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """Decode holds the call of `room`: may it go on? Asked again while it waits, for a sign of life. All that is to be
    known about the call comes to prefill with its own leg; a room that prefill does not know gets no answer. Of several
    data-parallel ranks all are asked, and one knows."""

    room: Room


class Left(msgspec.Struct, tag="left", array_like=True, frozen=True):
    """The call of `room` has left decode, however it ended, with so many tokens of output; `answered` if it came to its
    end, `final` if it did so without calling one of the tools it was offered. Decode keeps the KV of the first
    `kept_tokens` of prompt and output, for as long as it has no better use for the memory. Further calls of its session
    go by `priority_ms` here, if the session is known."""

    room: Room
    output_tokens: Tokens
    final: bool = False
    answered: bool = False
    kept_tokens: Tokens = 0
    priority_ms: Milliseconds | None = None


class Running(msgspec.Struct, tag="running", array_like=True, frozen=True):
    """These calls still run on decode; their sessions are not idle."""

    rooms: Annotated[list[Room], msgspec.Meta(max_length=ROOMS_PER_MESSAGE)]


class Ranks(msgspec.Struct, tag="ranks", array_like=True, frozen=True):
    """This prefill instance has so many data-parallel ranks, each with a door. A door says so when first asked."""

    count: Annotated[int, msgspec.Meta(ge=2, le=256)]


class Enter(msgspec.Struct, tag="enter", array_like=True, frozen=True):
    """Prefill lets the call of `room` go on; its session has entered, and goes by this priority from now on. Of a call
    that named none, `session_id` is the one that prefill infers from its prompt, if any."""

    room: Room
    priority_ms: Milliseconds
    session_id: SessionId | None = None


class Reorder(msgspec.Struct, tag="reorder", array_like=True, frozen=True):
    """Further calls of this session, whose call has just left decode, go by this priority, which its newer prediction
    has changed."""

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
    """These sessions have ended, or been `paused`: a further call of theirs must ask again."""

    session_ids: Annotated[list[SessionId], msgspec.Meta(max_length=SESSIONS_PER_MESSAGE)]
    paused: bool = False


class Lends(msgspec.Struct, tag="lends", array_like=True, frozen=True):
    """Finished calls may keep so many tokens of KV on this decode for this prefill, as busy as it is now."""

    tokens: Tokens


class Keeps(msgspec.Struct, tag="keeps", array_like=True, frozen=True):
    """Decode has had better use for memory: of these sessions it keeps no more than so many first tokens, or none."""

    sessions: Annotated[list[tuple[SessionId, Tokens]], msgspec.Meta(max_length=SESSIONS_PER_MESSAGE)]


class Borrow(msgspec.Struct, tag="borrow", array_like=True, frozen=True):
    """Prefill asks a decode that has nothing to do with the call of `room` for what it keeps of the call's prompt: for
    its pages, locked for so many seconds. `extra_key` and `cache_salt` are SGLang's own parts of the key."""

    room: Room
    prompt: Annotated[bytes, msgspec.Meta(max_length=MAX_PROMPT_BYTES)]
    """Token ids, 4 bytes each, little-endian."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)]
    extra_key: KeyPart | None = None
    cache_salt: KeyPart | None = None


class Return(msgspec.Struct, tag="return", array_like=True, frozen=True):
    """Prefill has no more use for the lease of `room`."""

    room: Room


class Lease(msgspec.Struct, tag="lease", array_like=True, frozen=True):
    """Decode's answer to `Borrow`: the pages of the prompt's first `tokens`, in order, and for each of its ranks where
    they can be read (its Mooncake session). No tokens: it keeps nothing of this prompt, or, if `busy`, has no memory to
    lock just now."""

    room: Room
    tokens: Tokens = 0
    pages: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_LEASED_PAGES)] = b""
    """Page numbers, 4 bytes each, little-endian."""
    sessions: Annotated[tuple[MooncakeSession, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    busy: bool = False


FromDecode = Ask | Left | Running | Lends | Keeps | Lease
FromPrefill = Ranks | Enter | Reorder | Wait | Turned | Ended | Borrow | Return

encode = msgspec.msgpack.Encoder().encode
decode_from_decode = msgspec.msgpack.Decoder(FromDecode).decode
decode_from_prefill = msgspec.msgpack.Decoder(FromPrefill).decode
