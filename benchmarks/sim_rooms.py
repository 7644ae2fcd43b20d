"""What the simulated benchmarks share: loads, deployments, cached runs in all cores, and the form of a result.

A *case* is a run: `StudySettings` exactly as `python -m sglang_basin.simulate` takes them and, where that command has
no flag for it, a stepped load in place of the surge. Results of cases are kept under `out/benchmarks/`, named by
everything that decides them (settings, trace, profile, code): a benchmark that was interrupted goes on where it was.

A *finding* is what a benchmark leaves in `benchmarks/results/NAME.json`: figures beside the article's, tables, notes,
and what it was made with. `sim_readme.py` makes `benchmarks/README.md` of all findings.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from sglang_basin.replay.arrivals import ArrivalProfile, Surge, arrival_times
from sglang_basin.replay.plan import Plan, PlannedSession, draw
from sglang_basin.replay.quantities import positive_int
from sglang_basin.replay.trace import Scaling
from sglang_basin.simulator import policy_factory, simulate
from sglang_basin.simulator.simulation import ClientSettings, PolicyFactory
from sglang_basin.simulator.study import Study, StudySettings, code_digest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "out" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"

SURGE_FROM_S, SURGE_TO_S = 900.0, 1500.0
"""Minutes 15 to 25, the article's window."""
COUNTED_S, TAIL_S = 5400.0, 900.0
"""Sessions of the first 90 minutes count; 15 more minutes of the same load let the last of them finish."""
BASE_SEEDS = (1, 2, 3)
CHOICE_SEEDS = (1, 2)
"""Of the runs that settings are chosen on."""
FRESH_SEEDS = (4, 5)
"""Of those that the choice is judged on."""

# ---- Workloads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Recorded sessions, and how they are brought to the article's sizes."""

    name: str
    says: str
    traces: tuple[str, ...]
    """In order of preference: paths from the repository's root, or names of shipped traces."""
    scaling: Scaling = field(default_factory=Scaling)
    shared_prefix_tokens: int | None = None

    @property
    def trace(self) -> str:
        """The first one that is here. The last is shipped and always is."""
        return next((name for name in self.traces[:-1] if (ROOT / name).is_file()), self.traces[-1])

    @property
    def fell_back(self) -> bool:
        return self.trace != self.traces[0]

    def settings(self) -> dict[str, Any]:
        trace = self.trace
        return {
            "trace": str(ROOT / trace) if (ROOT / trace).is_file() else trace,
            "scaling": self.scaling,
            "shared_prefix_tokens": self.shared_prefix_tokens,
        }


CODE_SMALL = Workload(
    name="code-25k",
    says="Claude Code on SWE-rebench, tokens x 0.63: the article's median prompt of 25.6K (its 1P1D figures)",
    traces=("../shared/traces/swe_rebench_claude_code.jsonl.gz", "swe_bench"),
    scaling=Scaling(tokens=0.63),
    shared_prefix_tokens=13_200,
)
CODE = Workload(
    name="code",
    says="Claude Code on SWE-rebench as recorded: median prompt 40K, median peak 51K, 9th decile 84K",
    traces=("../shared/traces/swe_rebench_claude_code.jsonl.gz", "swe_bench"),
    shared_prefix_tokens=13_200,
)
TERMINAL = Workload(
    name="terminal",
    says="mini-swe-agent on Terminal-Bench, tokens x 4.57: the article's median prompt of 25.6K; nothing is shared",
    traces=("../shared/traces/terminal_bench.jsonl.gz", "swe_bench"),
    scaling=Scaling(tokens=4.57),
)
LONG = Workload(
    name="long",
    says="interactive Claude Code, at most 200K tokens, pauses at most 60 s: the article's median peak of 107K",
    traces=("../shared/traces/claude_code_kvtester.jsonl.gz", "claude_code_kvtester"),
    scaling=Scaling(tool_cap_s=60.0, max_context_tokens=200_000),
)
BENCH = Workload(
    name="bench",
    says="mini-swe-agent on SWE-bench, tokens x 1.82: a median prompt of 25.6K; nothing is shared",
    traces=("../shared/traces/swe_bench.jsonl.gz", "swe_bench"),
    scaling=Scaling(tokens=1.82),
)
WORKLOADS = (CODE_SMALL, CODE, TERMINAL, LONG, BENCH)

