"""Writing a log off the critical path: a bounded queue and a thread.

Who notes something never waits and never fails for it. What the queue cannot take, because the disk is slower than the
notes come, or what the disk does not take at all, is lost and counted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

Cause = Literal["queue", "disk"]


class LogThread(Generic[T]):
    """Hands what is put to `write`, in order, in a thread of its own."""

    def __init__(
        self,
        write: Callable[[Sequence[T]], None],
        *,
        name: str,
        most_waiting: int,
        most_at_once: int = 1,
        on_lost: Callable[[int, Cause], None] = lambda count, cause: None,
    ) -> None:
        """`write` gets up to `most_at_once` items and may raise: they then count as lost. `on_lost` must not raise;
        the putter calls it for what found the queue full, and this thread, within its `except`, for the rest."""
        self.written = 0
        self.lost = 0
        self.last_failure: str | None = None
        self._write = write
        self._most_at_once = most_at_once
        self._on_lost = on_lost
        self._waiting: queue.Queue[T | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Have it written soon. Never blocks, never raises."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._lose(1, "queue")

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most `timeout_s`, and stop."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        open_ = True
        while open_:
            items: list[T] = []
            item = self._waiting.get()
            while item is not None:
                items.append(item)
                if len(items) == self._most_at_once or self._waiting.empty():
                    break
                item = self._waiting.get()
            open_ = item is not None
            if items:
                self._write_items(items)

    def _write_items(self, items: list[T]) -> None:
        try:
            self._write(items)
            self.written += len(items)
        except Exception as error:  # noqa: BLE001 - a log must never cost more than its lines
            self.last_failure = f"{type(error).__name__}: {error}"
            self._lose(len(items), "disk")

    def _lose(self, count: int, cause: Cause) -> None:
        self.lost += count
        self._on_lost(count, cause)
