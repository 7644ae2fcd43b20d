"""The table of SGLang settings: what is added, what is refused, and that SGLang really has all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_basin.config import BasinConfig
from sglang_basin.engine import flags

PREFILL = ["--model-path", "m", "--disaggregation-mode", "prefill"]


def test_alias_is_spelled_out_and_the_rest_left_alone() -> None:
    given = ["--model-path", "m", "--disagg-mode", "decode", "--tp", "2", "--disagg-mode=decode"]
    assert flags.expand_alias(given) == [
        *["--model-path", "m", "--disaggregation-mode", "decode", "--tp", "2", "--disaggregation-mode=decode"]
    ]


def test_two_modes_are_refused_naming_both_spellings() -> None:
    with pytest.raises(flags.FlagConflict, match=r"--disagg-mode and --disaggregation-mode .* decode and prefill"):
        flags.expand_alias(["--disagg-mode", "decode", "--disaggregation-mode", "prefill"])


def test_adds_what_basin_needs_with_a_reason_each() -> None:
    settings = flags.prepare(BasinConfig(hold_limit_s=240), PREFILL, {})
    added = settings.arguments[len(PREFILL) :]
    assert settings.arguments[: len(PREFILL)] == PREFILL
    assert added == [needed.flag for needed in flags.NEEDED if needed.when(BasinConfig(), "prefill")]
    assert settings.environment == {**{raised.variable: "540" for raised in flags.RAISED}, flags.QUERY_RANK: "1"}
    assert len(settings.notes) == len(added) + len(settings.environment)


def test_a_flag_the_user_gave_is_not_repeated() -> None:
    settings = flags.prepare(BasinConfig(), [*PREFILL, "--enable-priority-scheduling"], {})
    assert settings.arguments.count("--enable-priority-scheduling") == 1
    assert not any(note.startswith("--enable-priority-scheduling") for note in settings.notes)


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        (["--tokenizer-worker-num", "2"], ("--tokenizer-worker-num 2", "--basin-*")),
        (["--schedule-policy=lpm"], ("--schedule-policy lpm", "--enable-priority-scheduling")),
        (
            ["--priority-scheduling-preemption-threshold", "3"],
            ("--priority-scheduling-preemption-threshold 3", "--disable-priority-preemption"),
        ),
        (["--grpc-mode"], ("--grpc-mode", "--basin-*")),
        (["--attention-data-parallel-size=2"], ("--attention-data-parallel-size 2", "--basin-*")),
        (["--enable-pd-role-switch"], ("--enable-pd-role-switch", "--basin-*")),
    ],
)
def test_conflict_names_both(arguments: list[str], both: tuple[str, str]) -> None:
    with pytest.raises(flags.FlagConflict) as caught:
        flags.prepare(BasinConfig(), [*PREFILL, *arguments], {})
    assert all(name in str(caught.value) for name in both)


@pytest.mark.parametrize("arguments", [["--tokenizer-worker-num", "1"], ["--schedule-policy", "lof"]])
def test_values_that_basin_can_live_with_pass(arguments: list[str]) -> None:
    assert flags.prepare(BasinConfig(), [*PREFILL, *arguments], {}).arguments[4:6] == arguments


@pytest.mark.parametrize("mode", [[], ["--disaggregation-mode", "null"]])
def test_basin_needs_a_disaggregated_server(mode: list[str]) -> None:
    with pytest.raises(flags.FlagConflict, match="--disagg-mode prefill or decode"):
        flags.prepare(BasinConfig(), ["--model-path", "m", *mode], {})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SGLANG_RUST_SERVER": "true"}, "SGLANG_RUST_SERVER"),
        ({"SGLANG_PLATFORM": "other_npu"}, "SGLANG_PLATFORM=other_npu"),
        ({"SGLANG_PLUGINS": "mine, other"}, "SGLANG_PLUGINS=mine, other"),
        ({"SGLANG_PLATFORM": "basin_cpu", "SGLANG_PLUGINS": "basin"}, "add basin_cpu"),
        ({"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "240"}, "--basin-hold-limit-s 240"),
        ({flags.QUERY_RANK: "0"}, f"{flags.QUERY_RANK}=0"),
        ({"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "5m"}, "whole seconds"),
    ],
)
def test_environment_that_excludes_basin_is_refused(environment: dict[str, str], named: str) -> None:
    with pytest.raises(flags.FlagConflict) as caught:
        flags.prepare(BasinConfig(hold_limit_s=240), PREFILL, environment)
    assert named in str(caught.value)


def test_a_longer_timeout_of_the_user_stays() -> None:
    given = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1200"}
    settings = flags.prepare(BasinConfig(), PREFILL, given)
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" not in settings.environment


def test_parsed_record_is_held_against_the_same_tables() -> None:
    """Abbreviated flags and `--config` files show up here only."""
    good = {needed.field: True for needed in flags.NEEDED} | {"disaggregation_mode": "prefill"}
    flags.check_record(BasinConfig(), SimpleNamespace(**good))
    for field, value, flag in (
        ("tokenizer_worker_num", 4, "--tokenizer-worker-num 4"),
        ("schedule_policy", "lpm", "--schedule-policy lpm"),
        ("disaggregation_mode", "null", "--disaggregation-mode"),
        ("enable_priority_scheduling", False, "--enable-priority-scheduling"),
    ):
        with pytest.raises(flags.FlagConflict, match=flag):
            flags.check_record(BasinConfig(), SimpleNamespace(**(good | {field: value})))


@pytest.mark.parametrize(
    ("setting", "config", "named"),
    [
        ({"nnodes": 2}, BasinConfig(), "--nnodes"),
        ({"elastic_ep_backend": "mooncake"}, BasinConfig(), "--elastic-ep-backend"),
        ({"disaggregation_decode_enable_radix_cache": True}, BasinConfig(lending="on"), "--basin-lending on"),
    ],
)
def test_what_does_not_go_with_several_ranks_is_refused(
    setting: dict[str, object], config: BasinConfig, named: str
) -> None:
    good = {needed.field: True for needed in flags.NEEDED} | {"disaggregation_mode": "decode"}
    ranks = {"dp_size": 2}
    flags.check_record(BasinConfig(), SimpleNamespace(**good, **ranks))
    flags.check_record(config, SimpleNamespace(**(good | setting)))
    with pytest.raises(flags.FlagConflict, match=f"dp-size 2 conflicts with {named}"):
        flags.check_record(config, SimpleNamespace(**(good | setting | ranks)))


def test_lending_turns_on_the_cache_that_it_keeps_in_on_decode_only() -> None:
    flag = "--disaggregation-decode-enable-radix-cache"
    lending = BasinConfig(lending="on")
    decode = ["--model-path", "m", "--disaggregation-mode", "decode"]
    assert flag in flags.prepare(lending, decode, {}).arguments
    assert flag not in flags.prepare(lending, PREFILL, {}).arguments
    assert flag not in flags.prepare(BasinConfig(), decode, {}).arguments
    good = {needed.field: True for needed in flags.NEEDED} | {"disaggregation_mode": "decode"}
    without = good | {"disaggregation_decode_enable_radix_cache": False}
    flags.check_record(BasinConfig(), SimpleNamespace(**without))
    with pytest.raises(flags.FlagConflict, match=flag):
        flags.check_record(lending, SimpleNamespace(**without))


REAL = """
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_basin.config import BasinConfig
from sglang_basin.engine import flags
import argparse

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
by_flag = {flag: action for action in parser._actions for flag in action.option_strings}
for row in (*flags.NEEDED, *flags.REFUSED):
    assert by_flag[row.flag].dest == row.field, row.flag
