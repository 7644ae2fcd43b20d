"""Sessions told apart by their prompts: each rule by example, and all of them against plain token lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.policy.lineage import CELL_TOKENS, MIN_TOKENS, Lineage, Placement, Standing

RUNNING, ANSWERED, OPEN = Standing.RUNNING, Standing.ANSWERED, Standing.OPEN
SYSTEM = list(range(1000, 1100))
"""A system prompt that sessions have in common; it ends in the middle of a cell."""


class Prefixes:
    """A prompt whose prefixes are told apart exactly, as fingerprints do but for chance."""

    _numbers: dict[tuple[int, ...], int] = {}  # noqa: RUF012 - equal prefixes have one number in all prompts

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self.tokens = len(token_ids)
        self.cells = [self._prefix(start) for start in range(0, self.tokens + 1, CELL_TOKENS)]

    def within(self, cell: int) -> list[int]:
        start = cell * CELL_TOKENS
        return [self._prefix(end) for end in range(start, min(start + CELL_TOKENS, self.tokens + 1))]

    def _prefix(self, tokens: int) -> int:
        return self._numbers.setdefault(self._token_ids[:tokens], len(self._numbers))


class Client:
    """A lineage and what each session does."""

    def __init__(self, max_sessions: int = 1000) -> None:
        self.lineage = Lineage(max_sessions=max_sessions, prefix="s")
        self.standings: dict[str, Standing] = {}

    def call(self, token_ids: Sequence[int], then: Standing = ANSWERED) -> str:
        """A call with this prompt; its session does `then` from now on."""
        placed = self.place(token_ids, then)
        assert placed.is_session
        return placed.session_id

    def place(self, token_ids: Sequence[int], then: Standing = ANSWERED, *, sure: bool = True) -> Placement:
        placed = self.lineage.place(Prefixes(token_ids), lambda known: self.standings[known] is RUNNING, sure=sure)
        assert placed is not None
        self.now(then, placed.session_id)
        return placed

    def now(self, standing: Standing, *session_ids: str) -> None:
        """This is what these sessions are doing from now on."""
        for session_id in session_ids:
            self.standings[session_id] = standing
            if standing is ANSWERED:
                self.lineage.answered(session_id)


def test_a_prompt_that_extends_a_context_is_the_sessions_next_call() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1])
    assert client.call([*SYSTEM, 1, 2]) == first
    assert client.call([*SYSTEM, 1, 2, *range(500)]) == first
    assert client.call([*SYSTEM, 1, 2, *range(500), 7]) == first


def test_sessions_with_a_system_prompt_in_common_stay_apart() -> None:
    client = Client()
    contexts = [[*SYSTEM, task] for task in range(300)]
    sessions = [client.call(context) for context in contexts]
    assert len(set(sessions)) == 300
    for turn in range(3):
        contexts = [[*context, 5000 + turn, 7] for context in contexts]
        assert [client.call(context) for context in contexts] == sessions


def test_a_task_does_not_go_on_with_one_that_its_text_begins_with() -> None:
    """Prompts end behind their last message, so "task 1" is not the start of "task 12"."""
    end_of_turn = 9
    client = Client()
    one = client.call([*SYSTEM, 1, end_of_turn])
    twelve = client.call([*SYSTEM, 1, 2, end_of_turn])
    assert one != twelve
    assert client.call([*SYSTEM, 1, end_of_turn, 50, 51]) == one
    assert client.call([*SYSTEM, 1, 2, end_of_turn, 50, 51]) == twelve


def test_twins_started_side_by_side_are_two_sessions_and_stay_two() -> None:
    client = Client()
    prompt = [*SYSTEM, 1]
    twins = [client.call(prompt, then=RUNNING) for _ in range(8)]
    assert len(set(twins)) == 8
    client.now(ANSWERED, *twins)
    second = [client.call([*prompt, 20 + number], then=RUNNING) for number in range(8)]
    assert sorted(second) == sorted(twins)
    client.now(ANSWERED, *twins)
    assert [client.call([*prompt, 20 + number, 3]) for number in range(8)] == second


def test_a_twin_started_after_the_first_was_answered_is_a_session_too() -> None:
    client = Client()
    one = client.call([*SYSTEM, 1])
    other = client.call([*SYSTEM, 1])
    assert one != other
    assert client.call([*SYSTEM, 1, 2]) in (one, other)


def test_the_next_call_goes_to_the_twin_that_was_answered() -> None:
    client = Client()
    one = client.call([*SYSTEM, 1], then=RUNNING)
    client.call([*SYSTEM, 1], then=RUNNING)
    client.now(ANSWERED, one)
    assert client.call([*SYSTEM, 1, 2]) == one


def test_a_first_call_that_was_turned_away_finds_its_session_again() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1], then=OPEN)
    assert client.call([*SYSTEM, 1], then=OPEN) == first
    assert client.call([*SYSTEM, 1]) == first
    assert client.call([*SYSTEM, 1]) != first  # answered by now: this one is a twin


def test_a_later_call_tried_again_before_its_abort_is_noticed_stays_in_its_session() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1])
    assert client.call([*SYSTEM, 1, 2], then=RUNNING) == first
    assert client.call([*SYSTEM, 1, 2], then=RUNNING) == first


def test_an_extension_counts_while_the_end_of_the_last_call_is_not_known_yet() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1], then=RUNNING)
    assert client.call([*SYSTEM, 1, 2]) == first


def test_a_rewritten_history_is_the_same_session() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1])
    client.call([*SYSTEM, 1, 70, 2])  # with reasoning 70
    assert client.call([*SYSTEM, 1, 2, 3]) == first  # which the template has stripped
    assert client.call([*SYSTEM, 1, 2, 3, 4]) == first


def test_a_fork_that_runs_beside_the_session_is_a_session_of_its_own() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1])
    assert client.call([*SYSTEM, 1, 2], then=RUNNING) == first
    fork = client.call([*SYSTEM, 1, 3], then=RUNNING)
    assert fork != first
    client.now(ANSWERED, first, fork)
    assert client.call([*SYSTEM, 1, 3, 4]) == fork
    assert client.call([*SYSTEM, 1, 2, 4]) == first


def test_a_compacted_context_is_a_new_session() -> None:
    client = Client()
    first = client.call([*SYSTEM, 1])
    client.call([*SYSTEM, 1, 2, 3])
    assert client.call([*SYSTEM, 99]) != first


def test_equal_answers_of_twins_do_not_swap_them() -> None:
    """Greedy twins: the second's next prompt equals the first's last one, which was answered or still runs."""
    for standing in (ANSWERED, RUNNING):
        client = Client()
        one = client.call([*SYSTEM, 1], then=RUNNING)
        other = client.call([*SYSTEM, 1], then=RUNNING)
        client.now(ANSWERED, one)
        assert client.call([*SYSTEM, 1, 2], then=standing) == one
        client.now(ANSWERED, other)
        assert client.call([*SYSTEM, 1, 2], then=standing) == other


def test_prompts_too_short_to_tell_anything_have_no_session() -> None:
    lineage = Lineage(max_sessions=10, prefix="s")
    assert lineage.place(Prefixes(range(MIN_TOKENS - 1)), lambda known: False) is None
    assert lineage.place(Prefixes([]), lambda known: False) is None
    assert lineage.place(Prefixes(range(MIN_TOKENS)), lambda known: False) == Placement("s1", True)


def test_a_conversation_that_may_be_a_single_call_is_a_session_from_its_second_call_on() -> None:
    client = Client()
    placed = client.place([*SYSTEM, 1], sure=False)
    assert not placed.is_session
    assert client.place([*SYSTEM, 1, 2], sure=False) == Placement(placed.session_id, True)
    assert client.place([*SYSTEM, 1, 2, 3], sure=False) == Placement(placed.session_id, True)
    client.lineage.ended(placed.session_id)
    assert client.place([*SYSTEM, 1, 2, 3, 4], sure=False) == Placement(placed.session_id, True)


def test_a_single_call_tried_again_is_still_no_session() -> None:
    client = Client()
    placed = client.place([*SYSTEM, 1], then=OPEN, sure=False)
    assert client.place([*SYSTEM, 1], then=OPEN, sure=False) == Placement(placed.session_id, False)
    assert client.place([*SYSTEM, 1], then=OPEN) == Placement(placed.session_id, True)


def test_twins_of_which_it_is_not_known_that_they_go_on_are_told_apart_too() -> None:
    client = Client()
    twins = [client.place([*SYSTEM, 1], then=RUNNING, sure=False).session_id for _ in range(4)]
    client.now(ANSWERED, *twins)
    later = [client.place([*SYSTEM, 1, number], then=RUNNING, sure=False) for number in range(4)]
    assert sorted(placed.session_id for placed in later) == sorted(twins)
    assert all(placed.is_session for placed in later)


def test_a_client_whose_prompts_change_from_their_start_has_no_sessions() -> None:
    client = Client()
    placed = [client.place([clock, *SYSTEM, *range(clock)], sure=False) for clock in range(50)]
    assert not any(one.is_session for one in placed)


def test_single_calls_do_not_push_sessions_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_basin.policy.lineage.MAX_LOOSE", 5)
    client = Client(max_sessions=2)
    session = client.call([*SYSTEM, 1])
    for task in range(100, 150):
        client.place([*SYSTEM, task], sure=False)
    assert len(client.lineage) == 6
    assert client.call([*SYSTEM, 1, 2]) == session


def test_of_those_that_send_the_same_prompt_all_day_the_latest_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each new one was compared with all before it, up to 20,000, and took milliseconds."""
    monkeypatch.setattr("sglang_basin.policy.lineage.MAX_TWINS", 5)
    client = Client()
    singles = [client.place([*SYSTEM, 1], sure=False) for _ in range(40)]
    assert len(client.lineage) == 5
    assert client.call([*SYSTEM, 1, 2]) == singles[-5].session_id
    agents = [client.call([*SYSTEM, 3]) for _ in range(20)]
    for turn in range(len(agents)):  # they go on apart from each other, and end
        assert client.call([*SYSTEM, 3, turn]) in agents
    for agent in agents:
        client.lineage.ended(agent)
    assert len(client.lineage) == 5 + 5
    assert client.call([*SYSTEM, 3, 19, 7]) == agents[19]


