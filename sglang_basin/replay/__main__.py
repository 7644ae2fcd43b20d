"""`python -m sglang_basin.replay`: replay recorded sessions against a server, or report on runs already recorded."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from sglang_basin.replay.arrivals import ArrivalProfile, Surge
from sglang_basin.replay.driver import DriveSettings, Progress, ServerError, check_server, run, served_model
from sglang_basin.replay.goodput import Target
from sglang_basin.replay.plan import Plan, build_plan
from sglang_basin.replay.quantities import (
    duration_s,
    format_duration,
    positive_int,
    rate_per_s,
    scale_factor,
    surge_extra,
    token_range,
)
from sglang_basin.replay.records import RecordError, RunResult, read_records
from sglang_basin.replay.summary import Summary, summarize
from sglang_basin.replay.trace import (
    Scaling,
    Session,
    TraceError,
    find_trace,
    read_trace,
    scale_trace,
    shipped_traces,
)
from sglang_basin.replay.unloaded import (
    UnloadedError,
    UnloadedTimes,
    measure_unloaded,
    read_unloaded,
    write_unloaded,
)

EXIT_OK = 0
EXIT_FAILED = 1
"""No server, a broken file, or not one call that succeeded."""
EXIT_INTERRUPTED = 130

PLAIN_PROGRESS_EVERY_S = 10.0


class UsageError(Exception):
    """Flags that do not go together; the message names them."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.replay",
        description="Replay recorded agent sessions against a server and judge how they were served.",
        epilog="Shipped traces: " + ", ".join(shipped_traces()) + ". Exit codes: 0 done, 1 failed, 2 wrong usage, "
        "130 interrupted (what was measured is kept and reported).",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to replay, and where").add_argument
    add("--url", metavar="URL", help="server or router, such as http://127.0.0.1:8000")
    add("--trace", metavar="FILE", help="trace (.jsonl or .jsonl.gz) or the bare name of a shipped one")
    add("--seed", type=int, default=1, help="of sessions, arrivals and prompts (default: 1)")
    add(
        "--order",
        choices=("shuffle", "recorded"),
        default="shuffle",
        help="how sessions are drawn (shuffle)",
    )
    add("--sessions", type=positive_int, metavar="N", help="stop opening sessions after N")
    add("--endpoint", choices=("generate", "chat"), default="generate", help="SGLang /generate or OpenAI chat")
    add("--model", help="model name in chat calls (default: the first that the server lists)")
    add("--token-ids", type=token_range, default=(16, 512), metavar="LOW:HIGH", help="range of prompt ids (16:512)")

    add = parser.add_argument_group("sessions, scaled").add_argument
    add("--scale-tokens", type=scale_factor, default=1.0, metavar="F", help="factor on token counts, such as 1/20")
    add("--scale-time", type=scale_factor, default=1.0, metavar="F", help="factor on tool waits")
    add("--max-calls", type=positive_int, metavar="N", help="only the first N calls of a session")
    add("--tool-cap", type=duration_s, metavar="D", help="longest tool wait, after scaling")
    add("--max-context", type=positive_int, metavar="N", help="end a session before prompt + output exceed N tokens")

    add = parser.add_argument_group("arrivals").add_argument
    add("--rate", type=rate_per_s, metavar="R", help="sessions, such as 11/min")
    add("--arrivals", choices=("poisson", "fixed"), default="poisson", help="process (default: poisson)")
    add("--surge", type=surge_extra, metavar="P", help="change of the rate, such as +250%%, between --from and --to")
    add("--from", dest="surge_from", type=duration_s, metavar="D", help="when the surge starts")
    add("--to", dest="surge_to", type=duration_s, metavar="D", help="when the surge ends")
    add("--duration", type=duration_s, metavar="D", help="how long sessions arrive and are counted, such as 7m")
    add(
        "--tail",
        type=duration_s,
        default=0.0,
        metavar="D",
        help="go on this long with uncounted sessions (0s)",
    )
    add("--drain", type=duration_s, default=0.0, metavar="D", help="then let open sessions finish (0s)")

    add = parser.add_argument_group("calls").add_argument
    add("--retries", type=int, default=0, metavar="N", help="tries again N times, after Retry-After (default: 0)")
    add("--call-timeout", type=duration_s, default=600.0, metavar="D", help="a call fails after this (default: 600s)")
    add(
        "--announce-end",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the last call of a session says so, as an agent harness can (default: yes)",
    )
    add(
        "--session-header",
        action="append",
        metavar="NAME",
        help="request header with the session's id, for routers that pin by header (default: x-basin-session-id)",
    )

    add = parser.add_argument_group("target").add_argument
    add("--tpot-ms", type=float, default=50.0, metavar="MS", help="per-token target (default: 50)")
    add("--stretch", type=float, default=4.0, metavar="X", help="allowed total / unloaded time (default: 4)")
    add("--unloaded", type=Path, metavar="FILE", help="unloaded times measured with --measure-unloaded")
    add(
        "--measure-unloaded",
        type=Path,
        metavar="FILE",
        help="measure them, sessions one at a time",
    )
    add("--measure-sessions", type=positive_int, default=12, metavar="N", help="how many of the plan's (default: 12)")

    add = parser.add_argument_group("report").add_argument
    add(
        "--out",
        type=Path,
        default=Path("out/replay"),
        metavar="DIR",
        help="calls.jsonl, summary.json, page.html, plots.png",
    )
    add("--name", default="run", help="what the report calls this run (default: run)")
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a recorded run (its calls.jsonl) beside it",
    )
    add("--cache-tokens", type=positive_int, metavar="N", help="draw the prefix cache's size into the plot")
    return parser