for row in flags.REFUSED:
    assert row.accepts(by_flag[row.flag].default), row.flag
assert getattr(envs, flags.QUERY_RANK).default is False
for flag, field in (
    ("--dp-size", "dp_size"),
    ("--nnodes", "nnodes"),
    ("--elastic-ep-backend", "elastic_ep_backend"),
):
    assert by_flag[flag].dest == field
for row in flags.RAISED:
    assert getattr(envs, row.variable).default == row.default_s, row.variable
assert flags.MODE_FLAG in by_flag and flags.CONFIG_FLAG

words = ["--model-path", "m", "--disaggregation-mode", "prefill"]
flags.check_record(BasinConfig(), prepare_server_args(flags.prepare(BasinConfig(), words, {}).arguments))
shortened = flags.prepare(BasinConfig(), [*words, "--tokenizer-worker", "2"], {})
try:
    flags.check_record(BasinConfig(), prepare_server_args(shortened.arguments))
except flags.FlagConflict as error:
    assert "--tokenizer-worker-num 2" in str(error)
    print("all of it")
"""


def test_sglang_has_every_flag_and_default_of_the_tables() -> None:
    """Against the real package, in a process of its own: importing it takes ten seconds."""
    environment = {**os.environ, "SGLANG_PLATFORM": "basin_cpu"}
    done = subprocess.run(
        [sys.executable, "-c", REAL], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("all of it")
