"""The door's rules, one by one, and its invariants under any course of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Admit, Queue, Reason, Refuse
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.idle import FACTOR, LEAST_PAUSES
from sglang_basin.policy.pausing import PauseSettings
from sglang_basin.policy.priority import SizeAwareOrder
from sglang_basin.policy.reservation import CurrentContext
from sglang_basin.policy.shedding import SheddingSettings


def make_door(budget_tokens: int = 100, pausing: PauseSettings | None = None, **changes: object) -> Door:
    settings_ = {"idle_timeout_s": 60.0, "hold_limit_s": 30.0, "max_sessions": 1000, **changes}
    budget = Budget(BudgetSettings(fixed_tokens=budget_tokens), capacity_tokens=1)
    return Door(DoorSettings(**settings_), law=CurrentContext(), budget=budget, pausing=pausing)


def enter(door: Door, call_id: str, session_id: str, tokens: int, now_s: float = 0.0) -> None:
    assert isinstance(door.call(call_id, session_id, tokens, now_s), Admit)


def test_below_the_budget_everybody_enters_and_over_it_sessions_wait() -> None:
    door = make_door()
    assert door.call("1", "a", 60, 0.0) == Admit("1", Reason.NOBODY_LIVE)
    assert door.call("2", "b", 60, 0.0) == Admit("2", Reason.BELOW_BUDGET)
    assert door.call("3", "c", 1, 0.0) == Queue("3", Reason.NO_HEADROOM, need_tokens=1, free_tokens=-20, ahead=0)


def test_once_armed_a_session_must_fit_until_nobody_waits_and_the_budget_is_well_kept() -> None:
    door = make_door()
    enter(door, "1", "a", 60)
    enter(door, "2", "b", 60)  # crosses the budget: armed
    door.end("b", 1.0)
    assert isinstance(door.call("3", "c", 30, 1.0), Admit)  # 60 of 100 and nobody waits: disarmed again
    door.call("4", "d", 30, 1.0)  # crosses
    assert door.state().reserved_tokens == 120
    assert isinstance(door.call("5", "e", 10, 2.0), Queue)
    door.end("c", 3.0)  # 90 of 100 and somebody waits: still armed
    assert door.poll(3.0) == [Admit("5", Reason.FITS, 1.0)]
    assert isinstance(door.call("6", "f", 1, 3.0), Queue)


def test_a_child_of_a_live_session_enters_at_once_others_wait() -> None:
    """Its parent holds the room that it would wait for, until the child is done."""
    door = make_door()
    enter(door, "1", "parent", 101)
    assert isinstance(door.call("2", "other", 10, 0.0), Queue)
    assert isinstance(door.call("3", "orphan", 10, 0.0, parent_id="gone"), Queue)
    assert door.call("4", "child", 10, 0.0, parent_id="parent") == Admit("4", Reason.CHILD)
    assert door.call("5", "grandchild", 10, 0.0, parent_id="child") == Admit("5", Reason.CHILD)
    assert door.state().working_set_tokens == 121
    door.end("parent", 1.0)
    assert isinstance(door.call("6", "late", 10, 1.0, parent_id="parent"), Queue)


def test_a_session_is_not_idle_while_one_that_it_waits_for_is_active() -> None:
    door = make_door()
    enter(door, "1", "parent", 10)
    door.finish("1", 1, 0.0)
    door.call("2", "child", 10, 1.0, parent_id="parent")
    door.finish("2", 1, 50.0)
    door.poll(100.0)
    assert door.take_ended() == []
    door.poll(110.0)
    assert sorted(session.session_id for session in door.take_ended()) == ["child", "parent"]


def test_sessions_that_name_each_other_as_parents_end_like_others() -> None:
    door = make_door()
    for call_id, session_id, parent_id in (("1", "a", "b"), ("2", "b", "a"), ("3", "c", "c")):
        door.call(call_id, session_id, 10, 0.0, parent_id=parent_id)
        door.finish(call_id, 1, 0.0)
    door.poll(60.0)
    assert sorted(session.session_id for session in door.take_ended()) == ["a", "b", "c"]


def test_a_session_runs_while_a_call_of_it_is_held_or_under_way() -> None:
    door = make_door()
    enter(door, "1", "a", 101)
    door.call("2", "b", 10, 0.0)
    assert [door.runs(session) for session in "abc"] == [True, True, False]
    door.prefilled("1", 1.0)
    door.abandon("2", 1.0)
    assert [door.runs(session) for session in "abc"] == [True, False, False]
    door.finish("1", 1, 2.0)
    assert not door.runs("a")


def test_a_later_small_session_does_not_pass_the_head() -> None:
    door = make_door()
    enter(door, "1", "a", 60)
    enter(door, "2", "b", 50)
    assert isinstance(door.call("3", "large", 50, 0.0), Queue)
    door.end("b", 0.5)
    small = door.call("4", "small", 5, 0.6)
    assert isinstance(small, Queue)
    assert small.reason is Reason.BEHIND_QUEUE
    assert small.ahead == 1
    assert door.poll(1.0) == []


@pytest.mark.parametrize(("updates", "first"), [(True, "short"), (False, "long")])
def test_inside_a_session_that_outgrew_its_prediction_makes_way(updates: bool, first: str) -> None:
    """Both began alike, one second apart; the first one has grown since. The door's own priorities stay."""
    settings_ = DoorSettings(idle_timeout_s=60.0, hold_limit_s=30.0, updates_order=updates)
    budget = Budget(BudgetSettings(fixed_tokens=10_000), capacity_tokens=1)
    door = Door(settings_, law=CurrentContext(), budget=budget, order=SizeAwareOrder(10.0))
    enter(door, "1", "long", 100, now_s=0.0)
    enter(door, "2", "short", 100, now_s=1.0)
    door.finish("1", 400, 2.0)
    enter(door, "3", "long", 600, now_s=3.0)
    assert min(("short", "long"), key=lambda session_id: door.order(session_id, 3.0)) == first
    assert [session.priority for name in ("long", "short") if (session := door.live_session(name))] == [10.0, 11.0]


