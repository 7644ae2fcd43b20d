import dataclasses
import json
import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_basin.predictor.payload import MAX_BODY_BYTES, MAX_SCORE, MAX_TERMS, TaskFeatures, task_payload
from sglang_basin.predictor.text import BUCKETS, MAX_CHARACTERS, TextScore, read_task

TASK = "Fix the parser: nested lists fail with a RecursionError in module 7"
SYSTEM = "You are a coding agent. Today is 2026-01-05. Work in /home/me/project."
USER = {"role": "user", "content": TASK}

BODIES = {
    "chat": {"messages": [{"role": "system", "content": SYSTEM}, USER, {"role": "assistant", "content": "ok"}]},
    "chat, developer": {"messages": [{"role": "developer", "content": SYSTEM}, USER]},
    "messages": {
        "system": [{"type": "text", "text": SYSTEM}],
        "messages": [{"role": "user", "content": [{"text": TASK}]}],
    },
    "messages, billing note": {
        "system": [{"text": "x-anthropic-billing-header: cc_version=2.1; cch=a9f3;"}, {"text": SYSTEM}],
        "messages": [USER],
    },
    "responses": {"instructions": SYSTEM, "input": [{"type": "message", **USER}]},
    "responses, text": {"instructions": SYSTEM, "input": TASK},
    "completions": {"prompt": TASK},
    "completions, list": {"prompt": [TASK, "another"]},
    "generate": {"text": TASK},
}


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_every_endpoint_tells_the_task(name, raw):
    body = {"model": "m", **BODIES[name]}
    payload = task_payload(json.dumps(body).encode() if raw else body)
    features = TaskFeatures.from_payload(json.loads(json.dumps(payload)))
    assert features.task == read_task(TASK)
    assert features.text is None
    known = task_payload({"model": "m", "system": SYSTEM, "messages": [USER]})
    if "system" in json.dumps(BODIES[name]) or "developer" in json.dumps(BODIES[name]) or "instructions" in body:
        assert payload["kin"] == known["kin"]
    else:
        assert payload["kin"] != known["kin"]


def test_kin_is_the_agent_and_the_model_whatever_the_day():
    def kin(system, model="m"):
        return task_payload({"model": model, "system": system, "messages": [USER]})["kin"]

    assert kin(SYSTEM) == kin(SYSTEM.replace("2026-01-05", "2026-02-17"))
    assert kin(SYSTEM) == kin(SYSTEM.ljust(600) + "the user's own rules")
    assert kin(SYSTEM) != kin("You review pull requests.")
    assert kin(SYSTEM) != kin(SYSTEM, "another")


def test_a_later_call_tells_the_same():
    first = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, USER]}
    later = {
        **first,
        "messages": [*first["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}],
    }
    assert task_payload(json.dumps(first).encode()) == task_payload(json.dumps(later).encode())


def test_text_travels_only_when_asked_for():
    assert "nested" not in json.dumps(task_payload({"messages": [USER]}))
    kept = TaskFeatures.from_payload(task_payload({"messages": [USER]}, keep_text=True))
    assert kept.text == TASK


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\x00\xff\xfe" * 1000,
        b'{"messages":7}',
        b'{"messages":[]}',
        b'{"messages":[1,2,3]}',
        b'{"prompt":[1,2,3]}',
        b'{"prompt":[[1,2],[3]]}',
        b'{"messages":[{"role":"assistant","content":"x"}]}',
        b'{"messages":[{"role":"user","content":"   "}]}',
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":[{"role":"user","content":' + b"[" * 3000 + b"]" * 3000 + b"}]}",
        b'{"text":"' + b"x" * MAX_BODY_BYTES + b'"}',
        {},
        {"messages": {"role": "user"}},
    ],
)
def test_a_body_that_tells_nothing(body):
    assert task_payload(body) is None


def test_words_of_any_language_and_odd_characters():
    for text in ("修复登录错误" * 3000, "Почини разбор списков", "\ud800 alone", "🙂" * 5000):
        payload = task_payload({"messages": [{"role": "user", "content": text}]}, keep_text=True)
        sent = json.dumps(payload)
        assert len(sent) < 4 * MAX_TERMS * 4 / 3 + 8 * MAX_CHARACTERS + 400
        task = TaskFeatures.from_payload(json.loads(sent)).task
        assert task.fingerprint == read_task(text).fingerprint
        assert len(task.terms) <= MAX_TERMS


