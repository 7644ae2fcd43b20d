"""The profile interface that the launchers build on."""

import subprocess
import sys

import pytest

from sglang_basin.platforms.profiles import PROFILES, ROLES, parse_cores


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_each_role_gets_the_transfer_it_needs():
    cpu = PROFILES["cpu"]
    assert flag(cpu.engine_arguments("prefill"), "--disaggregation-transfer-backend") == "mooncake_tcp"
    assert flag(cpu.engine_arguments("decode"), "--disaggregation-transfer-backend") == "mooncake_tcp"
    assert flag(cpu.engine_arguments("decode"), "--disaggregation-decode-retraction-backup") == "cpu_tensor"
    assert not [word for word in cpu.engine_arguments("both") if word.startswith("--disaggregation")]
    assert flag(PROFILES["cuda"].engine_arguments("prefill"), "--disaggregation-transfer-backend") == "mooncake"


@pytest.mark.parametrize("role", ROLES)
def test_every_flag_exists_in_this_sglang(role):
    from sglang.srt.server_args import ServerArgs

    parser = __import__("argparse").ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for profile in PROFILES.values():
        parser.parse_args(["--model-path", "none", *profile.engine_arguments(role)])


def test_cores_set_the_binding_and_the_thread_count():
    environment = PROFILES["cpu"].environment(role="decode", cores="2-3,5")
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "2-3,5"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_unpinned_servers_take_one_thread_each():
    environment = PROFILES["cpu"].environment(role="prefill", cores=None)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment


def test_a_gpu_server_is_left_as_it_is():
    assert PROFILES["cuda"].environment(role="prefill", cores="0") == {}


def test_unknown_roles_are_refused_by_name():
    with pytest.raises(ValueError, match="prefill, decode, both"):
        PROFILES["cpu"].engine_arguments("router")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0-2", (0, 1, 2)), (" 4, 1-2", (1, 2, 4))])
def test_cores_are_read_as_taskset_writes_them(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "-1", "3-1", "1,", "0-", "0-99999999999", "1-2-3", "²"])
def test_malformed_cores_are_refused(text):
    with pytest.raises(ValueError, match="cores"):
        parse_cores(text)


def test_profiles_import_neither_sglang_nor_torch():
    code = (
        "import sys, sglang_basin.platforms.profiles; "
        "sys.exit(any(name.split('.')[0] in ('sglang', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