def test_calls_of_a_live_session_never_queue_even_over_budget() -> None:
    door = make_door()
    enter(door, "1", "a", 90)
    door.finish("1", 5, 1.0)
    assert door.call("2", "a", 500, 2.0) == Admit("2", Reason.LIVE_SESSION)
    assert door.state().working_set_tokens == 500


def test_the_head_enters_over_budget_when_nobody_is_live() -> None:
    door = make_door()
    assert door.call("1", "huge", 5000, 0.0) == Admit("1", Reason.NOBODY_LIVE)
    assert isinstance(door.call("2", "next", 5000, 0.0), Queue)
    door.end("huge", 1.0)
    assert door.poll(1.0) == [Admit("2", Reason.NOBODY_LIVE, 1.0)]


def test_the_end_of_a_session_lets_the_queue_enter_in_order_of_arrival() -> None:
    door = make_door()
    enter(door, "1", "a", 101)
    for i in range(2, 6):
        assert isinstance(door.call(str(i), f"s{i}", 40, float(i)), Queue)
    door.finish("1", 0, 10.0)
    door.end("a", 10.0)
    assert [outcome.call_id for outcome in door.poll(10.0)] == ["2", "3"]
    assert [session.session_id for session in door.take_ended()] == ["a"]


def test_a_session_waiting_with_two_calls_enters_with_both() -> None:
    door = make_door()
    enter(door, "1", "a", 101)
    assert isinstance(door.call("2", "b", 10, 0.0), Queue)
    assert isinstance(door.call("3", "b", 12, 0.0), Queue)
    door.end("a", 1.0)
    assert {outcome.call_id for outcome in door.poll(1.0)} == {"2", "3"}


