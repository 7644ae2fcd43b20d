"""Calls as SGLang's HTTP process hands them on, with Basin's stamp in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_basin.engine.identity import ACTION_TYPE, Stamp


def tokenized(
    stamp: Stamp, prompt: Iterable[int], *, host: str, room: int, rid: str = "r", port: int | None = None
) -> TokenizedGenerateReqInput:
    """`host` and `port` are the prefill's bootstrap address."""
    action = KvHintAction(
        action_id="a", action_type=ACTION_TYPE, action_version="1", payload=msgspec.to_builtins(stamp)
    )
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        bootstrap_host=host,
        bootstrap_port=port,
        bootstrap_room=room,
        kv_hints=KvHintsEnvelope(protocol_version="1", message_id="m", actions=[action]),
    )