def test_over_the_bound_the_session_without_a_call_for_longest_is_forgotten() -> None:
    client = Client(max_sessions=2)
    one, two = client.call([*SYSTEM, 1]), client.call([*SYSTEM, 2])
    assert client.call([*SYSTEM, 1, 1]) == one
    client.call([*SYSTEM, 3])
    assert len(client.lineage) == 2
    assert client.call([*SYSTEM, 1, 1, 1]) == one
    assert client.call([*SYSTEM, 2, 2]) != two


def test_an_ended_session_that_calls_again_has_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_basin.policy.lineage.MAX_LOOSE", 2)
    client = Client()
    sessions = [client.call([*SYSTEM, task]) for task in range(4)]
    for session in sessions[:3]:
        client.lineage.ended(session)
    assert len(client.lineage) == 3  # the first that ended is one too many
    assert client.call([*SYSTEM, 1, 1]) == sessions[1]
    client.lineage.ended(sessions[3])
    assert [client.call([*SYSTEM, task, 2]) == sessions[task] for task in range(4)] == [False, True, True, True]
    assert client.call([*SYSTEM, 1, 1, 1]) == sessions[1]


def test_a_forgotten_session_leaves_nothing_behind() -> None:
    client = Client()
    prompts = [[*SYSTEM, task, *range(200 * turn)] for task in range(20) for turn in range(3)]
    sessions = {client.call(prompt) for prompt in prompts}
    for number, session in enumerate(sessions):
        if number % 2:
            client.lineage.ended(session)
        client.lineage.forget(session)
    client.lineage.forget("never heard of")
    client.lineage.answered("never heard of")
    client.lineage.ended("never heard of")
    kept = [vars(client.lineage)[name] for name in ("_at", "_cells", "_sessions", "_loose")]
    assert kept == [{}, {}, {}, {}]


