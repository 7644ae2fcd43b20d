"""What a node consists of: a pure function from the user's options to processes with exact commands.

`make_plan` decides everything (ports come from a `Ports` that it is given); `Node` starts what it says, and
`Plan.shell` prints it for people who start processes by other means.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sglang_basin.config import OPTIONS, BasinConfig, ConfigError
from sglang_basin.engine.flags import values_of
from sglang_basin.platforms.profiles import PROFILES, parse_cores
from sglang_basin.wire import SESSION_HEADERS

Role = Literal["prefill", "decode", "router"]

ROUTING_KEY_HEADERS = (*SESSION_HEADERS, "x-smg-routing-key")
"""Headers that tell the router which session a call belongs to, the most explicit first."""

ROUTER_ARGUMENTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--prefill-policy", "consistent_hashing"), "a session stays on one prefill, which alone guards its cache"),
    (("--decode-policy", "consistent_hashing"), "a session stays on one decode, where its finished KV is kept"),
    (("--routing-key-headers", *ROUTING_KEY_HEADERS), "what names the session; calls without one are spread at random"),
    (("--disable-retries",), "a replayed call multiplies load exactly when it hurts"),
    (("--disable-circuit-breaker",), "ten 503s of the door would otherwise close the whole node for a minute"),
    (("--disable-worker-overload-protection",), "it is for decodes alone, see --spare-decode-at"),
    (("--worker-wedge-secs", "3600"), "a decode whose calls wait at the door is not stuck"),
    (("--health-check-timeout-secs", "30"), "a busy engine answers late; it is not gone"),
    (("--worker-startup-check-interval", "1"), "engines are up before the router: register them at once"),
    (("--shutdown-grace-period-secs", "3"), "the engines end at the same time anyway"),
    (("--disable-tokenizer-autoload",), "engines tokenize; the router forwards text"),
)
"""The router's flags, each with its reason; `--router-args` come after them, so that they win."""

MANAGED = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--disagg-mode",
    "--disaggregation-mode",
    "--disaggregation-bootstrap-port",
    "--base-gpu-id",
)
"""SGLang flags that differ between engines or tie them together: the node sets them."""

_SIZES = {
    "tp": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "pp": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "dp": ("--dp-size", "--dp", "--data-parallel-size"),
    "attn-dp": ("--attn-dp-size", "--attention-data-parallel-size"),
}


SPARE_DECODE_AT = 0.95
"""Behind this a decode begins to make calls wait and to take memory back from running ones."""

_ATTENTION_GROUPS = "--enable-dp-attention"
"""With it `--dp-size` counts attention's groups, not replicas."""


class PlanError(ConfigError):
    """Options that make no node: the message names the option and the mend."""


