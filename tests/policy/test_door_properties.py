"""Invariants of the door under every law, order, predictor, budget, ticket and shedding setting."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Admit, Queue, Reason, Refuse
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.pausing import PauseSettings
from sglang_basin.policy.prediction import PeaksSeen, Prediction
from sglang_basin.policy.priority import ArrivalOrder, SizeAwareOrder
from sglang_basin.policy.reservation import CurrentContext, PartialPeak, ReservationLaw, StatisticalMultiplexing
from sglang_basin.policy.sessions import Session
from sglang_basin.policy.shedding import SheddingSettings

SESSIONS = [f"s{i}" for i in range(10)]


class Factors:
    """A predictor with any opinion: the session's peak is so many times its context, by a spread around that."""

    def __init__(self, factors: list[float], spread: float) -> None:
        self._factors = factors
        self._spread = spread
        self.learned: list[str] = []

    def predict(self, session: Session) -> Prediction:
        factor = self._factors[(session.calls_seen + len(session.session_id)) % len(self._factors)]
        middle = max(1.0, factor * session.context_tokens)
        low, high = middle / self._spread, middle * self._spread
        return Prediction((low, low, middle, high, high))

    def learn(self, session: Session) -> None:
        self.learned.append(session.session_id)

    def forget(self, session_id: str) -> None:
        assert session_id in SESSIONS


LAWS: st.SearchStrategy[ReservationLaw] = st.one_of(
    st.just(CurrentContext()),
    st.builds(PartialPeak, st.floats(0, 1), st.sampled_from([0.25, 0.5, 0.9])),
    st.builds(StatisticalMultiplexing, st.floats(0.001, 0.4), st.floats(0.5, 50)),
)
ORDERS = st.one_of(st.just(ArrivalOrder()), st.builds(SizeAwareOrder, st.floats(0.5, 100)))
PREDICTORS: st.SearchStrategy[Callable[[], object]] = st.one_of(
    st.just(lambda: None),
    st.just(lambda: PeaksSeen(memory=16)),
    st.builds(
        lambda factors, spread: lambda: Factors(factors, spread),
        st.lists(st.floats(0.2, 20), min_size=1, max_size=4),
        st.floats(1.0, 4.0),
    ),
)
SHEDDING = st.sampled_from(
    [None, SheddingSettings(head_wait_s=5.0, arrival_window_s=30.0, completion_window_s=10.0, memory_s=100.0)]
)
BUDGETS = st.one_of(
    st.builds(BudgetSettings, fixed_tokens=st.integers(1, 200), band=st.sampled_from([0.0, 0.3])),
    st.builds(BudgetSettings, knee_tokens=st.one_of(st.none(), st.integers(1, 300)), band=st.sampled_from([0.0, 0.2])),
)


@dataclass
class Setup:
    """One configuration of the door, made anew for each run."""

    law: ReservationLaw
    order: ArrivalOrder | SizeAwareOrder
    predictor: Callable[[], object]
    shedding: SheddingSettings | None
    budget: BudgetSettings
    grace_s: float
    max_queued: int | None
    hold_limit_s: float = 15.0
    idle_timeout_s: float = 20.0
    max_sessions: int = 1000
    shared_once: bool = True
    updates_order: bool = True
    pausing: PauseSettings | None = None

    def door(self) -> Door:
        return Door(
            DoorSettings(
                idle_timeout_s=self.idle_timeout_s,
                idle_floor_s=self.idle_timeout_s / 2,
                final_grace_s=self.grace_s,
                hold_limit_s=self.hold_limit_s,
                ticket_grace_s=self.grace_s,
                max_sessions=self.max_sessions,
                max_queued=self.max_queued,
                shared_once=self.shared_once,
                updates_order=self.updates_order,
            ),
            law=self.law,
            budget=Budget(self.budget, capacity_tokens=100),
            order=self.order,
            predictor=self.predictor(),  # type: ignore[arg-type]
            shedding=self.shedding,
            pausing=self.pausing,
        )


