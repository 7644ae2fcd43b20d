"""What a session's calls so far say about its peak, as a short row of numbers. Standard library only.

A `History` follows one session through the policy's own numbers (calls seen, present context): an arrival shows how
much the tool's result added, an end how much the model wrote. It keeps sums, not the calls, so its size is fixed and
an update takes a few microseconds. Logarithms are natural and of 1 + tokens where the count can be 0.
"""

from __future__ import annotations

import math
import operator
import struct

NAMES: tuple[str, ...] = (
    "log_context",
    "log_first",
    "log_calls",
    "log_grown_ratio",
    "log_growth_per_call",
    "log_growth_recent",
    "log_growth_max",
    "log_output_per_call",
    "log_output_recent",
    "log_output_max",
    "log_result_per_call",
    "log_result_recent",
    "log_result_last",
    "mean_log_output",
    "mean_log_result",
    "spread_log_result",
    "share_small_results",
    "share_large_results",
    "shrinks",
    "spread_log_output",
    "share_small_outputs",
    "share_large_outputs",
    "output_trend",
    "result_trend",
    "log_pause_last",
    "mean_log_pause",
    "log_pause_recent",
    "log_pause_max",
    "kin_over_context",
    "text_score",
    "log_text_characters",
)
"""The row's columns. `result` is what a tool's answer added to the prompt, `pause` the time until it came, in tenths of
a second; a `trend` compares recent calls with all of them. `kin` are sessions of the same agent and model (the same
system prompt): their mean log peak less the log context. Changing this changes the model file's form.
"""

_KNOWN_AT_FIRST = ("log_context", "log_first", "kin_over_context", "text_score", "log_text_characters")
ZEROS_AT_FIRST = frozenset(place for place, name in enumerate(NAMES) if name not in _KNOWN_AT_FIRST)
"""Columns that are 0 in the row of a first call that has just arrived."""

SMALL_RESULT_TOKENS = 100
LARGE_RESULT_TOKENS = 1500
SMALL_OUTPUT_TOKENS = 60
LARGE_OUTPUT_TOKENS = 500
SHRINK_SHARE = 0.8
"""A prompt below this share of the context before it counts as a compaction."""

_ZEROS = (0.0,) * len(ZEROS_AT_FIRST)
_RECENT = 0.3
_log, _log1p = math.log, math.log1p

_COUNTS = (
    "calls",
    "context",
    "first",
    "prompt",
    "growth_max",
    "outputs",
    "output_max",
    "small_outputs",
    "large_outputs",
    "results",
    "result_last",
    "small_results",
    "large_results",
    "shrinks",
)
_SUMS = ("output_sum", "result_sum")
_MEANS = (
    "growth_recent",
    "output_recent",
    "result_recent",
    "log_output_sum",
    "log_output_squares",
    "log_output_recent",
    "log_result_sum",
    "log_result_squares",
    "log_result_recent",
    "log_pause_sum",
    "log_pause_last",
    "log_pause_max",
    "log_pause_recent",
)
_FIELDS = (*_COUNTS, *_SUMS, *_MEANS, "_output_counted")
_PACKED = struct.Struct(f"<{len(_COUNTS)}I{len(_SUMS)}Q{len(_MEANS)}d?")
_values = operator.attrgetter(*_FIELDS)

PACKED_BYTES = _PACKED.size
"""Of a packed `History`."""


