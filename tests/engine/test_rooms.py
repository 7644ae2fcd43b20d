"""SGLang's own thread that sends KV, with a room that the scheduler's thread takes away at the worst moment."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue, TransferKVChunk
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

from sglang_basin.engine import rooms

ROOM = 5


def manager(request_status: dict[int, KVPoll], transfer_infos: dict[int, Any]) -> MooncakeKVManager:
    """As much of a KV manager as its transfer thread looks at. Bypasses the constructor, which wants a live engine."""
    made = object.__new__(MooncakeKVManager)
    made.request_status, made.transfer_infos = request_status, transfer_infos
    made.enable_trace = made.enable_staging = made.enable_deferred_decode_kv_release = False
    made._staging_outstanding = defaultdict(int)
    made._deferred_ack_targets, made._deferred_ack_poisoned_rooms = {}, set()
    made.req_to_decode_prefix_len = {}
    made.bootstrap_port = 1
    return made


def outcome(made: MooncakeKVManager) -> str:
    """How the thread fares with one chunk of the room and the end of its queue."""
    queue = FastQueue()
    indices = np.zeros(1, np.int32)
    queue.put(
        TransferKVChunk(
            room=ROOM,
            prefill_kv_indices=indices,
            index_slice=slice(0, 1),
            is_last_chunk=True,
            prefill_aux_index=0,
            state_indices=None,
        )
    )
    queue.put(None)  # SGLang's sign to stop
    said: list[str] = []

    def run() -> None:
        try:
            made.transfer_worker(queue, None)  # type: ignore[arg-type]
            said.append("stopped when told to")
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    return said[0]


def vanishing(kind: type[dict[int, Any]], looks: int) -> type[dict[int, Any]]:
    """A table whose entries are gone after so many looks for them, as when the scheduler clears the call just then."""

    class Vanishing(kind):  # type: ignore[misc, valid-type]
        seen = 0

        def __contains__(self, room: object) -> bool:
            found = super().__contains__(room)
            self.seen += 1
            if self.seen == looks:
                self.clear()
            return found

    return Vanishing


@pytest.mark.parametrize(("status", "looks"), [(KVPoll.Transferring, 1), (KVPoll.Success, 1), (KVPoll.Success, 2)])
def test_a_call_that_ends_between_two_looks_does_not_end_the_transfer_thread(status: KVPoll, looks: int) -> None:
    stock = vanishing(dict, looks)({ROOM: status})
    assert f"Transfer thread failed because of {ROOM}" in outcome(manager(stock, {}))

    made = manager({}, {})
    rooms.RoomTables(made, shown=False)
    made.request_status = vanishing(rooms.Table, looks)({ROOM: status}, made.request_status._gone)  # type: ignore[attr-defined]
    assert outcome(made) == "stopped when told to"
    assert ROOM not in made.transfer_infos


def test_transfer_infos_may_vanish_too() -> None:
    stock = vanishing(dict, 1)({ROOM: {}})
    assert f"Transfer thread failed because of {ROOM}" in outcome(manager({ROOM: KVPoll.Success}, stock))

    made = manager({}, {})
    rooms.RoomTables(made, shown=False)
    made.request_status[ROOM] = KVPoll.Success
    made.transfer_infos = vanishing(rooms.Table, 1)({ROOM: {}}, made.transfer_infos._gone)  # type: ignore[attr-defined]
    assert outcome(made) == "stopped when told to"


def test_the_tables_keep_what_they_held_and_answer_looks_as_ever() -> None:
    made = manager({1: KVPoll.Bootstrapping}, {1: {"s": "info"}})
    rooms.RoomTables(made, shown=False)
    assert made.check_status(1) == KVPoll.Bootstrapping
    assert made.check_status(2) == KVPoll.Failed
    assert 2 not in made.request_status
    assert made.request_status.get(2) is None
    assert (made.transfer_infos[1], made.transfer_infos[2]) == ({"s": "info"}, {})