SETUPS = st.builds(
    Setup,
    law=LAWS,
    order=ORDERS,
    predictor=PREDICTORS,
    shedding=SHEDDING,
    budget=BUDGETS,
    grace_s=st.sampled_from([0.0, 12.0]),
    max_queued=st.sampled_from([None, 3]),
    shared_once=st.booleans(),
    updates_order=st.booleans(),
    pausing=st.sampled_from([None, PauseSettings(), PauseSettings(patience_s=5.0, every_s=0.0)]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "last", "prefilled", "finish", "final", "abandon", "end", "view", "tick"]),
        st.integers(0, len(SESSIONS) - 1),
        st.integers(0, 15),  # which of the calls, or how full the engine is
        st.integers(1, 80),  # tokens
        st.floats(0.0, 8.0),  # seconds that pass before
    ),
    max_size=80,
)


@dataclass
class Run:
    """Drives a door and keeps its own books of what happened."""

    door: Door
    now_s: float = 0.0
    waiting: dict[str, str] = field(default_factory=dict)
    """Held calls and their sessions."""
    running: dict[str, str] = field(default_factory=dict)
    outcomes: list[Admit | Refuse] = field(default_factory=list)
    """Of the last step."""
    _made: itertools.count[int] = field(default_factory=itertools.count)

    def step(self, kind: str, session: str, which: int, tokens: int, pause_s: float) -> None:
        door, self.outcomes = self.door, []
        self.now_s += pause_s
        known = sorted({**self.waiting, **self.running})
        call_id = known[which % len(known)] if known else None
        if kind in ("call", "last"):
            self.call(session, tokens, ends_session=kind == "last")
        elif kind == "end":
            self._refused(list(door.end(session, self.now_s)))
            self.running = {c: s for c, s in self.running.items() if s != session}
        elif kind == "view":
            view = EngineView(cache_tokens=2 * tokens, hit_rate=None if which == 0 else which / 15)
            door.observe(view, self.now_s)
        elif call_id is not None and kind == "prefilled":
            door.prefilled(call_id, self.now_s, cached_tokens=None if which == 0 else 5 * which)
        elif call_id is not None and kind in ("finish", "final", "abandon"):
            self.waiting.pop(call_id, None)
            self.running.pop(call_id, None)
            if kind == "abandon":
                door.abandon(call_id, self.now_s)
            else:
                door.finish(call_id, tokens, self.now_s, final=kind == "final")
        self.settle()

    def call(self, session: str, tokens: int, *, ends_session: bool = False) -> Admit | Queue | Refuse:
        call_id = f"c{next(self._made)}"
        decision = self.door.call(call_id, session, tokens, self.now_s, ends_session=ends_session)
        assert decision.call_id == call_id
        if isinstance(decision, Queue):
            self.waiting[call_id] = session
        elif isinstance(decision, Admit):
            self.running[call_id] = session
        else:
            assert decision.reason is Reason.QUEUE_FULL
        return decision

    def settle(self) -> None:
        for outcome in self.door.poll(self.now_s):
            if isinstance(outcome, Refuse):
                self._refused([outcome])
            else:
                self.outcomes.append(outcome)
                self.running[outcome.call_id] = self.waiting.pop(outcome.call_id)  # KeyError: it did not wait

    def _refused(self, refused: list[Refuse]) -> None:
        for outcome in refused:
            del self.waiting[outcome.call_id]  # KeyError: it did not wait, or ended twice
            self.outcomes.append(outcome)

    def live(self) -> list[Session]:
        return [session for name in SESSIONS if (session := self.door.live_session(name)) is not None]


