"""What Basin asks of SGLang's own settings: flags and environment variables, each with its reason.

One table for each of three kinds. `NEEDED` are flags that Basin sets, `REFUSED` are settings under which it cannot
work, `RAISED` are time-outs that must outlast the longest hold. `prepare` applies them to a command line before
SGLang is imported; `check_record` looks again at what SGLang parsed, which also covers abbreviated flags and
`--config` files.

Imports neither sglang nor torch. Flag spellings and defaults are those of SGLang 0.5.23 (`srt/arg_groups/fields`,
`srt/environ.py`).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_basin.config import BasinConfig, ConfigError
from sglang_basin.platforms.profiles import CPU_PLATFORM

PLUGIN = "basin"
"""Basin's entry point in the group `sglang.srt.plugins`; without it no hook is registered."""

MODE_FLAG = "--disaggregation-mode"
MODE_ALIAS = "--disagg-mode"
MODES = ("prefill", "decode")
CONFIG_FLAG = "--config"
"""SGLang's YAML file of flags; what it sets is known only once SGLang has parsed it."""


class FlagConflict(ConfigError):
    """The user's setting and Basin's contradict each other: the message names both and the mend."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """A boolean SGLang flag that Basin sets, where `when` holds. `field` is its attribute of `ServerArgs`."""

    flag: str
    field: str
    why: str
    when: Callable[[BasinConfig, str], bool] = lambda config, mode: True
    """Takes the mode, "prefill" or "decode", too."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A SGLang setting that Basin allows only some values of.

    `accepts` takes the parsed value, None where SGLang's record has no value. `default` is SGLang's own value.
    """

    flag: str
    field: str
    parse: Callable[[str], Any] | None  # None for a boolean flag
    accepts: Callable[[Any], bool]
    needs: str
    why: str
    against: str = "--basin-*"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A SGLang time-out, in whole seconds, that runs while Basin holds a call. `default_s` is SGLang's."""

    variable: str
    default_s: int
    why: str

    def value_s(self, config: BasinConfig) -> int:
        """The longest hold comes on top of what SGLang itself allows for."""
        return self.default_s + math.ceil(config.hold_limit_s)


NEEDED: tuple[Needed, ...] = (
    Needed(
        flag="--enable-priority-scheduling",
        field="enable_priority_scheduling",
        why="prefill's waiting queue and decode's queues take calls in Basin's order",
    ),
    Needed(
        flag="--schedule-low-priority-values-first",
        field="schedule_low_priority_values_first",
        why="a priority is a point in time: the earliest goes first",
    ),
    Needed(
        flag="--disable-priority-preemption",
        field="disable_priority_preemption",
        why="an admitted call runs to its end; preempting it would throw its KV away",
    ),
    Needed(
        flag="--enable-cache-report",
        field="enable_cache_report",
        why="usage.prompt_tokens_details.cached_tokens shows clients the hit rate",
    ),
    Needed(
        flag="--disaggregation-decode-enable-radix-cache",
        field="disaggregation_decode_enable_radix_cache",
        why="--basin-lending keeps finished calls' KV on decode in this cache",
        when=lambda config, mode: config.lending == "on" and mode == "decode",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        flag="--tokenizer-worker-num",
        field="tokenizer_worker_num",
        parse=int,
        accepts=lambda value: value in (None, 1),
        needs="1",
        why="SGLang loads no plugin in tokenizer workers, so sessions could not be told apart",
    ),
    Refused(
        flag="--schedule-policy",
        field="schedule_policy",
        parse=str,
        accepts=lambda value: value in (None, "fcfs", "lof"),
        needs="fcfs or lof",
        why="SGLang sorts by priority under these two only",
        against="--enable-priority-scheduling",
    ),
    Refused(
        flag="--priority-scheduling-preemption-threshold",
        field="priority_scheduling_preemption_threshold",
        parse=int,
        accepts=lambda value: value in (None, 10),
        needs="unset",
        why="it tunes the preemption that Basin turns off",
        against="--disable-priority-preemption",
    ),
    Refused(
        flag="--smg-grpc-mode",
        field="smg_grpc_mode",
        parse=None,
        accepts=lambda value: not value,
        needs="unset",
        why="gRPC requests do not pass SGLang's tokenizer manager, where Basin reads the session",
        aliases=("--grpc-mode",),
    ),
    Refused(
        flag="--encoder-only",
        field="encoder_only",
        parse=None,
        accepts=lambda value: not value,
        needs="unset",
        why="an encoder has no KV cache to guard",
    ),
    Refused(
        flag="--enable-pd-role-switch",
        field="enable_pd_role_switch",
        parse=None,
        accepts=lambda value: not value,
        needs="unset",
        why="a gate is prefill's or decode's for good, and would go on as that after a switch",
    ),
    Refused(
        flag="--attn-dp-size",
        field="attn_dp_size",
        parse=int,
        accepts=lambda value: value in (None, 1),
        needs="1",
        why="groups of attention have not been run with Basin yet; replicas of the whole model have (--dp-size without "
        "--enable-dp-attention)",
        aliases=("--attention-data-parallel-size",),
    ),
)

