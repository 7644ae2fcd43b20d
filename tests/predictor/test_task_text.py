import time
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_basin.predictor.text import BUCKETS, MAX_CHARACTERS, TextScore, read_task, task_text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("role", "content", "text", "x")), inner)
    ),
    max_leaves=20,
)


@given(st.one_of(st.text(max_size=3000), st.binary(max_size=3000), st.none()))
@example("\ud800 lone surrogate")
@example("修复这个错误 " * 50)
@example(b"\xff\xfe\x00" * 100)
@example("x" * 10_000)
def test_any_text_is_read(text):
    task = read_task(text)
    if task is None:
        return
    assert task.characters == len(text)
    buckets = [bucket for bucket, _ in task.terms]
    assert buckets == sorted(set(buckets))
    assert all(0 <= bucket < BUCKETS and count >= 1 for bucket, count in task.terms)
    assert sum(count for _, count in task.terms) <= MAX_CHARACTERS
    scores = TextScore([1.0] * BUCKETS, [0.5] * BUCKETS)
    assert abs(scores.score(task)) <= 0.5 * BUCKETS**0.5


@pytest.mark.parametrize("text", ["", "   \n", None, b""])
def test_no_text(text):
    assert read_task(text) is None


@pytest.mark.parametrize(
    "text", ["word " * 2_000_000, "修复" * 5_000_000, b"\x00\xff" * 5_000_000, "<system-reminder>" * 600_000]
)
def test_ten_megabytes_take_bounded_time_and_no_memory(text):
    tracemalloc.start()
    started = time.perf_counter()
    task = read_task(text)
    if isinstance(text, str):
        task_text([{"role": "user", "content": text}])
    took = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert task is None or task.characters == len(text)
    assert took < 10  # milliseconds when linear, minutes when not
    assert peak < 5 * 2**20


def test_whitespace_makes_no_other_task():
    assert read_task("fix  the\nbug").fingerprint == read_task("fix the bug").fingerprint
    assert read_task("fix the bug").fingerprint != read_task("fix the bugs").fingerprint


def test_languages_without_spaces_share_parts():
    one, other = read_task("修复登录错误"), read_task("修复支付错误")
    shared = {bucket for bucket, _ in one.terms} & {bucket for bucket, _ in other.terms}
    assert len(shared) >= 2


def test_the_first_user_message_is_the_task():
    messages = [
        {"role": "system", "content": "You are an agent"},
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>notes</system-reminder>"}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Fix it"}]},
        {"role": "user", "content": "later"},
    ]
    assert task_text(messages) == "Fix it"


@pytest.mark.parametrize(
    ("content", "task"),
    [
        ("<system-reminder>a</system-reminder> fix <system-reminder>b</system-reminder>it", "fix  it"),
        ("<system-reminder> never closed", "<system-reminder> never closed"),
        ("</system-reminder> fix", "</system-reminder> fix"),
    ],
)
def test_the_agents_own_notes_are_cut_out(content, task):
    assert task_text([{"role": "user", "content": content}]) == task


@pytest.mark.parametrize(
    "messages", [None, 3, {}, [], [None, 3, "x"], [{"role": "user"}], [{"role": "user", "content": 7}]]
)
def test_no_user_message(messages):
    assert task_text(messages) is None


@given(JSON)
def test_any_json_as_messages(messages):
    found = task_text(messages)
    assert found is None or isinstance(found, str)