def test_the_last_call_announced_ends_the_session_when_it_finishes() -> None:
    door = make_door()
    door.call("1", "a", 50, 0.0, ends_session=True)
    assert door.state().live_sessions == 1
    door.prefilled("1", 1.0)
    door.finish("1", 10, 2.0)
    assert door.state().live_sessions == 0
    assert door.state().working_set_tokens == 0


def test_idle_sessions_end_but_not_while_a_call_is_in_this_instance() -> None:
    door = make_door(idle_timeout_s=10.0)
    enter(door, "1", "busy", 10)
    enter(door, "2", "idle", 10)
    door.finish("2", 1, 0.0)
    door.poll(11.0)
    assert door.live_session("busy") is not None
    assert door.live_session("idle") is None


def test_reports_of_running_calls_keep_a_session_alive_and_lost_ones_do_not_for_ever() -> None:
    door = make_door(idle_timeout_s=10.0)
    enter(door, "1", "a", 10)
    door.prefilled("1", 1.0)
    for now_s in (8.0, 16.0, 24.0):
        door.decoding("1", now_s)
        door.poll(now_s)
    assert door.live_session("a") is not None
    door.poll(35.0)
    assert door.live_session("a") is None


def test_a_call_held_too_long_is_refused_and_its_session_leaves() -> None:
    door = make_door(hold_limit_s=30.0)
    enter(door, "1", "a", 101)
    door.call("2", "b", 10, 5.0)
    assert door.poll(34.0) == []
    (refused,) = door.poll(35.0)
    assert isinstance(refused, Refuse)
    assert refused.call_id == "2"
    assert refused.waited_s == 30.0
    assert door.state().queued_sessions == 0


def test_an_abandoned_held_call_leaves_nothing_behind() -> None:
    door = make_door()
    enter(door, "1", "a", 101)
    door.call("2", "b", 10, 0.0)
    door.abandon("2", 1.0)
    assert door.state().queued_sessions == 0
    assert not door.holds_any
    door.end("a", 2.0)
    assert door.poll(2.0) == []


def test_a_call_that_comes_twice_counts_once() -> None:
    door = make_door()
    enter(door, "1", "a", 101)
    assert isinstance(door.call("2", "b", 10, 0.0), Queue)
    assert isinstance(door.call("2", "b", 10, 0.0), Queue)
    assert door.state().held_calls == 1
    door.end("a", 1.0)
    assert [outcome.call_id for outcome in door.poll(1.0)] == ["2"]
    assert door.state().working_set_tokens == 10


def test_a_session_ends_a_grace_after_its_final_answer() -> None:
    door = make_door(final_grace_s=5.0)
    enter(door, "1", "a", 10)
    door.prefilled("1", 1.0)
    door.finish("1", 3, 2.0, final=True)
    door.poll(6.9)
    assert door.state().live_sessions == 1
    door.poll(7.0)
    assert door.state().live_sessions == 0
    assert [session.session_id for session in door.take_ended()] == ["a"]
    assert door.call("2", "a", 20, 8.0).reason is not Reason.LIVE_SESSION, "what comes after the end is a new session"


def test_a_call_within_the_grace_takes_the_end_back() -> None:
    door = make_door(final_grace_s=5.0)
    enter(door, "1", "a", 10)
    door.finish("1", 3, 2.0, final=True)
    assert door.call("2", "a", 20, 6.0).reason is Reason.LIVE_SESSION
    door.poll(9.0)
    door.finish("2", 3, 9.0)
    door.poll(15.0)
    assert door.state().live_sessions == 1


def test_a_final_answer_beside_another_call_of_the_session_ends_nothing() -> None:
    door = make_door(final_grace_s=5.0)
    enter(door, "1", "a", 10)
    door.call("2", "a", 12, 0.5)
    door.finish("1", 3, 1.0, final=True)
    door.poll(8.0)
    assert door.state().live_sessions == 1


