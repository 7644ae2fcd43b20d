import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_sessions import SMALL, made
from sklearn.tree import ExtraTreeRegressor

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.arithmetic import CUT, MAX_LOG_GROWTH, MIN_VARIANCE, NOTHING, above_zero
from sglang_basin.predictor.baseline import Baseline
from sglang_basin.predictor.calibration import Calibration
from sglang_basin.predictor.evaluate import cross_validate, score
from sglang_basin.predictor.features import NAMES
from sglang_basin.predictor.fitted import Frozen
from sglang_basin.predictor.forest import LEFT, Forest, ForestSettings, fit_forest
from sglang_basin.predictor.kept import History, Subject
from sglang_basin.predictor.line import Line, fit_line
from sglang_basin.predictor.mixture import Mixture
from sglang_basin.predictor.model_file import default_model_path, load_model
from sglang_basin.predictor.online import FIRST_CALLS, Averages, stage
from sglang_basin.predictor.training import fit_model

SHIPPED = load_model(default_model_path())


def test_the_model_learns_what_there_is_to_learn():
    judged = score(cross_validate(made(120), lambda part: Frozen(fit_model(part, SMALL)), folds=4))
    first, fourth = judged[0], next(one for one in judged if one.call == 4)
    assert first.rank > 0.6  # from the text
    assert fourth.rank > first.context_rank + 0.3
    assert 0.8 <= fourth.p90_coverage <= 1.0


def test_the_baseline_learns_from_the_text():
    judged = score(cross_validate(made(120), Baseline, folds=4))
    assert judged[0].rank > 0.6


def test_same_sessions_same_model():
    one, other = fit_model(made(40), SMALL), fit_model(made(40), SMALL)
    assert np.array_equal(one.forest.sums, other.forest.sums)
    assert np.array_equal(one.line.gram, other.line.gram)


def test_too_few_sessions_are_refused():
    with pytest.raises(ValueError, match="at least 10"):
        fit_model(made(9), SMALL)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10**7)), min_size=1, max_size=30))
def test_quantiles_ascend_from_the_context(model_once, steps):
    history, calls = History(), 1
    for more, context in steps:
        calls += more
        history.advance(calls, context)
        tokens = model_once.explain(history, Subject()).tokens
        assert len(tokens) == len(SHARES)
        assert list(tokens) == sorted(tokens)
        assert tokens[0] >= context * (1 - 1e-9)
        assert all(math.isfinite(value) for value in tokens)


@pytest.fixture(scope="module")
def model_once():
    return fit_model(made(60), SMALL)


def test_runs_of_a_task_pull_the_prediction(model):
    subject, history = Subject(task=77), History()
    history.advance(1, 2000)
    before = model.explain(history, subject).mean
    for _ in range(4):
        model.learn(NOTHING, 0, subject.kin, subject.task, 400_000)
    after = model.explain(history, subject)
    assert after.mean > before + 1
    assert model.explain(history, Subject()).mean == pytest.approx(before, abs=0.05)


def test_a_run_that_outgrew_its_task_is_not_held_back(model):
    """A task whose runs ended at 5K says little about one that is at 50K already; never that it must shrink."""
    subject, history = Subject(task=5), History()
    for _ in range(8):
        model.learn(NOTHING, 0, subject.kin, subject.task, 5_000)
    history.advance(1, 50_000)
    guess = model.explain(history, subject)
    assert guess.mean > 0
    assert guess.spread > 0


@given(st.floats(-30, 30), st.floats(0.01, 4.0))
def test_truncated_normal(mean, variance):
    moved, spread = above_zero(mean, variance)
    assert moved >= max(0.0, mean) - 1e-9
    assert 0 <= spread <= variance * (1 + 1e-9)


def test_truncated_normal_by_sampling():
    rng = np.random.default_rng(1)
    drawn = rng.normal(-0.4, math.sqrt(0.5), 400_000)
    drawn = drawn[drawn > 0]
    assert above_zero(-0.4, 0.5) == pytest.approx((drawn.mean(), drawn.var()), rel=0.02)


def walked(forest, row, stage):
    """Mean and variance by the definition: from node 1 to 2n, or 2n + 1 where the value is above the threshold."""
    found = []
    _, trees, size = forest.questions.shape
    for tree in range(trees):
        node = 1
        while node < size:
            node = 2 * node + int(row[forest.questions[stage, tree, node]] > forest.thresholds[stage, tree, node])
        weight, target, square = forest.sums[:, (stage * trees + tree) * size + node - size]
        found.append((target / weight, square / weight))
    mean, square = np.mean(found, axis=0)
    return mean, max(0.0, square - mean**2)


