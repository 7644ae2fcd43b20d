"""Fingerprints of prefixes: equal exactly for equal prefixes, and quick on long prompts."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.policy.lineage import CELL_TOKENS, Lineage

LENGTHS = st.integers(0, 4 * CELL_TOKENS)


def prefixes(fingerprints: Fingerprints, token_ids: list[int], tail_tokens: int = 0) -> list[int]:
    """The fingerprints of all prefixes of a prompt, cell by cell."""
    prompt = fingerprints.of(array("q", token_ids), tail_tokens)
    assert prompt.tokens == max(0, len(token_ids) - tail_tokens)
    found = [fingerprint for cell in range(len(prompt.cells)) for fingerprint in prompt.within(cell)]
    assert [found[cell * CELL_TOKENS] for cell in range(len(prompt.cells))] == prompt.cells
    assert len(found) == prompt.tokens + 1
    return found


@given(LENGTHS, LENGTHS, st.integers(0, 200_000), st.integers(0, 200_000))
def test_prompts_agree_on_what_they_have_in_common_and_on_nothing_more(
    common: int, rest: int, one: int, other: int
) -> None:
    fingerprints = Fingerprints(seed=1)
    start = [5 * number % 977 for number in range(common)]
    first = prefixes(fingerprints, [*start, one, *range(rest)])
    second = prefixes(fingerprints, [*start, other, *range(rest)])
    assert first[: common + 1] == second[: common + 1]
    equal_after = [a == b for a, b in zip(first[common + 1 :], second[common + 1 :], strict=True)]
    assert all(equal_after) if one == other else not any(equal_after)


@given(st.lists(st.sampled_from([0, 0, 0, 1, 2**17]), max_size=4 * CELL_TOKENS))
def test_no_two_prefixes_of_a_prompt_agree_not_even_by_tokens_of_id_zero(token_ids: list[int]) -> None:
    found = prefixes(Fingerprints(seed=5), token_ids)
    assert len(set(found)) == len(found)


@given(LENGTHS, st.integers(0, 300))
def test_a_tail_is_as_if_it_were_not_there(tokens: int, tail: int) -> None:
    fingerprints = Fingerprints(seed=2)
    token_ids = [7 * number % 1009 for number in range(tokens)]
    assert prefixes(fingerprints, token_ids, tail) == prefixes(fingerprints, token_ids[: max(0, tokens - tail)])


def test_keys_are_the_processs_own() -> None:
    token_ids = list(range(1, 500))
    assert prefixes(Fingerprints(), token_ids)[1:] != prefixes(Fingerprints(), token_ids)[1:]


def test_keys_of_short_prompts_stay_when_longer_ones_come() -> None:
    fingerprints = Fingerprints(seed=3)
    short = prefixes(fingerprints, list(range(300)))
    long = fingerprints.of(list(range(100_000)))
    assert long.cells[: 300 // CELL_TOKENS + 1] == short[::CELL_TOKENS]


@pytest.mark.parametrize("make", [list, tuple, lambda ids: array("q", ids), lambda ids: array("i", ids)])
def test_any_sequence_of_token_ids_will_do(make) -> None:
    fingerprints = Fingerprints(seed=4)
    token_ids = [11 * number % 1013 for number in range(200)]
    assert fingerprints.of(make(token_ids)).cells == fingerprints.of(array("q", token_ids)).cells


def test_two_thousand_sessions_over_a_long_system_prompt_are_told_apart() -> None:
    fingerprints, lineage = Fingerprints(), Lineage(max_sessions=10_000, prefix="s")
    system = array("q", [13 * number % 100_003 for number in range(13_000)])

    def place(context: array) -> str:
        placed = lineage.place(fingerprints.of(context), lambda known: False)
        assert placed is not None
        return placed.session_id

    tasks = [system + array("q", [number // 50, number % 50, 3]) for number in range(2_000)]
    sessions = [place(task) for task in tasks]
    assert len(set(sessions)) == 2_000
    assert [place(task + array("q", [5, 6, 7])) for task in tasks] == sessions
