"""What a platform asks of each SGLang server: flags and environment variables, with their reasons.

Read by the launchers, which put a profile's flags *before* the user's own, so that a flag given twice means what the
user said (argparse keeps the last). Imports neither sglang nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]
"""What a server does: one side of a disaggregated pair, or both in one process."""

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")

CPU_PLATFORM = "basin_cpu"
"""The name under which `pyproject.toml` registers the CPU platform with SGLang."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One platform's needs. `common` goes to every server, the others to that role alone.

    `variables` are the environment variables of every server. `pins_cores` says whether the platform computes on CPU
    cores, so that `environment(cores=...)` means something.
    """

    name: str
    common: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    pins_cores: bool = False

    def engine_arguments(self, role: Role) -> list[str]:
        """SGLang flags for a server of this role. Raises ValueError for an unknown role."""
        _check_role(role)
        own = {"prefill": self.prefill, "decode": self.decode, "both": ()}[role]
        return [*self.common, *own]

    def environment(self, *, role: Role, cores: str | None, ranks: int = 1) -> dict[str, str]:
        """Variables to set for a server of this role, on top of the launcher's own environment.

        `cores` names the CPU cores that its model runs on, as `taskset -c` writes them ("0", "2-3", "0,4-5"); None
        leaves the placement to the kernel, one thread a server. Its `ranks` (tensor, pipeline and data parallel ones)
        share them. A platform that does not compute on the CPU ignores both. Raises ValueError for an unknown role or
        malformed cores.
        """
        _check_role(role)
        count = len(parse_cores(cores)) if cores is not None else 1
        values = dict(self.variables)
        if self.pins_cores:
            # torch's own default is one thread per core in every server: three servers then fight over each core
            # (seen on two cores: 5.8 requests/s, against 35.6 with one thread a server).
            values["OMP_NUM_THREADS"] = str(count)
            if cores is not None:
                values["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * ranks)
        return values


def parse_cores(text: str) -> tuple[int, ...]:
    """The CPU numbers that a `taskset -c` list names, ascending. Raises ValueError naming the mend."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not (low.isascii() and low.isdigit()) or (dash and not (high.isascii() and high.isdigit())):
            raise ValueError(f'cores: expected a list such as "0", "2-3" or "0,4-5", got {text!r}')
        first, last = int(low), int(high if dash else low)
        if last < first or last >= 4096:
            raise ValueError(f"cores: {part.strip()!r} in {text!r} is not a range of CPU numbers")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ValueError(f"role: must be one of {', '.join(ROLES)}, got {role!r}")


CPU = Profile(
    name="cpu",
    common=(
        *("--device", "cpu"),
        # The only attention backend that is plain torch; the others are CUDA or AMX kernels.
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        # Overlap hides the scheduler behind a device's kernels; here both are the same core.
        "--disable-overlap-schedule",
        # An idle scheduler otherwise spins on a whole core, which its neighbours need.
        "--sleep-on-idle",
        # Bound the request tables and the logits buffers: 2.5 instead of 3.6 GiB a server.
        *("--max-running-requests", "64"),
        *("--context-length", "16384"),
    ),
    prefill=("--disaggregation-transfer-backend", "mooncake_tcp"),
    decode=(
        *("--disaggregation-transfer-backend", "mooncake_tcp"),
        # The default keeps retracted KV in pinned memory, which means CUDA.
        *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    ),
    variables=(
        ("SGLANG_PLATFORM", CPU_PLATFORM),
        # The scheduler then imports one model file instead of all; other architectures still load, only later.
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang_basin.platforms.models"),
        # Each engine process imports 8,000 modules. Where the caller's environment forbids cached bytecode
        # (containers often do) it compiles them anew, 20 s instead of 8; empty means allowed.
        ("PYTHONDONTWRITEBYTECODE", ""),
    ),
    pins_cores=True,
)

CUDA = Profile(
    name="cuda",
    prefill=("--disaggregation-transfer-backend", "mooncake"),
    decode=("--disaggregation-transfer-backend", "mooncake"),
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in (CPU, CUDA)}
