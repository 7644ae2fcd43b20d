from __future__ import annotations

import pytest
from made_sessions import SMALL, made

from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.training import fit_model


@pytest.fixture
def model() -> PeakModel:
    """A model of its own for each test: learning changes it."""
    return fit_model(made(80), SMALL)
