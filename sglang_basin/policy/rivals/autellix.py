"""Autellix: least attained service by program (PLAS), as the order of the queues.

Source: Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs" (arXiv 2502.13965): a
call's priority is the service that the program's earlier calls have received; less goes first. Priorities fall into a
few discrete queues, first come first served within each, so that nearly equal programs do not take turns; a call
whose waiting time exceeds `beta` times its service is promoted to the first queue. There is no admission.

Left open by the source for this setting, and how it is filled here:
- Service on separate prefill and decode instances: tokens, new prompt tokens + `output_weight` x output tokens. A
  token of prompt is new unless the previous call of the program had it in its context, so recomputation after an
  eviction is not held against a program. The weight is swept.
- The borders of the discrete queues: `first_quantum_tokens` x 4^i, swept; None orders by the exact service.
- Preemption of calls that run: none; SGLang's priority queues run without it.
- Promotion compares times: `promote_after_s` of waiting, swept (None: never). It is judged when a queue asks for the
  key.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from sglang_basin.policy.decisions import Reason
from sglang_basin.policy.rivals.table import Program, ProgramTable, RivalSettings, require_positive
from sglang_basin.policy.sessions import Call

LEVELS_APART = 1e10
"""Between the keys of two discrete queues: more than any arrival time in seconds, and exact to 0.1 ms in the first
sixty queues. Exact service is counted in tokens and needs no levels."""


@dataclass(frozen=True, kw_only=True)
class AutellixSettings(RivalSettings):
    output_weight: float = 4.0
    """Service of one output token, in new prompt tokens."""
    first_quantum_tokens: float | None = 10_000.0
    promote_after_s: float | None = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "output_weight")
        for name in ("first_quantum_tokens", "promote_after_s"):
            if getattr(self, name) is not None:
                require_positive(self, name)


class Autellix(ProgramTable):
    name = "autellix"

    def __init__(self, settings: AutellixSettings | None = None) -> None:
        self.settings = settings or AutellixSettings()
        super().__init__(self.settings)
        self._attained: dict[str, float] = {}  # of calls that are over
        self._had: dict[str, int] = {}  # longest context that has been served before, per program

    def attained_tokens(self, session_id: str) -> float:
        """Service that the program's finished calls have received; 0 for unknown programs."""
        return self._attained.get(session_id, 0.0)

    def order(self, session_id: str, call_arrived_s: float) -> float:
        """Lowest first: the discrete queue, then arrival; or the exact service."""
        settings = self.settings
        attained = self._attained.get(session_id, 0.0)
        if settings.promote_after_s is not None and self._now_s - call_arrived_s >= settings.promote_after_s:
            attained = 0.0
        if settings.first_quantum_tokens is None:
            return attained
        quanta = attained / settings.first_quantum_tokens
        level = 0 if quanta < 1 else 1 + int(math.log(quanta, 4))
        return level * LEVELS_APART + call_arrived_s

    def _arrived(self, program: Program, call: Call, now_s: float) -> Reason | None:
        return Reason.ADMISSION_OFF

    def _returned(self, program: Program, call: Call, output_tokens: int, now_s: float) -> None:
        session_id = program.session_id
        new_tokens = max(0, call.prompt_tokens - self._had.get(session_id, 0))
        served = new_tokens + self.settings.output_weight * output_tokens
        self._attained[session_id] = self._attained.get(session_id, 0.0) + served
        self._had[session_id] = call.prompt_tokens + output_tokens

    def _ended(self, program: Program, now_s: float) -> None:
        self._attained.pop(program.session_id, None)
        self._had.pop(program.session_id, None)


SWEEP: tuple[AutellixSettings, ...] = tuple(
    AutellixSettings(output_weight=weight, first_quantum_tokens=quantum, promote_after_s=promote_s)
    for weight, quantum, promote_s in itertools.product(
        (1.0, 4.0, 16.0), (None, 1_000.0, 10_000.0, 50_000.0), (None, 60.0, 300.0)
    )
)