HOST = {"prefill.host_tokens": "2304000"}
"""HiCache at SGLang's default ratio of 2: twice the pool of h200-1p3d."""
LEND = {"decode.lend": "true"}


def surge(extra: float) -> Surge:
    return Surge(extra, SURGE_FROM_S, SURGE_TO_S)


# ---- Policies ------------------------------------------------------------------------------------------------------

BLURRED = {"predictor": "oracle", "rank_correlation": "0.56"}
"""True peaks blurred to the lower of the two rank correlations that the article measured for its own predictor."""
TRAINED = {"predictor": "held-out"}
"""The trained predictor on tasks that it has never seen: see `sim_held_out`."""
ONLINE = {"predictor": "seen"}
"""The engine's own predictor, which starts with nothing and learns from sessions that end."""
DEFAULT = {"law": "current", "alpha": "0.75", "band": "0", "order": "size", "order_tokens_per_s": "10"}
"""The defaults of `BasinOptions`, written out: chosen by `sim_law.py`, and a test holds that they are the same."""
BASIN = DEFAULT | TRAINED
BASIN_ONLINE = DEFAULT | ONLINE
ARTICLE = {
    "law": "peak",
    "order": "size",
    "order_tokens_per_s": "30",
    "band": "0.1",
    "shared_once": "false",
    "updates_order": "false",
    "pausing": "false",
} | TRAINED
"""The article's full design: each session's predicted peak reserved, size-aware order, the budget within a small band,
whoever has entered runs to completion;
with lending where the deployment lends, and with the same predictor as the default."""


# ---- Cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run. `steps`, if any, are (from_s, sessions a second) in place of the settings' rate and surge; the settings'
    duration and tail hold."""

    settings: StudySettings
    steps: tuple[tuple[float, float], ...] = ()

    def plan(self) -> Plan:
        if not self.steps:
            return self.settings.plan()
        sessions = [planned.session for planned in dataclasses.replace(self.settings, rate_per_s=1.0).plan().sessions]
        distinct = list({session.trace_id: session for session in sessions}.values())
        distinct.sort(key=lambda session: session.trace_id)
        return stepped_plan(distinct, self.settings, self.steps)

    def told(self) -> dict[str, Any]:
        """For the cache's key and for the finding: no path of this machine."""
        made: dict[str, Any] = {"settings": self.settings.as_dict(), "steps": list(map(list, self.steps))}
        made["settings"]["trace"] = Path(made["settings"]["trace"]).name
        return made


def case(
    workload: Workload,
    *,
    profile: str = "h200-1p3d",
    policy: str = "basin",
    options: Mapping[str, str] | None = None,
    changes: Mapping[str, str] | None = None,
    rate_per_min: float = 1.0,
    extra: float | None = None,
    seed: int = 1,
    counted_s: float = COUNTED_S,
    tail_s: float = TAIL_S,
    steps_per_min: Sequence[tuple[float, float]] = (),
    client: ClientSettings | None = None,
) -> Case:
    settings = StudySettings(
        **workload.settings(),
        profile=profile,
        policy=policy,
        policy_options=dict(options or {}),
        profile_changes=dict(changes or {}),
        rate_per_s=rate_per_min / 60,
        duration_s=counted_s,
        tail_s=tail_s,
        surge=None if extra is None else surge(extra),
        seed=seed,
        client=client or ClientSettings(),
    )
    steps = tuple((at_s, rate / 60) for at_s, rate in steps_per_min)
    return Case(settings=settings, steps=steps)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A deployment and its load, on which policies are compared."""

    name: str
    says: str
    workload: Workload
    rate_per_min: float
    extra: float | None
    profile: str = "h200-1p3d"
    changes: Mapping[str, str] = field(default_factory=dict)
    client: ClientSettings = field(default_factory=ClientSettings)

    def case(self, policy: str, options: Mapping[str, str], seed: int) -> Case:
        """An hour that counts and a quarter that does not."""
        return case(
            self.workload,
            profile=self.profile,
            policy=policy,
            options=options,
            changes=self.changes,
            rate_per_min=self.rate_per_min,
            extra=self.extra,
            seed=seed,
            counted_s=3600.0,
            tail_s=900.0,
            client=self.client,
        )


DECODE_FIRST = {"prefill.pool_tokens": "1344000", "decode.pool_tokens": "98304"}
"""1P1D whose decode memory is met long before the cache's limit."""
IMPATIENT = ClientSettings(retries=3, call_timeout_s=120.0)

