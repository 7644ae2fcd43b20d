"""CONCUR: a congestion window over the agents that may be active at the same time.

Source: Chen et al., "CONCUR: High-Throughput Agentic Batch Inference of LLM via Congestion-Based Concurrency Control"
(arXiv 2601.22705, ICML 2026). A controller between agents and engine admits, pauses and resumes whole agents, and
only between their steps. Each control period it reads the engine's KV cache usage U and hit rate H and moves the
window W: U < 0.2: W + 2;  U > 0.5 and H < 0.2: W x 0.5;  otherwise unchanged.

Left open by the source, and how it is filled here:
- The control period and the initial window: both swept.
- What counts as usage. An LRU pool fills up with cached KV whatever the load is, and then U < 0.2 never holds again;
  an engine's `token_usage` leaves evictable KV out, but in PD a prefill pool holds next to nothing that is not
  evictable. So U is one of: `programs`, the contexts of the active agents over the cache; `pool`, what the device
  pool holds; `decode`, what running calls hold of decode's pool. Swept.
- Which agents a halved window pauses: those whose next call comes while more than W are active, i.e. in the order in
  which they reach a step boundary (`pauses_active`); or none, so that the window shrinks by attrition. Swept.
- Who goes first when there is room again: paused agents before new ones, each in order of waiting since.
- The window never falls below 1, and with no agent active the first in line enters.
- A period in which nothing was prefilled has no hit rate and is no sign of thrashing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sglang_basin.policy.decisions import Reason
from sglang_basin.policy.rivals.table import Program, ProgramTable, RivalSettings, require_positive, require_share
from sglang_basin.policy.sessions import Call

Usage = Literal["programs", "pool", "decode"]
USAGES: tuple[Usage, ...] = ("programs", "pool", "decode")


@dataclass(frozen=True, kw_only=True)
class ConcurSettings(RivalSettings):
    """Times in seconds, shares of a pool or of a prompt."""

    period_s: float = 5.0
    initial_window: int = 32
    usage: Usage = "programs"
    pauses_active: bool = True
    low_usage: float = 0.2
    high_usage: float = 0.5
    low_hit_rate: float = 0.2
    increase: float = 2.0
    decrease: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "period_s", "initial_window", "increase")
        require_share(self, "low_hit_rate", "decrease")
        if self.usage not in USAGES:
            raise ValueError(f"usage: must be one of {', '.join(USAGES)}, got {self.usage!r}")
        if not 0 <= self.low_usage <= self.high_usage:
            raise ValueError(f"low_usage: must be between 0 and high_usage, got {self.low_usage} and {self.high_usage}")


class Concur(ProgramTable):
    name = "concur"

    def __init__(self, settings: ConcurSettings | None = None) -> None:
        self.settings = settings or ConcurSettings()
        super().__init__(self.settings)
        self.window = float(self.settings.initial_window)
        self._active: dict[str, int] = {}  # session -> the context it is counted with
        self._active_tokens = 0
        self._paused: dict[str, None] = {}  # were active before, in order of waiting
        self._new: dict[str, None] = {}
        self._next_s: float | None = None

    @property
    def active_tokens(self) -> int:
        """Contexts of the active agents."""
        return self._active_tokens

    def _arrived(self, program: Program, call: Call, now_s: float) -> Reason | None:
        self._start(now_s)
        session_id = program.session_id
        if session_id in self._active:
            at_a_boundary = len(program.calls) == 1
            over = len(self._active) > max(1, int(self.window))
            if not (self.settings.pauses_active and at_a_boundary and over):
                self._count(program)
                return Reason.LIVE_SESSION
            self._forget(session_id)
            self._paused[session_id] = None
            return None
        if session_id in self._paused or session_id in self._new:
            return None
        if not self._paused and not self._new and self._has_room():
            self._count(program)
            return Reason.FITS
        self._new[session_id] = None
        return None

    def _due(self, now_s: float) -> Iterable[tuple[Program, Reason]]:
        self._control(now_s)
        while (self._paused or self._new) and self._has_room():
            line = self._paused or self._new
            session_id = next(iter(line))
            del line[session_id]
            program = self._programs[session_id]
            reason = Reason.FITS if self._active else Reason.NOBODY_LIVE
            self._count(program)
            yield program, reason

    def _returned(self, program: Program, call: Call, output_tokens: int, now_s: float) -> None:
        if program.session_id in self._active:
            self._count(program)

    def _gave_up(self, program: Program, now_s: float) -> None:
        self._paused.pop(program.session_id, None)
        self._new.pop(program.session_id, None)

    def _ended(self, program: Program, now_s: float) -> None:
        self._forget(program.session_id)
        self._gave_up(program, now_s)

    def _tick_s(self, now_s: float) -> float | None:
        return self._next_s if self._programs else None

    def _has_room(self) -> bool:
        return len(self._active) < max(1, int(self.window))

    def _start(self, now_s: float) -> None:
        if self._next_s is None:
            self._next_s = now_s + self.settings.period_s

    def _control(self, now_s: float) -> None:
        """One step of the control law per period that has passed since; idle periods without a view count as none."""
        if self._next_s is None or now_s < self._next_s:
            return
        self._next_s = now_s + self.settings.period_s
        view, settings = self._view, self.settings
        if view is None:
            return
        usage = {
            "programs": self._active_tokens / max(1, view.capacity_tokens),
            "pool": view.cache_used_share,
            "decode": view.decode_used_share,
        }[settings.usage]
        if usage < settings.low_usage:
            self.window += settings.increase
        elif usage > settings.high_usage and view.hit_rate is not None and view.hit_rate < settings.low_hit_rate:
            self.window = max(1.0, self.window * settings.decrease)

    def _count(self, program: Program) -> None:
        self._active_tokens += program.context_tokens - self._active.get(program.session_id, 0)
        self._active[program.session_id] = program.context_tokens

    def _forget(self, session_id: str) -> None:
        self._active_tokens -= self._active.pop(session_id, 0)


SWEEP: tuple[ConcurSettings, ...] = (
    *(
        ConcurSettings(usage=usage, period_s=period_s, initial_window=window, pauses_active=pauses)
        for usage, period_s, window, pauses in itertools.product(
            USAGES, (1.0, 5.0, 15.0, 60.0), (8, 32, 128), (True, False)
        )
    ),
    # The published thresholds use at most half of the cache; these use all of it.
    *(
        ConcurSettings(low_usage=low, high_usage=high, low_hit_rate=hit_rate, period_s=period_s, initial_window=window)
        for (low, high), hit_rate, period_s, window in itertools.product(
            ((0.6, 0.9), (0.8, 1.0)), (0.2, 0.5, 0.8), (5.0, 15.0), (8, 32)
        )
    ),
)