class PortSource(Protocol):
    def take(self, port: int, purpose: str) -> int: ...
    def find(self, *, also: Sequence[int] = ()) -> int: ...


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What the user asked for. `config` None means stock SGLang; `port` 0 lets the node choose.

    `cores` is "auto", "none", "PREFILL;DECODE" or one list per engine, as `taskset -c` writes lists. `gpus` are the
    devices to use in order (CUDA platform only); naming one twice lets two engines share it. `spare_decode_at` is the
    part of a decode's KV pool in use by running calls from which on its sessions' calls go to another decode that has
    room; 0 is never, and so is stock SGLang.
    """

    model_path: str
    prefill: int = 1
    decode: int = 1
    platform: str = "cpu"
    config: BasinConfig | None = None
    engine_arguments: tuple[str, ...] = ()
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    router_arguments: tuple[str, ...] = ()
    spare_decode_at: float = SPARE_DECODE_AT
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 30000
    cores: str = "auto"
    gpus: tuple[str, ...] = ()
    log_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of the node. `environment` is what it needs on top of the launcher's own; `cores` where it runs."""

    name: str
    role: Role
    command: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    cores: tuple[int, ...] = ()
    bootstrap_port: int | None = None
    log: Path | None = None

    def shell(self) -> str:
        """The command as one line for a shell."""
        words = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        words = ["env", *words] if words else []
        if self.cores:
            words += ["taskset", "-c", ",".join(map(str, self.cores))]
        return shlex.join([*words, *self.command])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole node: engines, then the router in front of them, at `url`. `spare_decode_at` as in `NodeOptions`; None
    where there is nothing to set."""

    engines: tuple[Process, ...]
    router: Process
    host: str
    spare_decode_at: float | None = None

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def processes(self) -> tuple[Process, ...]:
        return (*self.engines, self.router)

    def of(self, role: Role) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role == role)

    def shell(self) -> str:
        """Every command with its environment, in starting order; then what the router is told once it runs."""
        lines = [f"# {process.name}: {process.url}\n{process.shell()}" for process in self.processes]
        if self.spare_decode_at is not None:
            body = json.dumps(spec_of_spared("DECODE_URL", self.spare_decode_at))
            put = f"curl -X PUT {self.url}/workers/ID -H 'Content-Type: application/json' -d {shlex.quote(body)}"
            lines.append(f"# then, for each decode in the router's /workers:\n# {put}")
        return "\n".join(lines)


def make_plan(options: NodeOptions, ports: PortSource, available_cores: Sequence[int]) -> Plan:
    """Decide ports, cores, GPUs and commands. Raises PlanError, or PortError from `ports`."""
    _check(options)
    roles: list[Role] = [*["prefill"] * options.prefill, *["decode"] * options.decode]  # type: ignore[list-item]
    router_port = ports.take(options.port, "--port (the router)") if options.port else ports.find()
    cores = _assign_cores(options, roles, available_cores)
    gpus = _assign_gpus(options, roles)
    engines = []
    for index, role in enumerate(roles):
        name = f"{role}-{roles[:index].count(role)}"
        engines.append(_engine(options, name, role, ports, cores[index], gpus[index]))
    router = _router(options, engines, router_port, ports)
    spares = options.config is not None and options.decode > 1 and options.spare_decode_at > 0
    at = options.spare_decode_at if spares else None
    return Plan(engines=tuple(engines), router=router, host=options.host, spare_decode_at=at)


def spec_of_spared(url: str, at: float) -> dict[str, Any]:
    """The worker as the router's PUT /workers/{id} wants it. smg has the threshold as a flag too, but then it holds for
    prefill as well, and with every prefill over it smg forgets which decode a session is pinned to (seen, 1.13.0)."""
    return {"url": url, "worker_type": "decode", "overload": {"token_usage": at}}


def basin_flags(config: BasinConfig) -> list[str]:
    """The flags that say `config`: at least one, as any flag turns Basin on; else only what differs from default."""
    words = ["--basin-admission", config.admission]
    for option in OPTIONS:
        value = getattr(config, option.name)
        if option.name != "admission" and value != option.default:
            words += [option.flag, str(value)]
    return words


def url_of(host: str, port: int) -> str:
    """Where a client on this machine reaches a server bound to `host`."""
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}"


def engine_host(host: str) -> str:
    """Engines serve the router only: where that listens on every interface, they stay on the loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _check(options: NodeOptions) -> None:
    if options.platform not in PROFILES:
        raise PlanError(f"--platform {options.platform}: must be one of {', '.join(PROFILES)}")
    for name, count in (("--prefill", options.prefill), ("--decode", options.decode)):
        if not 1 <= count <= 64:
            raise PlanError(f"{name} {count}: must be between 1 and 64")
    if not 0 <= options.spare_decode_at <= 1:
        raise PlanError(f"--spare-decode-at {options.spare_decode_at:g}: must be between 0 (never) and 1")
    given = {
        "SGLang flags": options.engine_arguments,
        "--prefill-args": options.prefill_arguments,
        "--decode-args": options.decode_arguments,
    }
    for where, words in given.items():
        for word in words:
            flag = word.split("=", 1)[0]
            if flag in MANAGED:
                raise PlanError(f"{flag} in {where}: launch_node sets it for each engine; leave it out")
            if flag.startswith("--basin-"):
                raise PlanError(f"{flag} in {where}: give it once, to launch_node itself")
        if words and not words[0].startswith("-"):
            raise PlanError(f"{where}: expected SGLang flags, got {words[0]!r}")


def _engine(
    options: NodeOptions,
    name: str,
    role: Literal["prefill", "decode"],
    ports: PortSource,
    cores: tuple[int, ...],
    base_gpu: int | None,
) -> Process:
    profile = PROFILES[options.platform]
    host = engine_host(options.host)
    port = ports.find()
    module, mode = "sglang.launch_server", "--disaggregation-mode"
    if options.config is not None:
        module, mode = "sglang_basin.launch_server", "--disagg-mode"
    words = ["--model-path", options.model_path, mode, role, "--host", host, "--port", str(port)]
    bootstrap_port = None
    if role == "prefill":
        first_door = options.config.control_port_offset if options.config else 0
        doors = _size(options, role, "dp") * _size(options, role, "attn-dp")
        bootstrap_port = ports.find(also=range(first_door, first_door + doors) if options.config else ())
        words += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if base_gpu is not None:
        words += ["--base-gpu-id", str(base_gpu)]
    words += profile.engine_arguments(role)
    words += options.engine_arguments
    words += options.prefill_arguments if role == "prefill" else options.decode_arguments
    if options.config is not None:
        words += basin_flags(options.config)
    environment = profile.environment(role=role, cores=",".join(map(str, cores)) or None, ranks=_devices(options, role))
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(options.gpus))
    return Process(
        name=name,
        role=role,
        command=(sys.executable, "-m", module, *words),
        environment={**environment, **options.environment},
        url=url_of(host, port),
        cores=cores,
        bootstrap_port=bootstrap_port,
        log=options.log_dir / f"{name}.log" if options.log_dir else None,
    )