FOUR = (
    Scenario(
        name="code, GPU",
        says="1P3D, device cache alone, 5.5/min, +100 %",
        workload=CODE,
        rate_per_min=5.5,
        extra=1.0,
    ),
    Scenario(
        name="code, host tier",
        says="1P3D with HiCache, 10/min, +100 %",
        workload=CODE,
        rate_per_min=10.0,
        extra=1.0,
        changes=HOST,
    ),
    Scenario(
        name="terminal, host tier",
        says="1P3D with HiCache, 6/min, +100 %",
        workload=TERMINAL,
        rate_per_min=6.0,
        extra=1.0,
        changes=HOST,
    ),
    Scenario(
        name="long, host tier",
        says="1P3D with HiCache, 0.8/min, +300 %",
        workload=LONG,
        rate_per_min=0.8,
        extra=3.0,
        changes=HOST,
    ),
)
"""Stand-ins for the article's four 1P3D scenarios, whose loads are not known to us: each gets stuck under stock."""
GRID = (
    *FOUR,
    Scenario(
        name="code, GPU, +300 %",
        says="1P3D, device cache alone, 5.5/min, +300 %",
        workload=CODE,
        rate_per_min=5.5,
        extra=3.0,
    ),
    Scenario(
        name="code, overload",
        says="1P3D, device cache alone, 8.5/min for good, no surge",
        workload=CODE,
        rate_per_min=8.5,
        extra=None,
    ),
    Scenario(
        name="code, impatient",
        says="1P3D, device cache alone, 5.5/min, +100 %; clients give up after 120 s and try 3 times again",
        workload=CODE,
        rate_per_min=5.5,
        extra=1.0,
        client=IMPATIENT,
    ),
    Scenario(
        name="terminal, GPU",
        says="1P3D, device cache alone, 3/min, +100 %",
        workload=TERMINAL,
        rate_per_min=3.0,
        extra=1.0,
    ),
    Scenario(
        name="code, lending",
        says="1P3D that lends, 9/min, +100 %",
        workload=CODE,
        rate_per_min=9.0,
        extra=1.0,
        changes=LEND,
    ),
    Scenario(
        name="terminal, lending",
        says="1P3D that lends, 6/min, +100 %",
        workload=TERMINAL,
        rate_per_min=6.0,
        extra=1.0,
        changes=LEND,
    ),
    Scenario(
        name="code-25k, 1P1D",
        says="1P1D H100, 3.3/min, +100 %",
        workload=CODE_SMALL,
        rate_per_min=3.3,
        extra=1.0,
        profile="h100-1p1d",
    ),
    Scenario(
        name="decode-first",
        says="1P1D H100 with 1.3M tokens of cache and 98K of decode memory, 3/min, +100 %",
        workload=CODE_SMALL,
        rate_per_min=3.0,
        extra=1.0,
        profile="h100-1p1d",
        changes=DECODE_FIRST,
    ),
)
"""The scenarios that defaults are chosen on, with `CHOICE_SEEDS`."""
HELD_OUT = (
    Scenario(
        name="bench, GPU",
        says="1P3D, device cache alone, 5/min, +100 %",
        workload=BENCH,
        rate_per_min=5.0,
        extra=1.0,
    ),
    Scenario(
        name="code, host tier, +300 %",
        says="1P3D with HiCache, 10/min, +300 %",
        workload=CODE,
        rate_per_min=10.0,
        extra=3.0,
        changes=HOST,
    ),
    Scenario(
        name="terminal, GPU, overload",
        says="1P3D, device cache alone, 5/min for good, no surge",
        workload=TERMINAL,
        rate_per_min=5.0,
        extra=None,
    ),
    Scenario(
        name="long, lending",
        says="1P3D that lends, 0.8/min, +300 %",
        workload=LONG,
        rate_per_min=0.8,
        extra=3.0,
        changes=LEND,
    ),
)
"""Loads that nothing was chosen on."""


