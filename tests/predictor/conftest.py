from __future__ import annotations

import copy

import pytest
from made_sessions import SMALL, made

from sglang_basin.predictor.model import PeakModel
from sglang_basin.predictor.training import fit_model


@pytest.fixture(scope="session")
def fitted() -> PeakModel:
    return fit_model(made(80), SMALL)


@pytest.fixture
def model(fitted: PeakModel) -> PeakModel:
    """A model of its own for each test: learning changes it."""
    return copy.deepcopy(fitted)
