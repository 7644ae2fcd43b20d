"""Basin's configuration: one frozen record, one table of options.

`OPTIONS` is the authority. Flags (`--basin-*`), the TOML file (`--basin-config`), the environment variable that
carries the configuration into SGLang's subprocesses and the README's table are all made from it. Basin is *on* when
a configuration exists at all; with none, `engine.plugin` registers no hook.

This module imports neither sglang nor torch: launchers and tests read it without paying for an engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT_VARIABLE = "BASIN_CONFIG"
"""Set to the configuration's JSON by the launchers; absent means Basin is off."""


class ConfigError(ValueError):
    """A wrong option: the message names the option and the mend."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of the option table.

    `name` is the field of `BasinConfig` (and, with dashes, the flag), `parse` turns a flag's text into the value,
    `check` returns what is wrong with a value or None, `why` gives the reason for the default.
    """

    name: str
    parse: Callable[[str], Any]
    types: tuple[type, ...]
    default: Any
    help: str
    why: str
    check: Callable[[Any], str | None] = lambda value: None

    @property
    def flag(self) -> str:
        return "--basin-" + self.name.replace("_", "-")


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else f"must be one of {', '.join(choices)}"


def _at_least(low: float) -> Callable[[Any], str | None]:
    return lambda value: None if value is None or low <= value < math.inf else f"must be at least {low:g} and finite"


def _between(low: float, high: float) -> Callable[[Any], str | None]:
    return lambda value: None if low <= value <= high else f"must be between {low:g} and {high:g}"