def test_the_idle_timeout_follows_the_pauses_between_calls() -> None:
    door = make_door(idle_timeout_s=100.0, idle_floor_s=5.0)
    now_s = 0.0
    for number in range(LEAST_PAUSES + 1):
        door.call(f"a{number}", "a", 10, now_s)
        door.finish(f"a{number}", 1, now_s)
        now_s += 4.0
    door.poll(now_s := now_s - 4.0 + FACTOR * 4.0 - 0.5)
    assert door.state().live_sessions == 1
    door.poll(now_s + 1.0)
    assert door.state().live_sessions == 0


def test_a_queued_session_that_ends_gets_its_calls_refused() -> None:
    door = make_door()
    enter(door, "1", "a", 101)
    door.call("2", "b", 10, 0.0)
    (refused,) = door.end("b", 1.0)
    assert refused.reason is Reason.SESSION_ENDED
    assert door.state().held_calls == 0


def test_calls_without_identity_pass_and_take_no_place() -> None:
    door = make_door()
    assert door.call("1", None, 1000, 0.0) == Admit("1", Reason.NO_IDENTITY)
    assert door.state().live_sessions == 0


def test_switched_off_everything_passes_and_is_still_watched() -> None:
    door = make_door(enabled=False)
    enter(door, "1", "a", 90)
    assert door.call("2", "b", 90, 0.0) == Admit("2", Reason.ADMISSION_OFF)
    assert door.state().working_set_tokens == 180


def test_the_table_stays_within_its_bound() -> None:
    door = make_door(budget_tokens=10**9, max_sessions=10)
    for i in range(50):
        enter(door, str(i), f"s{i}", 1)
    assert door.state().live_sessions == 10
    assert door.live_session("s49") is not None


def test_a_clock_that_jumps_back_neither_ends_nor_refuses_anything() -> None:
    door = make_door(idle_timeout_s=10.0, hold_limit_s=10.0)
    enter(door, "1", "a", 101, 1000.0)
    door.call("2", "b", 10, 1000.0)
    assert door.poll(5.0) == []
    assert door.state().live_sessions == 1
    assert door.state().held_calls == 1


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_tokens"):
        make_door(budget_tokens=0)


def test_a_client_that_comes_again_is_no_new_demand() -> None:
    """Regression: a storm of retries after refusals must not look like a long-run overload and bring on shedding."""
    settings_ = DoorSettings(idle_timeout_s=1e9, hold_limit_s=10)
    budget = Budget(BudgetSettings(fixed_tokens=100), capacity_tokens=1)
    shedding = SheddingSettings(arrival_window_s=60, completion_window_s=60, head_wait_s=5)
    door = Door(settings_, law=CurrentContext(), budget=budget, shedding=shedding)
    door.call("a", "a", 101, 0.0)
    reasons = set()
    for second in range(1, 240):
        if second % 12 == 1:
            for number in range(3):
                door.call(f"{second}-{number}", f"s{number}", 10, float(second))
        reasons |= {outcome.reason for outcome in door.poll(float(second))}
    assert reasons == {Reason.HELD_TOO_LONG}