@given(SETUPS, STEPS)
@settings(max_examples=400, deadline=None)
def test_sums_match_the_table_and_tables_end_empty(setup: Setup, steps: list) -> None:
    run = Run(setup.door())
    door = run.door
    for kind, session, which, tokens, pause_s in steps:
        run.step(kind, SESSIONS[session], which, tokens, pause_s)
        live, state = run.live(), door.state()
        assert state.live_sessions == len(live)
        assert state.working_set_tokens == sum(session.context_tokens for session in live)
        credits = [session.credited_tokens for session in live]
        once = max(credits, default=0)
        assert state.distinct_tokens == state.working_set_tokens - sum(credits) + once
        mean = sum(session.reserved_tokens for session in live) + once
        variance = sum(session.reserved_variance for session in live)
        assert state.reserved_tokens == pytest.approx(mean + setup.law.z * math.sqrt(variance), abs=1.0, rel=1e-6)
        for one in live:  # what it reserves is what the law says of it now
            if one.leaving:
                assert one.calls
                assert (one.reserved_tokens, one.reserved_variance, one.credited_tokens) == (0, 0, 0)
                continue
            tokens, variance = setup.law.reserve(one)
            assert (one.reserved_tokens, one.reserved_variance) == (tokens - one.credited_tokens, variance)
            assert one.reserved_tokens >= one.context_tokens - one.credited_tokens >= 0
            assert 0 <= one.credited_tokens <= (one.context_tokens if setup.shared_once else 0)
            if one.found_tokens is not None:
                assert one.credited_tokens <= one.shared_tokens <= one.found_tokens
        for one in door.sessions():
            assert (one.law_tokens, one.law_variance) == setup.law.reserve(one)
            assert one.live or door._need_with(one) >= door._need(), "one that is over budget already cannot be entered"
        assert state.held_calls == len(run.waiting)
        assert door.holds_any == bool(run.waiting)
        paused = {session.session_id for session in door._paused.waiting.values()}
        assert paused <= set(run.waiting.values())
        assert state.paused_sessions == len(door._paused) >= len(paused)
        assert all(one.paused and not one.live and not one.leaving for one in door._paused)
        assert state.queued_sessions >= len(set(run.waiting.values()) - paused)
        assert door._leaving_tokens == sum(one.context_tokens for one in live if one.leaving)
        if setup.max_queued is not None:
            assert state.queued_sessions <= setup.max_queued
        if setup.grace_s == 0:
            assert state.queued_sessions == len(set(run.waiting.values()) - paused)
        if run.waiting:
            assert live, "with nobody live the head would have entered"
        assert len(door._queue) + len(door._away) == len(door._waiting) == state.queued_sessions
        assert door._queue == sorted(door._queue)
        assert set(door._away) | {entry[2] for entry in door._queue} == set(door._waiting)
        wake_s = door.wake_s(run.now_s)
        assert wake_s is None or wake_s >= run.now_s

    for call_id in list(run.running):
        door.finish(call_id, 1, run.now_s)
    for _ in range(2 * len(SESSIONS) + 4):  # let in, finish, run out of time
        run.now_s += 30.0
        run.settle()
        for call_id in list(run.running):
            del run.running[call_id]
            door.finish(call_id, 1, run.now_s)
    assert not run.waiting
    state = door.state()
    assert (state.live_sessions, state.queued_sessions, state.paused_sessions, state.held_calls) == (0, 0, 0, 0)
    assert state.working_set_tokens == state.distinct_tokens == state.reserved_tokens == 0
    for name in ("_live", "_waiting", "_queue", "_away", "_calls", "_held", "_fronts"):
        assert not getattr(door, name), name


