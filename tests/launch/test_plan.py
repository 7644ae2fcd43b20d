"""What a node consists of, decided from options alone."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from launching import run_module

from sglang_basin.config import BasinConfig, split_flags
from sglang_basin.node.plan import NodeOptions, Plan, PlanError, basin_flags, engine_host, make_plan, url_of


class Counting:
    """Ports one after another, so that plans are the same in every run."""

    def __init__(self) -> None:
        self.given = 40000
        self.above: list[list[int]] = []

    def take(self, port: int, purpose: str) -> int:
        return port

    def find(self, *, also: Sequence[int] = ()) -> int:
        self.given += 1
        if also:
            self.above.append(list(also))
        return self.given


def plan_of(**options):
    return make_plan(NodeOptions(model_path="m", **options), Counting(), [0, 1, 2, 3])


def value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_full_decode_is_spared_where_another_one_can_be_taken() -> None:
    def plan(**options: Any) -> Plan:
        return make_plan(NodeOptions(model_path="m", **options), Counting(), [0, 1])

    assert plan(decode=2, config=BasinConfig()).spare_decode_at == 0.95
    assert plan(decode=2, config=BasinConfig(), spare_decode_at=0.5).spare_decode_at == 0.5
    assert "-X PUT" in plan(decode=2, config=BasinConfig()).shell()
    for nothing in (
        plan(config=BasinConfig()),
        plan(decode=2),
        plan(decode=2, config=BasinConfig(), spare_decode_at=0.0),
    ):
        assert nothing.spare_decode_at is None
        assert "-X PUT" not in nothing.shell()
    with pytest.raises(PlanError, match=r"--spare-decode-at 1\.5: must be between 0"):
        plan(decode=2, spare_decode_at=1.5)


def test_engines_and_router_fit_together() -> None:
    plan = plan_of(prefill=2, decode=3, platform="cpu")
    assert [engine.name for engine in plan.engines] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    words = plan.router.command
    for engine in plan.engines:
        at = words.index(engine.url)
        assert words[at - 1] == f"--{engine.role}"
        assert engine.url.endswith(value(engine.command, "--port"))
        if engine.role == "prefill":
            assert words[at + 1] == str(engine.bootstrap_port)
            assert value(engine.command, "--disaggregation-bootstrap-port") == str(engine.bootstrap_port)
    ports = [value(engine.command, "--port") for engine in plan.engines]
    assert len(set(ports)) == 5
    assert "--disable-retries" in words


def test_stock_engines_are_sglang_itself() -> None:
    plan = plan_of()
    assert all(engine.command[1:3] == ("-m", "sglang.launch_server") for engine in plan.engines)
    assert not any("basin" in word for engine in plan.engines for word in engine.command[3:])


def test_basin_engines_carry_the_configuration_and_a_control_port() -> None:
    ports = Counting()
    config = BasinConfig(budget_tokens=9, control_port_offset=321)
    plan = make_plan(NodeOptions(model_path="m", config=config), ports, [0])
    assert ports.above == [[321]]
    for engine in plan.engines:
        assert engine.command[1:3] == ("-m", "sglang_basin.launch_server")
        assert split_flags(engine.command[3:])[0] == config


@pytest.mark.parametrize("flags", [("--dp-size", "3"), ("--attn-dp-size=3", "--tp-size", "3")])
def test_each_data_parallel_rank_of_prefill_gets_a_control_port(flags: tuple[str, ...]) -> None:
    ports = Counting()
    config = BasinConfig(control_port_offset=321)
    make_plan(NodeOptions(model_path="m", config=config, prefill_arguments=flags), ports, [0])
    assert ports.above == [[321, 322, 323]]


@pytest.mark.parametrize(
    "config",
    [
        BasinConfig(),
        BasinConfig(admission="off"),
        BasinConfig(budget_tokens=12_345_678, idle_timeout_s=1234567.25, control_host="10.0.0.1"),
    ],
)
def test_flags_say_the_configuration_exactly(config: BasinConfig) -> None:
    assert split_flags(basin_flags(config))[0] == config


def test_users_flags_come_after_the_platforms() -> None:
    """argparse keeps the last, so the user wins."""
    plan = plan_of(
        platform="cpu",
        engine_arguments=("--context-length", "4096"),
        prefill_arguments=("--max-total-tokens", "24000"),
        router_arguments=("--decode-policy", "random"),
    )
    prefill, decode = plan.engines
    last = len(prefill.command) - 1 - prefill.command[::-1].index("--context-length")
    assert prefill.command[last + 1] == "4096"
    assert "--max-total-tokens" in prefill.command
    assert "--max-total-tokens" not in decode.command
    assert plan.router.command[-2:] == ("--decode-policy", "random")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prefill": 0}, "--prefill 0"),
        ({"decode": 0}, "--decode 0"),
        ({"platform": "tpu"}, "--platform tpu"),
        ({"engine_arguments": ("--port", "3")}, "--port"),
        ({"decode_arguments": ("--disagg-mode=prefill",)}, "--disagg-mode"),
        ({"prefill_arguments": ("--basin-budget-tokens", "3")}, "--basin-budget-tokens"),
        ({"engine_arguments": ("stray",)}, "'stray'"),
        ({"cores": "0;1;2"}, "'PREFILL;DECODE'"),
        ({"cores": "0;9"}, "core 9"),
        ({"cores": "a;b"}, "--cores"),
        ({"gpus": ("0",)}, "--gpus"),
        ({"platform": "cuda", "gpus": ("0",)}, "2 engines need 2 GPUs"),
        ({"platform": "cuda", "gpus": ("0", "1", "2"), "engine_arguments": ("--tp", "2")}, r"4 GPUs \(2 \+ 2\)"),
        ({"platform": "cuda", "gpus": ("0", "1"), "engine_arguments": ("--tp", "two")}, "--tp-size two"),
        ({"platform": "cuda", "gpus": ("0", "1", "0", "2"), "engine_arguments": ("--tp", "2")}, "neighbours"),
    ],
)
def test_impossible_nodes_are_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        plan_of(**options)


@pytest.mark.parametrize(
    ("cores", "decode", "expected"),
    [
        ("auto", 1, [(0, 1), (2, 3)]),
        ("auto", 2, [(0, 1), (2,), (3,)]),
        ("auto", 3, [(0, 1), (2,), (3,), (2,)]),
        ("none", 2, [(), (), ()]),
        ("0;1-2", 2, [(0,), (1, 2), (1, 2)]),
        ("0;1;3", 2, [(0,), (1,), (3,)]),
    ],
)
def test_cores(cores: str, decode: int, expected: list[tuple[int, ...]]) -> None:
    plan = plan_of(platform="cpu", decode=decode, cores=cores)
    assert [engine.cores for engine in plan.engines] == expected


def test_one_core_is_left_to_the_kernel() -> None:
    plan = make_plan(NodeOptions(model_path="m"), Counting(), [5])
    assert [engine.cores for engine in plan.engines] == [(), ()]


def test_gpus_follow_each_sides_tensor_parallel_size() -> None:
    plan = plan_of(
        platform="cuda",
        decode=2,
        gpus=tuple("0123"),
        prefill_arguments=("--tensor-parallel-size", "2"),
    )
    assert [value(engine.command, "--base-gpu-id") for engine in plan.engines] == ["0", "2", "3"]
    assert {engine.environment["CUDA_VISIBLE_DEVICES"] for engine in plan.engines} == {"0,1,2,3"}
    assert [engine.cores for engine in plan.engines] == [(), (), ()]


def test_two_engines_can_share_a_gpu() -> None:
    plan = plan_of(platform="cuda", gpus=("5", "5"))
    assert [value(engine.command, "--base-gpu-id") for engine in plan.engines] == ["0", "0"]
    assert plan.engines[0].environment["CUDA_VISIBLE_DEVICES"] == "5"


def test_addresses() -> None:
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert url_of("::1", 1) == "http://[::1]:1"
    assert url_of("10.1.2.3", 1) == "http://10.1.2.3:1"
    assert engine_host("0.0.0.0") == "127.0.0.1"  # engines are not offered to the world
    assert engine_host("10.1.2.3") == "10.1.2.3"


def test_dry_run_prints_commands_that_run(tmp_path) -> None:
    model = tmp_path / "a model"
    done = run_module(
        "sglang_basin.launch_node",
        *["--model-path", str(model), "--decode", "2", "--platform", "cpu", "--port", "0", "--dry-run"],
        *["--cores", "0;0", "--basin-budget-tokens", "4000", "--prefill-args", "--page-size 16", "--tp", "1"],
    )
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 4
    assert all(str(model) in shlex.split(line) for line in commands[:3])
    assert [line.count("--page-size 16") for line in commands[:3]] == [1, 0, 0]
    assert all("--tp 1" in line and "taskset -c 0" in line for line in commands[:3])
    # As pasted, up to the point where SGLang would take over: its --help and smg's are the real programs'.
    for line in (commands[0], commands[3]):
        shown = subprocess.run(line + " --help", shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert shown.returncode == 0, shown.stderr
        assert "usage:" in shown.stdout


def test_command_line_errors_are_one_line() -> None:
    for arguments, named in (
        (["--model-path", "m", "--decode", "0", "--dry-run"], "--decode 0"),
        (["--model-path", "m", "--no-basin", "--basin-admission", "off", "--dry-run"], "--no-basin"),
        (["--model-path", "m", "--basin-admision", "off", "--dry-run"], "--basin-admision"),
        (["--model-path", "m", "--prefill-args", "'open", "--dry-run"], "--prefill-args"),
    ):
        done = run_module("sglang_basin.launch_node", "--platform", "cpu", "--port", "0", *arguments)
        assert done.returncode == 2
        assert named in done.stderr
        assert "Traceback" not in done.stderr


def test_all_ranks_of_an_engine_share_its_cores() -> None:
    plan = plan_of(platform="cpu", cores="0;1,2", prefill_arguments=("--tp-size", "2", "--dp-size=2"))
    prefill, decode = plan.engines
    assert prefill.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0|0|0"
    assert decode.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "1,2"
    groups = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    for arguments in (groups, ("--tp-size", "2", "--attn-dp-size", "2")):
        prefill = plan_of(platform="cpu", cores="0;1,2", prefill_arguments=arguments).engines[0]
        assert prefill.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0"