@given(st.integers(1, 10), st.integers(0, 10_000))
def test_trees_are_walked_as_they_are_defined(depth, seed):
    """Leaves above the last level among them, and after the leaves have learned."""
    rng = np.random.default_rng(seed)
    size, trees, columns = 1 << depth, 3, 6
    questions = rng.integers(0, columns, size=(2, trees, size))
    thresholds = np.where(rng.random((2, trees, size)) < 0.2, LEFT, rng.normal(size=(2, trees, size)))
    forest = Forest(questions, thresholds, 1 + rng.random((3, 2 * trees * size)))
    for _ in range(3):
        rows = rng.normal(size=(2, columns))
        for at_stage in (0, 1):
            assert forest.moments(rows[0], at_stage) == pytest.approx(walked(forest, rows[0], at_stage), abs=1e-12)
        forest.add(rows, np.array([0, 1]), rng.normal(size=2), 0.5, 1 / 50)


def test_a_forest_is_asked_only_about_what_it_has():
    forest = Forest(np.full((2, 1, 2), 5), np.zeros((2, 1, 2)), np.ones((3, 4)))
    assert forest.moments(np.zeros(6), 1) == (1.0, 0.0)
    with pytest.raises(IndexError):
        forest.moments(np.zeros(5), 1)
    with pytest.raises(IndexError):
        forest.moments(np.zeros(6), 2)
    with pytest.raises(IndexError):
        forest.moments(np.zeros(6), -1)
    with pytest.raises(IndexError):
        forest.leaves_of(np.zeros((2, 6)), np.array([1, -1]))


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**5)), min_size=1, max_size=20), st.floats(-9, 9))
def test_a_guess_is_made_of_its_parts(calls, text_score):
    history = History()
    for number, (prompt, output) in enumerate(calls, 1):
        history.advance(number, prompt, 1.0)
        history.advance(number, prompt + output)
    guess = SHIPPED.explain(history, Subject(text_score=text_score, characters=77))
    row = history.row(SHIPPED.kins.shrunk(None, SHIPPED.log_peak), text_score, 77)
    assert np.array_equal(guess.row[: len(NAMES)], row)
    of_forest, variance = walked(SHIPPED.forest, row, stage(len(calls)))
    parts = np.array([SHIPPED.trend.value(row), SHIPPED.line.value(row), of_forest])
    assert guess.row[len(NAMES) :] == pytest.approx(parts, abs=1e-9)
    assert guess.mean == pytest.approx(float(SHIPPED.mixture.shares @ parts), abs=1e-9)
    assert guess.spread == pytest.approx(math.sqrt(variance + MIN_VARIANCE), rel=1e-6)
    growth = np.clip(guess.mean + guess.spread * SHIPPED.calibration.scores[guess.stage], 0, MAX_LOG_GROWTH)
    assert guess.tokens == pytest.approx(np.exp(row[0] + growth))


def test_forest_one_row_as_many():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(300, len(NAMES)))
    targets = rows[:, 0] + rng.normal(size=300) * 0.1
    stages = rng.integers(0, 3, size=300)
    forest = fit_forest(rows, stages, targets, np.ones(300), 4, ForestSettings(trees=20, depth=5))
    means, variances = forest.moments_of(rows, stages)
    for place in (0, 17, 299):
        assert forest.moments(rows[place], int(stages[place])) == pytest.approx((means[place], variances[place]))
    assert np.corrcoef(means, targets)[0, 1] > 0.8
    line = fit_line(rows, targets, np.ones(300))
    standard = np.clip((rows[5] - line.middle) / line.scale, -CUT, CUT)
    assert line.value(rows[5]) == pytest.approx(float(line.slopes @ [*standard, 1.0]))
    assert line.value(rows[5]) == pytest.approx(line.values_of(rows)[5])


