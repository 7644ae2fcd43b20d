"""Bootstrap rooms of calls that end in prefill without a transfer, and what they leave in its transfer tables.

Decode may send its transfer metadata for a call that prefill's door has refused or whose client has left, before or
after that: the tables hold an entry that no sender will ever clear, and decode waits for a transfer that never comes.
SGLang 0.5.23 makes such an entry whenever metadata arrives behind the end of its call. So each rank marks the room of a
call that is over as failed, which tells decode at once, and removes the entries a moment later. A call that decode has
given up and that never came to prefill, since the router or the network lost that leg, leaves an entry as well; it goes
when such a call can no longer be on its way.

A call that SGLang itself aborts in its waiting queue, or between two chunks of its prompt, has a sender, but SGLang
0.5.23 does not clear it: two entries stay for each such call. So each rank clears it.

SGLang's threads that send KV and hear of decode look whether a room is in these tables and read its entry a moment
later; the scheduler's thread takes it out in between when the call has just ended. The thread dies of the KeyError, and
no transfer to the decode instances that it serves ever ends again, although the server looks healthy (seen after a
restart of prefill). So the tables here have an answer for a room that is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_basin.engine.metrics import metrics

CLEAR_AFTER_S = 5.0
"""Entries are removed this long after the call's end: SGLang's bootstrap thread may be filling them in just now."""

WATCH_FOR_S = 120.0
"""Metadata that arrives later than this after the call's end is no longer expected."""

SWEEP_EVERY_S = 1.0


class Table(dict[int, Any]):
    """A transfer table that another thread may empty between a look and the next: what is gone reads as `gone()`."""

    def __init__(self, entries: Mapping[int, Any], gone: Callable[[], Any]) -> None:
        super().__init__(entries)
        self._gone = gone

    def __missing__(self, room: int) -> Any:
        return self._gone()


@dataclass(frozen=True, slots=True)
class DroppedRooms:
    """Sent from rank 0 to all ranks among the requests of one broadcast; taken out again on arrival."""

    rooms: tuple[int, ...]


@dataclass(slots=True)
class RoomTables:
    """The transfer tables of one rank's KV manager (a `CommonKVManager`)."""

    kv_manager: Any
    shown: bool
    """Whether this rank's table is the one on the gauge."""
    hold_limit_s: float
    """How long the door may hold a call, seconds."""
    _ended_s: dict[int, float] = field(default_factory=dict)
    """When the calls of these rooms ended, seconds of the monotonic clock, in that order."""
    _failed_s: dict[int, float] = field(default_factory=dict)
    """Since when rooms that no call has claimed are marked as failed."""
    _aborted: list[Any] = field(default_factory=list)
    _failed: Any = None
    """SGLang's mark of a failed room."""
    _next_sweep_s: float = 0.0

    def __post_init__(self) -> None:
        """Before the first call. With pipeline parallelism SGLang keeps the status elsewhere, under a lock."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self._failed = KVPoll.Failed
        manager = self.kv_manager
        if type(manager.request_status) is dict:
            manager.request_status = Table(manager.request_status, lambda: KVPoll.Failed)
        manager.transfer_infos = Table(manager.transfer_infos, dict)

    def drop(self, rooms: tuple[int, ...], now_s: float) -> None:
        """Calls of these rooms will never be prefilled."""
        for room in rooms:
            self.end(room, now_s)
            self._fail(room)

    def end(self, room: int, now_s: float) -> None:
        """The call of this room is over, in whichever way."""
        self._ended_s.pop(room, None)
        self._ended_s[room] = now_s

    def abort(self, sender: Any) -> None:
        """SGLang has aborted the call of this sender (a `BaseKVSender`) and will not look at it again."""
        self._aborted.append(sender)

    def sweep(self, now_s: float) -> None:
        """Clear what calls that are over left behind, or what decode sent for them since. Cheap; call it in every
        turn."""
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + SWEEP_EVERY_S
        status, infos = self.kv_manager.request_status, self.kv_manager.transfer_infos
        if self.shown:
            metrics().rooms.set(len(status))
        while self._aborted:
            sender = self._aborted.pop()
            sender.clear()
            self.kv_manager.failure_records.pop(sender.bootstrap_room, None)
        # copies: other threads add to the tables
        entered = {*list(infos), *(list(status) if isinstance(status, Table) else ())}
        for room in entered & self._ended_s.keys():
            if now_s - self._ended_s[room] >= CLEAR_AFTER_S:
                self._fail(room)
                self._clear(room)
        # a call that is here looks at its room in every turn, so what stays marked has none
        failed = [room for room in entered - self._ended_s.keys() if status.get(room) == self._failed]
        self._failed_s = {room: self._failed_s.get(room, now_s) for room in failed}
        for room, failed_s in self._failed_s.items():
            if now_s - failed_s > self.hold_limit_s + WATCH_FOR_S:
                self._clear(room)
        for room in list(itertools.takewhile(lambda room: now_s - self._ended_s[room] > WATCH_FOR_S, self._ended_s)):
            del self._ended_s[room]

    def _fail(self, room: int) -> None:
        if room in self.kv_manager.request_status:
            self.kv_manager.conclude_failure(bootstrap_room=room, failure_reason="The call is over on prefill.")

    def _clear(self, room: int) -> None:
        manager = self.kv_manager
        tables = (
            manager.request_status,
            manager.transfer_infos,
            manager.req_to_decode_prefix_len,
            manager.failure_records,
        )
        for table in tables:
            table.pop(room, None)