class History:
    """Sums over one session's calls. Contexts in tokens; `advance` with each change of the session."""

    __slots__ = _FIELDS

    def __init__(self) -> None:
        self.calls = self.context = self.first = self.prompt = 0
        self.outputs = self.results = self.shrinks = self.small_results = self.large_results = 0
        self.growth_max = self.output_max = self.result_last = 0
        self.growth_recent = self.output_recent = self.result_recent = 0.0
        self.output_sum = self.result_sum = 0
        self.small_outputs = self.large_outputs = 0
        self.log_output_sum = self.log_output_squares = self.log_output_recent = 0.0
        self.log_result_sum = self.log_result_squares = self.log_result_recent = 0.0
        self.log_pause_sum = self.log_pause_last = self.log_pause_max = self.log_pause_recent = 0.0
        self._output_counted = True

    def advance(self, calls: int, context_tokens: int, pause_s: float = 0.0) -> bool:
        """Take in the session's present numbers; False when nothing changed. Calls side by side count as one step.

        `pause_s` is the time between the last call's end and this one's arrival; it counts once a call.
        """
        context_tokens = max(1, context_tokens)
        if calls == self.calls and context_tokens == self.context:
            return False
        if calls > self.calls:
            if self.calls:
                self._result(context_tokens, pause_s)
            else:
                self.first = context_tokens
            self.calls, self.prompt = calls, context_tokens
            self._output_counted = False
        elif not self._output_counted:
            self._output_counted = True
            self._output(max(0, context_tokens - self.prompt))
        self.context = context_tokens
        return True

    def _result(self, prompt: int, pause_s: float) -> None:
        grown = prompt - self.prompt
        if prompt < SHRINK_SHARE * self.context:
            self.shrinks += 1
        self.growth_max = max(self.growth_max, grown)
        result = max(0, prompt - self.context)
        first = self.results == 0
        self.growth_recent = grown if first else self.growth_recent + _RECENT * (grown - self.growth_recent)
        self.result_recent = result if first else self.result_recent + _RECENT * (result - self.result_recent)
        self.results += 1
        self.result_last = result
        self.result_sum += result
        logged = _log1p(result)
        self.log_result_recent = (
            logged if first else self.log_result_recent + _RECENT * (logged - self.log_result_recent)
        )
        self.log_result_sum += logged
        self.log_result_squares += logged * logged
        self.small_results += result < SMALL_RESULT_TOKENS
        self.large_results += result > LARGE_RESULT_TOKENS
        pause = _log1p(10.0 * pause_s) if pause_s > 0 else 0.0
        self.log_pause_recent = pause if first else self.log_pause_recent + _RECENT * (pause - self.log_pause_recent)
        self.log_pause_sum += pause
        self.log_pause_last = pause
        self.log_pause_max = max(self.log_pause_max, pause)

    def _output(self, output: int) -> None:
        logged, first = _log1p(output), self.outputs == 0
        self.output_recent = output if first else self.output_recent + _RECENT * (output - self.output_recent)
        self.log_output_recent = (
            logged if first else self.log_output_recent + _RECENT * (logged - self.log_output_recent)
        )
        self.outputs += 1
        self.output_sum += output
        self.output_max = max(self.output_max, output)
        self.log_output_sum += logged
        self.log_output_squares += logged * logged
        self.small_outputs += output < SMALL_OUTPUT_TOKENS
        self.large_outputs += output > LARGE_OUTPUT_TOKENS

    def packed(self) -> bytes:
        """All of it in a quarter of the space, for the time between two calls."""
        return _PACKED.pack(*_values(self))

    def unpack(self, packed: bytes) -> None:
        """Become what was `packed`. Name by name, which takes a third of the time that a loop takes."""
        (
            self.calls,
            self.context,
            self.first,
            self.prompt,
            self.growth_max,
            self.outputs,
            self.output_max,
            self.small_outputs,
            self.large_outputs,
            self.results,
            self.result_last,
            self.small_results,
            self.large_results,
            self.shrinks,
            self.output_sum,
            self.result_sum,
            self.growth_recent,
            self.output_recent,
            self.result_recent,
            self.log_output_sum,
            self.log_output_squares,
            self.log_output_recent,
            self.log_result_sum,
            self.log_result_squares,
            self.log_result_recent,
            self.log_pause_sum,
            self.log_pause_last,
            self.log_pause_max,
            self.log_pause_recent,
            self._output_counted,
        ) = _PACKED.unpack(packed)

    def at_first(self) -> bool:
        """Whether all that happened is that a first call has arrived."""
        return self.calls == 1 and not self._output_counted

    def row(self, kin_log_peak: float, text_score: float, text_characters: int) -> list[float]:
        """The numbers in the order of `NAMES`; finite for whatever was taken in."""
        log_context = _log(self.context or 1)
        if self.at_first():
            return [log_context, log_context, *_ZEROS, kin_log_peak - log_context, text_score, _log1p(text_characters)]
        log_first = _log(self.first or 1)
        results, outputs = self.results or 1, self.outputs or 1
        mean_log_result = self.log_result_sum / results
        mean_log_output = self.log_output_sum / outputs
        variance = self.log_result_squares / results - mean_log_result * mean_log_result
        of_outputs = self.log_output_squares / outputs - mean_log_output * mean_log_output
        growth = (self.context - self.first) / results
        recent = self.growth_recent
        return [
            log_context,
            log_first,
            _log(self.calls or 1),
            log_context - log_first,
            _log1p(growth) if growth > 0 else 0.0,
            _log1p(recent) if recent > 0 else 0.0,
            _log1p(self.growth_max),
            _log1p(self.output_sum / outputs),
            _log1p(self.output_recent),
            _log1p(self.output_max),
            _log1p(self.result_sum / results),
            _log1p(self.result_recent),
            _log1p(self.result_last),
            mean_log_output,
            mean_log_result,
            math.sqrt(variance) if variance > 0 else 0.0,
            self.small_results / results,
            self.large_results / results,
            float(self.shrinks),
            math.sqrt(of_outputs) if of_outputs > 0 else 0.0,
            self.small_outputs / outputs,
            self.large_outputs / outputs,
            self.log_output_recent - mean_log_output,
            self.log_result_recent - mean_log_result,
            self.log_pause_last,
            self.log_pause_sum / results,
            self.log_pause_recent,
            self.log_pause_max,
            kin_log_peak - log_context,
            text_score,
            _log1p(text_characters),
        ]
