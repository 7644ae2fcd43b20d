"""Whether Basin can run here: `python -m sglang_basin.doctor [--json] [--model-path M] [--engine URL]…`

One line per check with the mend, exit code 0 when none failed. Starts nothing, registers no hook, changes nothing.
The hook targets are checked in the installed SGLang itself, so most of the time goes into importing that.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import sglang_basin
from sglang_basin import top
from sglang_basin.config import BasinConfig
from sglang_basin.engine.flags import PLUGIN
from sglang_basin.lending import nvml
from sglang_basin.lending.nvml import Gpu
from sglang_basin.lending.places import Choice, Place, choose
from sglang_basin.node.ports import is_free
from sglang_basin.patching import series
from sglang_basin.patching.patch import PatchError
from sglang_basin.platforms.profiles import CPU_PLATFORM

if TYPE_CHECKING:
    from sglang_basin.engine.hooks import Hook

Status = Literal["OK", "FAIL", "SKIP"]

DISTRIBUTION = "sglang-basin"
SYSTEM_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
"""What Mooncake's transfer engine links against, and the Debian/Ubuntu package of each."""

OWN_PINS = ("sglang", "smg")
SGLANG_PINS = ("torch", "flashinfer_python", "sglang-kernel")
"""Packages whose exact version SGLang itself asks for; a stray upgrade of one breaks it in odd places."""

MOONCAKE = {"cuda": "mooncake-transfer-engine-cuda13", "cpu": "mooncake-transfer-engine-non-cuda"}
BOOTSTRAP_PORT = 8998
"""SGLang's default --disaggregation-bootstrap-port."""

ROUTER_PORT = 30000
ENGINE_ANSWER_S = 6.0
OPEN_FILES = 4096
RDMA_DEVICES = Path("/sys/class/infiniband")
SHARED_MEMORY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
"""NCCL keeps its buffers in /dev/shm, of which a container gets 64 MiB by default."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `mend` is empty unless it failed."""

    status: Status
    check: str
    detail: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.status:<4} {self.check}: {self.detail}" + (f"; mend: {self.mend}" if self.mend else "")


def examine(
    model_path: str | None = None, engines: Sequence[str] = (), api_key: str | None = None
) -> Iterator[Finding]:
    """Every check, the quick ones first."""
    gpus = gpu_names()
    platform = "cuda" if gpus else "cpu"
    yield check_python()
    yield Finding("OK", "GPU", ", ".join(gpus)) if gpus else Finding("SKIP", "GPU", "none: the CPU platform applies")
    yield from check_versions()
    yield from check_mooncake(platform)
    yield from check_entry_points()
    yield from check_system_libraries()
    yield check_compiler()
    yield check_kernels()
    yield check_predictor()
    yield from check_ports()
    yield check_shared_memory(SHARED_MEMORY_BYTES[platform])
    yield check_open_files()
    if model_path is not None:
        yield check_model(model_path)
    yield from check_transports(nvml.gpus(), nvml.unreachable, RDMA_DEVICES)
    for url in engines:
        yield from check_lenders(url, api_key)
    yield from check_patches(series.patches_folder())
    yield from check_hooks(platform)


def check_python() -> Finding:
    """For the record only: on an older Python than 3.11 the package neither installs nor imports."""
    return Finding("OK", "python", f"{sys.version.split()[0]} at {sys.executable}")


def check_versions() -> Iterator[Finding]:
    """Basin's own pins, then SGLang's."""
    own = _pins(DISTRIBUTION)
    own["sglang"] = sglang_basin.SGLANG_VERSION
    for name in OWN_PINS:
        yield check_version(name, own.get(name))
    inner = _pins("sglang")
    for name in SGLANG_PINS:
        yield check_version(name, inner.get(_canonical(name)))
    yield check_version("triton", None)


def check_version(name: str, expected: str | None) -> Finding:
    """`expected` None: any version. A build tag (`2.9.0+cu130`) does not count."""
    found = _version(name)
    wanted = f"{name}=={expected}" if expected else name
    if found is None:
        return Finding("FAIL", name, "not installed", f"pip install '{wanted}'")
    if expected is not None and found.split("+")[0] != expected:
        return Finding("FAIL", name, f"{found}, needs exactly {expected}", f"pip install '{wanted}'")
    return Finding("OK", name, found)


def check_mooncake(platform: str) -> Iterator[Finding]:
    """Exactly the wheel of this platform: all kinds install the same module, so the last one wins."""
    right = MOONCAKE[platform]
    installed = {
        distribution.name: distribution.version
        for distribution in metadata.distributions()
        if (distribution.name or "").startswith("mooncake-transfer-engine")
    }
    wrong = sorted(set(installed) - {right})
    if wrong:
        mend = f"pip uninstall -y {' '.join(wrong)} && pip install --force-reinstall {right}"
        yield Finding("FAIL", "mooncake", f"{', '.join(wrong)} on the {platform} platform", mend)
    elif right not in installed:
        yield Finding("FAIL", "mooncake", "not installed", f"pip install {right}")
    else:
        yield Finding("OK", "mooncake", f"{right} {installed[right]}")


