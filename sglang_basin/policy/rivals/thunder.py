"""ThunderAgent: programs are paused and restored so that their contexts fit the cache.

Source: Kang et al., "ThunderAgent: A Simple, Fast and Program-Aware Agentic Inference System" (arXiv 2602.13692, ICML
2026) and its repository ThunderAgent-org/ThunderAgent (`scheduler/router.py`, `backend/state.py`): a router counts,
per backend, tokens of *reasoning* programs + w x tokens of *acting* ones + 100 for each, against the KV capacity, and
every 5 s it
1. restores paused programs into the capacity that is left: those with a waiting call, then new ones, then acting
   ones, each group shortest first, skipping what does not fit;
2. while over capacity, pauses acting programs, shortest first, then marks reasoning ones, shortest first, to be
   paused when their call returns; a marked program's tokens count as free already.
A new program passes when nobody waits and it fits, else it waits like a paused one. The next call of a paused program
waits until it is restored, at most 1800 s, then it passes whatever the capacity is.

`WATERMARKED` is the port in NVIDIA Dynamo (`SessionAwareConfig`): pausing starts above 0.95 of the capacity and goes
on down to 0.80, and a program is restored only below 0.95 - 0.10.

Left open by the source, and how it is filled here:
- Which pool is the capacity when prefill and decode are separate: prefill's device pool, where a prefix gives its
  time back; with `counts_host` its host tier and lent memory as well. Swept.
- Tokens shared by all programs (system prompts) are subtracted in the original, from an engine metric that has no
  equivalent here: `subtracts_shared` takes what first calls found cached, as the door does.
- The paper lets the weight of an acting program decay with the time that it acts (halving each second) when it looks
  for room to restore; the code has that off by default. `acting_half_life_s`, swept.
- A program that left while it waited keeps its state; its next call waits again.
- One instance: the best-fit packing over backends falls away.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_basin.policy.decisions import Reason
from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.rivals.table import Program, ProgramTable, RivalSettings, require_positive, require_share
from sglang_basin.policy.sessions import Call


@dataclass(frozen=True, kw_only=True)
class ThunderSettings(RivalSettings):
    """Shares are parts of the capacity, times seconds. The defaults are the original's."""

    tick_s: float = 5.0
    pause_threshold: float = 1.0
    pause_target: float = 1.0
    resume_hysteresis: float = 0.0
    acting_weight: float = 1.0
    acting_half_life_s: float | None = None
    """After how long in a tool a program counts half when room to restore is looked for; None: it counts fully."""
    buffer_tokens: int = 100
    """Headroom for each active program."""
    resume_timeout_s: float = 1800.0
    counts_host: bool = False
    subtracts_shared: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "tick_s", "pause_threshold", "resume_timeout_s")
        require_share(self, "acting_weight")
        if self.acting_half_life_s is not None:
            require_positive(self, "acting_half_life_s")
        if not 0 <= self.pause_target <= self.pause_threshold:
            raise ValueError(f"pause_target: must be between 0 and pause_threshold, got {self.pause_target}")
        if not 0 <= self.resume_hysteresis < self.pause_threshold:
            raise ValueError(f"resume_hysteresis: must be between 0 and pause_threshold, got {self.resume_hysteresis}")


@dataclass(slots=True)
class _Active:
    """What an active program counts for."""

    tokens: float = 0.0
    acting_since_s: float | None = None
    marked: bool = False
    """It will be paused when its call returns, and counts as gone already."""


