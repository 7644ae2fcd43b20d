"""Requests that take a stock server down are refused with 400, and the servers go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import requests
from calls import generate, prompt
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from stack import MODEL, Stack

from sglang_basin.engine.inputs import refuse_harmful
from sglang_basin.engine.metrics import metrics

OPTIONS = {"max_new_tokens": 4, "temperature": 0}


def manager(**more: Any) -> SimpleNamespace:
    collector = SimpleNamespace(labels={"model_name": "m", "team": ""})
    known = {"enable_metrics": True, "metrics_collector": collector, "model_config": SimpleNamespace(vocab_size=100)}
    return SimpleNamespace(**known | more)


@pytest.mark.parametrize(
    ("fields", "input_ids", "problem"),
    [
        ({}, [0, 99], None),
        ({}, [5, 100], "token id 100; valid range is [0, 100)"),
        ({}, [-1, 5], "token id -1"),
        ({}, None, None),
        ({"lora_path": "adapter"}, [100], None),
        ({"lora_path": "adapter"}, [-2], "token id -2"),
        ({"image_data": "x.png"}, [-200, 100_000], None),
        ({"custom_labels": {"team": "a"}}, [1], None),
        ({"custom_labels": {"team": "a", "floor": "3"}}, [1], "custom_labels contains 'floor'"),
    ],
)
def test_harmful_requests_are_told_from_others(
    fields: dict[str, Any], input_ids: list[int] | None, problem: str | None
) -> None:
    request = GenerateReqInput(text="t", **fields)
    if problem is None:
        refuse_harmful(manager(), request, input_ids)
        return
    with pytest.raises(ValueError, match=r".") as refused:
        refuse_harmful(manager(), request, input_ids)
    assert problem in str(refused.value)


def test_labels_do_no_harm_without_metrics_and_embeddings_have_none() -> None:
    refuse_harmful(manager(enable_metrics=False), GenerateReqInput(text="t", custom_labels={"floor": "3"}), [1])
    refuse_harmful(manager(), EmbeddingReqInput(text="t"), [1])


def test_a_check_that_fails_costs_no_call() -> None:
    before = metrics().faults.labels("inputs")._value.get()
    refuse_harmful(SimpleNamespace(), GenerateReqInput(text="t"), [1])
    assert metrics().faults.labels("inputs")._value.get() == before + 1


@pytest.mark.stack
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/generate", {"input_ids": [5, MODEL.vocab], "sampling_params": OPTIONS}, f"token id {MODEL.vocab}"),
        ("/generate", {"input_ids": [[5], [-7]], "sampling_params": OPTIONS}, "token id -7"),
        ("/v1/completions", {"prompt": [5, 999_999], "max_tokens": 4}, "token id 999999"),
        ("/generate", {"text": "hi", "custom_labels": {"team": "x"}, "sampling_params": OPTIONS}, "contains 'team'"),
    ],
)
def test_the_servers_survive_what_kills_stock(empty: Stack, path: str, body: dict[str, Any], said: str) -> None:
    urls = [empty.prefill_url, empty.decode_url, empty.url]
    if path.startswith("/v1"):
        urls.pop()  # the router takes no token ids there
        body = {**body, "model": requests.get(empty.url + "/v1/models", timeout=20).json()["data"][0]["id"]}
    for url in urls:
        answer = requests.post(url + path, json=body, timeout=30)
        assert answer.status_code == 400, (url, answer.status_code, answer.text)
        assert said in answer.text
    assert generate(empty, None, prompt(60, 4)).ok
