"""Prompts of a replayed session, with the recorded token counts and the recorded shared prefixes.

A session's next prompt is the part of (previous prompt + what the server really answered) that the recording kept,
then new tokens up to the recorded length. New token i of a call is a pure function of (seed, session, call, i): two
runs of one plan send the same prompts as far as the servers answer alike.

`TokenPrompt` makes token ids for `/generate`; `ChatPrompt` makes messages of about the right length for chat.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_basin.replay.trace import Call

Tokens = npt.NDArray[np.int32]


def _stream_key(*parts: object) -> int:
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def token_stream(key: int, start: int, stop: int, token_ids: tuple[int, int]) -> Tokens:
    """Tokens `start` to `stop` of the endless stream `key`: SplitMix64 of the position, folded into the id range."""
    low, high = token_ids
    position = np.arange(start, max(start, stop), dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(high - low) + np.uint64(low)).astype(np.int32)


class TokenPrompt:
    """The growing context of one session as token ids. Call `next` and `received` in turn."""

    def __init__(
        self, *, seed: int, trace_name: str, uid: str, shared_prefix_tokens: int, token_ids: tuple[int, int]
    ) -> None:
        self._seed = seed
        self._uid = uid
        self._token_ids = token_ids
        self._call_index = 0
        # The system prompt is one stream for the whole trace; sessions use more or less of it. The first context
        # holds one token more of it than the session shares, so that the first prompt leaves it exactly there.
        shared = token_stream(_stream_key(seed, trace_name, "shared"), 0, shared_prefix_tokens + 1, token_ids)
        self._context = shared if shared_prefix_tokens else np.empty(0, np.int32)
        self._shared_prefix_tokens = shared_prefix_tokens

    @property
    def context(self) -> Tokens:
        """Previous prompt + output."""
        return self._context

    def next(self, call: Call) -> Tokens:
        """The call's prompt: exactly `cached_prefix_tokens` of it (or of a shorter actual context) are the context's.

        When the recording left the context there, the first new token differs from the one it replaces.
        """
        recorded_tokens = call.cached_prefix_tokens if self._call_index else self._shared_prefix_tokens
        kept = self._context[: min(recorded_tokens, call.prompt_tokens)]
        key = _stream_key(self._seed, self._uid, self._call_index)
        new = token_stream(key, len(kept), call.prompt_tokens, self._token_ids)
        if len(new) and len(kept) < len(self._context) and new[0] == self._context[len(kept)]:
            low, high = self._token_ids
            new[0] = low + (new[0] - low + 1) % (high - low)
        prompt: Tokens = np.concatenate((kept, new))
        self._context = prompt
        self._call_index += 1
        return prompt

    def received(self, output_ids: list[int]) -> None:
        """Append what the server answered to the last prompt."""
        self._context = np.concatenate((self._context, np.asarray(output_ids, dtype=np.int32)))


_SENTENCE = (
    "the file has one test that fails when we run it with the new flag so look at what it does and then make the "
    "change in the code to get the right value back from the first call before you go on with the rest of the work"
)
_WORDS = tuple(_SENTENCE.split(" "))


class ChatPrompt:
    """The growing conversation of one session as chat messages.

    Token counts can only be approximate: each turn adds as many words as the recorded prompt has tokens more than the
    server counted so far. A recorded divergence cuts the conversation at the last whole message before it.
    """

    def __init__(self, *, seed: int, trace_name: str, uid: str, shared_prefix_tokens: int) -> None:
        self._seed = seed
        self._uid = uid
        self._call_index = 0
        self._messages: list[dict[str, Any]] = []
        self._ends: list[int] = []
        """Tokens of the conversation up to the end of each message, as far as known."""
        if shared_prefix_tokens:
            text = self._text(_stream_key(seed, trace_name, "shared"), shared_prefix_tokens)
            self._append("system", text, shared_prefix_tokens)

    @staticmethod
    def _text(key: int, words: int) -> str:
        return " ".join(_WORDS[index] for index in token_stream(key, 0, words, (0, len(_WORDS))))

    def _append(self, role: str, text: str, end_tokens: int) -> None:
        self._messages.append({"role": role, "content": text})
        self._ends.append(end_tokens)

    def next(self, call: Call) -> list[dict[str, Any]]:
        """The call's messages, ending with a user message."""
        if self._call_index and self._ends and call.cached_prefix_tokens < self._planned_tokens:
            while len(self._messages) > 1 and self._ends[-1] > call.cached_prefix_tokens:
                self._messages.pop()
                self._ends.pop()
        words = max(1, call.prompt_tokens - (self._ends[-1] if self._ends else 0))
        text = self._text(_stream_key(self._seed, self._uid, self._call_index), words)
        self._append("user", text, call.prompt_tokens)
        self._planned_tokens = call.context_tokens
        self._call_index += 1
        return list(self._messages)

    def received(self, text: str, prompt_tokens: int, output_tokens: int) -> None:
        """Append the answer; the counts are the server's."""
        self._ends[-1] = prompt_tokens
        self._append("assistant", text, prompt_tokens + output_tokens)

    _planned_tokens: int = 0
