"""Qwen3, the architecture of `tiny_model`."""

from sglang.srt.models.qwen3 import Qwen3ForCausalLM

EntryClass = Qwen3ForCausalLM