RAISED: tuple[Raised, ...] = (
    Raised(
        variable="SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        default_s=300,
        why="prefill waits this long for decode, which may hold the call at the door",
    ),
    Raised(
        variable="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        default_s=300,
        why="decode waits this long for prefill's KV, which may hold the call at the door",
    ),
)


QUERY_RANK = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"
QUERY_RANK_WHY = "a session stays on one data-parallel rank of prefill, so a call's room does not tell which"

_TRUE = ("1", "true", "yes", "y")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to start SGLang with: its arguments, variables to add to the environment, and a line for each addition."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def expand_alias(arguments: Sequence[str]) -> list[str]:
    """Spell `--disagg-mode` as SGLang does. Raises FlagConflict when both spellings name different modes."""
    out = []
    for word in arguments:
        name, equals, value = word.partition("=")
        out.append(MODE_FLAG + equals + value if name == MODE_ALIAS else word)
    modes = values_of(out, MODE_FLAG)
    if len(set(modes)) > 1:
        raise FlagConflict(
            f"{MODE_ALIAS} and {MODE_FLAG} are one option, given as {' and '.join(modes)}; keep one of them"
        )
    return out


def disaggregation_mode(arguments: Sequence[str]) -> str | None:
    """The mode among SGLang's arguments (after `expand_alias`), or None."""
    modes = values_of(arguments, MODE_FLAG)
    return modes[-1] if modes else None


