"""Requests that would take a stock server down are answered 400 instead. Runs in the HTTP process of both sides.

Two faults of SGLang 0.5.23, each reproduced on a running engine:

- A token id outside the vocabulary reaches the embedding: an IndexError (on CUDA an assertion on the device) ends the
  scheduler, and the server with it.
- `custom_labels` of `/generate` under `--enable-metrics` must be label names that the server was started with: any
  other name ends the loop that hands answers out, and no call gets an answer any more although the server looks alive.

SGLang turns a ValueError of `_validate_one_request` into the answer 400, which is what its own checks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_basin.engine.metrics import fault


def refuse_harmful(self: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """Before `TokenizerManager._validate_one_request`. Raises ValueError, naming the field, for a harmful request."""
    try:
        problem = _outside_vocabulary(obj, input_ids, self.model_config.vocab_size) or _unknown_labels(self, obj)
    except Exception:  # noqa: BLE001 - a check that fails must not cost a call
        fault("inputs", "could not check a request; it is served unchecked")
        return
    if problem:
        raise ValueError(problem)


def _outside_vocabulary(obj: Any, input_ids: Sequence[int] | None, vocabulary: int) -> str | None:
    """Calls with images or the like are exempt: their placeholders are replaced in the scheduler, where the model
    knows them. Calls of a LoRA adapter have no upper bound here: adapters may add tokens."""
    if not input_ids or obj.contains_mm_input():
        return None
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or (highest >= vocabulary and not getattr(obj, "lora_path", None)):
        wrong = lowest if lowest < 0 else highest
        return f"input_ids contains out-of-vocabulary token id {wrong}; valid range is [0, {vocabulary})."
    return None


def _unknown_labels(manager: Any, obj: Any) -> str | None:
    labels = getattr(obj, "custom_labels", None)
    if not labels or not manager.enable_metrics:
        return None
    known = manager.metrics_collector.labels
    unknown = sorted(set(labels) - set(known))
    if not unknown:
        return None
    return (
        f"custom_labels contains {', '.join(map(repr, unknown))}; this server knows {', '.join(map(repr, known))}. "
        f"Start it with --tokenizer-metrics-allowed-custom-labels to add some."
    )