def stepped_plan(sessions: Sequence[Any], settings: StudySettings, steps: Sequence[tuple[float, float]]) -> Plan:
    """Poisson arrivals at a rate that changes in steps; each step draws with a seed of its own."""
    duration_s, end_s = settings.duration_s, settings.duration_s + settings.tail_s
    profile = ArrivalProfile(rate_per_s=steps[0][1], duration_s=duration_s, tail_s=settings.tail_s)
    deck = draw(sessions, settings.order, settings.seed)
    planned: list[PlannedSession] = []
    for number, (from_s, rate_per_s) in enumerate(steps):
        to_s = steps[number + 1][0] if number + 1 < len(steps) else end_s
        here = ArrivalProfile(rate_per_s=rate_per_s, duration_s=to_s - from_s)
        for time_s in arrival_times(here, 1000 * settings.seed + number):
            at_s = from_s + time_s
            uid = f"step-{settings.seed}-{len(planned):05d}"
            planned.append(PlannedSession(uid, at_s, next(deck), at_s < duration_s))
    return Plan(Path(settings.trace).name, settings.seed, profile, tuple(planned))


def run_case(one: Case, factory: Callable[[Plan], PolicyFactory] | None = None) -> dict[str, Any]:
    """The result as `simulate --json` has it, and how it ended. `factory` in place of the settings' policy."""
    settings, plan, hardware = one.settings, one.plan(), one.settings.hardware()
    policy = factory(plan) if factory else policy_of(one, plan)
    started_s = time.perf_counter()
    log = simulate(plan, hardware, policy, client=settings.client, target=settings.target, sample_s=settings.sample_s)
    study = Study(settings, hardware, log, time.perf_counter() - started_s, 0.0)
    result = study.result()
    result["end"] = dataclasses.asdict(how_it_ends(result["series"], log.plan))
    result["wall_s"] = round(study.wall_s, 3)
    return result


def policy_of(one: Case, plan: Plan) -> PolicyFactory:
    """The settings' policy; `predictor: held-out` is one that only these benchmarks have."""
    settings, predictor = one.settings, None
    options = dict(settings.policy_options)
    if options.get("predictor") == "held-out":
        options["predictor"] = "none"
        from sim_held_out import held_out  # fits models: scikit-learn, 100 MiB

        predictor = held_out(plan, settings.trace, settings.scaling)
    return policy_factory(settings.policy, options, plan, settings.hardware(), predictor)


# ---- How a run ends ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class End:
    """The last half hour of a run."""

    arrived: int
    finished: int
    hit_rate: float | None
    """Mean of the samples."""
    stuck: bool
    """Sessions leave at less than three quarters of the rate at which they come. Poisson arrivals alone are within
    that (165 ± 13 at 5.5 a minute); policies that keep hit rates high but serve nobody are stuck as well."""