def test_the_queue_is_bounded_too() -> None:
    """Regression: many waiting sessions neither grow the table without bound nor push live ones out."""
    door = make_door(max_sessions=5)
    enter(door, "a", "a", 101)
    decisions = [door.call(f"c{i}", f"s{i}", 200, 1.0) for i in range(50)]
    assert sum(isinstance(decision, Queue) for decision in decisions) == 5
    assert {decision.reason for decision in decisions if isinstance(decision, Refuse)} == {Reason.QUEUE_FULL}
    assert door.live_session("a") is not None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "last", "prefilled", "finish", "final", "abandon", "end", "decoding", "tick"]),
        st.integers(0, 7),  # session
        st.integers(0, 15),  # which of the calls
        st.integers(1, 80),  # tokens
        st.floats(0.0, 8.0),  # seconds that pass before
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_invariants_hold_under_any_course_of_events(events: list, budget_tokens: int) -> None:
    """Sums match the table, nobody waits while nobody is live, and each held call ends exactly once."""
    door = make_door(budget_tokens, idle_timeout_s=20.0, hold_limit_s=15.0, max_sessions=6, final_grace_s=8.0)
    now_s, made, waiting = 0.0, [], set()

    def settle() -> None:
        for outcome in door.poll(now_s):
            assert outcome.call_id in waiting, "a wait ends once, for a call that waits"
            waiting.remove(outcome.call_id)

    for kind, session, which, tokens, pause_s in events:
        now_s += pause_s
        call_id = made[which % len(made)] if made else None
        if kind in ("call", "last"):
            call_id = f"c{len(made)}"
            made.append(call_id)
            decision = door.call(call_id, f"s{session}", tokens, now_s, ends_session=kind == "last")
            if isinstance(decision, Queue):
                waiting.add(call_id)
        elif kind == "end":
            waiting -= {refused.call_id for refused in door.end(f"s{session}", now_s)}
        elif call_id is not None and kind in ("finish", "final"):
            waiting.discard(call_id)
            door.finish(call_id, tokens, now_s, final=kind == "final")
        elif call_id is not None and kind == "abandon":
            waiting.discard(call_id)
            door.abandon(call_id, now_s)
        elif call_id is not None and kind == "prefilled":
            door.prefilled(call_id, now_s)
        elif call_id is not None and kind == "decoding":
            door.decoding(call_id, now_s)
        settle()

        state = door.state()
        live = [s for i in range(8) if (s := door.live_session(f"s{i}")) is not None]
        assert state.live_sessions == len(live) <= 6
        assert state.working_set_tokens == sum(s.context_tokens for s in live)
        assert state.reserved_tokens == sum(s.reserved_tokens for s in live)
        assert state.held_calls == len(waiting)
        assert (state.held_calls == 0) == (state.queued_sessions == 0)
        if state.queued_sessions:
            assert live, "with nobody live the head would have entered"

    now_s += 100.0
    settle()
    assert not waiting
    for call_id in made:
        door.finish(call_id, 1, now_s)
    now_s += 100.0
    settle()
    assert door.state().live_sessions == 0
    assert door.state().working_set_tokens == door.state().reserved_tokens == 0


@pytest.mark.parametrize("grace_s", [0.0, 1.0, 40.0, 600.0])
def test_the_advice_when_to_come_back_is_within_the_grace(grace_s: float) -> None:
    settings = DoorSettings(idle_timeout_s=60, hold_limit_s=30, ticket_grace_s=grace_s)
    assert 0 < settings.retry_after_s <= 60
    assert settings.retry_after_s < grace_s or grace_s == 0


def grown(**changes: object) -> Door:
    """Three sessions that entered at 10 tokens each and have grown to 40, 50 and 60 of 100; `c` still runs."""
    door = make_door(pausing=PauseSettings(), **changes)
    for number, (session_id, tokens) in enumerate((("a", 40), ("b", 50), ("c", 60))):
        enter(door, f"{number}.0", session_id, 10)
        door.finish(f"{number}.0", 1, 0.0)
        assert isinstance(door.call(f"{number}.1", session_id, tokens - 1, 1.0), Admit)
        if session_id != "c":
            door.finish(f"{number}.1", 1, 1.0)
    return door


def test_over_the_cache_the_shortest_idle_sessions_are_paused_until_the_rest_fits() -> None:
    door = grown()
    assert door.poll(2.0) == []
    assert door.take_sent_back() == ["a", "b"]  # 149 -> 109 -> 59, which is below 80
    assert door.take_sent_back() == []
    state = door.state()
    assert (state.live_sessions, state.paused_sessions, state.working_set_tokens) == (1, 2, 59)
    assert isinstance(door.call("0.2", "a", 45, 3.0), Queue)  # 104 is over 85
    decision = door.call("1.2", "b", 51, 3.0)
    assert decision == Queue("1.2", Reason.PAUSED, need_tokens=51, free_tokens=26, ahead=1)
    assert door.poll(4.0) == []
    door.end("c", 5.0)
    assert door.poll(5.0) == [Admit("0.2", Reason.FITS, 2.0)]  # the shorter one; both together are over 85
    door.end("a", 6.0)
    assert door.poll(6.0) == [Admit("1.2", Reason.FITS, 3.0)]


