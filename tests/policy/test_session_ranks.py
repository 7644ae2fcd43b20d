"""Sessions stay on their ranks, and new ones even out."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.policy.ranks import SessionRanks

IDLE_S = 10.0


def test_a_session_stays_and_a_new_one_goes_where_the_fewest_are_active() -> None:
    ranks = SessionRanks(idle_s=IDLE_S, max_sessions=100)
    assert [ranks.rank_of(name, (0, 1, 2), 0.0) for name in "abcdef"] == [0, 1, 2, 0, 1, 2]
    assert [ranks.rank_of(name, (0, 1, 2), 1.0) for name in "abcdef"] == [0, 1, 2, 0, 1, 2]
    ranks.ended("b")
    assert ranks.rank_of("g", (0, 1, 2), 1.0) == 1
    assert ranks.rank_of("b", (0, 1, 2), 1.0) == 1  # it comes back to its cache, although two others are there


def test_idle_sessions_do_not_count_but_are_known() -> None:
    ranks = SessionRanks(idle_s=IDLE_S, max_sessions=100)
    assert [ranks.rank_of(name, (0, 1), 0.0) for name in "abc"] == [0, 1, 0]
    assert ranks.rank_of("b", (0, 1), IDLE_S) == 1
    assert ranks.rank_of("d", (0, 1), IDLE_S + 1) == 0  # a and c are idle by now
    assert [ranks.rank_of(name, (0, 1), IDLE_S + 1) for name in "ac"] == [0, 0]


def test_a_child_goes_where_its_parent_is() -> None:
    ranks = SessionRanks(idle_s=IDLE_S, max_sessions=100)
    assert [ranks.rank_of(name, (0, 1), 0.0) for name in ("parent", "other", "third")] == [0, 1, 0]
    assert ranks.rank_of("child", (0, 1), 0.0, parent_id="parent") == 0
    assert ranks.rank_of("grandchild", (0, 1), 0.0, parent_id="child") == 0
    assert ranks.rank_of("orphan", (0, 1), 0.0, parent_id="unknown") == 1


def test_a_session_moves_only_from_a_rank_that_is_gone() -> None:
    ranks = SessionRanks(idle_s=IDLE_S, max_sessions=100)
    assert [ranks.rank_of(name, (0, 1), 0.0) for name in "ab"] == [0, 1]
    assert [ranks.rank_of(name, (1,), 1.0) for name in "ab"] == [1, 1]
    assert [ranks.rank_of(name, (0, 1), 2.0) for name in "ab"] == [1, 1]
    assert ranks.rank_of("c", (0, 1), 2.0) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.booleans(), st.one_of(st.none(), st.integers(0, 12)), st.floats(0, 15)),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_what_is_counted_is_what_is_active(calls: list[tuple[int, bool, int | None, float]], count: int) -> None:
    ranks = SessionRanks(idle_s=IDLE_S, max_sessions=8)
    now_s = 0.0
    for name, ends, parent, later_s in calls:
        now_s += later_s
        before = ranks._rank.get(str(name))
        rank = ranks.rank_of(str(name), range(count), now_s, parent_id=None if parent is None else str(parent))
        assert before is None or rank == before
        if ends:
            ranks.ended(str(name))
        assert set(ranks._active) <= set(ranks._rank)
        assert len(ranks._rank) <= 8
        assert +ranks._on == Counter(ranks._rank[session] for session in ranks._active)
        assert all(now_s - at_s <= IDLE_S for at_s in ranks._active.values())
