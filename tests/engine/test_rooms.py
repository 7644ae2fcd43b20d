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
HOLD_LIMIT_S = 60.0


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
    rooms.RoomTables(made, shown=False, hold_limit_s=HOLD_LIMIT_S)
    made.request_status = vanishing(rooms.Table, looks)({ROOM: status}, made.request_status._gone)  # type: ignore[attr-defined]
    assert outcome(made) == "stopped when told to"
    assert ROOM not in made.transfer_infos


def test_transfer_infos_may_vanish_too() -> None:
    stock = vanishing(dict, 1)({ROOM: {}})
    assert f"Transfer thread failed because of {ROOM}" in outcome(manager({ROOM: KVPoll.Success}, stock))

    made = manager({}, {})
    rooms.RoomTables(made, shown=False, hold_limit_s=HOLD_LIMIT_S)
    made.request_status[ROOM] = KVPoll.Success
    made.transfer_infos = vanishing(rooms.Table, 1)({ROOM: {}}, made.transfer_infos._gone)  # type: ignore[attr-defined]
    assert outcome(made) == "stopped when told to"


def test_the_tables_keep_what_they_held_and_answer_looks_as_ever() -> None:
    made = manager({1: KVPoll.Bootstrapping}, {1: {"s": "info"}})
    rooms.RoomTables(made, shown=False, hold_limit_s=HOLD_LIMIT_S)
    assert made.check_status(1) == KVPoll.Bootstrapping
    assert made.check_status(2) == KVPoll.Failed
    assert 2 not in made.request_status
    assert made.request_status.get(2) is None
    assert (made.transfer_infos[1], made.transfer_infos[2]) == ({"s": "info"}, {})


def tables(made: MooncakeKVManager) -> rooms.RoomTables:
    """Tables whose word to decode goes nowhere: no decode is there."""
    made.failure_records, made.failure_lock = {}, threading.Lock()
    made._deferred_ack_targets, made.deferred_bootstrap, made.kv_status_msg_tag = {}, None, None
    made.pp_rank = made.attn_tp_rank = made.attn_cp_rank = 0
    return rooms.RoomTables(made, shown=False, hold_limit_s=HOLD_LIMIT_S)


def metadata_arrives(made: MooncakeKVManager, room: int) -> None:
    """What SGLang's bootstrap thread does when decode's metadata for a room is there."""
    made.transfer_infos[room] = {}
    made.req_to_decode_prefix_len[room] = 0
    made.update_status(room, KVPoll.WaitingForInput)


def entries(made: MooncakeKVManager) -> int:
    return sum(
        map(len, (made.request_status, made.transfer_infos, made.req_to_decode_prefix_len, made.failure_records))
    )


@pytest.mark.parametrize("late_s", [1.0, 30.0])
def test_metadata_behind_the_end_of_its_call_is_cleared(late_s: float) -> None:
    made = manager({}, {})
    watched = tables(made)
    metadata_arrives(made, 7)  # a call under way, which nothing here may touch
    watched.end(ROOM, 0.0)
    watched.sweep(late_s)
    metadata_arrives(made, ROOM)
    watched.sweep(late_s + rooms.CLEAR_AFTER_S)
    assert list(made.request_status) == list(made.transfer_infos) == [7]
    assert entries(made) == 3


def test_a_failed_room_that_no_call_claims_goes_when_none_can_be_on_its_way() -> None:
    made = manager({}, {})
    watched = tables(made)
    metadata_arrives(made, ROOM)
    made.update_status(ROOM, KVPoll.Failed)
    for now_s in range(0, int(HOLD_LIMIT_S + rooms.WATCH_FOR_S) + 1, 30):
        watched.sweep(float(now_s))
        assert made.check_status(ROOM) == KVPoll.Failed
    watched.sweep(HOLD_LIMIT_S + rooms.WATCH_FOR_S + 2)
    assert entries(made) == 0


def test_only_the_rooms_of_the_last_minutes_are_remembered() -> None:
    watched = tables(manager({}, {}))
    for second in range(1000):
        watched.end(second % 400, float(second))
        watched.sweep(float(second))
    assert list(watched._ended_s) == [room % 400 for room in range(999 - int(rooms.WATCH_FOR_S), 1000)]