def test_below_the_threshold_nobody_is_paused() -> None:
    door = grown()
    door.end("a", 1.5)
    door.end("b", 1.5)
    assert door.poll(2.0) == []
    assert door.take_sent_back() == []
    assert door.state().paused_sessions == 0


def test_a_session_whose_call_is_under_way_leaves_when_it_is_over() -> None:
    door = make_door(pausing=PauseSettings())
    enter(door, "1", "small", 30)
    enter(door, "2", "large", 90)
    assert door.poll(1.0) == []
    assert door.take_sent_back() == ["small"]  # whoever remembers it must ask about its next call
    assert (door.state().live_sessions, door.state().reserved_tokens) == (2, 90)
    door.finish("1", 1, 2.0)
    assert (door.state().live_sessions, door.state().paused_sessions) == (1, 1)
    assert isinstance(door.call("3", "small", 35, 3.0), Queue)


def test_who_has_waited_too_long_goes_on_over_the_budget_one_at_a_time() -> None:
    door = make_door(pausing=PauseSettings(patience_s=10.0), hold_limit_s=1e9)
    for session_id in ("a", "b"):
        enter(door, f"{session_id}1", session_id, 30)
        door.finish(f"{session_id}1", 1, 0.0)
    enter(door, "large", "large", 90)
    door.poll(1.0)
    assert isinstance(door.call("a2", "a", 35, 2.0), Queue)
    assert isinstance(door.call("b2", "b", 32, 3.0), Queue)
    assert door.poll(11.9) == []
    assert door.poll(13.0) == [Admit("a2", Reason.WAITED_LONGEST, 11.0)]
    assert door.poll(20.0) == []
    door.finish("a2", 1, 21.0)
    assert door.poll(22.0) == [Admit("b2", Reason.WAITED_LONGEST, 19.0)]


def test_a_paused_session_that_never_comes_back_ends_and_teaches() -> None:
    door = grown(idle_timeout_s=60.0)
    door.poll(2.0)
    door.take_sent_back()
    door.poll(63.0)
    assert sorted(session.session_id for session in door.take_ended()) == ["a", "b"]
    assert door.state().paused_sessions == 0


def test_a_client_that_takes_a_held_call_back_leaves_its_session_paused() -> None:
    door = grown()
    door.poll(2.0)
    assert isinstance(door.call("0.2", "a", 45, 3.0), Queue)
    door.abandon("0.2", 4.0)
    assert (door.state().held_calls, door.state().paused_sessions) == (0, 2)
    door.end("c", 5.0)
    assert isinstance(door.call("0.3", "a", 45, 6.0), Admit)


def test_the_end_of_a_paused_session_refuses_the_call_that_waits() -> None:
    door = grown()
    door.poll(2.0)
    door.call("0.2", "a", 45, 3.0)
    (refused,) = door.end("a", 4.0)
    assert (refused.call_id, refused.reason) == ("0.2", Reason.SESSION_ENDED)
    assert (door.state().held_calls, door.state().paused_sessions) == (0, 1)


@pytest.mark.parametrize("shares", [(0.9, 0.95, 0.8), (0.8, 0.85, 0.9), (0.9, 0.0, 0.8)])
def test_pausing_refuses_shares_in_the_wrong_order(shares: tuple[float, float, float]) -> None:
    above, down_to, resume = shares
    with pytest.raises(ValueError, match="down_to_share"):
        PauseSettings(above_share=above, down_to_share=down_to, resume_share=resume)
