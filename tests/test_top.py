"""`sglang_basin.top` against real HTTP servers: what is shown, and what each kind of wrong server is told."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from rich.console import Console
from statuses import bare_status

from sglang_basin import status, top
from sglang_basin.status import (
    CacheFigures,
    ControlFigures,
    DoorFigures,
    PeerFigures,
    Report,
    SessionFigures,
    Status,
)


def session(number: int) -> SessionFigures:
    return SessionFigures(
        session_id=f"agent-{number} [bold]",
        state="live",
        context_tokens=1_500 * number,
        reserved_tokens=2_000 * number,
        predicted_peak_tokens=2_500 * number,
        calls_seen=number,
        calls_open=1,
        priority_s=float(number),
        arrived_s=0.0,
        idle_s=3.0,
    )


def prefill() -> Status:
    return Status(
        role="prefill",
        gate="on",
        uptime_s=60.0,
        door=DoorFigures(
            rule="partial reservation",
            armed=True,
            live_sessions=12,
            queued_sessions=3,
            paused_sessions=4,
            held_calls=2,
            tickets=1,
            head_wait_s=42.0,
            working_set_tokens=12_000,
            distinct_tokens=9_000,
            reserved_tokens=11_000,
            budget_tokens=10_000,
            reference_tokens=10_000,
            sessions=[session(number) for number in range(9, 0, -1)],
        ),
        held_calls=2,
        entered_sessions=12,
        cache=CacheFigures(pool_tokens=16_000, used_ratio=0.5, hit_ratio=0.91, high_hit_ratio=0.95),
        control=ControlFigures(
            address="tcp://127.0.0.1:1",
            peers=[PeerFigures(name="d0", heard_ago_s=2.0), PeerFigures(name="d1", heard_ago_s=None)],
            unanswered=4,
            dropped={"garbage": 5},
        ),
        decisions={"admit/fits": 7, "queue/no_headroom": 3, "refuse/shed": 0},
        faults={},
    )


def report(*states: Status) -> bytes:
    return status.encode_report(Report(basin="0.1.0", sglang="0.5.23", states=list(states)))


@contextmanager
def serving(body: bytes, code: int = 200, key: str | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            here = self.path == status.PATH
            self.send_response(401 if not allowed else code if here else 404)
            self.end_headers()
            self.wfile.write(body if allowed and here else b"{}")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(*argv: str, terminal: bool = False, sleeps: int = 0) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=110, height=60, force_terminal=terminal, color_system=None)
    left = sleeps

    def sleep(seconds: float) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    return top.main(argv, console, sleep), out.getvalue()


def run_once(*states: Status) -> str:
    with serving(report(*states)) as url:
        return run("--once", url)[1]


def test_one_look_shows_door_cache_control_and_the_largest_sessions() -> None:
    with serving(report(prefill())) as url:
        code, shown = run("--once", "--sessions", "4", url)
    assert code == 0
    for piece in (
        "9.0K of 10.0K (contexts add up to 12.0K)",
        "11.0K of 10.0K",
        "50% of 16.0K",
        "0.91, while all is well 0.95",
        "12 live, 3 waiting, the first for 42 s, 4 paused (calls held: 2, clients away: 1)",
        "2 peers, last heard 2 to 2 s ago, 1 never heard, 4 unanswered, dropped: garbage 5",
        "admit/fits 7, queue/no_headroom 3",
        "agent-9 [bold]",
        "and 11 more",
    ):
        assert piece in shown, shown
    assert "shed" not in shown
    assert "agent-5" not in shown


def test_ranks_of_one_server_are_told_apart() -> None:
    ranks = [msgspec.structs.replace(prefill(), dp_rank=rank, dp_ranks=2) for rank in (0, 1)]
    shown = run_once(*ranks)
    assert shown.count("data-parallel rank") == 2
    assert "data-parallel rank 1 of 2" in shown
    assert "rank" not in run_once(prefill())


def test_a_gate_that_gave_up_and_its_faults_stand_out() -> None:
    failed = bare_status("decode", gate="failed", faults={"gate": 1})
    with serving(report(failed)) as url:
        code, shown = run("--once", url)
    assert code == 0
    assert "The gate is failed" in shown
    assert "FAULTS: gate 1" in shown


def test_json_is_what_the_engines_said_by_url() -> None:
    with serving(report(prefill())) as url:
        code, shown = run("--json", url, "http://127.0.0.1:9")
    said = json.loads(shown)
    assert code == 1
    assert said[url]["states"][0]["door"]["sessions"][0]["session_id"] == "agent-9 [bold]"
    assert "refused" in said["http://127.0.0.1:9"]["problem"]


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"", 404, "has no Basin"),
        (b'{"error": {"message": "The scheduler has not answered"}}', 503, "503: The scheduler has not answered"),
        (b"<html>", 502, "HTTP 502"),
        (b"not json", 200, "not of a Basin"),
        (b'{"basin": "0.1.0", "sglang": "x", "states": [{"role": "router"}]}', 200, "not of a Basin"),
        (b'{"x":' + b"[" * 100_000, 200, "not of a Basin"),
        (b"x" * (status.MAX_BYTES + 1), 200, "longer than"),
    ],
)
def test_a_server_without_a_status_is_told_apart(body: bytes, code: int, says: str) -> None:
    with serving(body, code) as url:
        exit_code, shown = run("--once", url)
    assert exit_code == 1
    assert says in " ".join(shown.split()), shown


def test_nobody_there() -> None:
    code, shown = run("--once", "http://127.0.0.1:9")
    assert code == 1
    assert "Connection refused" in shown


def test_the_api_key_is_sent_and_asked_for() -> None:
    with serving(report(prefill()), key="secret") as url:
        refused, shown = run("--once", url)
        accepted, _ = run("--once", "--api-key", "secret", url)
    assert (refused, accepted) == (1, 0)
    assert "--api-key" in shown


def test_the_live_view_goes_on_until_interrupted_whatever_the_engines_do() -> None:
    with serving(report(prefill())) as url:
        code, shown = run(url, "http://127.0.0.1:9", terminal=True, sleeps=2)
    assert code == 0
    assert shown.count("9.0K of 10.0K") == 3


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["localhost:3000"], "must begin with http://"),
        (["http://a", "--every", "0"], "--every: must be at least 0.1, got 0"),
        (["http://a", "--timeout", "nan"], "--timeout"),
        (["http://a", "--sessions", "-1"], "--sessions"),
    ],
)
def test_wrong_arguments_are_named(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err
