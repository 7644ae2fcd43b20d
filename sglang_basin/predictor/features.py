"""What a session's calls so far say about its peak, as a short row of numbers: the names of its columns.

Logarithms are natural and of 1 + tokens where the count can be 0. `arithmetic.write_row` makes the row.
"""

from __future__ import annotations

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
