from __future__ import annotations

import pytest
from made_sessions import made

from sglang_basin.predictor.forest import ForestSettings
from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.training import TrainingSettings, fit_model

SMALL = TrainingSettings(forest=ForestSettings(trees=16, depth=4, candidates=6))
"""A forest that is fitted in a moment."""


@pytest.fixture
def model() -> PeakModel:
    """A model of its own for each test: learning changes it."""
    return fit_model(made(80), SMALL)
