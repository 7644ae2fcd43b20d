"""Continuum / CacheTTL: a finished call's KV is pinned for a time-to-live that pays for itself; program-level FCFS.

Source: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live" (arXiv
2511.02230; called CacheTTL from version 4 on) and its repository Hanchenli/vllm-continuum. After a call that ends in
a tool, the KV stays pinned for the tau that maximizes

    F(tau) * (T * eta + reload(context)) - tau

with F the distribution of tool times, T the mean wait in the queue of calls that came back to evicted KV, eta =
-corr(k, N - k) over finished programs of N steps (how well the steps done foretell those left), and reload the time
to recompute or load the context back. Until 100 tool times are known: F = exponential with a mean of 1 s, eta = 1.
Queues: calls whose KV is pinned first, then by the arrival of the program. When memory is short, pins go, latest
program first. The released code has no estimate: it pins for 2 s if the tool's mean time is at most 2 s; `CONSTANT`
pins for 2 s always, since here that mean is one of all tools.

Left open by the source, and how it is filled here:
- F is per tool in the paper; no tool name reaches the engine, so F is that of all tools (the paper's own fallback).
- What a second of pinning costs: a second, whatever the context takes of the cache. `hold_weight` scales it; swept.
- reload: `reload_s_per_token` x context + `reload_s_per_token2` x context^2. The driver sets both from the hardware
  that it simulates (`dataclasses.replace`); `reload_factor` scales them, swept, since it decides everything.
- T is measured from the arrival of an unpinned program's next call to the end of its prefill, less the reload;
  windows of 256 waits and 256 finished programs.
- Samples of F: the last 1024; the maximum is taken over the corners of F's upper hull, which is where it lies.
- Whoever drives this policy unpins when memory is short, the session with the highest `order` first, and keeps the
  pin of a session whose next call already waits; the policy is not told and orders by the TTL that it gave.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_basin.policy.decisions import Reason
from sglang_basin.policy.rivals.table import Program, ProgramTable, RivalSettings, require_positive
from sglang_basin.policy.sessions import Call

COLD_START_SAMPLES = 100
COLD_START_MEAN_S = 1.0
WINDOW = 256
TOOL_TIMES = 1024
REFRESH_EVERY = 32
"""New tool times after which the hull is made anew."""
PINNED_FIRST_S = 1e10
"""Subtracted from the key of pinned calls: more than any arrival time in seconds."""


@dataclass(frozen=True, kw_only=True)
class ContinuumSettings(RivalSettings):
    """Times in seconds."""

    constant_ttl_s: float | None = None
    """Pin for this long instead of the utility's tau."""
    constant_up_to_mean_s: float | None = None
    """With a constant: only while the mean tool time is at most this; None pins always."""
    reload_s_per_token: float = 2.5e-5
    reload_s_per_token2: float = 0.0
    reload_factor: float = 1.0
    hold_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "hold_weight", "reload_factor")
        for name in ("constant_ttl_s", "constant_up_to_mean_s"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        for name in ("reload_s_per_token", "reload_s_per_token2"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must be at least 0, got {getattr(self, name)}")


class ToolTimes:
    """The distribution of the last tool times, and the tau that maximizes F(tau) * benefit - tau."""

    def __init__(self, memory: int = TOOL_TIMES) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._sum_s = 0.0
        self._memory = memory
        self._seen = 0
        self._hull: list[tuple[float, float]] = []
        self._hull_seen = 0

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def mean_s(self) -> float | None:
        return self._sum_s / len(self._recent) if self._recent else None

    def learn(self, tool_s: float) -> None:
        self._seen += 1
        self._recent.append(tool_s)
        self._sum_s += tool_s
        bisect.insort(self._sorted, tool_s)
        if len(self._recent) > self._memory:
            gone = self._recent.popleft()
            self._sum_s -= gone
            del self._sorted[bisect.bisect_left(self._sorted, gone)]

    def best_ttl_s(self, benefit_s: float) -> float:
        """0 when pinning does not pay."""
        if benefit_s <= 0:
            return 0.0
        if len(self._recent) <= COLD_START_SAMPLES:
            mean_s = COLD_START_MEAN_S
            return mean_s * math.log(benefit_s / mean_s) if benefit_s > mean_s else 0.0
        if not self._hull or self._seen - self._hull_seen >= REFRESH_EVERY:
            self._hull, self._hull_seen = upper_hull(self._sorted), self._seen
        # Slopes fall along the hull: go on while a second more buys more than a second.
        low, high = 0, len(self._hull) - 1
        while low < high:
            middle = (low + high) // 2
            (tau, share), (next_tau, next_share) = self._hull[middle], self._hull[middle + 1]
            if (next_share - share) * benefit_s > next_tau - tau:
                low = middle + 1
            else:
                high = middle
        return self._hull[low][0]


def upper_hull(ascending: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of the concave hull over an empirical distribution: (time, share at most that), from time 0 on."""
    count = len(ascending)
    hull = [(0.0, bisect.bisect_right(ascending, 0.0) / count)]
    for i, time_s in enumerate(ascending):
        if time_s <= 0 or (i + 1 < count and ascending[i + 1] == time_s):
            continue
        point = (time_s, (i + 1) / count)
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


class StepCorrelation:
    """eta = -corr(k, N - k) over the steps k = 1 … N - 1 of the last finished programs; 0 while it is undefined."""

    def __init__(self, memory: int = WINDOW) -> None:
        self._lengths: deque[int] = deque()
        self._memory = memory
        self._pairs = 0
        self._sum = self._sum_squares = self._sum_products = 0  # of k; by symmetry also of N - k

    def learn(self, steps: int) -> None:
        self._add(steps, 1)
        self._lengths.append(steps)
        if len(self._lengths) > self._memory:
            self._add(self._lengths.popleft(), -1)

    @property
    def eta(self) -> float:
        if self._pairs < 2:
            return 0.0
        variance = self._pairs * self._sum_squares - self._sum * self._sum
        covariance = self._pairs * self._sum_products - self._sum * self._sum
        return max(-1.0, min(1.0, -covariance / variance)) if variance > 0 else 0.0

    def _add(self, steps: int, sign: int) -> None:
        total = steps * (steps - 1) // 2
        squares = (steps - 1) * steps * (2 * steps - 1) // 6
        self._pairs += sign * max(0, steps - 1)
        self._sum += sign * total
        self._sum_squares += sign * squares
        self._sum_products += sign * (steps * total - squares)


class Continuum(ProgramTable):
    name = "continuum"

    def __init__(self, settings: ContinuumSettings | None = None) -> None:
        self.settings = settings or ContinuumSettings()
        super().__init__(self.settings)
        if self.settings.constant_ttl_s is not None:
            self.name = "continuum-constant"
        self.tool_times = ToolTimes()
        self.correlation = StepCorrelation()
        self._waits: deque[float] = deque(maxlen=WINDOW)
        self._waits_sum_s = 0.0
        self._in_tool: dict[str, float] = {}  # session -> when its last call returned
        self._pinned_until: dict[str, float] = {}
        self._pinned_call: dict[str, bool] = {}  # session -> whether its present call found its KV pinned

    def reload_s(self, context_tokens: int) -> float:
        """What it takes to get a context back that is no longer cached."""
        settings = self.settings
        per_token_s = settings.reload_s_per_token + settings.reload_s_per_token2 * context_tokens
        return settings.reload_factor * context_tokens * per_token_s

    def mean_evicted_wait_s(self) -> float:
        return self._waits_sum_s / len(self._waits) if self._waits else 0.0

    def order(self, session_id: str, call_arrived_s: float) -> float:
        program = self._programs.get(session_id)
        arrived_s = call_arrived_s if program is None else program.arrived_s
        return arrived_s - PINNED_FIRST_S if self._pinned_call.get(session_id) else arrived_s

    def keep_until_s(self, session_id: str, now_s: float) -> float | None:
        """Asked once when a call has finished. None when pinning does not pay or the program is over."""
        program = self._programs.get(session_id)
        if program is None or program.calls:
            return None
        ttl_s = self._ttl_s(program)
        if ttl_s <= 0:
            return None
        self._pinned_until[session_id] = now_s + ttl_s
        return now_s + ttl_s

    def _ttl_s(self, program: Program) -> float:
        settings = self.settings
        if settings.constant_ttl_s is not None:
            mean_s, limit_s = self.tool_times.mean_s, settings.constant_up_to_mean_s
            return 0.0 if limit_s is not None and mean_s is not None and mean_s > limit_s else settings.constant_ttl_s
        eta = 1.0 if len(self.tool_times) <= COLD_START_SAMPLES else self.correlation.eta
        benefit_s = self.mean_evicted_wait_s() * eta + self.reload_s(program.context_tokens)
        return self.tool_times.best_ttl_s(benefit_s / settings.hold_weight)

    def _arrived(self, program: Program, call: Call, now_s: float) -> Reason | None:
        session_id = program.session_id
        returned_s = self._in_tool.pop(session_id, None)
        if returned_s is not None:
            self.tool_times.learn(now_s - returned_s)
            self._pinned_call[session_id] = now_s <= self._pinned_until.pop(session_id, float("-inf"))
        return Reason.ADMISSION_OFF

    def _prefilled(self, program: Program, call: Call, now_s: float) -> None:
        if self._pinned_call.get(program.session_id) is False:  # it came back, and nothing was kept for it
            if len(self._waits) == WINDOW:
                self._waits_sum_s -= self._waits[0]
            wait_s = max(0.0, now_s - call.arrived_s - self.reload_s(call.prompt_tokens))
            self._waits.append(wait_s)
            self._waits_sum_s += wait_s

    def _returned(self, program: Program, call: Call, output_tokens: int, now_s: float) -> None:
        if not program.calls:
            self._in_tool[program.session_id] = now_s
            self._pinned_call.pop(program.session_id, None)

    def _ended(self, program: Program, now_s: float) -> None:
        self.correlation.learn(program.steps)
        for table in (self._in_tool, self._pinned_until, self._pinned_call):
            table.pop(program.session_id, None)


CONSTANT = ContinuumSettings(constant_ttl_s=2.0)

SWEEP: tuple[ContinuumSettings, ...] = tuple(
    ContinuumSettings(reload_factor=factor, hold_weight=weight)
    for factor, weight in itertools.product((0.3, 1.0, 3.0), (0.03, 0.1, 0.3, 1.0))
)

CONSTANT_SWEEP: tuple[ContinuumSettings, ...] = (
    ContinuumSettings(constant_ttl_s=2.0, constant_up_to_mean_s=2.0),
    *(ContinuumSettings(constant_ttl_s=ttl_s) for ttl_s in (2.0, 5.0, 10.0, 30.0, 60.0)),
)
