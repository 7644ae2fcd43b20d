"""Made-up sessions whose peaks follow a rule, for tests that need something to learn."""

from __future__ import annotations

import random

from sglang_basin.predictor.forest import ForestSettings
from sglang_basin.predictor.recorded import Recorded, kin_of
from sglang_basin.predictor.text import read_task
from sglang_basin.predictor.training import TrainingSettings

SMALL = TrainingSettings(forest=ForestSettings(trees=16, depth=4))
"""A forest that is fitted in a moment."""


def made(count: int, *, seed: int = 1, factor: float = 1.0, first: str = "") -> list[Recorded]:
    """Sessions of two kinds, told apart by a word of their text and by how fast they grow."""
    rng = random.Random(seed)
    sessions = []
    for number in range(count):
        long = rng.random() < 0.5
        words = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(12))
        text = f"{first} task {number} {'refactor everything' if long else 'rename one'} {words}"
        prompt, calls = round(2000 * factor), []
        for _ in range(rng.randint(14, 18) if long else rng.randint(4, 6)):
            output = rng.randint(80, 200)
            calls.append((prompt, output))
            prompt += output + round(factor * (rng.randint(900, 1500) if long else rng.randint(100, 300)))
        sessions.append(Recorded(tuple(calls), f"{first}{number}", kin_of("agent", "model"), read_task(text), text))
    return sessions
