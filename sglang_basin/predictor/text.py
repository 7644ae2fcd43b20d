"""The task: a session's first user message, as hashed word counts. Any text, any size: bounded time and memory.

Only the first `MAX_CHARACTERS` are looked at. Words are hashed to `BUCKETS` numbers (the hashing trick; Weinberger et
al., 2009), so neither a vocabulary nor a word is ever stored. Scripts without spaces are taken as pairs of characters.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BUCKETS = 2**13
MAX_CHARACTERS = 8192
MAX_MESSAGES = 64
MAX_PARTS = 64
"""Messages before, and parts within, the first user message that are looked at."""

_WORD = re.compile(r"[a-z0-9_]+|[^\W\d_]+")
_MAX_WORD = 40
_NOTE_OPENS, _NOTE_CLOSES = "<system-reminder>", "</system-reminder>"
"""What Claude Code puts around its own notes inside a user's message."""
_MAX_SEARCHED = 65536


@dataclass(frozen=True, slots=True)
class Task:
    """A task text, reduced to numbers. `terms` are (bucket, count) pairs, by bucket."""

    fingerprint: int
    characters: int
    terms: tuple[tuple[int, int], ...]


def fingerprint(text: str) -> int:
    """64 bits that name a text (or an agent and model) without saying what it is."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def read_task(text: str | bytes | None) -> Task | None:
    """The task's numbers; None where there is no text. Bytes that are no UTF-8 are read with replacements."""
    if not text:
        return None
    characters = len(text)
    head = text[: MAX_CHARACTERS * 4]
    if isinstance(head, bytes):
        head = head.decode("utf-8", "replace")
    head = " ".join(head[:MAX_CHARACTERS].split())
    if not head:
        return None
    counts: dict[int, int] = {}
    crc = zlib.crc32
    for word in _WORD.findall(head.lower()):
        if word.isascii():
            bucket = crc(word[:_MAX_WORD].encode()) % BUCKETS
            counts[bucket] = counts.get(bucket, 0) + 1
        else:
            for at in range(max(1, len(word) - 1)):
                bucket = crc(word[at : at + 2].encode("utf-8", "replace")) % BUCKETS
                counts[bucket] = counts.get(bucket, 0) + 1
    return Task(fingerprint(head), characters, tuple(sorted(counts.items())))


def task_text(messages: object) -> str | None:
    """The first user message of a chat request, without system prompts, tool definitions and the agent's own notes.

    `messages` is what the client sent: a list of {"role", "content"} with a string or a list of parts as content, or a
    bare string. Whatever has another form is passed over; None when no user text is found.
    """
    if isinstance(messages, str):
        return messages or None
    if not isinstance(messages, list):
        return None
    for message in messages[:MAX_MESSAGES]:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        found = _without_notes(content_text(message.get("content"))[:_MAX_SEARCHED]).strip()
        if found:
            return found
    return None


def _without_notes(text: str) -> str:
    """A note that is never closed is kept: it may be the user's own words."""
    kept: list[str] = []
    at = 0
    while (opens := text.find(_NOTE_OPENS, at)) >= 0 and (closes := text.find(_NOTE_CLOSES, opens)) >= 0:
        kept.append(text[at:opens])
        at = closes + len(_NOTE_CLOSES)
    kept.append(text[at:])
    return " ".join(kept)


def content_text(content: object) -> str:
    """The text of a message's content, a string or a list of parts; empty for whatever has another form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") for part in content[:MAX_PARTS] if isinstance(part, dict))
    return "\n".join(part[:_MAX_SEARCHED] for part in parts if isinstance(part, str))


class TextScore:
    """A linear score of hashed TF-IDF: how much longer (in log peak) a task is than others of the same agent."""

    def __init__(self, idf: Sequence[float], weights: Sequence[float]) -> None:
        if len(idf) != BUCKETS or len(weights) != BUCKETS:
            raise ValueError(f"text: idf and weights must have {BUCKETS} numbers, got {len(idf)} and {len(weights)}")
        self.idf = list(map(float, idf))
        self.weights = list(map(float, weights))

    def score(self, task: Task | None) -> float:
        if task is None:
            return 0.0
        total = squares = 0.0
        idf, weights = self.idf, self.weights
        for bucket, count in task.terms:
            value = idf[bucket] if count == 1 else (1.0 + math.log(count)) * idf[bucket]
            squares += value * value
            total += value * weights[bucket]
        return total / math.sqrt(squares) if squares > 0 else 0.0