def check_entry_points() -> Iterator[Finding]:
    """Without these SGLang does not know of Basin: it would serve, unprotected."""
    expected = {"sglang.srt.plugins": (PLUGIN, CPU_PLATFORM), "sglang.srt.platforms": (CPU_PLATFORM,)}
    for group, names in expected.items():
        registered = {point.name for point in metadata.entry_points(group=group)}
        missing = [name for name in names if name not in registered]
        if missing:
            mend = f"pip install --force-reinstall --no-deps {DISTRIBUTION} (or -e . in a checkout)"
            yield Finding("FAIL", f"entry points {group}", f"missing {', '.join(missing)}", mend)
        else:
            yield Finding("OK", f"entry points {group}", ", ".join(names))


def check_system_libraries() -> Iterator[Finding]:
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError as error:
            yield Finding("FAIL", library, str(error), f"apt-get install -y {package}")
        else:
            yield Finding("OK", library, "loads")


def check_kernels() -> Finding:
    """That the GPU kernels are installed; whether they compile, the tests know. Imports nothing."""
    spec = importlib.util.find_spec("basin_kernels")
    if spec is None or spec.origin is None:
        mend = f"pip install --force-reinstall --no-deps {DISTRIBUTION} (or -e . in a checkout)"
        return Finding("FAIL", "basin_kernels", "not installed", mend)
    return Finding("OK", "basin_kernels", f"page copy, at {Path(spec.origin).parent}")


def check_predictor() -> Finding:
    """That the default model runs here. Where it has never been loaded, its inner loops are compiled now."""
    from sglang_basin.predictor.model_file import default_model_path, load_model

    try:
        load_model(default_model_path())
    except Exception as error:  # noqa: BLE001 - whatever keeps it from running is the finding
        mend = "pip install --upgrade numba, or serve with --basin-predictor seen"
        return Finding("FAIL", "predictor", f"{type(error).__name__}: {error}", mend)
    return Finding("OK", "predictor", f"the shipped model loads, numba {_version('numba')}")


def check_compiler() -> Finding:
    found = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if found is None:
        return Finding(
            "FAIL", "C compiler", "none, SGLang and Triton build helpers at run time", "apt-get install -y gcc"
        )
    return Finding("OK", "C compiler", found)


def check_ports() -> Iterator[Finding]:
    """The default ports; `launch_node` finds free ones for the engines by itself."""
    offset = BasinConfig().control_port_offset
    for port, what, flag in (
        (BOOTSTRAP_PORT, "bootstrap", "--disaggregation-bootstrap-port"),
        (BOOTSTRAP_PORT + offset, "Basin's control channel", "--basin-control-port-offset"),
        (ROUTER_PORT, "router", "--port"),
    ):
        if is_free("127.0.0.1", port):
            yield Finding("OK", f"port {port}", f"free ({what})")
        else:
            yield Finding(
                "FAIL", f"port {port}", f"taken ({what})", f"stop its owner (ss -ltnp), or give another {flag}"
            )


def check_shared_memory(least_bytes: int) -> Finding:
    try:
        free_bytes = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("FAIL", "shared memory", f"/dev/shm: {error.strerror}", "mount a tmpfs on /dev/shm")
    shown = f"{free_bytes / 2**20:,.0f} MiB free in /dev/shm"
    if free_bytes < least_bytes:
        mend = "give the container more: docker run --shm-size 8g, or an emptyDir of medium Memory"
        return Finding("FAIL", "shared memory", f"{shown}, needs {least_bytes >> 20} MiB", mend)
    return Finding("OK", "shared memory", shown)


