import copy
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lessons import Lessons

from sglang_basin.policy.prediction import SHARES
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor import arithmetic, online
from sglang_basin.predictor.arithmetic import KEPT_ROWS, NOTHING, half, note, whole
from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.kept import History, KeptSessions, Subject
from sglang_basin.predictor.model_file import default_model_path, load_model
from sglang_basin.predictor.predictor import TrainedPredictor

SHIPPED = load_model(default_model_path())


def session(context, calls):
    return Session("s", 0.0, context, 0.0, calls_seen=calls)


def lessons_of(predictor, name="s"):
    return Lessons.of(*predictor._kept.record(predictor._kept.find(name)))


def test_compiled_sizes_are_those_of_the_rest():
    assert len(NAMES) == arithmetic.COLUMNS
    assert tuple(last + 1 for last in arithmetic.LAST_CALLS[:-1]) == online.FIRST_CALLS[1:]
    assert arithmetic.QUANTILES == SHARES


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2_000_000)), min_size=1, max_size=40),
    st.floats(-3, 3),
    st.integers(0, 99),
)
def test_the_first_guess_of_each_stage_is_a_lesson(steps, text_score, seed):
    predictor, history, calls = TrainedPredictor(SHIPPED, seed=seed), History(), 0
    subject = Subject(kin=3, task=4, text_score=text_score, characters=70)
    predictor._kept.tell(predictor._kept.begin("s"), subject)
    firsts = {}
    for more, context in steps:
        calls += more
        predictor.predict(session(context, calls))
        history.advance(calls, context)
        guess = SHIPPED.explain(history, subject)
        firsts.setdefault(guess.stage, guess)
    lessons, guesses = lessons_of(predictor), list(firsts.values())
    assert lessons.stages.tolist() == list(firsts)
    assert lessons.log_contexts == pytest.approx([guess.row[0] for guess in guesses], rel=1e-6)
    assert np.array_equal(lessons.means, np.array([guess.mean for guess in guesses], np.float16))
    assert np.array_equal(lessons.spreads, np.array([guess.spread for guess in guesses], np.float16))
    assert len(set(lessons.places.tolist())) == len(lessons.places) == min(KEPT_ROWS, len(firsts))
    for place, row in zip(lessons.places.tolist(), lessons.rows, strict=True):
        assert np.array_equal(row, guesses[place].row.astype(np.float16))
    assert predictor.counts.failures == 0


def test_every_stage_is_kept_as_often_as_any_other():
    draws, stages, kept = 2_000, 8, Counter()
    for seed in range(draws):
        predictor = TrainedPredictor(SHIPPED, seed=seed)
        for calls in online.FIRST_CALLS[:stages]:
            predictor.predict(session(5_000, calls))
        kept.update(lessons_of(predictor).places.tolist())
    expected = draws * KEPT_ROWS / stages
    assert all(abs(kept[stage] - expected) < 5 * expected**0.5 for stage in range(stages))


def test_no_more_is_noted_than_there_is_room_for():
    """Compiled code would write on into the next session's."""
    kept, row = np.concatenate([NOTHING, NOTHING]), np.ones(arithmetic.COLUMNS + arithmetic.PARTS)
    for _ in range(3 * arithmetic.STAGES):
        note(kept, 0, 11, 99, 0.5, 0.25, row)
    assert len(Lessons.of(kept).stages) == arithmetic.STAGES
    assert len(Lessons.of(kept).rows) == KEPT_ROWS
    assert kept[1] == NOTHING[0]
    assert len(Lessons.of(NOTHING).stages) == len(Lessons.of(NOTHING).rows) == 0


@given(st.floats(width=64))
def test_half_precision_as_numpys(number):
    with np.errstate(over="ignore"):
        assert half(number) == np.float64(number).astype(np.float16).view(np.uint16) or np.isnan(number)
    assert np.isnan(np.uint16(half(number)).view(np.float16)) == np.isnan(number)


def test_half_precision_between_all_its_numbers():
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    assert np.array_equal([whole(bits) for bits in range(1 << 16)], numbers, equal_nan=True)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    for these in (numbers, (numbers[1:] + numbers[:-1]) / 2, np.nextafter((numbers[1:] + numbers[:-1]) / 2, np.inf)):
        assert [half(one) for one in these] == these.astype(np.float16).view(np.uint16).tolist()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-5, 10**7), st.floats(0, 1e4)), max_size=40))
def test_sessions_side_by_side_do_not_touch_each_other(steps):
    """Each goes on as if it were alone, whatever becomes of its neighbours and of who had its place before."""
    table, history, calls, rng = KeptSessions(3), History(), 1, random.Random(1)

    def advance(name, calls, context, pause_s):
        arithmetic.advance(*table.record(table.find(name)), calls, context, pause_s)

    for name in "abc":
        table.tell(table.begin(name), Subject(7, None, 0.5, 9))
        advance(name, 5, 12_345, 1.0)
    table.forget("b")
    assert not table.is_told(table.begin("mine"))
    for more, context, pause_s in steps:
        calls += more
        history.advance(calls, context, pause_s)
        advance("mine", calls, context, pause_s)
        advance(rng.choice("ac"), 6 + calls, context + 1, pause_s)
    records, at = table.record(table.find("mine"))
    assert records[at] == history.kept[0]


def test_the_oldest_session_goes_and_what_was_told_stays_until_then():
    table = KeptSessions(300)
    for number in range(1_000):
        table.tell(table.begin(str(number)), Subject(number, None if number % 2 else 2**64 - 1 - number))
    assert len(table) == 300
    assert table.find("699") is None
    places = [table.find(str(number)) for number in range(700, 1_000)]
    assert len(set(places)) == 300
    for number, place in enumerate(places, 700):
        table.begin_again(place)
        assert table.is_told(place)
        assert table.keys_told(place) == (number, None if number % 2 else 2**64 - 1 - number)


def test_a_table_is_not_copied_by_halves():
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(TrainedPredictor(SHIPPED))