def how_it_ends(series: Mapping[str, Sequence[float | None]], plan: Plan, last_s: float = 1800.0) -> End:
    at_s, done = series["at_s"], series["finished_sessions"]
    from_s = (at_s[-1] or 0.0) - last_s
    first = next(i for i, time_s in enumerate(at_s) if (time_s or 0.0) >= from_s)
    finished = int((done[-1] or 0) - (done[first] or 0))
    arrived = sum(planned.arrival_s >= from_s for planned in plan.sessions)
    rates = [rate for rate in series["hit_rate"][first:] if rate is not None]
    return End(
        arrived=arrived,
        finished=finished,
        hit_rate=statistics.fmean(rates) if rates else None,
        stuck=finished < 0.75 * arrived,
    )


def between(result: Mapping[str, Any], name: str, from_s: float, to_s: float) -> float | None:
    """Mean of a series' samples in a window; None if it has none there."""
    series = result["series"]
    chosen = [
        value
        for at_s, value in zip(series["at_s"], series[name], strict=True)
        if from_s <= at_s < to_s and value is not None
    ]
    return statistics.fmean(chosen) if chosen else None


def recovered_after_s(result: Mapping[str, Any], hold_s: float = 600.0) -> float | None:
    """Seconds from the surge's end until the hit rate is back at 0.9 of what it was and, ten minutes long, stays; with
    no more first calls waiting than 1.5 times (and 3 more than) the most before the surge. None: never."""
    series = result["series"]
    healthy = between(result, "hit_rate", 300.0, SURGE_FROM_S)
    if healthy is None:
        return None
    before = [w for at_s, w in zip(series["at_s"], series["waiting_sessions"], strict=True) if at_s < SURGE_FROM_S]
    most = 1.5 * max(before) + 3
    since: float | None = None
    for at_s, rate, waiting in zip(series["at_s"], series["hit_rate"], series["waiting_sessions"], strict=True):
        if at_s < SURGE_TO_S:
            continue
        good = waiting <= most and (rate is None or rate >= 0.9 * healthy)
        since = (at_s if since is None else since) if good else None
        if since is not None and at_s - since >= hold_s:
            return float(since - SURGE_TO_S)
    return None


# ---- Many cases ----------------------------------------------------------------------------------------------------


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


def _key(function: Callable[[Any], Any], subject: Any) -> str:
    """Of a function's name and source file, and of its subject with all that it points to."""
    source = Path(function.__code__.co_filename).read_bytes()
    own = "" if function is run_case else hashlib.blake2b(source, digest_size=12).hexdigest()
    return _digest([function.__qualname__, own, code_digest(), _told(subject)])


def _told(subject: Any) -> Any:
    if isinstance(subject, Case):
        return subject.told() | {"study": subject.settings.key()}
    if isinstance(subject, dict):
        return {key: _told(value) for key, value in subject.items()}
    if isinstance(subject, list | tuple):
        return [_told(value) for value in subject]
    return msgspec.to_builtins(subject)


