import numpy as np
import pytest
from made_sessions import made

from sglang_basin.predictor.evaluate import ContextAlone, cross_validate, folds_of, predict, rank_correlation, score
from sglang_basin.predictor.recorded import Recorded


class Knows:
    """Predicts the truth, to check the scores themselves."""

    def __init__(self, sessions):
        self.fitted_on = {session.group for session in sessions}

    def quantiles(self, session, calls):
        assert session.group not in self.fitted_on
        return [[float(session.peak_tokens)] * 5 for _ in calls]


def test_the_truth_scores_full_marks_and_no_task_is_on_both_sides():
    for one in score(cross_validate(made(60), Knows, folds=5)):
        assert one.rank == pytest.approx(1.0)
        assert one.log_error == 0
        assert one.p50_coverage == one.p90_coverage == one.reserved_p50 == 1


def test_context_alone_has_the_rank_of_the_context():
    sessions = made(60)
    for one in score(predict(ContextAlone(sessions), sessions)):
        assert one.rank == pytest.approx(one.context_rank)


def test_rank_correlation_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    one, other = rng.integers(0, 9, 200), rng.integers(0, 9, 200)
    assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other)[0])
    assert rank_correlation(one, np.ones(200)) == 0


@pytest.mark.parametrize("grouped", [True, False])
def test_folds(grouped):
    sessions = [Recorded(((100, 1),), str(number % 12)) for number in range(60)]
    fold = folds_of(sessions, folds=4, grouped=grouped, seed=3)
    assert set(fold) == {0, 1, 2, 3}
    together = [len({fold[index] for index in range(60) if index % 12 == task}) for task in range(12)]
    assert together == [1] * 12 if grouped else min(together) > 1
