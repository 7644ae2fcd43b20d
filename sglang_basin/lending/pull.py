"""One pull: a thread that reads a call's missing layers, and what the scheduler's thread can see of it.

The reading thread may be stuck in a peer that has stopped; nobody ever waits for it without a limit. Its slots must
not be used for anything else before `over`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sglang_basin.engine.metrics import log


class Pull:
    """Reads layers 0 to `layers` - 1 in order with `read`, which raises on failure; `finally_` runs in the reading
    thread when the last read is through, however it ended. A layer that comes after `until_s` counts as failed: the
    peer may have used its pages for something else by then."""

    def __init__(
        self,
        layers: int,
        read: Callable[[int], None],
        finally_: Callable[[], None],
        name: str,
        until_s: float = float("inf"),
    ) -> None:
        self.layers = layers
        self._until_s = until_s
        self._read = read
        self._finally = finally_
        self._changed = threading.Condition()
        self._arrived = 0
        self._over = False
        self._given_up = False
        self.began_s = time.monotonic()
        self.first_s: float | None = None
        self.ended_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"basin-pull-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_up(self) -> None:
        """No further layer is begun; the one under way cannot be stopped."""
        self._given_up = True

    @property
    def arrived(self) -> int:
        """Layers that are in place."""
        return self._arrived

    @property
    def over(self) -> bool:
        """Nothing is written to the slots any more."""
        return self._over

    @property
    def landed(self) -> bool:
        return self._over and self._arrived == self.layers

    def remaining_s(self, now_s: float) -> float:
        """How long the layers that are missing will take if they come like the ones before; infinite before the first
        one."""
        arrived = self._arrived
        if arrived == 0:
            return float("inf")
        return (now_s - self.began_s) / arrived * (self.layers - arrived)

    def wait(self, layers: int, until_s: float) -> bool:
        """Whether the first `layers` layers are in place, after waiting for them until `until_s` at most."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._arrived >= layers or self._over, timeout=max(0.0, until_s - time.monotonic())
            )
            return self._arrived >= layers

    def wait_over(self, until_s: float) -> bool:
        """Whether the thread is through, after waiting for it until `until_s` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout=max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        try:
            for layer in range(self.layers):
                if self._given_up:
                    break
                self._read(layer)
                if time.monotonic() >= self._until_s:
                    raise TimeoutError("the lease of its pages is over")
                with self._changed:
                    self._arrived = layer + 1
                    self.first_s = self.first_s or time.monotonic()
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - any failure means the same: compute the tokens again
            log.warning("Basin: a pull failed at layer %d of %d: %s", self._arrived, self.layers, error)
        finally:
            try:
                self._finally()
            finally:
                with self._changed:
                    self.ended_s = time.monotonic()
                    self._over = True
                    self._changed.notify_all()