def test_trees_are_served_as_they_were_grown():
    """Without smoothing a leaf's mean is the mean of the rows that scikit-learn's own trees put there."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 6)).astype(np.float32).astype(float)
    targets = np.sin(3 * rows[:, 0]) + rows[:, 1] ** 2
    settings = ForestSettings(trees=12, depth=6, smoothing=1e-9, leaf_rows=3)
    forest = fit_forest(rows, np.zeros(400, int), targets, np.ones(400), 1, settings)
    grown = [
        ExtraTreeRegressor(max_depth=6, max_features=0.4, min_samples_leaf=3, random_state=1 + tree).fit(rows, targets)
        for tree in range(12)
    ]
    expected = np.mean([tree.predict(rows) for tree in grown], axis=0)
    assert forest.moments_of(rows, np.zeros(400, int))[0] == pytest.approx(expected)


def test_a_stage_without_rows_borrows_from_its_neighbours():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(100, 3))
    stages = np.repeat([0, 5], 50)
    settings = ForestSettings(trees=4, depth=2, stage_rows=30)
    forest = fit_forest(rows, stages, np.repeat([1.0, 3.0], 50), np.ones(100), 7, settings)
    for stage_asked, mean in ((0, 1.0), (1, 1.0), (2, 1.0), (4, 3.0), (5, 3.0), (6, 3.0)):
        assert forest.moments(rows[0], stage_asked)[0] == pytest.approx(mean, abs=0.01)
    grown = forest.sums[0].reshape(7, -1).sum(axis=1)
    assert grown[0] == pytest.approx(4 * 50, rel=0.2)  # neighbours shape a stage, they do not make it firmer
    assert grown[6] < 0.01 * grown[5]


@pytest.mark.parametrize("kind", ["forest", "line"])
def test_what_is_learned_replaces_what_was_fitted(kind):
    rng = np.random.default_rng(2)
    rows, stages = rng.normal(size=(200, len(NAMES))), np.zeros(200, int)
    fitted = (
        fit_forest(rows, stages, np.ones(200), np.ones(200), 1, ForestSettings(trees=10, depth=3)).scaled(0.5)
        if kind == "forest"
        else fit_line(rows, np.ones(200), np.ones(200)).scaled(100.0)
    )
    for _ in range(400):
        more, reached = rng.normal(size=(4, len(NAMES))), np.full(4, 3.0)
        if kind == "forest":
            fitted.add(more, stages[:4], reached, 0.5, 1 / 50)
        else:
            fitted.add(more, reached, 0.5, 1 / 50)
    means = fitted.moments_of(rows, stages)[0] if kind == "forest" else fitted.values_of(rows)
    assert means == pytest.approx(np.full(200, 3.0), abs=0.05)


def test_a_forest_that_forgets_for_long_stays_finite():
    rng = np.random.default_rng(2)
    rows, stages = rng.normal(size=(50, len(NAMES))), np.zeros(50, int)
    forest = fit_forest(rows, stages, rows[:, 0], np.ones(50), 1, ForestSettings(trees=4, depth=2))
    for _ in range(9000):
        forest.add(rows[:2], stages[:2], np.ones(2), 1.0, 1 / 10)
    assert np.isfinite(forest.sums).all()
    assert (forest.settled_sums()[0] > 0).all()
    assert np.isfinite(forest.moments_of(rows, stages)[0]).all()
    assert forest.settled_sums()[0].max() < 1e3


def test_calibration_finds_its_coverage_after_a_jump():
    """Errors three spreads off and twice as wide: a few hundred sessions later the quantiles hold again."""
    rng = random.Random(1)
    calibration = Calibration(np.tile([-1.28, -0.67, 0.0, 0.67, 1.28], (len(FIRST_CALLS), 1)))
    below = {share: 0 for share in SHARES}
    for number in range(2500):
        error = rng.gauss(3.0, 2.0)
        if number >= 500:
            for share, value in zip(SHARES, calibration.scores[3], strict=True):
                below[share] += error <= value
        calibration.learn(3, error)
    for share in SHARES:
        assert below[share] / 2000 == pytest.approx(share, abs=0.04)


def test_a_mixture_turns_to_the_better_part():
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(300, 3)) * (0.1, 1.0, 1.0)
    mixture = Mixture(noise.T @ noise)
    assert mixture.shares[0] >= 0.9
    for _ in range(300):
        mixture.learn(rng.normal(size=(1, 3)) * (2.0, 0.2, 0.2), 1.0, 1 / 50)
    assert mixture.shares[0] == 0.0
    assert mixture.shares[1] == pytest.approx(0.5, abs=0.2)
    assert sum(mixture.shares) == pytest.approx(1.0)


def test_averages_forget_the_least_recent():
    averages = Averages(capacity=3, horizon=50.0)
    for key in range(10):
        averages.learn(key, 9.0)
    assert len(averages) == 3
    assert averages.alone(0) == (0.0, 0.0)
    assert averages.alone(9)[1] == 9.0


def test_averages_follow_a_change():
    averages = Averages(capacity=3, horizon=20.0)
    for value in [8.0] * 200 + [11.0] * 60:
        averages.learn(1, value)
    assert averages.shrunk(1, 0.0) == pytest.approx(11.0, abs=0.4)


def test_stages_cover_all_calls():
    assert [stage(call) for call in FIRST_CALLS] == list(range(len(FIRST_CALLS)))
    assert stage(0) == 0
    assert stage(10**6) == len(FIRST_CALLS) - 1


def test_sums_of_no_rows_make_no_line():
    """Not positive definite: compiled code must not divide by what it finds there."""
    line = fit_line(np.random.default_rng(1).normal(size=(50, 4)), np.arange(50.0), np.ones(50))
    assert line.slopes[-1] == pytest.approx(np.arange(50.0).mean(), abs=3)
    for place, number in ((0, -1.0), (1, math.nan)):
        gram = line.gram.copy()
        gram[place, place] = number
        with pytest.raises(ArithmeticError, match="not those of any rows"):
            Line(line.columns, line.middle, line.scale, gram, line.moment)
    with pytest.raises(IndexError):
        Calibration(np.tile([-1.28, -0.67, 0.0, 0.67, 1.28], (len(FIRST_CALLS), 1))).learn(len(FIRST_CALLS), 0.0)
