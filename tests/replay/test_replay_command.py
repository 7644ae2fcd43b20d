import asyncio
import contextlib
import json
import os
import signal
import sys

import pytest
from replay_server import Behaviour, serving

from sglang_basin.replay.__main__ import main
from sglang_basin.replay.records import read_records


async def start(*flags, **more):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_basin.replay",
        *map(str, flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
        # What a shell starts in the background ignores SIGINT, and so does all that it starts in turn.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **more,
    )


async def finish(process, timeout_s=30):
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    return process.returncode, out.decode(), (err or b"").decode()


SMALL = (
    "--trace",
    "swe_bench",
    "--scale-tokens",
    "1/20",
    "--max-calls",
    "4",
    "--tool-cap",
    "50ms",
    "--arrivals",
    "fixed",
)


async def test_measure_then_replay_then_compare(tmp_path, capsys):
    async with serving(Behaviour(first_token_s=0.005, token_s=0.001)) as server:
        unloaded = tmp_path / "unloaded.json"
        measured = await finish(
            await start("--url", server.url, *SMALL, "--measure-unloaded", unloaded, "--measure-sessions", 3)
        )
        assert measured[0] == 0, measured[2]
        assert "3 sessions measured" in measured[1]
        load = ("--rate", "10/s", "--duration", "1s", "--drain", "5s", "--unloaded", unloaded)
        surge = ("--surge", "+100%", "--from", "300ms", "--to", "500ms")
        code, out, err = await finish(
            await start("--url", server.url, *SMALL, *load, *surge, "--out", tmp_path / "a", "--name", "first")
        )
        assert code == 0, err
    assert "12 sessions" in err
    assert "arrived" in err
    assert "goodput, sessions/h" in out
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    arm = summary["arms"]["first"]
    assert arm["completed_share"] == 1
    assert arm["offered_per_hour"] == pytest.approx(12 * 3600)
    assert arm["arrived_after_surge"] == arm["finished_after_surge"] == 5
    assert summary["unloaded_model"]["fitted_calls"] == 12
    assert (tmp_path / "a" / "plots.png").stat().st_size > 10_000
    recorded = tmp_path / "a" / "calls.jsonl"
    assert main(["--arm", f"one={recorded}", "--arm", f"two={recorded}", "--out", str(tmp_path / "both")]) == 0
    out = capsys.readouterr().out
    assert "one over time" in out
    assert any(line.split() == ["one", "two"] for line in out.splitlines())
    assert (tmp_path / "both" / "page.html").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_keeps_and_reports_what_was_measured(tmp_path, number):
    async with serving(Behaviour(first_token_s=0.02, token_s=0.002)) as server:
        load = ("--rate", "20/s", "--duration", "10m", "--out", tmp_path)
        process = await start("--url", server.url, *SMALL, *load)
        while len(server.requests) < 30:
            await asyncio.sleep(0.02)
        process.send_signal(number)
        code, out, err = await finish(process)
        assert code == 130, err
        await asyncio.sleep(0.1)
        assert server.open_calls == 0
    assert "Traceback" not in err
    assert "stopped after" in out
    result = read_records(tmp_path / "calls.jsonl")
    assert result.interrupted
    assert len(result.calls) >= 25
    assert {session.outcome for session in result.sessions} >= {"finished", "unfinished"}
    summary = json.loads((tmp_path / "summary.json").read_text())["arms"]["run"]
    assert summary["interrupted"] is True
    assert summary["finished_sessions"] > 0
    assert (tmp_path / "page.html").is_file()