@given(SETUPS, STEPS)
@settings(max_examples=200, deadline=None)
def test_a_priority_is_set_once_and_the_queue_moves_by_it(setup: Setup, steps: list) -> None:
    """While a session is in the table its key stays; it enters only past those who go after it, or who are away."""
    run = Run(setup.door())
    door = run.door
    keys: dict[str, float] = {}
    for kind, name, which, tokens, pause_s in steps:
        before = dict(run.waiting)
        was_paused = {session.session_id for session in door._paused}
        run.step(kind, SESSIONS[name], which, tokens, pause_s)
        for session in SESSIONS:
            known = door._known(session)
            if known is None:
                keys.pop(session, None)
            else:
                assert keys.setdefault(session, known.priority) == known.priority
                if not (known.live and setup.updates_order):
                    assert door.order(session, -1.0) == known.priority
                else:  # the same formula, with what is predicted by now
                    peak_tokens = known.predicted_peak(door.settings.peak_share)
                    assert door.order(session, -1.0) == setup.order.priority(known.arrived_s, peak_tokens)
        entered = {before[o.call_id] for o in run.outcomes if isinstance(o, Admit) and o.call_id in before}
        still = set(run.waiting.values()) & set(before.values())
        paused = {session.session_id for session in door._paused}
        for inside, outside in itertools.product(entered - was_paused, still - paused):
            assert keys[inside] <= keys[outside], "somebody passed the head"


@given(SETUPS, st.lists(st.tuples(st.integers(1, 80), st.floats(0, 5)), min_size=1, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_nobody_who_stays_starves(setup: Setup, arrivals: list, data: st.DataObject) -> None:
    """A finite stream of sessions: as those inside end, in any order, every one that waits enters."""
    setup = dataclasses.replace(setup, hold_limit_s=1e9, idle_timeout_s=1e9, max_queued=None, shedding=None)
    door, now_s, inside = setup.door(), 0.0, set()
    waiting = set()
    for i, (tokens, pause_s) in enumerate(arrivals):
        now_s += pause_s
        decision = door.call(f"c{i}", f"s{i}", tokens, now_s)
        (waiting if isinstance(decision, Queue) else inside).add(str(i))
    for _ in arrivals:
        for outcome in door.poll(now_s):
            waiting.remove(outcome.call_id[1:])
            inside.add(outcome.call_id[1:])
        if not inside:
            break
        leaves = data.draw(st.sampled_from(sorted(inside)))
        inside.remove(leaves)
        now_s += 1.0
        door.end(f"s{leaves}", now_s)
    assert not waiting
    assert door.state().queued_sessions == 0


@given(
    LAWS,
    PREDICTORS,
    st.floats(0.5, 50),
    st.lists(st.tuples(st.integers(1, 80), st.floats(0, 5)), min_size=2, max_size=30),
    st.integers(1, 100),
)
@settings(max_examples=200, deadline=None)
def test_a_session_of_peak_w_is_passed_only_by_arrivals_of_the_next_w_over_r_seconds(
    law: ReservationLaw, predictor: Callable[[], object], r: float, arrivals: list, budget_tokens: int
) -> None:
    setup = Setup(law, SizeAwareOrder(r), predictor, None, BudgetSettings(fixed_tokens=budget_tokens), 0.0, None)
    setup = dataclasses.replace(setup, hold_limit_s=1e9, idle_timeout_s=1e9)
    door, now_s = setup.door(), 0.0
    arrived_s: dict[str, float] = {}
    peaks: dict[str, float] = {}
    waiting: list[str] = []
    inside: list[str] = []

    def enters(session: str) -> None:
        for passed in waiting:
            if arrived_s[passed] < arrived_s[session]:
                assert arrived_s[session] <= arrived_s[passed] + peaks[passed] / r + 1e-9
        inside.append(session)

    def settle() -> None:
        for outcome in door.poll(now_s):
            session = "s" + outcome.call_id[1:]
            waiting.remove(session)
            enters(session)

    for i, (tokens, pause_s) in enumerate(arrivals):
        now_s += pause_s
        session = f"s{i}"
        arrived_s[session] = now_s
        decision = door.call(f"c{i}", session, tokens, now_s)
        peaks[session] = r * (door.order(session, now_s) - now_s)
        assert peaks[session] >= tokens * (1 - 1e-6) - 1e-6
        if isinstance(decision, Queue):
            waiting.append(session)
        else:
            enters(session)
        if i % 3 == 2 and inside:
            door.end(inside.pop(0), now_s)
        settle()
    while inside:
        now_s += 1.0
        door.end(inside.pop(0), now_s)
        settle()
    assert not waiting


# Pausing.


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.floats(0, 3)), min_size=2, max_size=10),
    st.integers(20, 120),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_sessions_that_outgrow_the_cache_all_finish(sessions: list, budget_tokens: int, data: st.DataObject) -> None:
    """Each makes eight calls and grows with each, whatever the order in which calls come and end; none is refused."""
    setup = Setup(
        CurrentContext(), ArrivalOrder(), lambda: None, None, BudgetSettings(fixed_tokens=budget_tokens), 0.0, None
    )
    pausing = PauseSettings(patience_s=20.0)
    door = dataclasses.replace(setup, hold_limit_s=1e9, idle_timeout_s=1e9, pausing=pausing).door()
    now_s, done = 0.0, dict.fromkeys(range(len(sessions)), 0)
    held: set[int] = set()
    running: set[int] = set()
    for _ in range(400):
        if all(calls == 8 for calls in done.values()):
            break
        now_s += data.draw(st.floats(0.1, 4.0)) if len(running) > 1 else 4.0
        idle = [one for one, calls in done.items() if calls < 8 and one not in held | running]
        for one in idle:
            first, grows, _ = sessions[one]
            call_id = f"{one}/{done[one]}"
            decision = door.call(call_id, f"s{one}", first + grows * done[one], now_s, ends_session=done[one] == 7)
            assert not isinstance(decision, Refuse)
            (running if isinstance(decision, Admit) else held).add(one)
        for outcome in door.poll(now_s):
            assert isinstance(outcome, Admit)
            one = int(outcome.call_id.partition("/")[0])
            held.remove(one)
            running.add(one)
        assert running, "calls wait and none runs"
        one = data.draw(st.sampled_from(sorted(running)))
        running.remove(one)
        door.finish(f"{one}/{done[one]}", 1, now_s)
        done[one] += 1
    assert all(calls == 8 for calls in done.values())
    assert (door.state().live_sessions, door.state().paused_sessions) == (0, 0)