def check_open_files() -> Finding:
    """The hard limit: SGLang raises its soft limit by itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        mend = f"ulimit -Hn {OPEN_FILES} as root, LimitNOFILE= in systemd, --ulimit nofile= in docker"
        return Finding("FAIL", "open files", f"at most {hard}, needs {OPEN_FILES}: a call takes several sockets", mend)
    return Finding("OK", "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard}")


def check_model(model_path: str) -> Finding:
    folder = Path(model_path)
    if not folder.exists():
        return Finding("SKIP", "model", f"{model_path} is no local folder: taken for a Hugging Face name")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Finding("FAIL", "model", f"{folder}/config.json: {error}", "point --model-path at a model's folder")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return Finding("FAIL", "model", f"no tokenizer in {folder}", "add tokenizer.json to the folder")
    architectures = config.get("architectures") if isinstance(config, dict) else None
    return Finding("OK", "model", f"{', '.join(architectures or ['?'])} in {folder}")


def check_patches(folder: Path) -> Iterator[Finding]:
    """Every patch that `series` lists fits the installed SGLang, and no patch is unlisted."""
    try:
        patches = series.read_series(folder)
        found = series.standings(patches, series.sglang_root()) if patches else []
    except PatchError as error:
        yield Finding("FAIL", "patches", str(error), "pip install --force-reinstall --no-deps sglang-basin")
        return
    if forgotten := series.unlisted(folder, patches):
        yield Finding("FAIL", "patches", f"not in series: {', '.join(forgotten)}", f"list them in {folder / 'series'}")
    if not patches:
        yield Finding("OK", "patches", "none needed")
    for standing in found:
        names = ", ".join(change.patch for change in standing.changes)
        if standing.state == "mismatch":
            yield Finding("FAIL", f"patch {standing.path}", standing.detail, standing.mend)
        else:
            how = "applies in memory at import" if standing.state == "applicable" else "in the installed file already"
            yield Finding("OK", f"patch {standing.path}", f"{names}: {how}")


def check_transports(
    gpus: Sequence[Gpu], reaches: Callable[[str, str], str | None], rdma_devices: Path
) -> Iterator[Finding]:
    """How a prefill here would read what decodes lend, by where they run, and why. `reaches` as for `places.choose`."""
    here = Place.here(None)

    if not gpus:
        yield Finding("OK", "lent by a decode on this machine", str(choose(here, here, reaches)))
    pairs: dict[Choice, list[str]] = {}
    for decode, prefill in itertools.product(gpus, gpus):
        choice = choose(replace(here, device=prefill.uuid), replace(here, device=decode.uuid), reaches)
        pairs.setdefault(choice, []).append(f"{decode.index}→{prefill.index}")
    for choice, between in pairs.items():
        yield Finding("OK", "lent by a decode on this machine", f"{choice} (GPUs {', '.join(between)})")
    rdma = sorted(path.name for path in rdma_devices.iterdir()) if rdma_devices.is_dir() else []
    over = f"RDMA devices {', '.join(rdma)}" if rdma else f"TCP, there is no RDMA device in {rdma_devices}"
    away = choose(replace(here, device="any"), replace(here, machine="another", device="any"), reaches)
    yield Finding("OK", "lent by a decode elsewhere", f"{away}; {over}")


def check_lenders(url: str, api_key: str | None) -> Iterator[Finding]:
    """What a running prefill says of the decodes that have lent to it."""
    try:
        report = top.fetch(url, api_key, ENGINE_ANSWER_S)
    except top.NoStatus as problem:
        yield Finding("FAIL", f"engine {url}", str(problem), "give a running engine's own address")
        return
    lenders = [lender for state in report.states for lender in state.lenders]
    if not lenders:
        yield Finding("SKIP", f"lent to {url}", "nobody has lent to it so far")
    for lender in lenders:
        yield Finding("OK", f"lent to {url} by {lender.name}", f"{lender.transport}: {lender.why}")


def check_hooks(platform: str, hooks: Iterable[Hook] | None = None) -> Iterator[Finding]:
    """Every hook's target in the installed SGLang; `hooks` None means Basin's table. Imports SGLang."""
    from sglang_basin.engine.hooks import HOOKS, LENDING, mismatches

    table = tuple(HOOKS + LENDING if hooks is None else hooks)
    if platform == "cpu":
        os.environ.setdefault("SGLANG_PLATFORM", CPU_PLATFORM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's modules warn of kernels that this machine lacks
        wrong = {mismatch.target: mismatch for mismatch in mismatches(table)}
    for hook in table:
        if mismatch := wrong.get(hook.target):
            yield Finding("FAIL", f"hook {hook.target}", mismatch.problem, mismatch.mend)
        else:
            yield Finding("OK", f"hook {hook.target}", f"{hook.kind}: {hook.why}")


def gpu_names() -> list[str]:
    """GPUs that the NVIDIA driver shows; empty without one."""
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pins(distribution: str) -> dict[str, str]:
    """Packages that `distribution` requires in exactly one version, by canonical name."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return {}
    pinned = (re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^;,\s]+)", line) for line in requirements)
    return {_canonical(match[1]): match[2] for match in pinned if match}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.doctor",
        description="Checks whether Basin can run here; says how to mend what not.",
    )
    parser.add_argument("--json", action="store_true", help="a JSON list of {status, check, detail, mend}")
    parser.add_argument("--model-path", metavar="M", help="check this model's folder too")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="a running prefill engine: by which transport it reads what each decode lends; may be given again",
    )
    parser.add_argument("--api-key", default=os.environ.get(top.KEY_VARIABLE), help=f"or ${top.KEY_VARIABLE}")
    known = parser.parse_args(argv)
    for url in known.engine:
        if not url.startswith(("http://", "https://")):
            parser.error(f"--engine: {url!r} must begin with http:// or https://")
    findings = []
    for finding in examine(known.model_path, known.engine, known.api_key):
        findings.append(finding)
        if not known.json:
            print(finding, flush=True)
    failed = sum(finding.status == "FAIL" for finding in findings)
    if known.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(f"{len(findings)} checks, {failed} failed" if failed else f"{len(findings)} checks, all well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
