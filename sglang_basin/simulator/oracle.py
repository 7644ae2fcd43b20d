"""A peak predictor that knows the plan and blurs it: in the simulator alone, to see what prediction error costs.

The true peaks' ranks among the trace's sessions become normal scores z; a session's signal is ρ·z + √(1 - ρ²)·ε with
ε drawn from its id. Given the signal, z is normal with mean ρ·signal and variance 1 - ρ²: its quantiles, mapped back
through the trace's own distribution of peaks, are calibrated by construction. ρ is chosen so that signal and peak have
the wanted *rank* correlation ρ_s: ρ = 2·sin(π·ρ_s / 6) (Pearson, 1907, for the bivariate normal). What has been seen
of a session cuts the distribution off below.

For orientation (the article): ρ_s is 0.64 on Terminal-Bench and 0.56 on SWE-bench Pro; 1 is an oracle, 0 the bare
distribution of peaks.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from sglang_basin.policy.prediction import SHARES, Prediction
from sglang_basin.policy.sessions import Session
from sglang_basin.replay.plan import Plan

_NORMAL = NormalDist()
_SHARE_SCORES = tuple(_NORMAL.inv_cdf(share) for share in SHARES)

STALE_FACTOR = 1.05
"""A prediction is made anew once the context has grown by this factor, or passed its lowest quantile."""


@dataclass(frozen=True, kw_only=True)
class OracleSettings:
    rank_correlation: float = 0.64
    """Between signal and true peak, Spearman's."""
    improves: bool = False
    """The noise shrinks in proportion to how much of its peak the session has reached."""
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank_correlation <= 1:
            raise ValueError(f"rank_correlation must be between 0 and 1, got {self.rank_correlation}")


class NoisyOracle:
    """`policy.interface.PeakPredictor`. All policies of a run see the same signal for the same session."""

    def __init__(self, plan: Plan, settings: OracleSettings | None = None) -> None:
        self.settings = settings or OracleSettings()
        self._peak_of = {planned.uid: planned.session.peak_tokens for planned in plan.sessions}
        distinct = {planned.session.trace_id: planned.session.peak_tokens for planned in plan.sessions}
        self._peaks = sorted(distinct.values())
        self._pearson = 2 * math.sin(math.pi * self.settings.rank_correlation / 6)
        self._signals: dict[str, float] = {}
        self._known: dict[str, tuple[float, Prediction]] = {}

    def signal(self, session_id: str) -> float:
        """What is known of the session before it starts, as a normal score."""
        noise = random.Random(f"{self.settings.seed}/oracle/{session_id}").gauss(0.0, 1.0)
        return self._pearson * self._score(self._peak_of[session_id]) + math.sqrt(1 - self._pearson**2) * noise

    def predict(self, session: Session) -> Prediction:
        session_id, context = session.session_id, float(session.context_tokens)
        if session_id not in self._peak_of:
            return Prediction((context,) * len(SHARES))
        known = self._known.get(session_id)
        if known is not None and context <= known[0]:
            return known[1]
        if self.settings.rank_correlation == 1:
            holds_until = peak = max(float(self._peak_of[session_id]), context)
            prediction = Prediction((peak,) * len(SHARES))
        else:
            prediction = self._blurred(session_id, context)
            holds_until = min(context * STALE_FACTOR, prediction.tokens[0])
        self._known[session_id] = (holds_until, prediction)
        return prediction

    def learn(self, session: Session) -> None:
        self.forget(session.session_id)

    def forget(self, session_id: str) -> None:
        self._known.pop(session_id, None)
        self._signals.pop(session_id, None)

    def _blurred(self, session_id: str, context: float) -> Prediction:
        pearson, peak = self._pearson, self._peak_of[session_id]
        signal = self._signals.get(session_id)
        if signal is None:
            signal = self._signals[session_id] = self.signal(session_id)
        if self.settings.improves:
            # A second look at the same score with the rest of the noise: as the session nears its peak, nearly none.
            reached = min(1.0, context / peak)
            truth = self._score(peak)
            pearson = math.sqrt(pearson**2 + (1 - pearson**2) * reached)
            spread = math.sqrt(max(0.0, 1 - self._pearson**2))
            noise = (signal - self._pearson * truth) / spread if spread else 0.0
            signal = pearson * truth + math.sqrt(max(0.0, 1 - pearson**2)) * noise
        middle, width = pearson * signal, math.sqrt(max(1e-12, 1 - pearson**2))
        seen = bisect.bisect_left(self._peaks, context) / len(self._peaks)
        if seen <= 0:
            scores = [middle + width * score for score in _SHARE_SCORES]
        else:
            below = _NORMAL.cdf((_NORMAL.inv_cdf(min(seen, 1 - 1e-9)) - middle) / width)
            shares = [min(max(below + share * (1 - below), 1e-9), 1 - 1e-9) for share in SHARES]
            scores = [middle + width * _NORMAL.inv_cdf(share) for share in shares]
        tokens = [max(context, self._tokens(score)) for score in scores]
        return Prediction(tuple(tokens))

    def _score(self, peak_tokens: int) -> float:
        """The normal score of a peak: its mid-rank among the trace's peaks."""
        low, high = bisect.bisect_left(self._peaks, peak_tokens), bisect.bisect_right(self._peaks, peak_tokens)
        return _NORMAL.inv_cdf((low + high) / 2 / len(self._peaks))

    def _tokens(self, score: float) -> float:
        """The peak at a normal score, linear between the trace's peaks."""
        peaks = self._peaks
        place = min(max(_NORMAL.cdf(score) * len(peaks) - 0.5, 0.0), len(peaks) - 1.0)
        low = int(place)
        high = min(low + 1, len(peaks) - 1)
        return peaks[low] + (peaks[high] - peaks[low]) * (place - low)
