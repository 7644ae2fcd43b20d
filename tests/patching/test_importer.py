"""Patches come into force as SGLang is imported, in spawned processes too, and leave its files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from example import FILE, FOLDER, MODULE

from sglang_basin.config import ENVIRONMENT_VARIABLE, BasinConfig
from sglang_basin.engine import plugin
from sglang_basin.patching import importer
from sglang_basin.patching.patch import PatchError
from sglang_basin.patching.series import FOLDER_VARIABLE, read_series, sglang_root, standings

ON = {ENVIRONMENT_VARIABLE: BasinConfig().to_json(), FOLDER_VARIABLE: str(FOLDER)}

IN_ONE_PROCESS = f"""
import importlib, inspect, json, traceback
from sglang_basin.patching import importer
importer.activate()
importer.activate()
module = importlib.import_module({MODULE!r})
importer.activate()  # nothing to do any more, and no complaint
try:
    module.decode_kv_hints_envelope("refuse me")
except ValueError:
    shown = traceback.format_exc()
print(json.dumps({{
    "patched_by": module.PATCHED_BY,
    "in_force": importer.is_patched({MODULE!r}),
    "file": module.__file__,
    "traceback": shown,
    "function": inspect.getsource(module.decode_kv_hints_envelope),
    "class": inspect.getsource(module.KvHintsEnvelope).splitlines()[0],
    "decodes": module.decode_kv_hints_envelope({{"protocol_version": "1", "message_id": "m"}}).message_id,
}}))
"""

IN_A_SPAWNED_PROCESS = f"""
import importlib.util, json, multiprocessing, sys
if __name__ == "__main__":
    # As under `python -m sglang_basin.launch_server`: what a spawned process imports first is that module.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("sglang_basin.launch_server")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import spawned
    child = context.Process(target=spawned.report, args=(sender,))
    child.start()
    sender.close()
    print(json.dumps(receiver.recv()))
    child.join(30)
"""


def run(script: str, **environment: str) -> dict:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BASIN")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def installed() -> dict[str, bytes]:
    """The file and its compiled forms, as they are on disk."""
    path = sglang_root() / FILE
    compiled = (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")
    return {str(each): each.read_bytes() for each in (path, *compiled)}


def test_a_patched_module_shows_its_patched_lines_and_the_disk_stays_as_it_is() -> None:
    before = installed()
    seen = run(IN_ONE_PROCESS, **ON)
    assert seen["patched_by"] == ["0001", "0002"]
    assert seen["in_force"]
    assert seen["file"] == str(sglang_root() / FILE)
    assert 'line 56, in decode_kv_hints_envelope\n    raise ValueError("raised by a patched line")' in seen["traceback"]
    assert 'if value == "refuse me":' in seen["function"]
    assert seen["function"].startswith("def decode_kv_hints_envelope")
    assert seen["class"] == "class KvHintsEnvelope(msgspec.Struct, frozen=True, kw_only=True):"
    assert seen["decodes"] == "m"
    assert installed() == before


def test_processes_that_sglang_spawns_are_patched_when_basin_is_on() -> None:
    assert run(IN_A_SPAWNED_PROCESS, **ON) == {"finder": True, "patched_by": ["0001", "0002"]}


def test_with_basin_off_nothing_is_patched() -> None:
    assert run(IN_A_SPAWNED_PROCESS, **{FOLDER_VARIABLE: str(FOLDER)}) == {"finder": False}


@pytest.fixture
def too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, types.ModuleType(MODULE))


@pytest.mark.usefixtures("too_late")
def test_too_late_is_refused_and_changes_nothing() -> None:
    before = list(sys.meta_path)
    with pytest.raises(PatchError, match=f"{MODULE} was imported before its patch; mend: start SGLang by python -m"):
        importer.install(standings(read_series(FOLDER), sglang_root()))
    assert sys.meta_path == before


@pytest.mark.usefixtures("too_late")
def test_the_plugin_stops_a_process_that_can_no_longer_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ON.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"0001-refuse-one-envelope\.patch, 0002-sign\.patch: .* before its patch"):
        plugin.register()


def test_the_launcher_refuses_a_patch_that_does_not_fit(tmp_path: Path) -> None:
    for patch in FOLDER.iterdir():
        text = patch.read_text()
        (tmp_path / patch.name).write_text(text.replace("Upstream-SHA256: d3", "Upstream-SHA256: 00"))
    command = [
        sys.executable,
        "-m",
        "sglang_basin.launch_server",
        "--disagg-mode",
        "prefill",
        "--basin-admission",
        "off",
    ]
    done = subprocess.run(
        [*command, "--model-path", "m"],
        env={**os.environ, FOLDER_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "launch_server: patches that cannot be applied:\n  - 0001-refuse-one-envelope.patch" in done.stderr
    assert "mend: pip install --force-reinstall --no-deps sglang==0.5.23" in done.stderr