# ---- From flags to settings ----------------------------------------------------------------------------------------


def join_negatives(argv: Sequence[str]) -> list[str]:
    """`--rate -11/min` as `--rate=-11/min`: argparse would take the value for a flag and hide what is wrong."""
    joined: list[str] = []
    for word in argv:
        if re.match(r"-[\d.]", word) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """What a setting refuses is a wrong flag."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def _required(options: argparse.Namespace, *names: str) -> None:
    missing = ["--" + name for name in names if getattr(options, name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} required" + ("" if options.arm else " (or --arm NAME=FILE to report only)")
        )


@usage_errors()
def _surge(options: argparse.Namespace) -> Surge | None:
    given = (options.surge, options.surge_from, options.surge_to)
    if all(value is None for value in given):
        return None
    if any(value is None for value in given):
        raise UsageError("--surge, --from and --to go together")
    return Surge(*given)


@usage_errors()
def _profile(options: argparse.Namespace) -> ArrivalProfile:
    _required(options, "rate", "duration")
    return ArrivalProfile(
        rate_per_s=options.rate,
        duration_s=options.duration,
        surge=_surge(options),
        tail_s=options.tail,
        process=options.arrivals,
    )


@usage_errors()
def _scaling(options: argparse.Namespace) -> Scaling:
    return Scaling(
        tokens=options.scale_tokens,
        time=options.scale_time,
        max_calls=options.max_calls,
        tool_cap_s=options.tool_cap,
        max_context_tokens=options.max_context,
    )


@usage_errors()
def _drive_settings(options: argparse.Namespace) -> DriveSettings:
    return DriveSettings(
        endpoint=options.endpoint,
        model=options.model or "default",
        token_ids=options.token_ids,
        announce_end=options.announce_end,
        retries=options.retries,
        call_timeout_s=options.call_timeout,
        drain_s=options.drain,
        session_headers=tuple(options.session_header or DriveSettings.session_headers),
    )


@usage_errors()
def _target(options: argparse.Namespace) -> Target:
    return Target(tpot_s=options.tpot_ms / 1000, stretch=options.stretch)


def _named_runs(pairs: Sequence[str]) -> dict[str, RunResult]:
    arms: dict[str, RunResult] = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if not name or not path:
            raise UsageError(f"--arm {pair}: write NAME=FILE")
        if name in arms:
            raise UsageError(f"--arm {pair}: there is already an arm {name!r}")
        arms[name] = read_records(Path(path))
    return arms


def _distinct(sessions: Iterator[Session]) -> list[Session]:
    return list({session.trace_id: session for session in sessions}.values())


# ---- Progress ------------------------------------------------------------------------------------------------------


def progress_text(progress: Progress) -> str:
    hit_rate = "-" if progress.recent_hit_rate is None else f"{progress.recent_hit_rate:.2f}"
    ttft = "-" if progress.recent_ttft_s is None else f"{progress.recent_ttft_s:.2f} s"
    return (
        f"arrived {progress.arrived}/{progress.planned}  live {progress.live}  waiting {progress.waiting}  "
        f"finished {progress.finished}  failed {progress.failed}  calls {progress.calls_ok}  "
        f"hit rate {hit_rate}  TTFT {ttft}"
    )


@contextlib.contextmanager
def shown_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal; elsewhere a line every 10 s."""
    if not console.is_terminal:
        last_s = -PLAIN_PROGRESS_EVERY_S

        def show_line(progress: Progress) -> None:
            nonlocal last_s
            if progress.elapsed_s - last_s >= PLAIN_PROGRESS_EVERY_S or progress.elapsed_s >= progress.end_s:
                last_s = progress.elapsed_s
                line = f"{format_duration(progress.elapsed_s)} of {format_duration(progress.end_s)}: "
                print(line + progress_text(progress), file=console.file, flush=True)

        yield show_line
        return
    columns = (TimeElapsedColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None)

        def show_bar(progress: Progress) -> None:
            bar.update(task, total=progress.end_s, completed=progress.elapsed_s, description=progress_text(progress))

        yield show_bar


@contextlib.contextmanager
def stop_on_signal(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the run in good order; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def asked() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, asked)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


