"""Drives one policy object as the engine's gate does: asks it, holds calls for it, tells it what happens.

One gate for each prefill instance, each with a policy object of its own. The policy sees prompts, outputs that have
happened, and an `EngineView` made from the pools; nothing that it is given leads to the plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from sglang_basin.policy.decisions import Admit, Outcome, Queue, Reason, Refuse
from sglang_basin.policy.interface import EngineView, ServingPolicy
from sglang_basin.simulator.calls import SimCall
from sglang_basin.simulator.decode import DecodeInstance
from sglang_basin.simulator.prefill import PrefillInstance
from sglang_basin.simulator.profile import HardwareProfile

LIVE_SESSION = Reason.LIVE_SESSION
"""Looked up once: an attribute of an enum costs more than a comparison."""

HIT_RATE_WINDOW_S = 60
"""Over how many seconds the view's hit rate counts, one tick each."""


class Gate:
    """Calls held for the policy, and why it decided as it did."""

    def __init__(
        self,
        policy: ServingPolicy,
        profile: HardwareProfile,
        prefill: PrefillInstance,
        decodes: Sequence[DecodeInstance],
    ) -> None:
        self.policy = policy
        self.prefill = prefill
        self.held: dict[str, SimCall] = {}
        self.reasons: Counter[str] = Counter()
        self.wake_s: float | None = None
        """When the next poll is due that has been scheduled already."""
        self._decodes = decodes
        decode = profile.decode
        self._lend_cap_tokens = int(decode.lend_share * decode.pool_tokens) if decode.lend else 0
        self._prefills = profile.prefill.instances
        self._host_tokens = max(0, profile.prefill.host_tokens - prefill.cache.pool_tokens)
        self._read_tokens_per_s = profile.link.write_back_tokens_per_s if decode.lend else None
        self._decode_tokens = sum(decode.cache.pool_tokens for decode in decodes)
        self._recent: deque[tuple[int, int]] = deque([(0, 0)] * HIT_RATE_WINDOW_S)
        self.recent_prompt_tokens = self.recent_cached_tokens = 0
        self._look_at_decodes()

    def ask(self, call: SimCall, now_s: float, ends_session: bool) -> Admit | Queue | Refuse:
        decision = self.policy.call(
            call.call_id, call.session.uid, call.prompt_tokens, now_s, ends_session=ends_session
        )
        if isinstance(decision, Admit):
            if decision.reason is not LIVE_SESSION:
                self._count(decision)
        elif isinstance(decision, Queue):
            self.held[call.call_id] = call
        else:
            self._count(decision)
        return decision

    def poll(self, now_s: float) -> list[tuple[SimCall, Outcome]]:
        """The held calls whose wait ends now."""
        ended = []
        for outcome in self.policy.poll(now_s):
            call = self.held.pop(outcome.call_id, None)
            if call is not None:
                self._count(outcome)
                ended.append((call, outcome))
        return ended

    def _count(self, decision: Admit | Refuse) -> None:
        kind = "admit" if isinstance(decision, Admit) else "refuse"
        self.reasons[f"{kind}: {decision.reason.value}"] += 1

    def tick(self) -> None:
        """Once a second: the calls prefilled since the last tick move into the window, decodes report."""
        self._look_at_decodes()
        prefill = self.prefill
        prompt, cached = prefill.recent_prompt_tokens, prefill.recent_cached_tokens
        prefill.recent_prompt_tokens = prefill.recent_cached_tokens = 0
        self._recent.append((prompt, cached))
        old_prompt, old_cached = self._recent.popleft()
        self.recent_prompt_tokens += prompt - old_prompt
        self.recent_cached_tokens += cached - old_cached

    @property
    def hit_rate(self) -> float | None:
        """Over the last minute; None while nothing was prefilled."""
        return self.recent_cached_tokens / self.recent_prompt_tokens if self.recent_prompt_tokens else None

    def observe(self, now_s: float) -> None:
        self.policy.observe(self.view(), now_s)

    def view(self) -> EngineView:
        """What the scheduler of this prefill instance could know now: its own state exactly, that of the decode
        instances as of the last second, as they report it."""
        prefill, cache = self.prefill, self.prefill.cache
        return EngineView(
            cache_tokens=cache.pool_tokens,
            host_tokens=self._host_tokens,
            lent_tokens=self._lent_tokens,
            cache_used_share=1.0 - cache.free_tokens / cache.pool_tokens,
            hit_rate=self.hit_rate,
            prefill_waiting_calls=prefill.waiting_calls,
            decode_tokens=self._decode_tokens,
            decode_used_share=self._decode_used_share,
            decode_waiting_calls=self._decode_waiting_calls,
            read_tokens_per_s=self._read_tokens_per_s,
        )

    def _look_at_decodes(self) -> None:
        held = waiting = lent = 0
        for decode in self._decodes:
            held += decode.held_tokens
            waiting += decode.waiting_calls
            if self._lend_cap_tokens:
                lent += max(0, min(self._lend_cap_tokens, decode.cache.pool_tokens - decode.held_tokens))
        self._lent_tokens = lent // self._prefills
        self._decode_used_share = held / self._decode_tokens
        self._decode_waiting_calls = waiting
