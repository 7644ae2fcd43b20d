"""The command line of `launch_server`; SGLang is a stand-in that reports what it was started with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launching import STAND_INS, run_module

from sglang_basin.config import BasinConfig
from sglang_basin.engine import flags

ALWAYS = [needed.flag for needed in flags.NEEDED if needed.when(BasinConfig(), "prefill")]
"""Flags that Basin sets on prefill at its defaults."""


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(STAND_INS), "STAND_IN": "report", **environment}
    return run_module("sglang_basin.launch_server", *arguments, **variables)


def report(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def test_without_a_basin_flag_nothing_is_set_or_said() -> None:
    arguments = [
        "--model-path",
        "m",
        "--disaggregation-mode",
        "prefill",
        "--tp-size=2",
        "--tokenizer-worker-num",
        "2",
    ]
    done = launch(*arguments)
    assert report(done) == {"argv": arguments, "environment": {}}
    assert "basin" not in done.stdout
    assert done.stdout.splitlines()[0] == "plugins loaded"
    assert done.stdout.splitlines()[-1] == "process tree ended"


def test_the_alias_works_without_basin_too() -> None:
    assert report(launch("--disagg-mode", "decode"))["argv"] == ["--disaggregation-mode", "decode"]


def test_with_basin_the_configuration_and_flags_reach_sglang() -> None:
    done = launch("--disagg-mode", "prefill", "--basin-budget-tokens", "5000", "--page-size", "16")
    seen = report(done)
    config = BasinConfig.from_environment(seen["environment"])
    assert config == BasinConfig(budget_tokens=5000)
    words = ["--disaggregation-mode", "prefill", "--page-size", "16"]
    assert seen["argv"] == [*words, *ALWAYS]
    assert seen["environment"]["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "540"
    said = [line for line in done.stdout.splitlines() if line.startswith("basin: set ")]
    assert seen["environment"][flags.QUERY_RANK] == "1"
    assert len(said) == len(ALWAYS) + len(flags.RAISED) + 1


def test_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "basin.toml"
    path.write_text('admission = "off"\nidle_timeout_s = 5\n')
    seen = report(launch("--disagg-mode", "decode", "--basin-config", str(path), "--basin-idle-timeout-s", "7"))
    assert BasinConfig.from_environment(seen["environment"]) == BasinConfig(admission="off", idle_timeout_s=7.0)


def test_configuration_of_a_parent_launcher_counts() -> None:
    given = BasinConfig(budget_tokens=77).to_json()
    seen = report(launch("--disagg-mode", "decode", BASIN_CONFIG=given))
    assert seen["argv"][2:] == ALWAYS
    assert seen["environment"]["BASIN_CONFIG"] == given


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--basin-bugdet-tokens", "5"], ["--basin-bugdet-tokens", "--basin-budget-tokens"]),
        (["--basin-budget-tokens", "-5"], ["--basin-budget-tokens", "at least 1"]),
        (["--basin-budget-tokens", "many"], ["--basin-budget-tokens", "many"]),
        (["--basin-config", "/nowhere.toml"], ["--basin-config", "/nowhere.toml"]),
        (["--basin-admission", "off", "--schedule-policy", "lpm"], ["--schedule-policy", "--enable-priority-sched"]),
        (
            ["--basin-admission", "off", "--schedule-pol", "lpm"],
            ["--schedule-policy", "--enable-priority-scheduling"],
        ),
    ],
)
def test_wrong_flags_end_in_one_clear_line(arguments: list[str], named: list[str]) -> None:
    done = launch("--disagg-mode", "prefill", *arguments)
    assert done.returncode == 2
    assert all(name in done.stderr for name in named), done.stderr
    assert "Traceback" not in done.stderr


def test_another_sglang_version_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "sglang-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    path = f"{tmp_path}:{STAND_INS}"
    done = launch("--disagg-mode", "prefill", "--basin-admission", "off", PYTHONPATH=path)
    assert done.returncode == 2
    assert "9.9.9" in done.stderr
    assert "pip install sglang==0.5.23" in done.stderr
    assert "plugins loaded" not in done.stdout  # refused before SGLang was touched
    assert report(launch("--disagg-mode", "prefill", PYTHONPATH=path))  # off: none of Basin's business


def test_a_hook_that_sglang_did_not_apply_stops_the_start() -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.init_request_receiver"
    done = launch("--disagg-mode", "prefill", "--basin-admission", "off", STAND_IN_UNAPPLIED=target)
    assert done.returncode == 2
    assert target in done.stderr


def test_help_shows_basin_first_and_the_way_to_the_rest() -> None:
    done = launch("--help")
    assert done.returncode == 0
    assert done.stdout.index("--basin-budget-tokens") < done.stdout.index("python -m sglang.launch_server --help")
