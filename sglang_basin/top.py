"""Admission as it happens: `python -m sglang_basin.top http://prefill:30001 http://decode:30002 …`

Asks each engine for `/basin/status` and shows the door, the cache, the control channel and the largest sessions. Give
the engines' own addresses: the router has none of this.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_basin import status
from sglang_basin.status import CacheFigures, ControlFigures, DoorFigures, Report, SessionFigures, Status

KEY_VARIABLE = "BASIN_API_KEY"
BAR_WIDTH = 40
BAR_SHOWS = 1.5
"""A bar is this many budgets wide, so that what is over the budget is seen."""


class NoStatus(Exception):
    """An engine could not be asked; the message says why and what to do."""


@dataclass(frozen=True)
class Seen:
    """One engine's answer, or why there is none."""

    url: str
    report: Report | None
    problem: str = ""


def fetch(url: str, api_key: str | None, timeout_s: float) -> Report:
    """Ask one engine. Raises NoStatus."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + status.PATH, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            body = response.read(status.MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise NoStatus(_refused(error)) from None
    except (OSError, ValueError) as error:  # URLError and time-outs are OSErrors
        raise NoStatus(f"no answer: {getattr(error, 'reason', error)}") from None
    try:
        if len(body) > status.MAX_BYTES:
            raise NoStatus(f"the answer is longer than {status.MAX_BYTES} bytes: not Basin's")
        return status.decode_report(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise NoStatus(f"the answer is not of a Basin of this version: {error}") from None


def _refused(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return (
            "it answers, but has no Basin: start the engine with a --basin-* flag (a router has none: name the engines)"
        )
    if error.code in (401, 403):
        return f"it wants a key: --api-key KEY, or ${KEY_VARIABLE}"
    try:
        said = json.loads(error.read(10_000))["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        said = error.reason
    return f"HTTP {error.code}: {said}"


def look(urls: Sequence[str], api_key: str | None, timeout_s: float) -> list[Seen]:
    """Ask all engines at once."""

    def one(url: str) -> Seen:
        try:
            return Seen(url, fetch(url, api_key, timeout_s))
        except NoStatus as problem:
            return Seen(url, None, str(problem))

    with ThreadPoolExecutor(max_workers=min(32, len(urls))) as pool:
        return list(pool.map(one, urls))


def screen(seen: Sequence[Seen], sessions: int) -> Group:
    """Everything that `top` shows, for one look at all engines."""
    return Group(*(_engine(one, sessions) for one in seen))


def _engine(seen: Seen, sessions: int) -> Panel:
    if seen.report is None:
        return Panel(Text(seen.problem), title=seen.url, border_style="red", title_align="left")
    parts: list[RenderableType] = []
    for state in seen.report.states:
        parts += _state(state, sessions)
    failed = any(state.gate != "on" for state in seen.report.states)
    roles = "/".join(dict.fromkeys(state.role for state in seen.report.states))
    return Panel(
        Group(*parts),
        title=f"{roles} {seen.url}",
        subtitle=f"Basin {seen.report.basin}, SGLang {seen.report.sglang}",
        border_style="red" if failed else "green",
        title_align="left",
        subtitle_align="right",
    )


def _state(state: Status, sessions: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if state.dp_ranks > 1:
        parts.append(Text(f"data-parallel rank {state.dp_rank} of {state.dp_ranks}", style="bold"))
    if state.gate != "on":
        parts.append(Text(f"The gate is {state.gate}: calls go on as in stock SGLang", style="bold red"))
    if state.door is not None:
        parts.append(_door(state.door, state.cache))
    else:
        parts.append(Text(f"held calls {state.held_calls}   sessions inside {state.entered_sessions}"))
        if state.cache is not None:
            parts.append(Text(f"KV pool {_cache(state.cache)}"))
    if state.control is not None:
        parts.append(Text(_control(state.control)))
    parts.append(Text(_counts("decisions", state.decisions)))
    if state.faults:
        parts.append(Text(_counts("FAULTS", state.faults), style="bold red"))
    if state.door is not None and state.door.sessions and sessions:
        parts.append(_sessions(state.door.sessions[:sessions], state.door))
    return parts


def _door(door: DoorFigures, cache: CacheFigures | None) -> Group:
    lines = Table.grid(padding=(0, 1))
    budget = f"of {_short(door.budget_tokens)}"
    working_set = f"{_short(door.distinct_tokens)} {budget} (contexts add up to {_short(door.working_set_tokens)})"
    lines.add_row("working set", _bar(door.distinct_tokens, door.budget_tokens), working_set)
    lines.add_row(
        "reserved", _bar(door.reserved_tokens, door.budget_tokens), f"{_short(door.reserved_tokens)} {budget}"
    )
    if cache is not None:
        lines.add_row("KV pool", _bar(cache.used_ratio, 1.0, "blue"), _cache(cache))  # a cache is full when all is well
        if cache.high_hit_ratio is not None:
            lines.add_row("hit rate", _hit_bar(cache), _hits(cache))
    waits = f", the first for {door.head_wait_s:.0f} s" if door.queued_sessions else ""
    armed = "judging new sessions" if door.armed else "below the budget: all enter"
    return Group(
        lines,
        Text(
            f"sessions: {door.live_sessions} live, {door.queued_sessions} waiting{waits}, "
            f"{door.paused_sessions} paused (calls held: {door.held_calls}, clients away: {door.tickets})"
        ),
        Text(f"{door.rule}; {armed}"),
    )


def _bar(value: float, full: float, colour: str = "") -> Bar:
    share = value / full if full else 0.0
    colour = colour or ("green" if share <= 0.9 else "yellow" if share <= 1.0 else "red")
    return Bar(BAR_SHOWS, 0, min(share, BAR_SHOWS), width=BAR_WIDTH, color=colour)


def _cache(cache: CacheFigures) -> str:
    parts = [f"{cache.used_ratio:.0%} of {_short(cache.pool_tokens)}"]
    if cache.host_tokens:
        parts.append(f"+ {_short(cache.host_tokens)} host")
    if cache.lent_tokens:
        parts.append(f"+ {_short(cache.lent_tokens)} lent")
    return " ".join(parts)


def _hits(cache: CacheFigures) -> str:
    hit = "none: no calls" if cache.hit_ratio is None else f"{cache.hit_ratio:.2f}"
    return f"{hit}, while all is well {cache.high_hit_ratio:.2f}"


def _hit_bar(cache: CacheFigures) -> Bar:
    hit, high = cache.hit_ratio or 0.0, cache.high_hit_ratio or 0.0
    colour = "green" if hit >= high - 0.05 else "yellow" if hit >= high - 0.1 else "red"
    return Bar(BAR_SHOWS, 0, hit, width=BAR_WIDTH, color=colour)


def _control(control: ControlFigures) -> str:
    heard = [peer.heard_ago_s for peer in control.peers]
    silent = [ago for ago in heard if ago is not None]
    parts = [f"control: {len(heard)} peers"]
    if silent:
        parts.append(f"last heard {min(silent):.0f} to {max(silent):.0f} s ago")
    if len(silent) < len(heard):
        parts.append(f"{len(heard) - len(silent)} never heard")
    parts.append(f"{control.unanswered} unanswered")
    if control.dropped:
        parts.append(_counts("dropped", control.dropped))
    return ", ".join(parts)


def _counts(title: str, counts: dict[str, int]) -> str:
    shown = sorted(((name, count) for name, count in counts.items() if count), key=lambda item: (-item[1], item[0]))
    return f"{title}: " + (", ".join(f"{name} {count}" for name, count in shown) or "none")


def _sessions(sessions: Sequence[SessionFigures], door: DoorFigures) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("session", "state", "context", "reserved", "peak", "calls", "open", "idle"):
        table.add_column(name, justify="left" if name in ("session", "state") else "right", no_wrap=True)
    for one in sessions:
        peak = "-" if one.predicted_peak_tokens is None else _short(one.predicted_peak_tokens)
        table.add_row(
            Text(one.session_id if len(one.session_id) <= 28 else one.session_id[:27] + "…"),
            one.state,
            _short(one.context_tokens),
            _short(one.reserved_tokens),
            peak,
            str(one.calls_seen),
            str(one.calls_open),
            f"{one.idle_s:.0f} s",
        )
    others = door.live_sessions + door.queued_sessions - len(sessions)
    if others > 0:
        table.add_row(Text(f"and {others} more", style="dim"))
    return table


def _short(tokens: float) -> str:
    """A token count in four characters or so: 950, 12.3K, 4.56M."""
    if abs(tokens) < 1000:
        return f"{tokens:.0f}"
    if abs(tokens) < 999_950:
        return f"{tokens / 1e3:.1f}K"
    return f"{tokens / 1e6:.2f}M"


def main(argv: Sequence[str], console: Console | None = None, sleep: Callable[[float], None] = time.sleep) -> int:
    """Returns 1 when an engine could not be asked and the view is not live, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m sglang_basin.top", description=__doc__.splitlines()[0])
    parser.add_argument("urls", nargs="+", metavar="URL", help="an engine: http://host:port")
    parser.add_argument("--once", action="store_true", help="show once and exit; 1 if an engine could not be asked")
    parser.add_argument("--json", action="store_true", help="print what the engines say, as one JSON object by URL")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between looks (default: 1)")
    parser.add_argument("--sessions", type=int, default=8, metavar="N", help="sessions shown (default: 8)")
    parser.add_argument("--timeout", type=float, default=6.0, metavar="SECONDS", help="for one answer (default: 6)")
    parser.add_argument("--api-key", default=os.environ.get(KEY_VARIABLE), help=f"or ${KEY_VARIABLE}")
    arguments = parser.parse_args(argv)
    for url in arguments.urls:
        if not url.startswith(("http://", "https://")):
            parser.error(f"URL: {url!r} must begin with http:// or https://")
    for name, least in (("every", 0.1), ("timeout", 0.1), ("sessions", 0)):
        if not getattr(arguments, name) >= least:
            parser.error(f"--{name}: must be at least {least:g}, got {getattr(arguments, name):g}")
    console = console or Console()

    def now() -> list[Seen]:
        return look(arguments.urls, arguments.api_key, arguments.timeout)

    if arguments.json or arguments.once or not console.is_terminal:
        seen = now()
        if arguments.json:
            print(_as_json(seen), file=console.file)
        else:
            console.print(screen(seen, arguments.sessions))
        return int(any(one.report is None for one in seen))
    try:
        with Live(screen(now(), arguments.sessions), console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(arguments.every)
                live.update(screen(now(), arguments.sessions), refresh=True)
    except KeyboardInterrupt:
        return 0


def _as_json(seen: Sequence[Seen]) -> str:
    said = {one.url: one.report if one.report is not None else {"problem": one.problem} for one in seen}
    return msgspec.json.format(msgspec.json.encode(said)).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