def prepare(config: BasinConfig, arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """What SGLang needs to be started with for Basin under `config`; `arguments` are SGLang's, the alias expanded.

    Raises FlagConflict when an explicit setting of the user contradicts Basin's.
    """
    mode = disaggregation_mode(arguments)
    if mode not in MODES and not (mode is None and _given(arguments, CONFIG_FLAG)):
        raise FlagConflict(_wrong_mode(mode))
    _refuse_arguments(arguments)
    _refuse_environment(environ)
    settings = Settings(arguments=list(arguments))
    for needed in NEEDED:
        if needed.when(config, mode or "") and needed.flag not in arguments:
            settings.arguments.append(needed.flag)
            settings.notes.append(f"{needed.flag}: {needed.why}")
    for raised in RAISED:
        _raise_timeout(raised, config, environ, settings)
    if environ.get(QUERY_RANK, "1").lower() not in _TRUE:
        raise FlagConflict(f"{QUERY_RANK}={environ[QUERY_RANK]} conflicts with --basin-* (unset it): {QUERY_RANK_WHY}")
    if QUERY_RANK not in environ:
        settings.environment[QUERY_RANK] = "1"
        settings.notes.append(f"{QUERY_RANK}=1: {QUERY_RANK_WHY}")
    return settings


def check_record(config: BasinConfig, server_args: object) -> None:
    """Hold SGLang's parsed arguments against the tables. Raises FlagConflict naming the flag."""
    mode = getattr(server_args, "disaggregation_mode", None)
    if mode not in MODES:
        raise FlagConflict(_wrong_mode(mode))
    for refused in REFUSED:
        value = getattr(server_args, refused.field, None)
        if not refused.accepts(value):
            raise FlagConflict(_refusal(refused, refused.flag, value))
    for needed in NEEDED:
        if needed.when(config, mode) and not getattr(server_args, needed.field, False):
            raise FlagConflict(f"{needed.flag} is off, but --basin-* needs it: {needed.why}")
    _check_ranks(config, server_args)


def _check_ranks(config: BasinConfig, server_args: object) -> None:
    """Raises FlagConflict for what does not go with several data-parallel ranks. SGLang has turned the older spelling
    `--dp-size N --enable-dp-attention` into `--attn-dp-size N` by now."""
    ranks = getattr(server_args, "dp_size", 1)
    if ranks == 1:
        return
    several = f"--dp-size {ranks}"
    if getattr(server_args, "nnodes", 1) > 1:
        raise FlagConflict(
            f"{several} conflicts with --nnodes above 1 under --basin-*: decode looks for all ranks' doors at one host"
            "; start one server a node"
        )
    if getattr(server_args, "elastic_ep_backend", None) is not None:
        raise FlagConflict(
            f"{several} conflicts with --elastic-ep-backend under --basin-*: ranks that join or leave would take their "
            "sessions and doors with them; leave it unset"
        )
    if config.lending == "on":
        raise FlagConflict(
            f"{several} conflicts with --basin-lending on: lending has not been tried with several ranks; leave one out"
        )


def _wrong_mode(mode: str | None) -> str:
    return f"{MODE_FLAG} {mode or 'unset'} conflicts with --basin-*: give {MODE_ALIAS} prefill or decode"


def _refuse_arguments(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for refused in REFUSED:
        how: dict[str, Any] = {"type": refused.parse} if refused.parse else {"action": "store_true"}
        parser.add_argument(refused.flag, *refused.aliases, dest=refused.field, **how)
    try:
        given = vars(parser.parse_known_args(list(arguments))[0])
    except argparse.ArgumentError:
        return  # SGLang's own parser words this better
    for refused in REFUSED:
        if refused.field in given and not refused.accepts(given[refused.field]):
            spelled = next(f for f in (refused.flag, *refused.aliases) if _given(arguments, f))
            raise FlagConflict(_refusal(refused, spelled, given[refused.field]))


def _refusal(refused: Refused, spelled: str, value: object) -> str:
    shown = spelled if refused.parse is None else f"{spelled} {value}"
    return f"{shown} conflicts with {refused.against} (it must be {refused.needs}): {refused.why}"


def _refuse_environment(environ: Mapping[str, str]) -> None:
    if environ.get("SGLANG_RUST_SERVER", "").lower() in _TRUE:
        raise FlagConflict(
            "SGLANG_RUST_SERVER conflicts with --basin-* (unset it): requests then bypass the tokenizer manager, "
            "where Basin reads the session"
        )
    platform = environ.get("SGLANG_PLATFORM", "")
    if platform not in ("", CPU_PLATFORM):
        raise FlagConflict(
            f"SGLANG_PLATFORM={platform} conflicts with --basin-* (unset it, or choose {CPU_PLATFORM}): SGLang then "
            f"skips the plugins of every other package that ships a platform, Basin's among them"
        )
    listed = environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in listed.split(",") if name.strip()}
    wanted = [PLUGIN, CPU_PLATFORM] if platform == CPU_PLATFORM else [PLUGIN]
    missing = [name for name in wanted if names and name not in names]
    if missing:
        raise FlagConflict(
            f"SGLANG_PLUGINS={listed} conflicts with --basin-* (add {','.join(missing)} to it, or unset it): SGLang "
            f"loads the plugins of this list only"
        )


def _raise_timeout(raised: Raised, config: BasinConfig, environ: Mapping[str, str], settings: Settings) -> None:
    given = environ.get(raised.variable)
    if given is None:
        settings.environment[raised.variable] = str(raised.value_s(config))
        settings.notes.append(f"{raised.variable}={raised.value_s(config)}: {raised.why}")
        return
    try:
        seconds = int(given)
    except ValueError:
        raise FlagConflict(f"{raised.variable}={given}: expected whole seconds") from None
    if seconds <= config.hold_limit_s:
        raise FlagConflict(
            f"{raised.variable}={given} conflicts with --basin-hold-limit-s {config.hold_limit_s:g} (raise the first "
            f"above the second, or unset it): {raised.why}"
        )


def _given(arguments: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(flag + "=") for word in arguments)


def values_of(arguments: Sequence[str], *flags: str) -> list[str]:
    """Every value given to any of these spellings, in order: `--flag value` and `--flag=value`."""
    found = []
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in flags:
            found.append(value if equals else following)
    return found