# ---- The two jobs --------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace, profile: ArrivalProfile, scaling: Scaling) -> Plan:
    path = find_trace(options.trace)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    sessions = scale_trace(read_trace(path), scaling)
    return build_plan(
        sessions, profile, options.seed, trace_name=name, order=options.order, max_sessions=options.sessions
    )


async def _with_model(options: argparse.Namespace, settings: DriveSettings) -> DriveSettings:
    """Chat calls must name a model that the server knows."""
    if settings.endpoint != "chat" or options.model:
        return settings
    return dataclasses.replace(settings, model=await served_model(options.url))


async def _measure(options: argparse.Namespace, console: Console) -> int:
    """`--measure-unloaded`: the first sessions of the plan, one at a time."""
    scaling, settings = _scaling(options), _drive_settings(options)
    if options.rate is None and options.duration is None:
        profile = ArrivalProfile(rate_per_s=1.0, duration_s=3600.0)  # no plan given: any sessions of the trace do
    else:
        profile = _profile(options)
    plan = _plan(options, profile, scaling)
    sessions = _distinct(planned.session for planned in plan.sessions)[: options.measure_sessions]
    await check_server(options.url)
    settings = await _with_model(options, settings)

    def show(done: int, total: int) -> None:
        print(f"unloaded: {done} of {total} sessions measured", file=console.file, flush=True)

    file = await measure_unloaded(
        sessions,
        options.url,
        seed=options.seed,
        trace_name=plan.trace_name,
        scaling=scaling,
        settings=settings,
        on_session=show,
    )
    times = UnloadedTimes(file)
    write_unloaded(options.measure_unloaded, file)
    print(times.describe())
    print(f"written to {options.measure_unloaded}")
    return EXIT_OK


async def _replay(options: argparse.Namespace, console: Console) -> tuple[RunResult, UnloadedTimes | None]:
    profile, scaling, settings = _profile(options), _scaling(options), _drive_settings(options)
    plan = _plan(options, profile, scaling)
    times = read_unloaded(options.unloaded) if options.unloaded else None
    if times is not None:
        times.check(plan.trace_name, scaling, settings.endpoint)
    await check_server(options.url)
    settings = await _with_model(options, settings)
    print(
        f"{len(plan.sessions)} sessions, {plan.call_count} calls from {plan.trace_name} to {options.url}",
        file=console.file,
        flush=True,
    )
    stop = asyncio.Event()
    with stop_on_signal(stop), shown_progress(console) as show:
        result = await run(
            plan,
            options.url,
            settings=settings,
            unloaded_s=times.of(planned.session for planned in plan.sessions) if times else None,
            records_path=options.out / "calls.jsonl",
            on_progress=show,
            stop=stop,
            note={
                "command": sys.argv[1:],
                "scaling": dataclasses.asdict(scaling),
                "calls": dataclasses.asdict(settings),
                "unloaded": times.describe() if times else None,
            },
        )
    return result, times


def _report(
    arms: dict[str, RunResult], options: argparse.Namespace, target: Target, times: UnloadedTimes | None
) -> None:
    from sglang_basin.replay import report  # brings matplotlib, which only a report needs

    summaries: dict[str, Summary] = {name: summarize(result, target=target) for name, result in arms.items()}
    more: dict[str, Any] = {"load": {name: report.describe(result.run) for name, result in arms.items()}}
    if times is not None:
        more["unloaded_model"] = dataclasses.asdict(times.model)
    for name, result in arms.items():
        print(report.text_timeline(name, result), end="\n\n")
    print(report.text_table(summaries))
    report.write_json(options.out / "summary.json", summaries, arms, **more)
    report.write_png(options.out / "plots.png", arms, cache_tokens=options.cache_tokens)
    report.write_page(options.out / "page.html", arms, target=target, cache_tokens=options.cache_tokens, settings=more)
    print(f"written to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")


def _exit_code(result: RunResult | None) -> int:
    if result is None:
        return EXIT_OK
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if any(call.outcome == "ok" for call in result.calls) else EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = build_parser()
    options = parser.parse_args(join_negatives(sys.argv[1:] if argv is None else argv))
    console = Console(stderr=True)
    try:
        target = _target(options)
        arms = _named_runs(options.arm)
        if options.name in arms and options.url:
            raise UsageError(f"--arm {options.name}=...: this run has that name; give it another with --name")
        result, times = None, None
        if options.measure_unloaded is not None:
            _required(options, "url", "trace")
            return asyncio.run(_measure(options, console))
        if options.url is not None or not arms:
            _required(options, "url", "trace")
            result, times = asyncio.run(_replay(options, console))
            arms = {**arms, options.name: result}
        _report(arms, options, target, times)
        return _exit_code(result)
    except UsageError as error:
        parser.error(str(error))
    except (TraceError, RecordError, UnloadedError, ServerError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
