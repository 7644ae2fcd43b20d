"""Whether a peer may be read from: closed after successes, open after a failure, tried again ever less often."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class Breaker:
    """One peer's breaker. Every read that `begin` announced is to end in `succeeded` or `failed`. Pure: time is an
    argument."""

    _failures: int = 0  # in a row
    _open_until_s: float = 0.0
    _probing: bool = False

    def allows(self, now_s: float) -> bool:
        """Whether a read may begin. After a failure: nothing for a while, then one at a time until one succeeds."""
        return self._failures == 0 or (now_s >= self._open_until_s and not self._probing)

    def begin(self) -> None:
        """A read begins that `allows` has just allowed."""
        self._probing = self._failures > 0

    def succeeded(self) -> None:
        self._failures = 0
        self._probing = False

    def failed(self, now_s: float) -> None:
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._probing = False
        self._open_until_s = max(self._open_until_s, now_s + pause_s)

    @property
    def failures(self) -> int:
        return self._failures
