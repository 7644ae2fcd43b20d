"""`python -m sglang_basin.simulate`: simulate a PD deployment under a policy, once or as a sweep."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from sglang_basin.replay.arrivals import Surge
from sglang_basin.replay.goodput import Target
from sglang_basin.replay.quantities import (
    QuantityError,
    duration_s,
    positive_int,
    rate_per_s,
    scale_factor,
    surge_extra,
)
from sglang_basin.replay.records import RecordError, RunResult
from sglang_basin.replay.summary import Summary, summarize
from sglang_basin.replay.trace import Scaling, TraceError, shipped_traces
from sglang_basin.simulator.fitting import as_toml, fit_profile
from sglang_basin.simulator.measured import MeasuredError, as_run_result, read_measured
from sglang_basin.simulator.policies import PolicyError, option_names, policy_names
from sglang_basin.simulator.profile import ProfileError, shipped_profiles
from sglang_basin.simulator.simulation import ClientSettings
from sglang_basin.simulator.study import Study, StudySettings, run_study, to_json
from sglang_basin.simulator.sweep import SweepError, Variant, run_sweep, table, variants, with_setting

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """Flags that do not go together; the message names them."""


def build_parser() -> argparse.ArgumentParser:
    options = "; ".join(f"{name}: {', '.join(option_names(name))}" for name in policy_names())
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.simulate",
        description="Simulate a PD deployment that serves recorded agent sessions under a policy.",
        epilog=f"Shipped traces: {', '.join(shipped_traces())}. Policies and their options: {options}. "
        "Profile fields: page_tokens and those of prefill, decode and link. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (a sweep resumes where it was).",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what runs").add_argument
    add("--profile", default="h200-1p3d", help=f"{', '.join(shipped_profiles())}, or a TOML file (h200-1p3d)")
    add("--policy", default="basin", metavar="NAME", help=f"{', '.join(policy_names())} (basin)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="policy.OPTION, profile.FIELD (profile.decode.lend=true), …; repeatable",
    )
    add("--seed", type=int, default=1, help="of sessions and arrivals (1)")

    add = parser.add_argument_group("sessions and arrivals, as in sglang_basin.replay").add_argument
    add("--trace", required=True, metavar="FILE", help="trace (.jsonl or .jsonl.gz) or the bare name of a shipped one")
    add("--order", choices=("shuffle", "recorded"), default="shuffle", help="how sessions are drawn (shuffle)")
    add("--rate", type=rate_per_s, metavar="R", help="sessions, such as 5.5/min")
    add("--arrivals", choices=("poisson", "fixed"), default="poisson", help="process (poisson)")
    add("--surge", type=surge_extra, metavar="P", help="change of the rate, such as +100%%, between --from and --to")
    add("--from", dest="surge_from", type=duration_s, metavar="D", help="when the surge starts")
    add("--to", dest="surge_to", type=duration_s, metavar="D", help="when the surge ends")
    add("--duration", type=duration_s, metavar="D", help="how long sessions arrive and are counted, such as 2h")
    add("--tail", type=duration_s, default=0.0, metavar="D", help="go on this long with uncounted sessions (0s)")
    add("--drain", type=duration_s, default=0.0, metavar="D", help="then let open sessions finish (0s)")
    add("--scale-tokens", type=scale_factor, default=1.0, metavar="F", help="factor on token counts, such as 1/8")
    add("--scale-time", type=scale_factor, default=1.0, metavar="F", help="factor on tool waits")
    add("--max-calls", type=positive_int, metavar="N", help="only the first N calls of a session")
    add("--tool-cap", type=duration_s, metavar="D", help="longest tool wait, after scaling")
    add("--shared-prefix", type=positive_int, metavar="N", help="all sessions share N tokens, before scaling (trace's)")
    add("--max-context", type=positive_int, metavar="N", help="end a session before prompt + output exceed N tokens")

    add = parser.add_argument_group("clients and target").add_argument
    add("--retries", type=int, default=0, metavar="N", help="tries again N times, after Retry-After (0)")
    add("--call-timeout", type=duration_s, default=600.0, metavar="D", help="a client gives up after this (600s)")
    add("--announce-end", action=argparse.BooleanOptionalAction, default=True, help="the last call says so (yes)")
    add("--tpot-ms", type=float, default=50.0, metavar="MS", help="per-token target (50)")
    add("--stretch", type=float, default=4.0, metavar="X", help="allowed total / unloaded time (4)")

    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="write the result here")
    add("--page", type=Path, metavar="FILE", help="write a page with plots here, as a replay does")
    add(
        "--measured",
        type=Path,
        metavar="FILE",
        help="calls.jsonl of a replay: simulate that very run (give its trace and scaling) and show both",
    )
    add(
        "--fit",
        type=Path,
        metavar="FILE",
        help="with --measured: fit the profile's costs to that run first, and write the fitted profile here",
    )

    add = parser.add_argument_group("many runs").add_argument
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B,…",
        help="all combinations of these settings; keys as for --set, and policy, profile, trace, rate, surge",
    )
    add("--seeds", metavar="A,B,…", help="each combination with each of these seeds")
    add("--jobs", type=positive_int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    add("--results", type=Path, default=Path("out/sweep"), metavar="DIR", help="one file a run; reused (out/sweep)")
    return parser


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise UsageError(f"{flag} {text}: write KEY=VALUE")
    return key, value


def _surge(options: argparse.Namespace) -> Surge | None:
    given = (options.surge, options.surge_from, options.surge_to)
    if all(value is None for value in given):
        return None
    if any(value is None for value in given):
        raise UsageError("--surge, --from and --to go together")
    return Surge(*given)


def _settings(options: argparse.Namespace) -> StudySettings:
    missing = [f"--{name}" for name in ("rate", "duration") if getattr(options, name) is None]
    if missing and options.measured is None:
        raise UsageError(f"{', '.join(missing)} required (or --measured)")
    settings = StudySettings(
        trace=options.trace,
        profile=options.profile,
        policy=options.policy,
        rate_per_s=options.rate or 1.0,
        duration_s=options.duration or 1.0,
        tail_s=options.tail,
        surge=_surge(options),
        process=options.arrivals,
        order=options.order,
        seed=options.seed,
        scaling=Scaling(
            tokens=options.scale_tokens,
            time=options.scale_time,
            max_calls=options.max_calls,
            tool_cap_s=options.tool_cap,
            max_context_tokens=options.max_context,
        ),
        shared_prefix_tokens=options.shared_prefix,
        client=ClientSettings(
            announce_end=options.announce_end,
            retries=options.retries,
            call_timeout_s=options.call_timeout,
            drain_s=options.drain,
        ),
        target=Target(tpot_s=options.tpot_ms / 1000, stretch=options.stretch),
    )
    for text in options.set:
        settings = with_setting(settings, *_pair(text, "--set"))
    return settings


# ---- One run -------------------------------------------------------------------------------------------------------


def _one(options: argparse.Namespace, settings: StudySettings) -> int:
    from sglang_basin.replay import report  # brings matplotlib

    measured = None
    if options.measured is not None:
        measured, settings = read_measured(options.measured, settings)
    if options.fit is not None:
        settings = _fitted(options.fit, measured, settings)
    study = run_study(settings)
    simulated = as_run_result(study.log, study.unloaded_s, settings.target.tpot_s)
    runs = {settings.policy: simulated}
    summaries = {settings.policy: Summary(**study.result()["summary"])}
    if measured is not None:
        runs = {"measured": measured, "simulated": simulated}
        summaries = {
            "measured": summarize(measured, target=settings.target),
            "simulated": summaries[settings.policy],
        }
    for name, run in runs.items():
        print(report.text_timeline(name, run), end="\n\n")
    print(report.text_table(summaries))
    _tell(study)
    if options.json is not None:
        _write(options.json, to_json(study.result(), study.cost()))
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        pool = study.hardware.prefill.pool_tokens
        report.write_page(options.page, runs, target=settings.target, cache_tokens=pool, settings=settings.as_dict())
    return EXIT_OK


def _fitted(path: Path, measured: RunResult | None, settings: StudySettings) -> StudySettings:
    if measured is None:
        raise UsageError("--fit goes with --measured")
    fit = fit_profile(measured, settings.hardware(), path.stem)
    _write(path, as_toml(fit.profile))
    print(
        f"fitted to {fit.lone_calls} lone prefills (median error {fit.ttft_error:.0%}) and {fit.steps:,} decode steps "
        f"({fit.step_error:.0%}): written to {path}\n"
    )
    return dataclasses.replace(settings, profile=str(path), profile_changes={})


def _tell(study: Study) -> None:
    cost, totals = study.cost(), study.log.totals
    decisions = ", ".join(f"{reason} {count:,}" for reason, count in sorted(study.log.reasons.items()))
    print(f"\ndecisions besides live sessions' calls: {decisions or 'none'}")
    print(
        f"prefill busy {totals['prefill_busy_share']:.0%}, {totals['computed_tokens']:,} tokens computed, "
        f"{totals['loaded_back_tokens']:,} loaded back, {totals['written_back_tokens']:,} written back, "
        f"{totals['retractions']} retractions"
    )
    print(
        f"{totals['calls']:,} calls in {cost['wall_s']} s ({cost['cpu_s']} s of CPU, {cost['cpu_us_per_call']} µs a "
        f"call), {cost['times_real_time']:,} times real time, peak memory {cost['peak_memory_mib']} MiB"
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# ---- Many runs -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, elsewhere a line for every tenth part."""
    if not console.is_terminal:
        told = -1

        def line(done: int, total: int) -> None:
            nonlocal told
            tenth = 10 * done // total
            if tenth != told:
                told = tenth
                print(f"{done} of {total} runs", file=console.file, flush=True)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("runs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _many(options: argparse.Namespace, settings: StudySettings, console: Console) -> int:
    swept: dict[str, list[str]] = {}
    for text in options.sweep:
        key, values = _pair(text, "--sweep")
        swept[key] = values.split(",")
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else [settings.seed]
    except ValueError:
        raise UsageError(f"--seeds {options.seeds}: write whole numbers, such as 1,2,3") from None
    runs = variants(settings, swept, seeds)
    _check_all(runs)
    with _shown(console) as show:
        results = run_sweep(runs, options.results, jobs=options.jobs, on_done=show)
    rows = []
    width = max(len(run.label) for run in runs)
    print(f"{'setting':{width}}  seeds  goodput/h (least, most)  completed  hit rate  first wait p50 / p99  TTFT p50")
    for label, count, means in table(runs, results):
        rows.append({"setting": label, "seeds": count, **means})
        low, high = means["goodput_range"]
        print(
            f"{label:{width}}  {count:5d}  {means['goodput_per_hour']:7.1f} ({low:6.1f}, {high:6.1f})  "
            f"{_cell(means['completed_share'], '9.1%')}  {_cell(means['hit_rate_last_third'], '8.3f')}  "
            f"{_cell(means['first_call_wait_p50_s'], '8.1f')} / {_cell(means['first_call_wait_p99_s'], '6.1f')} s  "
            f"{_cell(means['ttft_p50_s'], '6.2f')} s"
        )
    if options.json is not None:
        _write(options.json, json.dumps({"rows": rows, "runs": [result["result"] for result in results]}) + "\n")
    return EXIT_OK


def _check_all(runs: Sequence[Variant]) -> None:
    """Refuse wrong settings before the first run, not in a worker an hour later."""
    from sglang_basin.simulator.policies import policy_factory

    checked: set[tuple[Any, ...]] = set()
    for run in runs:
        settings = dataclasses.replace(run.settings, seed=0)
        key = (repr(settings),)
        if key not in checked:
            checked.add(key)
            policy_factory(settings.policy, settings.policy_options, settings.plan(), settings.hardware())


def _cell(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = build_parser()
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        settings = _settings(options)
        if options.sweep or options.seeds:
            return _many(options, settings, Console(stderr=True))
        return _one(options, settings)
    except (UsageError, PolicyError, SweepError, QuantityError) as error:
        parser.error(str(error))
    except (TraceError, ProfileError, RecordError, MeasuredError, ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