# Tickets.


@given(SETUPS, STEPS)
@settings(max_examples=200, deadline=None)
def test_who_is_away_keeps_the_place_within_the_grace_and_blocks_nobody(setup: Setup, steps: list) -> None:
    setup = dataclasses.replace(setup, grace_s=12.0, shedding=None, pausing=None)
    run = Run(setup.door())
    door = run.door
    away_since: dict[str, float] = {}
    places: dict[str, tuple[float, int]] = {}
    for kind, name, which, tokens, pause_s in steps:
        held_before = set(run.waiting.values())
        run.step(kind, SESSIONS[name], which, tokens, pause_s)
        with_calls = set(run.waiting.values())
        for session in SESSIONS:
            queued = door._waiting.get(session)
            if session in with_calls or door.live_session(session) is not None:
                away_since.pop(session, None)
            elif session in held_before and not (kind == "end" and SESSIONS[name] == session):
                away_since.setdefault(session, run.now_s)
            if kind == "end" and SESSIONS[name] == session:
                away_since.pop(session, None)
                places.pop(session, None)
            if session in away_since and run.now_s - away_since[session] < setup.grace_s:
                assert queued is not None, "its place is gone before the grace ended"
            if session in away_since and run.now_s - away_since[session] >= setup.grace_s:
                assert queued is None, "its place outlives the grace"
                away_since.pop(session)
            if queued is None:
                places.pop(session, None)
            else:
                place = (queued.priority, queued.ticket)
                assert places.setdefault(session, place) == place
        head = door._head()
        if head is not None:  # somebody who is here waits: then the first of those does not fit
            assert head.session_id in with_calls
            assert door._fit(head) is None