async def test_an_interrupted_measurement_writes_nothing(tmp_path):
    async with serving(Behaviour(first_token_s=0.1)) as server:
        process = await start("--url", server.url, *SMALL, "--measure-unloaded", tmp_path / "unloaded.json")
        while len(server.requests) < 5:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        code, _, err = await finish(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert not (tmp_path / "unloaded.json").exists()


async def test_a_kill_leaves_the_records_readable(tmp_path):
    async with serving(Behaviour(token_s=0.001)) as server:
        process = await start("--url", server.url, *SMALL, "--rate", "20/s", "--duration", "10m", "--out", tmp_path)
        while len(server.requests) < 20:
            await asyncio.sleep(0.02)
        process.kill()
        await finish(process)
    result = read_records(tmp_path / "calls.jsonl")
    assert result.interrupted
    assert len(result.calls) >= 10
    assert {session.outcome for session in result.sessions} >= {"unfinished"}
    assert {call.uid for call in result.calls} <= {session.uid for session in result.sessions}


USAGE = [
    ([], "--url, --trace required"),
    (["--url", "http://x", "--trace", "swe_bench"], "--rate, --duration required"),
    (["--rate", "-11/min"], "not a positive rate"),
    (["--duration", "soon"], "not a duration"),
    (["--scale-tokens", "0"], "not a positive factor"),
    (["--surge", "+250%", "--rate", "1/s", "--duration", "9s"], "--surge, --from and --to go together"),
    (
        ["--surge", "+250%", "--from", "60s", "--to", "120s", "--rate", "1/s", "--duration", "90s"],
        "ends after the run of 90s",
    ),
    (["--surge", "+250%", "--from", "9s", "--to", "3s", "--rate", "1/s", "--duration", "90s"], "from < to"),
    (["--rate", "1/s", "--duration", "9s", "--retries", "-1"], "retries must not be negative"),
    (["--rate", "1/s", "--duration", "9s", "--call-timeout", "0"], "call_timeout_s must be positive"),
    (["--arm", "nothing"], "write NAME=FILE"),
    (["--burst", "3"], "unrecognized arguments: --burst"),
]


@pytest.mark.parametrize(("flags", "message"), USAGE, ids=[message for _, message in USAGE])
def test_wrong_usage_is_explained(flags, message, capsys):
    if flags and "--url" not in flags and "--arm" not in flags:
        flags = ["--url", "http://127.0.0.1:9", "--trace", "swe_bench_lmcache", *flags]
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_used_is_named(tmp_path, capsys):
    load = ["--rate", "1/s", "--duration", "5s", "--out", str(tmp_path / "out")]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"session_id": "a", "calls": [{"prompt_tokens": 1, "output_tokens": 1}]}\n{"session_id"\n')
    for flags, message in (
        (["--url", "http://127.0.0.1:9", "--trace", "swe_bench_lmcache"], "no HTTP server answers"),
        (["--url", "http://127.0.0.1:9", "--trace", "missing.jsonl"], "no trace 'missing.jsonl'"),
        (["--url", "http://127.0.0.1:9", "--trace", str(broken)], "broken.jsonl:2: "),
        (["--arm", f"a={tmp_path}/none.jsonl"], "No such file"),
    ):
        assert main([*flags, *load]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_a_server_that_fails_every_call_fails_the_command(tmp_path):
    async with serving(Behaviour(answer=lambda body, number: "error")) as server:
        code, out, _ = await finish(
            await start("--url", server.url, *SMALL, "--rate", "5/s", "--duration", "1s", "--out", tmp_path)
        )
    assert code == 1
    assert "5 failed" in out


async def test_a_terminal_gets_a_progress_bar(tmp_path):
    leader, follower = os.openpty()
    shown = bytearray()

    def drain():
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal is an error
            shown.extend(os.read(leader, 65536))

    asyncio.get_running_loop().add_reader(leader, drain)
    try:
        async with serving(Behaviour(token_s=0.001)) as server:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sglang_basin.replay", "--url", server.url, *SMALL),
                *("--rate", "10/s", "--duration", "1s", "--out", str(tmp_path)),
                stdout=asyncio.subprocess.PIPE,
                stderr=follower,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
            )
            code, _, _ = await finish(process)
    finally:
        asyncio.get_running_loop().remove_reader(leader)
        os.close(follower)
        os.close(leader)
    assert code == 0
    assert b"\x1b[" in shown
    assert b"arrived 10/10" in shown