OPTIONS: tuple[Option, ...] = (
    Option(
        name="admission",
        parse=str,
        types=(str,),
        default="current",
        help="what a live session reserves: 'current' its current context, 'peak' its predicted longest one, 'partial' "
        "a part of the growth between the two; 'off' lets every call pass and only watches",
        why="serves most while sessions may be paused, and nobody waits for growth that may not come; without pausing "
        "take 'partial' (benchmarks/sim_law.py)",
        check=_one_of("current", "partial", "peak", "off"),
    ),
    Option(
        name="reserved_growth",
        parse=float,
        types=(float, int),
        default=0.75,
        help="under 'partial', the part of the predicted growth that is reserved: 0 is 'current', 1 is 'peak'",
        why="the middle of a plateau from 0.5 to 1 without pausing, over twelve simulated scenarios",
        check=_between(0.0, 1.0),
    ),
    Option(
        name="budget_tokens",
        parse=int,
        types=(int, type(None)),
        default=None,
        help="working set, in tokens, up to which new sessions enter at once",
        why="unset: the size of prefill's KV pool, what the cache can hold at most",
        check=_at_least(1),
    ),
    Option(
        name="knee_tokens",
        parse=int,
        types=(int, type(None)),
        default=None,
        help="working set above which the hit rate collapses, from calibration; the budget is then at most 0.9 of it",
        why="unset: the budget is the whole capacity of the cache",
        check=_at_least(1),
    ),
    Option(
        name="adaptive_band",
        parse=float,
        types=(float, int),
        default=0.0,
        help="how far the budget may move from its reference, as a part of it: up while sessions queue and the hit "
        "rate is high, down once it falls",
        why="the budget stays where it is: pausing corrects what it lets in too many; with 'partial' take 0.3 "
        "(benchmarks/sim_law.py)",
        check=_between(0.0, 0.95),
    ),
    Option(
        name="pausing",
        parse=str,
        types=(str,),
        default="on",
        help="'on' holds the next call of sessions that have entered, the shortest first, while the contexts inside "
        "come near the budget's reference; 'off' lets every session that has entered run to completion",
        why="first predictions are poor: what they let in too many must leave for a while (benchmarks/sim_ablation.py)",
        check=_one_of("on", "off"),
    ),
    Option(
        name="predictor",
        parse=str,
        types=(str,),
        default="trained",
        help="where predicted peaks come from: 'seen' the sessions that ended here, 'trained' the model that comes "
        "with Basin, corrected by them; or a model file of fit_predictor",
        why="knows agents from their first call on, and is corrected by what it sees",
        check=lambda value: None if value else "must not be empty",
    ),
    Option(
        name="session_log",
        parse=str,
        types=(str, type(None)),
        default=None,
        help="file that finished sessions are appended to, rotated at 16 MiB, for fit_predictor: token counts and "
        "hashed features, no text and no names; one file per prefill instance",
        why="unset: written only where somebody wants to fit a model",
    ),
    Option(
        name="order",
        parse=str,
        types=(str,),
        default="size",
        help="who goes first at the door and in the queues of prefill and decode: 'arrival' the earlier session, "
        "'size' the one of lower arrival time + predicted peak / r",
        why="serves more sessions in time than the order of arrival does (benchmarks/sim_law.py)",
        check=_one_of("arrival", "size"),
    ),
    Option(
        name="order_tokens_per_s",
        parse=float,
        types=(float, int),
        default=10.0,
        help="r of 'size': so many tokens of predicted peak weigh as much as a second of waiting",
        why="serves as much as the article's 30 where the cache is short, more where decode memory is",
        check=_at_least(1e-3),
    ),
    Option(
        name="infer_sessions",
        parse=str,
        types=(str,),
        default="on",
        help="'on' tells by their prompts which calls without a session's name belong together: one that extends a "
        "context is its next call; 'off' lets all such calls pass, uncounted",
        why="clients need not change anything",
        check=_one_of("on", "off"),
    ),
    Option(
        name="idle_timeout_s",
        parse=float,
        types=(float, int),
        default=600.0,
        help="a session without a call in flight for this long has ended",
        why="no coding client announces its end; ten minutes outlast nearly every recorded tool run",
        check=_at_least(0.1),
    ),
    Option(
        name="idle_floor_s",
        parse=float,
        types=(float, int),
        default=60.0,
        help="the time-out shrinks with the tool times seen, but not below this; the time-out's own value "
        "keeps it fixed",
        why="recorded coding sessions allow 62 to 256 s (benchmarks/idle_timeout.py)",
        check=_at_least(0.1),
    ),
    Option(
        name="final_grace_s",
        parse=float,
        types=(float, int),
        default=60.0,
        help="a session ends this long after an answer without a tool call to a request that offered tools, if no call "
        "follows (needs SGLang's --tool-call-parser)",
        why="an agent that calls no tool is done; a person who reads the answer may have one more question",
        check=_between(0.0, 86_400.0),
    ),
    Option(
        name="hold_limit_s",
        parse=float,
        types=(float, int),
        default=240.0,
        help="a call waits at the door at most this long, then is answered 503 with the reason and when to come back",
        why="below the time-outs of coding clients (300 s and more), so that the answer still reaches them",
        check=_between(0.0, 3600.0),
    ),
    Option(
        name="ticket_grace_s",
        parse=float,
        types=(float, int),
        default=120.0,
        help="a waiting session keeps its place this long after its client has left or was answered 503",
        why="twice the longest pause between two tries of the SDKs, so that a retry finds its place",
        check=_between(0.0, 86_400.0),
    ),
    Option(
        name="max_queue",
        parse=int,
        types=(int, type(None)),
        default=None,
        help="sessions that may wait at the door; above it new ones are answered 503 at once",
        why="unset: as many as --basin-max-live-sessions",
        check=_at_least(0),
    ),
    Option(
        name="shedding",
        parse=str,
        types=(str,),
        default="on",
        help="'on' drops the waiting session that comes last when more sessions arrive over --basin-shed-window-s than "
        "ever left and the first one waits over --basin-shed-wait-s",
        why="waiting longer helps nobody when capacity is truly short",
        check=_one_of("on", "off"),
    ),
    Option(
        name="shed_wait_s",
        parse=float,
        types=(float, int),
        default=120.0,
        help="how long the first session in the queue may wait before anybody is dropped",
        why="half the hold limit",
        check=_at_least(0.0),
    ),
    Option(
        name="shed_window_s",
        parse=float,
        types=(float, int),
        default=1800.0,
        help="how long a time the arrivals are counted over, and how long the engine runs before anybody is dropped",
        why="three times a ten-minute surge, which is to wait, not to be dropped",
        check=_between(1.0, 86_400.0),
    ),
    Option(
        name="lending",
        parse=str,
        types=(str,),
        default="off",
        help="'on' keeps finished calls' KV in memory that decode does not need, and reads back to prefill what its "
        "own cache has lost",
        why="off until it has been measured on GPUs",
        check=_one_of("on", "off"),
    ),
    Option(
        name="lent_share",
        parse=float,
        types=(float, int),
        default=0.5,
        help="part of decode's KV pool that finished calls may keep; the oldest goes first, and all of it before a "
        "call on decode waits",
        why="the article's",
        check=_between(0.0, 1.0),
    ),
    Option(
        name="lending_patience_s",
        parse=float,
        types=(float, int),
        default=2.0,
        help="a call waits for its lent part at most this long; what is missing is then computed",
        why="well above a pull that works, and little beside computing a long context anew",
        check=_between(0.01, 20.0),
    ),
    Option(
        name="lending_transport",
        parse=str,
        types=(str,),
        default="auto",
        help="how prefill reads lent KV: 'auto' maps the memory of a decode on its own machine (CUDA IPC) and reads "
        "from others through Mooncake; 'mooncake' maps nothing",
        why="mapped memory needs no NIC and no staging, and is used once it has brought what Mooncake does; "
        "doctor says what it comes to",
        check=_one_of("auto", "mooncake"),
    ),
    Option(
        name="control_host",
        parse=str,
        types=(str, type(None)),
        default=None,
        help="address that prefill's control channel binds to",
        why="unset: SGLang's own --host, the address the user already chose",
    ),
    Option(
        name="control_port_offset",
        parse=int,
        types=(int,),
        default=1000,
        help="prefill's control channel listens at its bootstrap port plus this, that of each further data-parallel "
        "rank one port higher; the same on prefill and decode",
        why="decode then finds it from the bootstrap address that each request carries, without any directory",
        check=_between(1, 50000),
    ),
    Option(
        name="record",
        parse=str,
        types=(str, type(None)),
        default=None,
        help="file that prefill's door writes what it is told and answers to, one JSON line each, up to 256 MiB; "
        "`sglang_basin.policy.recording.replay` runs it again",
        why="unset: for development and for reporting a surprise; it names sessions",
    ),
    Option(
        name="decision_log",
        parse=str,
        types=(str, type(None)),
        default=None,
        help="file of prefill's decisions, one JSON line each with its reason and numbers; it rotates at 64 MiB, four "
        "files at most, and names sessions by a hash",
        why="unset: the metrics count decisions by reason; the log is for asking why one of them fell",
    ),
    Option(
        name="max_live_sessions",
        parse=int,
        types=(int,),
        default=100_000,
        help="sessions remembered at once; above it the longest idle one is forgotten",
        why="bounds memory (under 2 KB a session) against clients that never reuse an id",
        check=_between(1, 10_000_000),
    ),
)

_BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class BasinConfig:
    """The validated configuration. Field meanings, units and defaults are in `OPTIONS`."""

    admission: str = "current"
    reserved_growth: float = 0.75
    budget_tokens: int | None = None
    knee_tokens: int | None = None
    adaptive_band: float = 0.0
    pausing: str = "on"
    predictor: str = "trained"
    session_log: str | None = None
    order: str = "size"
    order_tokens_per_s: float = 10.0
    infer_sessions: str = "on"
    idle_timeout_s: float = 600.0
    idle_floor_s: float = 60.0
    final_grace_s: float = 60.0
    hold_limit_s: float = 240.0
    ticket_grace_s: float = 120.0
    max_queue: int | None = None
    shedding: str = "on"
    shed_wait_s: float = 120.0
    shed_window_s: float = 1800.0
    lending: str = "off"
    lent_share: float = 0.5
    lending_patience_s: float = 2.0
    lending_transport: str = "auto"
    control_host: str | None = None
    control_port_offset: int = 1000
    record: str | None = None
    decision_log: str | None = None
    max_live_sessions: int = 100_000

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.name)
            if not isinstance(value, option.types) or isinstance(value, bool):
                expected = " or ".join(kind.__name__ for kind in option.types)
                raise ConfigError(f"{option.flag}: expected {expected}, got {value!r}")
            if wrong := option.check(value):
                raise ConfigError(f"{option.flag}: {wrong}, got {value!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str) -> BasinConfig:
        """Build from option names; `source` names the place in errors. Raises ConfigError."""
        for key in values:
            if key.replace("-", "_") not in _BY_NAME:
                raise ConfigError(f"{source}: unknown option {key!r}{_nearest(key, _BY_NAME)}")
        return cls(**{key.replace("-", "_"): value for key, value in values.items()})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> BasinConfig | None:
        """The configuration a launcher left in the environment, or None when Basin is off. Raises ConfigError."""
        text = environ.get(ENVIRONMENT_VARIABLE)
        if not text:
            return None
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{ENVIRONMENT_VARIABLE}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{ENVIRONMENT_VARIABLE}: expected a JSON object of options")
        return cls.from_mapping(values, ENVIRONMENT_VARIABLE)


def _nearest(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def read_file(path: Path) -> dict[str, Any]:
    """The options of a TOML file (top-level keys are option names). Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--basin-config {path}: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--basin-config {path}: not TOML ({error})") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


def flag_parser() -> argparse.ArgumentParser:
    """A parser of the `--basin-*` flags alone, for launchers to use as a parent. Unset flags leave no attribute."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    group = parser.add_argument_group("Basin")
    group.add_argument("--basin-config", type=Path, metavar="FILE", help="TOML file with any of the options below")
    for option in OPTIONS:
        default = "unset" if option.default is None else option.default
        group.add_argument(
            option.flag,
            dest=option.name,
            type=option.parse,
            metavar=option.name.rsplit("_", 1)[-1].upper(),
            help=f"{option.help} (default: {default}; {option.why})".replace("%", "%%"),
        )
    return parser


def split_flags(argv: Sequence[str]) -> tuple[BasinConfig | None, list[str]]:
    """Take the `--basin-*` flags out of `argv`.

    Returns the configuration (None when no such flag is given: Basin is off) and the other arguments, untouched.
    A flag beats the file. Raises ConfigError for unknown or wrong ones.
    """
    known, others = flag_parser().parse_known_args(list(argv))
    for word in others:
        flag = word.split("=", 1)[0]
        if flag.startswith("--basin"):
            flags = ["--basin-config", *(option.flag for option in OPTIONS)]
            raise ConfigError(f"unknown flag {flag}{_nearest(flag, flags)}")
    given = vars(known)
    if not given:
        return None, others
    path = given.pop("basin_config", None)
    values = read_file(path) if path is not None else {}
    source = f"--basin-config {path}" if path is not None else "flags"
    BasinConfig.from_mapping(values, source)  # the file alone must stand, so that errors name it
    return BasinConfig.from_mapping({**{k.replace("-", "_"): v for k, v in values.items()}, **given}, source), others


def options_markdown() -> str:
    """The README's table of options."""
    rows = ["| flag | default | meaning | why this default |", "| --- | --- | --- | --- |"]
    for option in OPTIONS:
        default = "unset" if option.default is None else f"{option.default}"
        rows.append(f"| `{option.flag}` | {default} | {option.help} | {option.why} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(options_markdown())
