"""The doctor finds what is wrong and says how to mend it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import STAND_INS, run_module
from statuses import bare_status

from sglang_basin import doctor
from sglang_basin.engine.hooks import HOOKS, LENDING
from sglang_basin.lending.nvml import Gpu
from sglang_basin.status import LenderFigures, Report


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    assert done.stdout.startswith("["), done.stderr[-2000:]
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_this_environment_is_well() -> None:
    """The real thing: every hook target in the installed SGLang."""
    done = run_module("sglang_basin.doctor", "--json")
    found = findings(done)
    bad = [
        finding
        for finding in found.values()
        if finding["status"] == "FAIL" and not finding["check"].startswith("port ")
    ]
    assert bad == []
    assert {f"hook {hook.target}" for hook in HOOKS + LENDING} <= set(found)
    assert found["basin_kernels"]["status"] == found["predictor"]["status"] == "OK"
    assert found["sglang"] == {"status": "OK", "check": "sglang", "detail": "0.5.23", "mend": ""}


def test_wrong_version_and_missing_hook_targets_fail(tmp_path: Path) -> None:
    """A package of another version on the path, in which no hook target exists."""
    other = tmp_path / "sglang-0.6.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.0\n")
    done = run_module("sglang_basin.doctor", PYTHONPATH=f"{tmp_path}:{STAND_INS}")
    assert done.returncode == 1
    assert "FAIL sglang: 0.6.0, needs exactly 0.5.23; mend: pip install 'sglang==0.5.23'" in done.stdout
    for hook in HOOKS + LENDING:
        assert f"FAIL hook {hook.target}: not found" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("failed")


def test_missing_package() -> None:
    finding = doctor.check_version("no-such-package-anywhere", "1.2")
    assert (finding.status, finding.mend) == ("FAIL", "pip install 'no-such-package-anywhere==1.2'")


def test_wrong_mooncake_wheel() -> None:
    (finding,) = doctor.check_mooncake("cuda")  # this environment has the wheel for machines without a GPU
    assert finding.status == "FAIL"
    assert "pip install --force-reinstall mooncake-transfer-engine-cuda13" in finding.mend


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    finding = doctor.check_kernels()
    assert (finding.status, finding.detail) == ("FAIL", "not installed")
    assert "pip install" in finding.mend


def test_a_predictor_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_basin.predictor.forest", None)
    finding = doctor.check_predictor()
    assert (finding.status, finding.check) == ("FAIL", "predictor")
    assert finding.detail.startswith("ModuleNotFoundError")
    assert "--basin-predictor seen" in finding.mend


def test_taken_port_is_named() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", doctor.BOOTSTRAP_PORT))
        server.listen()
        found = {finding.check: finding for finding in doctor.check_ports()}
    assert found[f"port {doctor.BOOTSTRAP_PORT}"].status == "FAIL"
    assert "--disaggregation-bootstrap-port" in found[f"port {doctor.BOOTSTRAP_PORT}"].mend


def test_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SYSTEM_LIBRARIES", {"libnowhere.so.9": "libnowhere9"})
    (finding,) = doctor.check_system_libraries()
    assert (finding.status, finding.mend) == ("FAIL", "apt-get install -y libnowhere9")


def test_model_folder(tmp_path: Path) -> None:
    assert doctor.check_model("org/name-on-the-hub").status == "SKIP"
    assert doctor.check_model(str(tmp_path)).status == "FAIL"
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert "tokenizer" in doctor.check_model(str(tmp_path)).detail
    (tmp_path / "tokenizer.json").write_text("{}")
    assert doctor.check_model(str(tmp_path)).status == "OK"


def test_open_files_and_shared_memory() -> None:
    assert doctor.check_open_files().status in ("OK", "FAIL")
    assert doctor.check_shared_memory(1 << 60).status == "FAIL"
    assert doctor.check_shared_memory(0).status == "OK"
    assert os.path.exists("/dev/shm")


def transports(gpus: list[Gpu], rdma_devices: Path, *cut_off: tuple[str, str]) -> list[str]:
    """What is said of lending where the pairs of GPUs in `cut_off` have no peer access."""
    found = doctor.check_transports(gpus, lambda *pair: "no link" if pair in cut_off else None, rdma_devices)
    return [f"{finding.check}: {finding.detail}" for finding in found]


def test_transports_of_lending_are_said_with_the_reason(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert transports([], none) == [
        "lent by a decode on this machine: mooncake: this process has no CUDA device",
        f"lent by a decode elsewhere: mooncake: it runs on another machine; TCP, there is no RDMA device in {none}",
    ]
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    gpus = [Gpu(0, "GPU-a", "H200"), Gpu(1, "GPU-b", "H200"), Gpu(2, "GPU-c", "H200")]
    here = "lent by a decode on this machine"
    assert transports(gpus, tmp_path, ("GPU-c", "GPU-a")) == [
        f"{here}: peer: the same GPU (GPUs 0→0, 1→1, 2→2)",
        f"{here}: peer: another GPU of this machine, with peer access (GPUs 0→1, 1→0, 1→2, 2→0, 2→1)",
        f"{here}: mooncake: its GPU's memory cannot be read from here: no link (GPUs 0→2)",
        "lent by a decode elsewhere: mooncake: it runs on another machine; RDMA devices mlx5_0, mlx5_1",
    ]


def test_a_running_prefill_is_asked_how_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = bare_status("prefill")
    report = Report(basin="0", sglang="0.5.23", states=[prefill])
    monkeypatch.setattr(doctor.top, "fetch", lambda url, key, timeout_s: report)
    (nobody,) = doctor.check_lenders("http://p", None)
    assert (nobody.status, nobody.detail) == ("SKIP", "nobody has lent to it so far")
    prefill.lenders.append(LenderFigures(name="10.0.0.2:4711", transport="peer", why="the same GPU"))
    (finding,) = doctor.check_lenders("http://p", None)
    assert str(finding) == "OK   lent to http://p by 10.0.0.2:4711: peer: the same GPU"


def test_an_engine_that_does_not_answer_fails() -> None:
    (finding,) = doctor.check_lenders("http://127.0.0.1:9", None)
    assert finding.status == "FAIL"
    assert "no answer" in finding.detail
