"""Data-parallel ranks of one server: each has a scheduler, a cache and a gate of its own, and a session stays on one.

SGLang spreads calls over prefill's ranks by their bootstrap room, a random number, so that a session's cache would be
on another rank with every call. Here its controller process, which every call passes, names the rank instead (SGLang's
`routed_dp_rank`), on prefill and on decode. The door of rank r listens r ports above the first one's. Decode asks all
of them about a session that it does not know; the one that has the call's other leg answers, and so tells decode its
rank. For calls that are not asked about, and should no door answer, SGLang's own way holds: prefill registers each
call's rank with its bootstrap server, and decode asks that (`flags.QUERY_RANK`).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_basin.config import BasinConfig
from sglang_basin.engine.fingerprints import Fingerprints
from sglang_basin.engine.identity import stamp_of
from sglang_basin.engine.metrics import fault
from sglang_basin.policy.lineage import Lineage
from sglang_basin.policy.ranks import SessionRanks


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many data-parallel ranks of its server a scheduler is."""

    own: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Rank:
        """This scheduler process's: a replica of the model, or an attention group within one."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        own = parallel.dp_rank if parallel.dp_size > 1 else parallel.attn_dp_rank
        return cls(own or 0, parallel.num_dp_ranks)

    def file(self, path: str) -> str:
        """A file of this rank's own: the path as it is for the first, with the rank appended for others."""
        return f"{path}.dp{self.own}" if self.own else path


ONLY_RANK = Rank()


class CallRanks:
    """Chooses the ranks of calls, in the process that hands them out. Calls without a name are told apart by their
    prompts; of equal prompts all go to one rank, which has them cached."""

    def __init__(self, config: BasinConfig) -> None:
        self._sessions = SessionRanks(idle_s=config.idle_timeout_s, max_sessions=config.max_live_sessions)
        self._lineage = Lineage(max_sessions=config.max_live_sessions, prefix="\0")  # no client's name begins so
        self._fingerprints = Fingerprints() if config.infer_sessions == "on" else None

    def rank_of(self, request: Any, ranks: Collection[int], now_s: float) -> int | None:
        """None where SGLang may choose: the call belongs to no session."""
        stamp = stamp_of(request)
        session_id = stamp.session_id
        if session_id is None:
            session_id = self._conversation(request, stamp.tail_tokens)
        if session_id is None:
            return None
        rank = self._sessions.rank_of(session_id, ranks, now_s, parent_id=stamp.parent_id)
        if stamp.ends_session:
            self._sessions.ended(session_id)
        return rank

    def _conversation(self, request: Any, tail_tokens: int) -> str | None:
        if self._fingerprints is None or request.input_ids is None:
            return None
        prompt = self._fingerprints.of(request.input_ids, tail_tokens)
        placed = self._lineage.place(prompt, lambda conversation: False)
        return None if placed is None else placed.session_id


@functools.cache
def _call_ranks() -> CallRanks:
    return CallRanks(BasinConfig.from_environment(os.environ) or BasinConfig())


def keep_on_rank(self: Any, req: Any, *rest: Any, **options: Any) -> None:
    """Before `DataParallelController.dispatching_with_trace`: name the rank of a call that belongs to a session, unless
    the router or the client has. `self` is the controller; its process is neither the HTTP server's nor a scheduler's.
    """
    from sglang_basin.engine.requests import TokenizedGenerateReqInput, peers

    try:
        if isinstance(req, TokenizedGenerateReqInput) and req.routed_dp_rank is None and peers(req):
            req.routed_dp_rank = _call_ranks().rank_of(req, self._active_workers, time.monotonic())
    except Exception:  # noqa: BLE001 - SGLang then chooses the rank
        fault("ranks", "could not choose a call's data-parallel rank; SGLang chooses")


@functools.cache
def _registrar() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="basin-ranks")


def register_rank(original: Callable[..., Any], self: Any) -> None:
    """Around `CommonKVSender._register_prefill_dp_rank`: register the replica's own rank. SGLang 0.5.23 registers that
    of its attention group, which is 0 in each replica. And do not wait for the answer in the scheduler's thread: decode
    asks until it is there."""
    self.kv_mgr.attn_dp_rank = Rank.here().own
    _registrar().submit(original, self)