def test_who_comes_back_within_the_grace_goes_before_who_came_meanwhile() -> None:
    setup = Setup(CurrentContext(), ArrivalOrder(), lambda: None, None, BudgetSettings(fixed_tokens=100), 60.0, None)
    door = setup.door()
    assert isinstance(door.call("1", "live", 101, 0.0), Admit)
    assert isinstance(door.call("2", "first", 60, 1.0), Queue)
    door.abandon("2", 2.0)
    assert isinstance(door.call("3", "second", 60, 3.0), Queue)
    assert door.state().queued_sessions == 2
    assert isinstance(door.call("4", "first", 60, 4.0), Queue)
    door.end("live", 5.0)
    assert [outcome.call_id for outcome in door.poll(5.0)] == ["4"]


def test_who_is_away_is_passed_by_who_is_here() -> None:
    setup = Setup(CurrentContext(), ArrivalOrder(), lambda: None, None, BudgetSettings(fixed_tokens=100), 60.0, None)
    door = setup.door()
    assert isinstance(door.call("1", "live", 101, 0.0), Admit)
    door.call("2", "first", 60, 1.0)
    door.call("3", "second", 60, 3.0)
    door.abandon("2", 4.0)
    door.end("live", 5.0)
    assert [outcome.call_id for outcome in door.poll(5.0)] == ["3"]
    assert door.state().queued_sessions == 1


# Shedding.


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), min_size=20, max_size=120),
    st.integers(5, 60),
    ORDERS,
)
@settings(max_examples=150, deadline=None)
def test_shedding_happens_only_under_its_rule_and_no_faster_than_the_excess(
    events: list, budget_tokens: int, order: ArrivalOrder | SizeAwareOrder
) -> None:
    """Against books of its own: arrivals of the last window, the best window of completions, the head's wait."""
    rule = SheddingSettings(head_wait_s=5.0, arrival_window_s=20.0, completion_window_s=10.0)
    setup = Setup(CurrentContext(), order, lambda: None, rule, BudgetSettings(fixed_tokens=budget_tokens), 0.0, None)
    door = dataclasses.replace(setup, hold_limit_s=1e9, idle_timeout_s=1e9).door()
    now_s = 0.0
    arrivals: list[float] = []
    completions: list[float] = []
    inside: list[str] = []
    waiting: dict[str, float] = {}
    shed_s: list[float] = []
    excesses: list[float] = []
    for i, (pause_s, ends) in enumerate(events):
        now_s += pause_s
        if ends and inside:
            door.end(inside.pop(0), now_s)
            completions.append(now_s)
        else:
            arrivals.append(now_s)
            if isinstance(door.call(f"c{i}", f"s{i}", 10, now_s), Admit):
                inside.append(f"s{i}")
            else:
                waiting[f"s{i}"] = now_s
        keys = {session: door.order(session, now_s) for session in waiting}
        in_window = [t for t in arrivals if t >= now_s - rule.arrival_window_s]
        best = max(
            (sum(end - rule.completion_window_s <= t <= end for t in completions) for end in completions), default=0
        )
        excess = len(in_window) / rule.arrival_window_s - best / rule.completion_window_s
        head = min(waiting, key=lambda session: (keys[session], waiting[session]), default=None)
        for outcome in door.poll(now_s):
            session = "s" + outcome.call_id[1:]
            arrived_s = waiting.pop(session)
            if isinstance(outcome, Admit):
                inside.append(session)
                continue
            assert outcome.reason is Reason.SHED
            assert head is not None
            assert now_s - (arrived_s if head == session else waiting[head]) >= rule.head_wait_s
            assert now_s - arrivals[0] >= rule.arrival_window_s, "the long run has not been seen yet"
            assert excess > 0
            assert keys[session] == max(keys.values()), "not the one of the lowest priority"
            if shed_s:
                assert now_s - shed_s[-1] >= 1 / excesses[-1] - 1e-9
            shed_s.append(now_s)
            excesses.append(excess)


