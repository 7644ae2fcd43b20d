import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_trace import sessions

from sglang_basin.replay.prompts import ChatPrompt, TokenPrompt, token_stream
from sglang_basin.replay.trace import Call, Session

IDS = (16, 512)


def shared_length(one, other):
    different = np.flatnonzero(one[: len(other)] != other[: len(one)])
    return int(different[0]) if len(different) else min(len(one), len(other))


def token_prompt(session, uid="u", seed=1, ids=IDS):
    return TokenPrompt(
        seed=seed, trace_name="t", uid=uid, shared_prefix_tokens=session.shared_prefix_tokens, token_ids=ids
    )


def replayed(prompt, session, output):
    """(context before, prompt) of each call, `output(index, call)` being what the server answers."""
    made = []
    for index, call in enumerate(session.calls):
        before = prompt.context.copy()
        made.append((before, prompt.next(call).copy()))
        prompt.received(output(index, call))
    return made


@given(sessions(), st.integers(0, 2**32))
def test_prompts_have_the_recorded_length_and_share_exactly_the_recorded_prefix(session, answer_seed):
    answers = np.random.default_rng(answer_seed)
    calls = replayed(
        token_prompt(session), session, lambda _, call: answers.integers(*IDS, call.output_tokens).tolist()
    )
    for call, (before, prompt) in list(zip(session.calls, calls, strict=True))[1:]:
        assert len(prompt) == call.prompt_tokens
        assert len(before) >= call.cached_prefix_tokens
        assert shared_length(prompt, before) == call.cached_prefix_tokens
        assert prompt.min() >= IDS[0]
        assert prompt.max() < IDS[1]


@given(sessions())
def test_a_short_answer_keeps_the_whole_context(session):
    calls = replayed(token_prompt(session), session, lambda *_: [17])
    for call, (before, prompt) in list(zip(session.calls, calls, strict=True))[1:]:
        assert len(prompt) == call.prompt_tokens
        assert shared_length(prompt, before) == min(call.cached_prefix_tokens, len(before))


@given(sessions(max_calls=3), sessions(max_calls=3))
def test_the_system_prompt_is_one_for_all_sessions(one, other):
    first = token_prompt(one, "a").next(one.calls[0])
    second = token_prompt(other, "b").next(other.calls[0])
    both = min(one.shared_prefix_tokens, other.shared_prefix_tokens)
    assert shared_length(first, second) >= both
    if one.shared_prefix_tokens != other.shared_prefix_tokens:
        assert shared_length(first, second) == min(both, len(first), len(second))


def test_same_seed_same_prompts_and_nothing_shared_otherwise():
    session = Session("s", (Call(500, 0, 10, 0.0),))
    first = token_prompt(session).next(session.calls[0])
    assert np.array_equal(first, token_prompt(session).next(session.calls[0]))
    assert shared_length(first, token_prompt(session, uid="v").next(session.calls[0])) < 5
    assert shared_length(first, token_prompt(session, seed=2).next(session.calls[0])) < 5


@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(0, 300))
def test_a_token_depends_on_its_position_alone(key, start, length):
    whole = token_stream(key, 0, start + length, IDS)
    assert np.array_equal(token_stream(key, start, start + length, IDS), whole[start:])


def test_tokens_are_spread_over_the_range():
    counts = np.bincount(token_stream(99, 0, 49_600, IDS), minlength=512)[16:]
    assert counts.min() > 50
    assert counts.max() < 160


def test_chat_prompts_grow_by_turns_and_follow_the_servers_count():
    prompt = ChatPrompt(seed=1, trace_name="t", uid="u", shared_prefix_tokens=40)
    first = prompt.next(Call(100, 0, 10, 0.0))
    assert [message["role"] for message in first] == ["system", "user"]
    assert len(first[1]["content"].split()) == 60
    prompt.received("the answer", prompt_tokens=140, output_tokens=10)
    second = prompt.next(Call(200, 110, 10, 0.0))
    assert second[:2] == first
    assert [message["role"] for message in second[2:]] == ["assistant", "user"]
    assert second[2]["content"] == "the answer"
    assert len(second[3]["content"].split()) == 50
    prompt.received("more", prompt_tokens=200, output_tokens=10)
    third = prompt.next(Call(120, 60, 10, 0.0))
    assert third[0] == first[0]
    assert [message["role"] for message in third] == ["system", "user"]
    assert third[1] != first[1]
