"""What sessions share: learnt from what first calls find cached, counted once by the door."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Admit, Queue, Reason
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.reservation import CurrentContext
from sglang_basin.policy.sharing import (
    MAX_PROMPTS,
    MIN_SEEN,
    QUORUM,
    SLACK_SHARE,
    SLACK_TOKENS,
    WINDOW,
    FirstPrompts,
    SharedFront,
)


def learnt(found: list[int]) -> SharedFront:
    front = SharedFront()
    for tokens in found:
        front.learn(tokens)
    return front


def test_a_system_prompt_is_seen_after_the_first_sessions() -> None:
    assert learnt([0, 13_184, 13_184]).tokens == 0
    front = learnt([0, 13_184, 13_184, 13_184])
    assert front.tokens == 13_184
    assert front.expected_tokens == 3 * 13_184 // 4


def test_own_contexts_of_sessions_that_come_back_are_not_shared() -> None:
    drawn = random.Random(1)
    returns = [drawn.randrange(20_000, 90_000) for _ in range(48)]
    assert learnt(returns).tokens == 0
    mixed = [*returns, *[13_184] * 16]
    drawn.shuffle(mixed)
    assert learnt(mixed).tokens == 13_184


def test_prompts_that_happen_to_agree_a_little_further_still_show_the_front() -> None:
    drawn = random.Random(2)
    assert 13_184 <= learnt([13_184 + drawn.randrange(40) for _ in range(30)]).tokens < 13_184 + 40


def test_a_new_agent_version_replaces_the_old_front_within_a_window() -> None:
    front = learnt([30_000] * WINDOW)
    for _ in range(WINDOW):
        front.learn(8_000)
    assert (front.tokens, front.expected_tokens) == (8_000, 8_000)


@given(st.lists(st.integers(0, 2_000), max_size=3 * WINDOW))
def test_the_front_is_a_length_that_a_quorum_of_the_window_agrees_on(found: list[int]) -> None:
    front, recent = learnt(found), found[-WINDOW:]
    assert front._sorted == sorted(recent)
    assert 0 <= front.expected_tokens <= front.tokens
    if len(recent) < MIN_SEEN:
        assert front.tokens == 0
        return

    def agree(length: int) -> bool:
        slack = max(SLACK_TOKENS, SLACK_SHARE * length)
        return sum(length <= one <= length + slack for one in recent) >= max(2, QUORUM * len(recent))

    assert front.tokens == max((one for one in recent if agree(one)), default=0)
    assert front.expected_tokens == sum(min(one, front.tokens) for one in recent) // len(recent)


def make_door(budget_tokens: int, *, shared_once: bool = True) -> Door:
    settings = DoorSettings(idle_timeout_s=1e9, hold_limit_s=1e9, shared_once=shared_once)
    budget = Budget(BudgetSettings(fixed_tokens=budget_tokens), budget_tokens)
    return Door(settings, law=CurrentContext(), budget=budget)


def enter(
    door: Door, number: int, prompt_tokens: int, found_tokens: int | None, prompt_id: int | None = None
) -> Admit | Queue:
    decision = door.call(f"c{number}", f"s{number}", prompt_tokens, float(number), prompt_id=prompt_id)
    assert isinstance(decision, Admit | Queue)
    if isinstance(decision, Admit):
        door.prefilled(f"c{number}", float(number), cached_tokens=found_tokens)
    return decision


@pytest.mark.parametrize(("shared_once", "enter_at_least"), [(True, 35), (False, 10)])
def test_what_all_share_counts_once(shared_once: bool, enter_at_least: int) -> None:
    """1,000 tokens a session, 800 of them shared: a budget of 10,000 holds (10,000 - 800) / 200 = 46 of them, or 35 if
    the first three, which came before anybody could know, count in full."""
    door = make_door(10_000, shared_once=shared_once)
    entered = 0
    for number in range(80):
        if isinstance(enter(door, number, 1_000, 800 if number else 0), Queue):
            break
        entered += 1
    state = door.state()
    assert entered >= enter_at_least
    assert entered <= (46 if shared_once else 11)
    assert state.working_set_tokens == 1_000 * entered
    assert state.reserved_tokens == state.distinct_tokens <= 10_000 + 1_000


def test_a_returning_session_is_credited_with_the_shared_front_alone() -> None:
    door = make_door(10**6)
    for number in range(8):
        enter(door, number, 1_000, 800 if number else 0)
    door.end("s3", 10.0)
    door.call("again", "s3", 50_000, 11.0)
    door.prefilled("again", 11.0, cached_tokens=49_920)
    session = door.live_session("s3")
    assert session is not None
    assert session.found_tokens == 49_920
    assert session.credited_tokens == 800
    assert session.reserved_tokens == 49_200


def test_sessions_that_came_before_the_front_was_known_are_credited_at_their_next_call() -> None:
    door = make_door(10**6)
    for number in range(8):
        enter(door, number, 1_000, 800)
    session = door.live_session("s1")
    assert session is not None
    assert session.credited_tokens == 0
    door.finish("c1", 10, 9.0)
    assert session.credited_tokens == 800


def test_only_the_first_call_tells_what_is_shared() -> None:
    door = make_door(10**6)
    for number in range(8):
        enter(door, number, 1_000, 800)
    door.finish("c7", 100, 9.0)
    door.call("later", "s7", 2_000, 10.0)
    door.prefilled("later", 10.0, cached_tokens=1_100)
    session = door.live_session("s7")
    assert session is not None
    assert (session.found_tokens, session.credited_tokens) == (800, 800)


def test_a_context_cut_below_the_front_gives_its_credit_back() -> None:
    door = make_door(10**6)
    for number in range(8):
        enter(door, number, 1_000, 800)
    door.finish("c7", 0, 9.0)
    door.call("cut", "s7", 300, 10.0)
    session = door.live_session("s7")
    assert session is not None
    assert (session.credited_tokens, session.reserved_tokens) == (300, 0.0)
    assert door.state().reserved_tokens == 3 * 1_000 + 4 * 200 + 800  # three came before the front was known


def test_an_engine_that_does_not_say_what_was_cached_credits_nothing() -> None:
    door = make_door(3_500)
    reasons = [enter(door, number, 1_000, None).reason for number in range(6)]
    assert reasons[4] is Reason.NO_HEADROOM
    assert door.state().distinct_tokens == door.state().working_set_tokens == 4_000


def test_tasks_that_are_started_again_one_after_another_share_nothing() -> None:
    """The cache still holds what sessions that have ended began with. It is nobody's but the new ones'."""
    door = make_door(10**6)
    for number in range(8):
        enter(door, number, 1_000, 0, prompt_id=number)
        door.end(f"s{number}", float(number))
    for number in range(8, 16):
        enter(door, number, 1_000, 999, prompt_id=number - 8)
    assert door.state().distinct_tokens == door.state().working_set_tokens == 8_000


def test_sessions_that_began_alike_share_their_prompt_as_long_as_they_live() -> None:
    door = make_door(10**6)
    for number in range(3):
        enter(door, number, 1_000, 990 if number else 0, prompt_id=7)
    assert door.state().distinct_tokens == 1_000 + 2 * 10
    door.finish("c2", 500, 3.0)
    assert door.state().distinct_tokens == 1_000 + 10 + 510
    door.end("s0", 4.0)  # the prompt is the second one's own now
    assert door.state().distinct_tokens == 1_000 + 510
    door.end("s1", 5.0)
    assert door.state().distinct_tokens == door.state().working_set_tokens == 1_500
    enter(door, 3, 1_000, 990, prompt_id=7)
    assert door.state().distinct_tokens == 1_500 + 10
    door.finish("c2", 0, 6.0)
    door.call("cut", "s2", 400, 7.0)  # its context was summed up: it begins otherwise
    assert door.state().distinct_tokens == door.state().working_set_tokens == 1_400


class World:
    """Sessions on one front, each with one of a few tasks, and a cache that never loses anything. A context is the
    front, the task, and what is the session's own; a cut one is the front and its own."""

    def __init__(self, front: int, tasks: list[int]) -> None:
        self.front = front
        self.tasks = tasks
        self.door = make_door(10**9)
        self.cached: set[int] = set()
        self.live: dict[str, tuple[int | None, int]] = {}  # session -> (its task, context)
        self.calls: dict[str, int] = {}  # those not prefilled yet -> task
        self.now_s = 0.0

    def start(self, task: int) -> None:
        self.now_s += 1.0
        name, prompt = f"s{self.now_s:.0f}", self.front + self.tasks[task]
        self.door.call(name, name, prompt, self.now_s, prompt_id=task)
        self.live[name], self.calls[name] = (task, prompt), task

    def prefill(self, name: str) -> None:
        if name in self.calls:
            task = self.calls.pop(name)
            found = self.front if self.cached else 0
            self.door.prefilled(
                name, self.now_s, cached_tokens=found + self.tasks[task] - 1 if task in self.cached else found
            )
            self.cached.add(task)

    def grow(self, name: str, tokens: int) -> None:
        self.prefill(name)
        task, context = self.live[name]
        self._call(name, context + tokens)
        self.live[name] = (task, context + tokens)

    def cut(self, name: str, tokens: int) -> None:
        self.prefill(name)
        task, context = self.live[name]
        first = self.front + self.tasks[task] if task is not None else context
        if self.front + tokens < first:
            self._call(name, self.front + tokens)
            self.live[name] = (None, self.front + tokens)

    def end(self, name: str) -> None:
        self.prefill(name)
        self.door.end(name, self.now_s)
        del self.live[name]

    def _call(self, name: str, context: int) -> None:
        self.now_s += 1.0
        self.door.finish(name, 0, self.now_s)
        self.door.call(name, name, context, self.now_s)

    def needs(self) -> int:
        """Tokens that a cache must hold for the live sessions, each prefix once."""
        held = {task for task, _ in self.live.values() if task is not None}
        own = sum(
            context - self.front - (self.tasks[task] if task is not None else 0) for task, context in self.live.values()
        )
        return own + sum(self.tasks[task] for task in held) + (self.front if self.live else 0)


