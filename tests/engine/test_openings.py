"""Conversations rendered by chat templates stay one session each, whatever the template does to the prompt's tail.

The templates are written after those that Qwen3, Qwen3's thinking models, DeepSeek-R1 and Llama 3.1 come with, cut
down to what matters here: how an answer is opened, and what becomes of it in history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.engine.openings import Message, Openings
from sglang_basin.platforms.tiny_model import CHAT_TEMPLATE, train_tokenizer
from sglang_basin.policy.lineage import Lineage

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|header|>", "<|/header|>", "<|eot|>"),
    *("<|User|>", "<|Assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
]

QWEN3 = (
    "{% set last = namespace(query=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content and loop.index0 > last.query %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content.lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
"""Drops the reasoning of all answers before the last question."""

DEEPSEEK_R1 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|/tool|>"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""Nothing but the next opening ends a user's message, and no reasoning is kept."""

LLAMA = (
    "{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)

TEMPLATES = {
    "tiny model": CHAT_TEMPLATE,
    "Qwen3": QWEN3 + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "Qwen3, thinking only": QWEN3 + "<think>\n{% endif %}",
    "DeepSeek-R1": DEEPSEEK_R1,
    "Llama 3.1": LLAMA,
}
MODES: list[dict[str, Any]] = [{}, {"enable_thinking": False}]


class Server:
    """Renders with one template and infers sessions, as HTTP process and gate do between them."""

    def __init__(self, template: str) -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(2048))
        self._tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        self._tokenizer.add_tokens(["\n\n"])  # a token in every large vocabulary
        self._tokenizer.chat_template = template
        self.openings = Openings(self.render)
        self._fingerprints = Fingerprints(seed=1)
        self._lineage = Lineage(max_sessions=1000, prefix="s")

    def render(self, messages: Sequence[Message], mode: Mapping[str, Any]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **mode)
        return self._tokenizer.encode(text)

    def call(self, messages: Sequence[Message], mode: Mapping[str, Any]) -> str:
        token_ids = self.render(messages, mode)
        prompt = self._fingerprints.of(token_ids, self.openings.tail_tokens(token_ids))
        placed = self._lineage.place(prompt, lambda known: False)
        assert placed is not None
        self._lineage.answered(placed.session_id)
        return placed.session_id


class Agent:
    """A client that names no session: it works on a task with tools, then the user asks for more."""

    SYSTEM = "You are an agent that works on a computer. " * 8

    def __init__(self, task: str, answers: str, keeps_reasoning: bool) -> None:
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.SYSTEM},
            {"role": "user", "content": task},
        ]
        self._answers = answers
        self._keeps_reasoning = keeps_reasoning
        self._steps = 0

    def go_on(self) -> None:
        """Take the model's answer and what comes of it into the conversation."""
        self._steps += 1
        answer: dict[str, Any] = {"role": "assistant", "content": f"{self._answers}step {self._steps}"}
        if self._keeps_reasoning:
            answer["reasoning_content"] = f"I think {self._steps} is next"
        if self._steps % 3:
            function = {"name": "look", "arguments": {"at": self._steps}}
            answer["tool_calls"] = [{"id": f"call_{self._steps}", "type": "function", "function": function}]
            answer["content"] = answer["content"] if self._steps % 2 else ""
            result = {"role": "tool", "tool_call_id": f"call_{self._steps}", "content": f"seen {self._steps}"}
        else:
            result = {"role": "user", "content": f"And then? {self._steps}"}
        self.messages += [answer, result]


@pytest.mark.parametrize("mode", MODES, ids=["thinking", "not thinking"])
@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("answers", ["", "\n\n"], ids=["plain answers", "answers that start with a line break"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_side_by_side_stay_one_session_each(
    template: str, answers: str, keeps_reasoning: bool, mode: dict[str, Any]
) -> None:
    server = Server(TEMPLATES[template])
    tasks = ["task 1", "task 12", "task 123", "task", "task 1\n", "task 1 again", "task 2"]
    agents = [Agent(task, answers, keeps_reasoning) for task in tasks]
    sessions = [server.call(agent.messages, mode) for agent in agents]
    same_prompt = {0, 4} if template == "Llama 3.1" else set()  # it trims the line break; equal prompts are twins
    assert len(set(sessions)) == len(tasks), same_prompt
    for _ in range(8):
        for agent in agents:
            agent.go_on()
        now = [server.call(agent.messages, mode) for agent in agents]
        if same_prompt and now != sessions:  # twins have no names but those their second prompts give them
            sessions[0], sessions[4] = sessions[4], sessions[0]
        assert now == sessions


@pytest.mark.parametrize(
    ("template", "mode", "lost"),
    [
        ("tiny model", {}, 1),  # the line break before an answer that starts with line breaks
        ("Qwen3", {}, 0),
        ("Qwen3", {"enable_thinking": False}, 4),
        ("Qwen3, thinking only", {}, 2),
        ("DeepSeek-R1", {}, 2),
        ("Llama 3.1", {}, 0),
    ],
)
def test_what_an_opening_loses(template: str, mode: dict[str, Any], lost: int) -> None:
    server = Server(TEMPLATES[template])
    prompt = server.render([{"role": "user", "content": "Where does the water go?"}], mode)
    assert server.openings.tail_tokens(prompt) == lost
    assert server.openings.tail_tokens(prompt[:-1]) == 0
    assert server.openings.tail_tokens([]) == 0


def test_a_template_that_cannot_be_rendered_has_no_openings() -> None:
    def refuse(messages: Sequence[Message], mode: Mapping[str, Any]) -> list[int]:
        raise ValueError("no chat template")

    assert Openings(refuse).tail_tokens([1, 2, 3]) == 0


def test_learning_takes_no_more_than_a_moment() -> None:
    calls = 0

    def count(messages: Sequence[Message], mode: Mapping[str, Any]) -> list[int]:
        nonlocal calls
        calls += 1
        return [len(str(messages)), 7]

    Openings(count)
    assert calls <= 100
