"""Sessions of calls that name none, as the gates infer them from their prompts (`policy.lineage`).

Prefill's names are the ones that count. A decode gate infers for itself only to know again what prefill let in, so that
it need not ask about every call.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.engine.identity import INFERRED_PREFIX, Stamp
from sglang_basin.engine.metrics import fault, metrics
from sglang_basin.policy.lineage import Lineage

MAX_CALLS = 20_000


class PromptSessions:
    """Names for unnamed calls. A failure costs a call its session, nothing else."""

    def __init__(self, max_sessions: int, runs: Callable[[str], bool] | None = None) -> None:
        """`runs` says of a session's name whether a call of it is held or under way: the door knows. Without it that is
        found out from what is placed and what has `left`."""
        self._fingerprints = Fingerprints()
        self._lineage = Lineage(max_sessions=max_sessions, prefix=f"{INFERRED_PREFIX}{secrets.token_hex(3)}-")
        self._runs = runs
        self._calls: OrderedDict[str, str] = OrderedDict()  # those that `runs` does not know -> conversation
        self._running: Counter[str] = Counter()  # conversations of these calls

    def session_of(self, call: str, request: Any, stamp: Stamp) -> str | None:
        """The session of a tokenized request. None while it may be a single call, and if its prompt is too short to
        tell anything or not of tokens; such a call must be `left` all the same."""
        if request.input_ids is None:
            return None
        try:
            prompt = self._fingerprints.of(request.input_ids, stamp.tail_tokens)
            placed = self._lineage.place(prompt, self._is_running, sure=stamp.starts_agent)
        except Exception:  # noqa: BLE001 - such a call passes as it did before
            fault("inference", "could not infer a session from a prompt; the call passes without one")
            return None
        if placed is None:
            return None
        if placed.is_session:
            metrics().identity.labels("prompt").inc()
        if not placed.is_session or self._runs is None:
            self._start(call, placed.session_id)
        return placed.session_id if placed.is_session else None

    def left(self, call: str, session_id: str | None, *, answered: bool) -> None:
        """A call is over, `answered` to its end or not. `session_id` is what the door knows it by, if it does; calls
        that were not inferred are passed over."""
        conversation = self._stop(call) or session_id
        if answered and conversation is not None:
            self._lineage.answered(conversation)

    def ended(self, session_id: str) -> None:
        """The session has ended. Any session's name will do."""
        self._lineage.ended(session_id)

    def _start(self, call: str, conversation: str) -> None:
        self._stop(call)
        self._calls[call] = conversation
        self._running[conversation] += 1
        if len(self._calls) > MAX_CALLS:
            self._stop(next(iter(self._calls)))

    def _stop(self, call: str) -> str | None:
        conversation = self._calls.pop(call, None)
        if conversation is not None:
            self._running[conversation] -= 1
            if not self._running[conversation]:
                del self._running[conversation]
        return conversation

    def _is_running(self, session_id: str) -> bool:
        return session_id in self._running or (self._runs is not None and self._runs(session_id))