def _run_into(function: Callable[[Any], Any], subject: Any, path: Path) -> None:
    """In a worker process. A file is complete or absent."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(function(subject)) + "\n", encoding="utf-8")
    part.replace(path)


def run_all(subjects: Sequence[Any], jobs: int, function: Callable[[Any], dict[str, Any]] = run_case) -> list[Any]:
    """`function` of each subject, in order; what is in the cache is not run again."""
    CACHE.mkdir(parents=True, exist_ok=True)
    paths = [CACHE / f"{_key(function, subject)}.json" for subject in subjects]
    missing = {path: subject for path, subject in zip(paths, subjects, strict=True) if not path.exists()}
    if missing:
        started_s, tenth = time.monotonic(), -1
        with ProcessPoolExecutor(max_workers=min(jobs, len(missing))) as pool:
            futures = [pool.submit(_run_into, function, subject, path) for path, subject in missing.items()]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    if 10 * done // len(missing) != tenth:
                        tenth = 10 * done // len(missing)
                        told = f"{done} of {len(missing)} runs, {time.monotonic() - started_s:.0f} s"
                        print(told, file=sys.stderr, flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


# ---- Findings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the article beside ours."""

    what: str
    article: str
    ours: str
    holds: str
    """`yes`, `no`, or `partly`."""
    cause: str = ""
    """Where it does not hold: the measured cause."""


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A benchmark's result."""

    name: str
    rank: int
    """Where in the page."""
    title: str
    method: str
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the tables were made of, for whoever wants to go on from here."""


def made_with(options: argparse.Namespace, workloads: Iterable[Workload], runs: int) -> dict[str, Any]:
    script = Path(sys.argv[0]).name
    flags = " ".join(sys.argv[1:])
    return {
        "command": f".venv/bin/python benchmarks/{script} {flags}".rstrip(),
        "quick": options.quick,
        "seeds": options.seeds,
        "runs": runs,
        "traces": {w.name: Path(w.trace).name.removesuffix(".gz").removesuffix(".jsonl") for w in workloads},
        "fallbacks": [w.name for w in workloads if w.fell_back],
        "versions": {
            "python": platform.python_version(),
            "sglang-basin": metadata.version("sglang-basin"),
            "numpy": metadata.version("numpy"),
            "policies and simulator": code_digest(),
        },
    }


def publish(finding: Finding, options: argparse.Namespace, workloads: Iterable[Workload], runs: int) -> None:
    """Print the finding and write it, with what it was made with."""
    made = dataclasses.asdict(finding) | {"made_with": made_with(options, workloads, runs)}
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{finding.name}.json"
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(as_text(finding))
    print(f"\nwritten to {path}")


def as_text(finding: Finding) -> str:
    lines = [finding.title, ""]
    if finding.figures:
        lines += _columns(
            ["figure", "article", "ours", "holds"],
            [[figure.what, figure.article, figure.ours, figure.holds] for figure in finding.figures],
        )
        lines += [f"  {figure.what}: {figure.cause}" for figure in finding.figures if figure.cause]
    for made in finding.tables:
        lines += ["", made.title, *_columns(made.columns, made.rows)]
    return "\n".join([*lines, *(["", *finding.notes] if finding.notes else [])])


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


# ---- The command line ----------------------------------------------------------------------------------------------


def parse(docstring: str | None, seeds: Sequence[int] = BASE_SEEDS) -> argparse.Namespace:
    """The flags that all of these scripts take; `seeds` are those of the committed result."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="one seed and fewer settings, for a first look")
    parser.add_argument("--seeds", type=_seeds, help="such as 1,2,3 (as the committed result; with --quick: 1)")
    parser.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="for result and plot (benchmarks/results; --quick: out/quick)"
    )
    options = parser.parse_args()
    options.seeds = options.seeds or list(seeds[:1] if options.quick else seeds)
    options.results = options.results or (ROOT / "out" / "quick" if options.quick else RESULTS)
    return options


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write whole numbers such as 1,2,3, got {text!r}") from None
    if len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError(f"a seed twice: {text}")
    return seeds


def holds(fully: bool, partly: bool = True) -> str:
    """A figure's verdict."""
    return "yes" if fully else "partly" if partly else "no"


# ---- Numbers as text -----------------------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """The mean, and the least and the most if they differ in print."""
    low, mean, high = (format(value, form) for value in (min(values), statistics.fmean(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def geometric_mean(values: Sequence[float], floor: float = 0.01) -> float:
    """With a floor, so that one zero among many scenarios does not hide all else."""
    return statistics.geometric_mean([max(value, floor) for value in values])


# ---- Plots ---------------------------------------------------------------------------------------------------------


def save_plot(figure: Any, options: argparse.Namespace, name: str) -> str:
    """A small PNG beside the result; returns its file name."""
    options.results.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    drawn.seek(0)
    Image.open(drawn).convert("RGB").quantize(64).save(options.results / f"{name}.png", optimize=True)
    return f"{name}.png"
