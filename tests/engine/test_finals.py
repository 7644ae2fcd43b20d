"""Final answers, by SGLang's own detectors of tool calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN

from sglang_basin.engine.finals import FinalAnswers

DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
STOPPED = FINISH_MATCHED_TOKEN(2)


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens, "the markers of tool calls may be special tokens"
        return "".join(map(chr, ids))


def final(text: str, parser: str = "qwen", reason: Any = STOPPED, offered_tools: bool = True) -> bool:
    finals = FinalAnswers(Characters(), FunctionCallParser([], parser).detector)
    call = SimpleNamespace(output_ids=[ord(c) for c in text], finished_reason=reason)
    return finals.is_final(call, offered_tools=offered_tools)


@pytest.mark.parametrize(
    ("parser", "called"),
    [
        ("qwen", 'So:\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=ls>\n</function>\n</tool_call>"),
        ("deepseekv3", DEEPSEEK),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0"),
        ("mistral", '[TOOL_CALLS] [{"name": "ls", "arguments": {}}]'),
    ],
)
def test_an_answer_that_calls_a_tool_is_not_final(parser: str, called: str) -> None:
    assert not final(called, parser)
    assert final("All done.", parser)


def test_only_an_answer_that_the_model_ended_is_final() -> None:
    assert not final("All d", reason=FINISH_LENGTH(5))
    assert not final("All d", reason=FINISH_ABORT())
    assert not final("All d", reason=None)


def test_without_tools_offered_or_a_parser_nothing_is_final() -> None:
    assert not final("All done.", offered_tools=False)
    assert not FinalAnswers(None, None).is_final(SimpleNamespace(finished_reason=STOPPED), offered_tools=True)