class Thunder(ProgramTable):
    name = "thunder"

    def __init__(self, settings: ThunderSettings | None = None) -> None:
        self.settings = settings or ThunderSettings()
        super().__init__(self.settings)
        if self.settings.pause_threshold != 1.0:
            self.name = "thunder-watermarked"
        self._active: dict[str, _Active] = {}
        self._paused: dict[str, float] = {}  # session -> since when its call waits, or when it was paused
        self._used = 0.0
        self._capacity: int | None = None  # None until the engine has been seen: no limit then, as in the original
        self._next_s: float | None = None

    @property
    def used_tokens(self) -> float:
        """What the active programs count for against the capacity."""
        return self._used

    def observe(self, view: EngineView, now_s: float) -> None:
        super().observe(view, now_s)
        self._capacity = max(1, view.capacity_tokens if self.settings.counts_host else view.cache_tokens)

    def _arrived(self, program: Program, call: Call, now_s: float) -> Reason | None:
        if self._next_s is None:
            self._next_s = now_s + self.settings.tick_s
        session_id = program.session_id
        if session_id in self._active:
            self._count(program, now_s)
            return Reason.LIVE_SESSION
        if session_id in self._paused:
            if program.held == 0:
                self._paused[session_id] = now_s
            return None
        if not self._paused and self._fits(program, self._used):
            self._activate(program, now_s)
            return Reason.FITS
        self._paused[session_id] = now_s
        return None

    def _due(self, now_s: float) -> Iterable[tuple[Program, Reason]]:
        if self._next_s is None or now_s < self._next_s:
            return
        self._next_s = now_s + self.settings.tick_s
        for program, reason in self._restorable(now_s):
            del self._paused[program.session_id]
            self._activate(program, now_s)
            if program.held:
                yield program, reason
        self._pause_until_safe(now_s)

    def _returned(self, program: Program, call: Call, output_tokens: int, now_s: float) -> None:
        active = self._active.get(program.session_id)
        if active is None:
            return
        if active.marked and not program.calls:
            self._pause(program, now_s)
        else:
            self._count(program, now_s)

    def _ended(self, program: Program, now_s: float) -> None:
        self._paused.pop(program.session_id, None)
        self._deactivate(program.session_id)

    def _tick_s(self, now_s: float) -> float | None:
        return self._next_s if self._programs else None

    # Capacity.

    def _limit(self, share: float) -> float:
        return float("inf") if self._capacity is None else share * self._capacity

    @property
    def _resume_share(self) -> float:
        return self.settings.pause_threshold - self.settings.resume_hysteresis

    def _fits(self, program: Program, used: float) -> bool:
        """Whether a program that is not active may become it."""
        return used + self._need(program) <= self._limit(self._resume_share)

    def _need(self, program: Program) -> float:
        return self._own_tokens(program) + self.settings.buffer_tokens

    def _own_tokens(self, program: Program) -> int:
        shared_tokens = self.shared_tokens(program) if self.settings.subtracts_shared else 0
        return program.context_tokens - shared_tokens

    def _used_with_decay(self, now_s: float) -> float:
        """Used tokens with acting programs faded out; looks at each active program."""
        half_life_s = self.settings.acting_half_life_s
        if half_life_s is None:
            return self._used
        faded = 0.0
        for active in self._active.values():
            if active.acting_since_s is not None and not active.marked:
                kept = 0.5 ** min(1000.0, (now_s - active.acting_since_s) / half_life_s)
                faded += (1 - kept) * (active.tokens - self.settings.buffer_tokens)
        return self._used - faded

    # Pausing and restoring.

    def _restorable(self, now_s: float) -> list[tuple[Program, Reason]]:
        """Paused programs that become active now, in the order of the source."""
        paused = sorted((self._programs[session_id] for session_id in self._paused), key=self._rank)
        used = self._used_with_decay(now_s)
        chosen = []
        for program in paused:
            if self._fits(program, used):
                reason = Reason.FITS
            elif program.held and now_s - self._paused[program.session_id] >= self.settings.resume_timeout_s:
                reason = Reason.ADMISSION_OFF  # waited for too long: the capacity no longer counts
            else:
                continue
            used += self._need(program)
            chosen.append((program, reason))
        return chosen

    @staticmethod
    def _rank(program: Program) -> tuple[int, int]:
        """With a waiting call first, then new programs, then acting ones; shortest first within."""
        group = 1 if program.steps == 1 else 0 if program.held else 2
        return group, program.context_tokens

    def _pause_until_safe(self, now_s: float) -> None:
        if self._used <= self._limit(self.settings.pause_threshold):
            return
        target = self._limit(self.settings.pause_target)
        active = sorted((self._programs[session_id] for session_id in self._active), key=lambda p: p.context_tokens)
        for program in [program for program in active if not program.calls]:
            if self._used <= target:
                return
            self._pause(program, now_s)
        for program in [program for program in active if program.calls]:
            if self._used <= target:
                return
            entry = self._active[program.session_id]
            if not entry.marked:
                entry.marked = True
                self._count(program, now_s)

    def _activate(self, program: Program, now_s: float) -> None:
        self._active[program.session_id] = _Active()
        self._count(program, now_s)

    def _pause(self, program: Program, now_s: float) -> None:
        self._deactivate(program.session_id)
        self._paused[program.session_id] = now_s

    def _deactivate(self, session_id: str) -> None:
        active = self._active.pop(session_id, None)
        if active is not None:
            self._used -= active.tokens
        if not self._active:
            self._used = 0.0  # no rounding error outlives the programs that caused it

    def _count(self, program: Program, now_s: float) -> None:
        """Take over the program's context and state into what is used."""
        active = self._active[program.session_id]
        acting = not program.calls
        weight = self.settings.acting_weight if acting else 1.0
        tokens = 0.0 if active.marked else weight * self._own_tokens(program) + self.settings.buffer_tokens
        self._used += tokens - active.tokens
        active.tokens = tokens
        if not acting:
            active.acting_since_s = None
        elif active.acting_since_s is None:
            active.acting_since_s = now_s


WATERMARKED = ThunderSettings(pause_threshold=0.95, pause_target=0.80, resume_hysteresis=0.10)


def _sweep(variant: ThunderSettings) -> tuple[ThunderSettings, ...]:
    return tuple(
        dataclasses.replace(
            variant,
            tick_s=tick_s,
            acting_half_life_s=half_life_s,
            counts_host=counts_host,
            subtracts_shared=subtracts_shared,
        )
        for tick_s, half_life_s, counts_host, subtracts_shared in itertools.product(
            (1.0, 5.0, 15.0), (None, 1.0, 30.0), (False, True), (False, True)
        )
    )


SWEEP = _sweep(ThunderSettings())
WATERMARKED_SWEEP = _sweep(WATERMARKED)