class Reference:
    """The module's four rules, word for word, on token lists."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[int, ...]] = {}
        self.last: dict[str, tuple[int, ...]] = {}

    def place(self, prompt: tuple[int, ...], standings: dict[str, Standing]) -> set[str]:
        """The sessions that may be chosen; empty for a new one."""

        def extends(before: tuple[int, ...]) -> bool:
            return len(before) < len(prompt) and prompt[: len(before)] == before

        equal = {session for session, last in self.last.items() if last == prompt}
        if unanswered := {session for session in equal if standings[session] is OPEN}:
            return unanswered
        again = {session for session in equal if standings[session] is RUNNING and self.first[session] != prompt}
        ranked: dict[tuple[int, int], set[str]] = {}
        for session in self.last:
            if extends(self.last[session]):
                rank = [ANSWERED, OPEN, RUNNING].index(standings[session])
                ranked.setdefault((-len(self.last[session]), rank), set()).add(session)
            if extends(self.first[session]) and standings[session] is not RUNNING:
                ranked.setdefault((-len(self.first[session]), 3), set()).add(session)
        if not ranked or (again and min(ranked)[1] > 0):
            return again
        return ranked[min(ranked)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_places_calls_as_the_rules_say_whatever_the_prompts(data: st.DataObject) -> None:
    """Prompts of few tokens over a common start, so that every relation between them occurs, at cell borders too."""
    start = data.draw(st.sampled_from([MIN_TOKENS, CELL_TOKENS - 2, CELL_TOKENS, 2 * CELL_TOKENS - 1]))
    tails = st.lists(st.integers(0, 1), max_size=5).map(lambda tail: [*range(100, 100 + start), *tail])
    lineage, reference, standings = Lineage(max_sessions=100, prefix="s"), Reference(), dict[str, Standing]()
    for _ in range(data.draw(st.integers(1, 25))):
        prompt = tuple(data.draw(tails))
        allowed = reference.place(prompt, standings)
        placement = lineage.place(Prefixes(prompt), lambda known: standings[known] is RUNNING)
        assert placement is not None
        placed = placement.session_id
        if allowed:
            assert placed in allowed
        else:
            assert placed not in standings
        reference.last[placed] = prompt
        reference.first.setdefault(placed, prompt)
        standings[placed] = data.draw(st.sampled_from(Standing))
        if standings[placed] is ANSWERED:
            lineage.answered(placed)
        if data.draw(st.integers(0, 9)) == 0:
            ended = data.draw(st.sampled_from(sorted(standings)))
            lineage.forget(ended)
            for known in (reference.first, reference.last, standings):
                known.pop(ended)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_concurrent_sessions_are_told_apart_exactly(data: st.DataObject) -> None:
    """Any interleaving of sessions over one system prompt, twins among them, whose histories the template rewrites at
    times: each conversation stays one session, and no two share one."""
    client = Client()
    tasks = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    words = itertools.count(10_000)
    contexts = [[*SYSTEM, task, 9] for task in tasks]
    ids: list[str | None] = [None for _ in tasks]
    running: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        conversation = data.draw(st.integers(0, len(tasks) - 1))
        if conversation in running:
            running.discard(conversation)
            session = ids[conversation]
            assert session is not None
            client.now(ANSWERED, session)
            contexts[conversation] += [next(words), next(words), 9]
            continue
        twin = tasks.count(tasks[conversation]) > 1
        if ids[conversation] is not None and not twin and data.draw(st.booleans()):
            contexts[conversation][len(SYSTEM) + 2 :] = [next(words), 9]  # all after the task is written anew
        session = client.call(contexts[conversation], then=RUNNING)
        if ids[conversation] is None:
            assert session not in ids
            ids[conversation] = session
        elif ids[conversation] != session:
            # Twins that have both been answered once are the same to us until their second prompts differ.
            other = ids.index(session)
            assert tasks[other] == tasks[conversation]
            assert other not in running
            assert len(contexts[conversation]) == len(SYSTEM) + 5
            ids[conversation], ids[other] = session, ids[conversation]
        running.add(conversation)