@pytest.mark.parametrize(
    "content", ["word " * 2_000_000, "修复" * 1_600_000, "<system-reminder>" * 600_000, "\x00\x01" * 800_000]
)
def test_ten_megabytes_are_read_in_bounded_time_and_memory(content):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}, ensure_ascii=False).encode()
    assert len(body) > 9_000_000
    tracemalloc.start()
    started = time.perf_counter()
    payload = task_payload(body)
    took = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert payload["characters"] >= MAX_CHARACTERS
    assert took < 10  # milliseconds when linear, minutes when not
    assert peak < 6 * MAX_BODY_BYTES


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("role", "content", "text", "x")), inner)
    ),
    max_leaves=20,
)
FIELDS = st.sampled_from(("model", "messages", "input", "prompt", "text", "system", "instructions"))


@given(st.dictionaries(FIELDS, ANY))
@example({"messages": [{"role": "user", "content": "a"}], "system": {"role": 1}})
@example({"messages": [{"role": "system"}, {"role": "user", "content": [{"text": "a"}]}]})
def test_any_body_raw_and_parsed_tell_the_same(body):
    raw = task_payload(json.dumps(body).encode())
    assert raw == task_payload(body)
    if raw is not None:
        TaskFeatures.from_payload(raw)


@given(st.binary(max_size=300))
def test_any_bytes(body):
    task_payload(body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kin": "xyz"}, "kin"),
        ({"kin": 7}, "kin"),
        ({"score": "1.0"}, "score"),
        ({"score": MAX_SCORE + 0.01}, "score"),
        ({"score": -math.inf}, "score"),
        ({"score": math.nan}, "score"),
        ({"task": "0" * 17}, "task"),
        ({"terms": "A" * 10_000}, "terms"),
        ({"terms": "!!!!"}, "terms"),
        ({"terms": "AAAA"}, "terms"),
        ({"terms": "//8BAA=="}, "buckets"),
        ({"terms": "AQAAAA=="}, "counts"),
        ({"terms": "AQABAAEAAQA="}, "ascend"),
        ({"characters": -1}, "characters"),
        ({"text": "x" * (MAX_CHARACTERS + 1)}, "text"),
        ({"more": 1}, "more"),
    ],
)
def test_a_foreign_payload_is_refused_by_name(change, says):
    payload = {**task_payload({"messages": [USER]}), **change}
    with pytest.raises(ValueError, match=says):
        TaskFeatures.from_payload(payload)


@given(st.text(max_size=300), st.integers(1, 300))
def test_a_score_that_travels_is_the_one_made_of_the_terms(text, size):
    """Whichever process makes it; and it is within what may travel."""
    weights = np.random.default_rng(size).normal(size=BUCKETS) * size
    text_score = TextScore(np.linspace(1.0, 9.0, BUCKETS).tolist(), weights.tolist())
    body = {"messages": [{"role": "user", "content": text}]}
    terms = TaskFeatures.from_payload(task_payload(body) or {})
    score = TaskFeatures.from_payload(task_payload(body, text_score=text_score) or {})
    both = TaskFeatures.from_payload(task_payload(body, text_score=text_score, keep_terms=True) or {})
    assert both == dataclasses.replace(terms, score=both.score)
    if terms.task is not None:
        assert score == dataclasses.replace(both, task=dataclasses.replace(terms.task, terms=()))
        assert score.score == max(-MAX_SCORE, min(MAX_SCORE, text_score.score(terms.task)))


@pytest.mark.parametrize("payload", [None, 7, [], "x"])
def test_no_payload(payload):
    with pytest.raises(ValueError, match="task payload"):
        TaskFeatures.from_payload(payload)


@given(ANY)
def test_any_payload_is_read_or_refused(payload):
    try:
        features = TaskFeatures.from_payload(payload)
    except ValueError:
        return
    assert set(dataclasses.asdict(features)) == {"kin", "task", "score", "text"}
