import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.lessons import KEPT_ROWS, NO_LESSONS, Guess, Lessons
from sglang_basin.predictor.online import STAGES


def guess(stage):
    row = np.array([*np.linspace(stage, stage + 1, len(NAMES)), 0.1, 0.2, stage / 10])
    return Guess(row, stage, 8.0 + stage / 4, 0.5 - stage / 100, 0.25, ())


def noted(stages, seed=1):
    lessons, draw = Lessons(), random.Random(seed)
    for stage in stages:
        lessons.note(guess(stage), draw)
    return lessons


@given(st.lists(st.integers(0, STAGES - 1), max_size=40), st.integers(0, 99))
def test_the_first_guess_of_each_stage_counts(stages, seed):
    lessons = noted(stages, seed)
    firsts = [stage for place, stage in enumerate(stages) if all(stage > before for before in stages[:place])]
    errors, rows = lessons.errors(), lessons.rows()
    assert errors["stage"].tolist() == firsts
    assert len(lessons) == len(errors) == len(firsts)
    assert len(rows) == min(KEPT_ROWS, len(firsts))
    assert len(set(rows["place"].tolist())) == len(rows)
    for row in rows:
        one, error = guess(firsts[row["place"]]), errors[row["place"]]
        assert [*row["values"], *row["parts"]] == pytest.approx(one.row.tolist(), rel=1e-3)
        assert (error["log_context"], error["mean"], error["spread"]) == pytest.approx(
            (one.log_context, one.mean, one.spread), rel=1e-3
        )


@pytest.mark.parametrize("stage", [0, STAGES - 1])
def test_a_first_guess_is_packed_at_once(stage):
    assert Lessons.first(guess(stage)) == noted([stage]).packed()
    assert Lessons().packed() == NO_LESSONS


def test_every_stage_is_kept_as_often_as_any_other():
    draws, stages = 4_000, 8
    kept = Counter()
    lessons = [noted(range(stages), seed) for seed in range(draws)]
    for one in lessons:
        kept.update(one.errors()["stage"][one.rows()["place"]].tolist())
    expected = draws * KEPT_ROWS / stages
    assert all(abs(kept[stage] - expected) < 5 * expected**0.5 for stage in range(stages))
