"""One turn of the scheduler's loop at a gate, arranged so that no request is lost whatever fails on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

from sglang_basin.engine.metrics import fault


class Turn:
    """Requests that came in and are still to be judged, and those that go on. A request is in exactly one of: to be
    judged, going on, held by the gate, answered by the gate."""

    def __init__(self) -> None:
        self._to_judge: deque[Any] = deque()
        self._going_on: list[Any] = []

    def begin(self, requests: list[Any]) -> None:
        self._to_judge.extend(requests)

    def go_on(self, request: Any) -> None:
        """This one is handed to SGLang when the turn ends."""
        self._going_on.append(request)

    def judge_all(self, judge: Callable[[Any], None]) -> None:
        """Give each request to `judge`, which lets it go on, holds it or answers it. Should it raise, the request goes
        on as in stock SGLang. Batches come one call at a time, which is how SGLang takes them itself."""
        while self._to_judge:
            request = self._to_judge.popleft()
            try:
                if isinstance(request, BatchTokenizedGenerateReqInput):
                    self._to_judge.extendleft(reversed(request.batch))
                else:
                    judge(request)
            except Exception:  # noqa: BLE001 - one odd request must neither be lost nor switch the gate off
                fault("request", "could not judge a request; it goes on as in stock SGLang")
                self._going_on.append(request)

    def end(self) -> list[Any]:
        """What goes on, in order."""
        going_on, self._going_on = self._going_on, []
        return going_on

    def rest(self) -> list[Any]:
        """After a failure in mid-turn: everything that is neither held nor answered."""
        rest = [*self._going_on, *self._to_judge]
        self._going_on.clear()
        self._to_judge.clear()
        return rest