def _router(options: NodeOptions, engines: Sequence[Process], port: int, ports: PortSource) -> Process:
    words = ["--pd-disaggregation"]
    for engine in engines:
        words += [f"--{engine.role}", engine.url]
        if engine.bootstrap_port is not None:
            words.append(str(engine.bootstrap_port))
    words += ["--host", options.host, "--port", str(port)]
    words += ["--prometheus-host", engine_host(options.host), "--prometheus-port", str(ports.find())]
    words += [word for group, _ in ROUTER_ARGUMENTS for word in group]
    words += options.router_arguments
    return Process(
        name="router",
        role="router",
        command=(sys.executable, "-m", "smg", "launch", *words),
        environment={},
        url=url_of(options.host, port),
        log=options.log_dir / "router.log" if options.log_dir else None,
    )


def _assign_cores(options: NodeOptions, roles: Sequence[Role], available: Sequence[int]) -> list[tuple[int, ...]]:
    """Cores for each engine; an empty tuple leaves it to the kernel."""
    if options.cores == "none" or (options.cores == "auto" and not PROFILES[options.platform].pins_cores):
        return [()] * len(roles)
    if options.cores == "auto":
        if len(available) < 2:
            return [()] * len(roles)
        # Prefill computes whole prompts, decode single tokens: half of the cores for either side, shared out evenly.
        half = len(available) // 2
        sides = {"prefill": available[:half], "decode": available[half:]}
        return [_share(sides[role], roles[:index].count(role), roles.count(role)) for index, role in enumerate(roles)]
    try:
        groups = [parse_cores(part) for part in options.cores.split(";")]
    except ValueError as error:
        raise PlanError(f"--cores {options.cores!r}: {error}") from None
    if missing := sorted({core for group in groups for core in group} - set(available)):
        raise PlanError(f"--cores {options.cores!r}: this process may not use core {missing[0]}")
    if len(groups) == len(roles):
        return groups
    if len(groups) == 2:
        return [groups[0] if role == "prefill" else groups[1] for role in roles]
    raise PlanError(
        f"--cores {options.cores!r}: expected 'PREFILL;DECODE' or one list for each of the {len(roles)} engines"
    )


def _share(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """The part of `cores` for one of `count` engines; with fewer cores than engines they take turns."""
    if len(cores) < count:
        return (cores[index % len(cores)],)
    size = len(cores) // count
    return tuple(cores[index * size : (index + 1) * size])


def _assign_gpus(options: NodeOptions, roles: Sequence[Role]) -> list[int | None]:
    """The first device of each engine, counted among the visible ones; None where the platform has no GPU."""
    if options.platform != "cuda":
        if options.gpus:
            raise PlanError("--gpus: only with --platform cuda")
        return [None] * len(roles)
    sizes = [_devices(options, role) for role in roles]
    if len(options.gpus) < sum(sizes):
        raise PlanError(
            f"--gpus: {len(roles)} engines need {sum(sizes)} GPUs ({' + '.join(map(str, sizes))}), "
            f"found {len(options.gpus)}; lower --prefill, --decode or --tp, or name one twice to share it"
        )
    visible = list(dict.fromkeys(options.gpus))
    bases: list[int | None] = []
    first = 0
    for size in sizes:
        mine = list(options.gpus[first : first + size])
        base = visible.index(mine[0])
        if visible[base : base + size] != mine:
            raise PlanError(f"--gpus: {','.join(mine)} must be neighbours in {','.join(visible)}")
        bases.append(base)
        first += size
    return bases


def _devices(options: NodeOptions, role: Role) -> int:
    """GPUs of one engine, or its ranks on CPU cores: tensor times pipeline size times replicas. Attention's own
    data-parallel groups lie within tensor parallelism."""
    replicas = 1 if _ATTENTION_GROUPS in _words(options, role) else _size(options, role, "dp")
    return _size(options, role, "tp") * _size(options, role, "pp") * replicas


def _size(options: NodeOptions, role: Role, name: str) -> int:
    flags = _SIZES[name]
    values = values_of(_words(options, role), *flags)
    if values and not re.fullmatch(r"[1-9]\d*", values[-1]):
        raise PlanError(f"{flags[0]} {values[-1]}: expected a number of GPUs")
    return int(values[-1]) if values else 1


def _words(options: NodeOptions, role: Role) -> tuple[str, ...]:
    own = options.prefill_arguments if role == "prefill" else options.decode_arguments
    return (*options.engine_arguments, *own)
