"""The article's predictor: ridge regression on TF-IDF of the task text plus the lengths of task text and first prompt.

Fitted offline with scikit-learn on log tokens, once per session, at its first call; it never changes its mind later,
except that no prediction is below the present context. Its quantiles are those of its own errors out of fold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler

from sglang_basin.policy.prediction import SHARES
from sglang_basin.predictor.recorded import Recorded
from sglang_basin.predictor.text import MAX_CHARACTERS

_PENALTIES = tuple(float(value) for value in np.logspace(-1, 4, 11))


class Baseline:
    """`evaluate.Fitted`. Also works without any text: then only the lengths are left."""

    def __init__(self, sessions: Sequence[Recorded]) -> None:
        target = np.log([session.peak_tokens for session in sessions])
        groups = [session.group for session in sessions]
        folds = min(5, len(set(groups)))
        errors = np.zeros(len(sessions))
        if folds >= 2:
            for fit, held in GroupKFold(folds).split(target, groups=groups):
                model = _Ridge([sessions[index] for index in fit], target[fit])
                errors[held] = target[held] - model.log_peaks([sessions[index] for index in held])
        self._ridge = _Ridge(sessions, target)
        self._errors = np.quantile(errors, SHARES)

    def quantiles(self, session: Recorded, calls: Sequence[int]) -> list[Sequence[float]]:
        log_peak = float(self._ridge.log_peaks([session])[0])
        tokens = np.exp(np.minimum(log_peak + self._errors, 25.0))
        return [np.maximum(tokens, session.calls[call - 1][0]).tolist() for call in calls]


class _Ridge:
    def __init__(self, sessions: Sequence[Recorded], target: Any) -> None:
        texts = [_text(session) for session in sessions]
        self._words: TfidfVectorizer | None = None
        if any(texts):
            self._words = TfidfVectorizer(sublinear_tf=True, max_features=20_000, token_pattern=r"\w+").fit(texts)
        self._scale = StandardScaler().fit(_lengths(sessions))
        self._model = RidgeCV(alphas=_PENALTIES).fit(self._columns(sessions), target)

    def log_peaks(self, sessions: Sequence[Recorded]) -> Any:
        return self._model.predict(self._columns(sessions))

    def _columns(self, sessions: Sequence[Recorded]) -> Any:
        lengths = csr_matrix(self._scale.transform(_lengths(sessions)))
        if self._words is None:
            return lengths
        return hstack([self._words.transform([_text(session) for session in sessions]), lengths]).tocsr()


def _text(session: Recorded) -> str:
    return (session.text or "")[:MAX_CHARACTERS]


def _lengths(sessions: Sequence[Recorded]) -> Any:
    return np.array([[math.log1p(len(session.text or "")), math.log(session.calls[0][0])] for session in sessions])
