"""The predictor's benchmarks: what they measure on numbers whose answer is known, and that the page is right."""

from __future__ import annotations

import json

import numpy as np
import predictor_ablation
import predictor_page
import pytest
from predictor_ceiling import GROUPS, everything, feature_study, variance_share

from sglang_basin.predictor.recorded import Recorded, kin_of
from sglang_basin.predictor.text import read_task


def session(number: int, long: bool, calls: int) -> Recorded:
    """Long ones write more from their first call on, and yet have no longer contexts."""
    rng = np.random.default_rng(number)
    prompt, made = 2000 + int(rng.integers(0, 500)), []
    for _ in range(calls):
        output = int(rng.integers(300, 400) if long else rng.integers(20, 60))
        made.append((prompt, output))
        prompt += 500 + int(rng.integers(0, 900))  # whoever writes less gets more back
    text = f"task {number}"
    return Recorded(tuple(made), text, kin_of("agent", "model"), read_task(text), text, (1.0,) * (calls - 1))


SESSIONS = [session(number, number % 2 == 0, 24 if number % 2 == 0 else 6) for number in range(120)]


def test_variance_between_groups_is_found() -> None:
    rng = np.random.default_rng(1)
    names = np.arange(300).repeat(4)
    between, within = rng.normal(size=300).repeat(4), rng.normal(size=1200)
    for part, share in ((3.0, 0.9), (1.0, 0.5), (0.0, 0.0)):
        assert variance_share(part * between + within, names) == pytest.approx(share, abs=0.05)


def test_everything_knows_nothing_of_what_comes_later() -> None:
    known = everything(SESSIONS, 4)
    cut = [
        Recorded((*one.calls[:3], (one.calls[3][0], 9999)), one.group, one.kin, one.task, one.text, one.pauses_s[:3])
        for one in SESSIONS
    ]
    again = everything(cut, 4)
    for group in GROUPS:
        if group in known.columns:
            assert np.array_equal(known.columns[group], again.columns[group]), group


def test_a_flexible_model_finds_what_there_is() -> None:
    found = feature_study(SESSIONS[:80], 4, folds=2)
    assert found["everything"][0] > found["everything"][1] > 0.1
    assert found["with"]["outputs"] > found["with"]["pauses"] + 0.05
    assert found["in sample"] >= found["everything"][0] - 0.05
    assert set(found["without"]) == set(found["with"])


def test_page_is_what_the_results_say() -> None:
    found = json.loads(predictor_page.RESULTS.read_text(encoding="utf-8"))
    assert predictor_page.PAGE.read_text(encoding="utf-8") == predictor_page.page(found)
    assert predictor_page.PLOT.is_file()


def test_binomial_interval() -> None:
    assert predictor_page.binomial_interval(9, 10) == pytest.approx((0.555, 0.9975), abs=1e-3)
    assert predictor_page.binomial_interval(10, 10)[1] == 1.0
    assert predictor_page.binomial_interval(0, 10)[0] == 0.0


def test_ratio_of_totals() -> None:
    whole, low, high = predictor_ablation.ratio([90.0, 100.0, 80.0], [100.0, 100.0, 100.0])
    assert whole == pytest.approx(0.9)
    assert 0.8 <= low < 0.9 < high <= 1.0