@given(
    st.integers(0, 3_000),
    st.lists(st.integers(1, 2_000), min_size=5, max_size=5),
    st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "prefill", "grow", "cut", "end"]),
            st.integers(0, 99),
            st.integers(1, 500),
        ),
        max_size=80,
    ),
)
def test_what_is_shared_is_never_overrated(front: int, tasks: list[int], steps: list[tuple[str, int, int]]) -> None:
    world = World(front, tasks)
    for what, which, tokens in steps:
        names = list(world.live)
        if what == "start":
            world.start(which % len(tasks))
        elif names:
            name = names[which % len(names)]
            if what in ("prefill", "end"):
                getattr(world, what)(name)
            else:
                getattr(world, what)(name, tokens)
        state = world.door.state()
        assert world.needs() <= state.distinct_tokens <= state.working_set_tokens
    for name in list(world.live):
        world.end(name)
    assert world.door.state().distinct_tokens == 0


def test_first_prompts_are_remembered_within_bounds() -> None:
    prompts = FirstPrompts()
    assert not prompts.enter(-1, "a")
    assert prompts.enter(-1, "b")
    for number in range(2 * MAX_PROMPTS):
        assert not prompts.enter(number, f"s{number}")
        assert prompts.leave(number, f"s{number}") is None
    assert len(prompts) <= MAX_PROMPTS + 1
    assert prompts.enter(2 * MAX_PROMPTS - 1, "again")
    assert not prompts.enter(0, "s0")