def test_a_steady_overload_is_shed_at_about_its_excess() -> None:
    """Two arrivals a second, one completion: of the rest, one a second has to go, and the queue stops growing."""
    rule = SheddingSettings(head_wait_s=30.0, arrival_window_s=60.0, completion_window_s=60.0)
    setup = Setup(CurrentContext(), ArrivalOrder(), lambda: None, rule, BudgetSettings(fixed_tokens=1000), 0.0, None)
    door = dataclasses.replace(setup, hold_limit_s=1e9, idle_timeout_s=1e9).door()
    inside: list[str] = []
    shed_s: list[float] = []
    queued = {}

    def settle() -> None:
        for outcome in door.poll(now_s):
            if isinstance(outcome, Admit):
                inside.append(outcome.call_id)
            else:
                shed_s.append(now_s)

    for second in range(1200):
        now_s = float(second)
        for i in range(2):
            session = f"s{second}-{i}"
            if isinstance(door.call(session, session, 10, now_s), Admit):
                inside.append(session)
            settle()
        if inside:
            door.end(inside.pop(0), now_s)
            settle()
        queued[second] = door.state().queued_sessions
    assert min(shed_s) >= 60.0
    assert len([t for t in shed_s if t >= 600]) == pytest.approx(600, rel=0.05)
    assert queued[1199] == pytest.approx(queued[600], abs=30)


# Laws.

CONTEXTS = st.integers(1, 100_000)


def make_session(context: int, quantiles: list[float], calls_seen: int = 3, first: int | None = None) -> Session:
    prediction = Prediction(tuple(sorted(quantiles)))
    first_tokens = context if first is None else min(first, context)
    return Session("s", 0.0, context, 0.0, prediction=prediction, calls_seen=calls_seen, first_tokens=first_tokens)


QUANTILES = st.lists(st.floats(0, 1e6), min_size=5, max_size=5)


@given(CONTEXTS, QUANTILES, st.floats(0, 1e6), st.floats(0, 1), st.integers(1, 50), st.integers(0, 100_000))
def test_a_larger_predicted_peak_never_reserves_fewer_tokens(
    context: int, quantiles: list, more: float, alpha: float, calls_seen: int, first: int
) -> None:
    small = make_session(context, quantiles, calls_seen, first)
    large = make_session(context, [q + more for q in quantiles], calls_seen, first)
    for law in (CurrentContext(), PartialPeak(alpha), PartialPeak(alpha, 0.9), StatisticalMultiplexing()):
        assert law.reserve(small)[0] <= law.reserve(large)[0] + 1e-6
        assert law.reserve(small)[0] >= context


@given(CONTEXTS, QUANTILES, st.integers(1, 50), st.integers(0, 100_000), st.floats(0.001, 0.49), st.floats(0.1, 1e4))
def test_alpha_spans_from_the_current_context_to_the_peak_and_multiplexing_lies_between(
    context: int, quantiles: list, calls_seen: int, first: int, epsilon: float, horizon_calls: float
) -> None:
    session = make_session(context, quantiles, calls_seen, first)
    current, peak = CurrentContext().reserve(session), PartialPeak(1.0, name="peak").reserve(session)
    assert PartialPeak(0.0).reserve(session) == current
    assert peak == (pytest.approx(session.predicted_peak(0.5)), 0.0)
    mixed_tokens, mixed_variance = StatisticalMultiplexing(epsilon, horizon_calls).reserve(session)
    assert current[0] <= mixed_tokens <= peak[0] + 1e-6
    assert mixed_variance >= 0
    if session.predicted_peak(0.9) == session.predicted_peak(0.1):  # sure of the peak: nothing to multiplex
        assert mixed_variance == 0


@given(st.lists(st.tuples(CONTEXTS, QUANTILES), min_size=1, max_size=30), st.floats(0.01, 0.4))
def test_multiplexing_of_many_is_never_dearer_than_each_on_its_own(sessions: list, epsilon: float) -> None:
    law = StatisticalMultiplexing(epsilon, 1e9)
    reservations = [law.reserve(make_session(context, quantiles)) for context, quantiles in sessions]
    tokens = sum(mean for mean, _ in reservations)
    together = tokens + law.z * math.sqrt(sum(variance for _, variance in reservations))
    alone = tokens + law.z * sum(math.sqrt(variance) for _, variance in reservations)
    assert together <= alone * (1 + 1e-9)


