"""Whether an answer was final: the request offered tools, the model stopped by itself, and it called none of them.

Decided on decode, where the output is, with SGLang's own detector of the model's tool-call format
(`--tool-call-parser`). Without a parser or a tokenizer nothing is ever taken for final.
"""

from __future__ import annotations

from typing import Any, Protocol

from sglang_basin.engine.metrics import log

MAX_TOKENS = 8192
"""Of a longer output only its end is looked at: a call of a tool is the last thing that an answer says."""


class _Detector(Protocol):
    def has_tool_call(self, text: str) -> bool: ...


class FinalAnswers:
    def __init__(self, tokenizer: Any, detector: _Detector | None) -> None:
        self._tokenizer = tokenizer
        self._detector = detector

    @classmethod
    def for_scheduler(cls, scheduler: Any) -> FinalAnswers:
        """With the parser of a live scheduler's configuration."""
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        name = getattr(scheduler.server_args, "tool_call_parser", None)
        tokenizer = getattr(scheduler, "tokenizer", None)
        if name is None or tokenizer is None:
            return cls(None, None)
        try:
            return cls(tokenizer, FunctionCallParser([], name, tokenizer=tokenizer).detector)
        except Exception as error:  # noqa: BLE001 - SGLang itself says more when the first request needs the parser
            log.warning("Basin cannot use the tool-call parser %s (%s): sessions end by idle time-out", name, error)
            return cls(None, None)

    def is_final(self, req: Any, *, offered_tools: bool) -> bool:
        """`req` is a finished call on decode. About a microsecond a token of output."""
        if not offered_tools or self._detector is None:
            return False
        reason = req.finished_reason
        if reason is None or reason.to_json().get("type") != "stop":
            return False
        text = self._tokenizer.decode(list(req.output_ids[-MAX_TOKENS:]), skip_special_tokens=False)
        return not self._detector.has_tool_call(text)
