"""How the served model's chat template opens an answer, and how much of that is gone once the answer is history.

A prompt ends with the template's invitation to answer, such as `<|im_start|>assistant\\n<think>\\n`. In the next
call's prompt an answer stands there, and the tail may read differently: no `<think>` before it, or a line break merged
with the answer's own. `policy.lineage` must not look for those tokens, yet for all before them: up to the end of the
last message every token tells sessions apart. So the tail is not guessed but learned, by rendering small conversations
with and without an answer through SGLang's own code, once per HTTP process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_basin.engine.metrics import fault

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Mapping[str, Any]], Sequence[int]]
"""From messages and template arguments to token ids, opening included; may raise for what a template does not know."""

MODES: tuple[Mapping[str, Any], ...] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"thinking": False},
)
"""Template arguments that change the opening, in the models that know them."""

_TOOL_CALL = [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def _after_a_question(mark: str) -> list[Message]:
    return [{"role": "user", "content": f"Question {mark}"}]


def _after_a_tool(mark: str) -> list[Message]:
    result = {"role": "tool", "tool_call_id": "call_1", "content": f"Result {mark}"}
    return [*_after_a_question("1"), {"role": "assistant", "content": "", "tool_calls": _TOOL_CALL}, result]


_NEXT_QUESTION = {"role": "user", "content": "And then?"}
_NEXT_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "More"}
_ANSWERS: tuple[tuple[Message, Message], ...] = (
    ({"content": "Answer"}, _NEXT_QUESTION),
    ({"content": "\n\nAnswer"}, _NEXT_QUESTION),
    ({"content": "Answer", "reasoning_content": "Thought"}, _NEXT_QUESTION),
    ({"content": "", "tool_calls": _TOOL_CALL}, _NEXT_RESULT),
    ({"content": "Answer", "tool_calls": _TOOL_CALL}, _NEXT_RESULT),
    ({"content": "", "reasoning_content": "Thought", "tool_calls": _TOOL_CALL}, _NEXT_RESULT),
)
"""What may stand in an answer's place later, each with a message that may follow it."""


class Openings:
    """The openings that a server's prompts end with."""

    def __init__(self, render: Render | None = None) -> None:
        """Learn from `render`; without one nothing is known and no tail is ever recognised."""
        lost: dict[tuple[int, ...], int] = {}
        if render is not None:
            for opening, tokens in _learn(render):
                lost[opening] = max(tokens, lost.get(opening, 0))
        self._lost = sorted(lost.items(), key=lambda item: -len(item[0]))

    def tail_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the prompt's end may read differently in the session's next prompt."""
        for opening, lost in self._lost:
            if tuple(token_ids[-len(opening) :]) == opening:
                return lost
        return 0


def _learn(render: Render) -> Iterator[tuple[tuple[int, ...], int]]:
    """Openings, with the end of the message before them so that they are recognised safely, and what they lose."""
    for mode, conversation in itertools.product(MODES, (_after_a_question, _after_a_tool)):
        asked, other = (_try(render, conversation(mark), mode) for mark in ("1", "2"))
        if not asked or not other:
            continue
        opening = asked[len(asked) - _common(asked[::-1], other[::-1]) :]
        kept = len(asked)
        for answer, following in _ANSWERS:
            history = [*conversation("1"), {"role": "assistant", **answer}, following]
            if answered := _try(render, history, mode):
                kept = min(kept, _common(asked, answered))
        if opening:
            yield tuple(opening), min(len(asked) - kept, len(opening))


def _try(render: Render, messages: Sequence[Message], mode: Mapping[str, Any]) -> list[int]:
    try:
        return list(render(messages, mode))
    except Exception:  # noqa: BLE001 - a template may refuse what it was not made for
        return []


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@functools.lru_cache(maxsize=1)
def served_openings(chat: Any) -> Openings:
    """Of an engine's `OpenAIServingChat`, which renders chat, messages and responses alike. Must not raise."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    def render(messages: Sequence[Message], mode: Mapping[str, Any]) -> Sequence[int]:
        request = ChatCompletionRequest(model="", messages=list(messages), chat_template_kwargs=dict(mode))
        return chat._process_messages(request, False).prompt_ids

    try:
        return Openings(render)
    except Exception:  # noqa: BLE001 - sessions of clients without a name are then told apart by whole prompts
        fault("openings", "could not learn how the chat template opens an answer")
        return Openings()