# Budget.

VIEWS = st.builds(
    EngineView,
    cache_tokens=st.integers(0, 10_000),
    host_tokens=st.integers(0, 10_000),
    lent_tokens=st.integers(0, 10_000),
    hit_rate=st.one_of(st.none(), st.floats(0, 1)),
)


@given(
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.floats(0, 0.9),
    st.lists(st.tuples(VIEWS, st.booleans(), st.floats(0, 20_000)), max_size=60),
)
def test_the_budget_stays_in_its_band_and_follows_capacity_at_once(
    fixed: int | None, knee: int | None, band: float, observations: list
) -> None:
    budget = Budget(BudgetSettings(fixed_tokens=fixed, knee_tokens=knee, band=band), capacity_tokens=100)
    for view, queued, reserved in observations:
        before = budget.factor
        budget.observe(view, queued=queued, reserved_tokens=reserved)
        capacity = max(1, view.cache_tokens + view.host_tokens + view.lent_tokens)
        reference = fixed if fixed is not None else capacity if knee is None else min(0.9 * knee, capacity)
        assert budget.reference_tokens == max(1, int(reference))
        assert 1 - band - 1e-9 <= budget.factor <= 1 + band + 1e-9
        low, high = (1 - band) * budget.reference_tokens, (1 + band) * budget.reference_tokens
        assert low - 1 - 1e-6 <= budget.tokens <= max(1, high + 1e-6)
        assert budget.tokens >= 1
        if view.hit_rate is None:
            assert budget.factor == before
        if budget.factor > before:
            assert queued


def test_the_budget_loosens_on_the_stretch_and_tightens_off_it() -> None:
    budget = Budget(BudgetSettings(band=0.2), capacity_tokens=1000)
    good, bad = EngineView(cache_tokens=1000, hit_rate=0.92), EngineView(cache_tokens=1000, hit_rate=0.5)
    for _ in range(100):
        budget.observe(good, queued=True, reserved_tokens=1000)
    assert budget.tokens == 1200
    budget.observe(good, queued=False, reserved_tokens=1000)
    assert budget.tokens == 1200
    for _ in range(100):
        budget.observe(bad, queued=True, reserved_tokens=1000)
    assert budget.tokens == 800


# Prediction.


@given(st.lists(st.integers(0, 5_000), max_size=80), st.integers(0, 6_000), st.integers(1, 32))
def test_peaks_seen_predicts_ascending_quantiles_above_the_context_in_bounded_memory(
    peaks: list, context: int, memory: int
) -> None:
    predictor = PeaksSeen(memory=memory)
    for peak_tokens in peaks:
        predictor.learn(Session("s", 0.0, peak_tokens, 0.0, peak_tokens=peak_tokens))
        assert len(predictor._recent) == len(predictor._sorted) <= memory
    assert predictor._sorted == sorted(predictor._recent)
    assert list(predictor._recent) == peaks[-memory:]
    prediction = predictor.predict(Session("s", 0.0, context, 0.0))
    tokens = prediction.tokens
    assert list(tokens) == sorted(tokens)
    assert tokens[0] >= context
    reached = sorted(peak for peak in peaks[-memory:] if peak >= max(1, context))
    if len(reached) >= PeaksSeen.MIN_SEEN:
        assert reached[0] <= tokens[0] <= tokens[-1] <= reached[-1]


@given(QUANTILES, st.floats(0, 1), st.floats(0, 1))
def test_a_prediction_rises_with_the_share_and_stays_between_its_ends(
    quantiles: list, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    prediction = Prediction(tuple(sorted(quantiles)))
    assert min(quantiles) <= prediction.at(low) <= prediction.at(high) * (1 + 1e-9) + 1e-9
    assert prediction.at(high) <= max(quantiles) * (1 + 1e-9)
