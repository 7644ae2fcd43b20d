"""The demo: one surge, two arms. Stock SGLang and Basin serve the same recorded agent sessions, one after the other.

    make demo                                     # about 14 minutes on two cores
    .venv/bin/python benchmarks/surge_demo.py --seed 2
    .venv/bin/python benchmarks/surge_demo.py --arms current,partial,peak     # Basin's admission laws beside each other

A real node runs (one prefill, two decodes, the router, Mooncake over TCP) on the reference CPU platform with a tiny
random model. Sessions of the shipped `claude_code_kvtester` trace, scaled down, arrive at a steady pace that the node
serves easily; for half a minute nine times as many arrive; then the pace is the old one again. Writes
`out/demo/summary.json`, `page.html` and `plots.png`, and the calls of each arm as JSONL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.metadata
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console

from sglang_basin.config import BasinConfig, ConfigError, split_flags
from sglang_basin.node import ChildDied, Node, NodeOptions, NotReady, running_node
from sglang_basin.platforms.tiny_model import ModelSpec, build, fast_dtype
from sglang_basin.replay import (
    ArrivalProfile,
    DriveSettings,
    RunResult,
    Scaling,
    Session,
    Surge,
    Target,
    UnloadedTimes,
    build_plan,
    find_trace,
    measure_unloaded,
    read_trace,
    report,
    run,
    scale_trace,
    summarize,
)
from sglang_basin.replay.__main__ import shown_progress, stop_on_signal


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The set-up. What decides whether a stack can get stuck at all, by the fluid model: the base load's working set
    must fit the cache, the surge's must not, and without hits prefill must finish sessions more slowly than they
    arrive."""

    trace: str = "claude_code_kvtester"
    scaling: Scaling = Scaling(  # noqa: RUF009 - frozen
        tokens=1 / 50, time=0.2, max_calls=24, tool_cap_s=5.0, max_context_tokens=4_000
    )
    rate_per_min: float = 8.0
    surge_extra: float = 8.0
    surge_from_s: float = 80.0
    surge_to_s: float = 110.0
    duration_s: float = 285.0
    tail_s: float = 55.0
    model: ModelSpec = dataclasses.field(
        default_factory=lambda: ModelSpec(hidden=640, layers=5, vocab=2048, dtype=fast_dtype(), seed=7)
    )
    """Where bfloat16 is emulated, prefill computes a third as fast, and then no policy serves this load."""
    prefill_pool_tokens: int = 36_000
    decode_pool_tokens: int = 60_000
    page_size: int = 16
    decodes: int = 2
    measured_sessions: int = 4
    unloaded_steps: float = 8.0
    """The article's goodput, but for the per-token target, which is so many times what a token takes on the idle node,
    50 ms at least: on the article's H100 that is its 50 ms (a step of one sequence takes 6.2 ms there, profile
    `h100-1p1d`). Here two decodes, router and clients share one core: a fixed target would measure the laptop."""

    def target(self, times: UnloadedTimes) -> Target:
        return Target(tpot_s=round(max(0.05, self.unloaded_steps * times.model.per_output_token_s), 3))

    @property
    def profile(self) -> ArrivalProfile:
        return ArrivalProfile(
            rate_per_s=self.rate_per_min / 60,
            duration_s=self.duration_s,
            tail_s=self.tail_s,
            surge=Surge(self.surge_extra, self.surge_from_s, self.surge_to_s),
            process="fixed",
        )

    def sessions(self) -> list[Session]:
        return scale_trace(read_trace(find_trace(self.trace)), self.scaling)

    def basin(self) -> BasinConfig:
        """Everything at its default, but for the time-outs: the demo's clients neither come back nor give up."""
        return BasinConfig(idle_timeout_s=60.0, hold_limit_s=900.0)


def demo_node(
    demo: Demo, config: BasinConfig | None, logs: Path, console: Console
) -> contextlib.AbstractContextManager[Node]:
    """The demo's node, with or without Basin."""
    options = NodeOptions(
        model_path=str(build(demo.model)),
        prefill=1,
        decode=demo.decodes,
        config=config,
        # Left alone, SGLang serves a float32 model in float16, which a CPU multiplies ten times as slowly.
        engine_arguments=("--page-size", str(demo.page_size), "--dtype", demo.model.dtype, "--enable-metrics"),
        prefill_arguments=("--max-total-tokens", str(demo.prefill_pool_tokens)),
        decode_arguments=("--max-total-tokens", str(demo.decode_pool_tokens)),
        port=0,
        log_dir=logs,
    )
    return running_node(options, progress=lambda elapsed_s, line: console.print(f"  {elapsed_s:5.1f} s  {line}"))


def flush_caches(node: Node) -> None:
    for engine in node.plan.engines:
        requests.post(engine.url + "/flush_cache", timeout=30).raise_for_status()


def keep_metrics(node: Node, folder: Path) -> None:
    """Each engine's metrics at the end of an arm, beside its log: what a figure came from."""
    for engine in node.plan.engines:
        with contextlib.suppress(requests.RequestException):  # one that died has said so already
            answer = requests.get(engine.url + "/metrics", timeout=30)
            if answer.ok:
                (folder / f"{engine.name}.metrics").write_text(answer.text)


async def measure(demo: Demo, node: Node, seed: int, settings: DriveSettings, console: Console) -> UnloadedTimes:
    """Sessions of the plan, one at a time on the idle stock node."""
    plan = build_plan(demo.sessions(), demo.profile, seed, trace_name=demo.trace)
    distinct = list({planned.session.trace_id: planned.session for planned in plan.sessions}.values())
    file = await measure_unloaded(
        distinct[: demo.measured_sessions],
        node.url,
        seed=seed,
        trace_name=demo.trace,
        scaling=demo.scaling,
        settings=settings,
        on_session=lambda done, total: console.print(f"  unloaded times: {done} of {total} sessions measured"),
    )
    return UnloadedTimes(file)


async def replay_arm(
    demo: Demo, node: Node, seed: int, settings: DriveSettings, times: UnloadedTimes, out: Path, console: Console
) -> RunResult:
    plan = build_plan(demo.sessions(), demo.profile, seed, trace_name=demo.trace)
    stop = asyncio.Event()
    with stop_on_signal(stop), shown_progress(console) as show, watched(node, stop):
        return await run(
            plan,
            node.url,
            settings=settings,
            unloaded_s=times.of(planned.session for planned in plan.sessions),
            records_path=out,
            on_progress=show,
            stop=stop,
        )


@contextlib.contextmanager
def watched(node: Node, stop: asyncio.Event) -> Iterator[None]:
    """End the run when a process of the node dies; the node's own error follows on the way out."""
    loop = asyncio.get_running_loop()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            try:
                node.check()
            except ChildDied:
                loop.call_soon_threadsafe(stop.set)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    node.check()


def versions() -> dict[str, str]:
    names = ("sglang", "sglang-basin", "smg", "torch", "mooncake-transfer-engine-non-cuda")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Demo, BasinConfig | None]:
    config, others = split_flags(argv)
    demo = Demo()
    parser = argparse.ArgumentParser(
        description="A surge on a real PD node: stock SGLang against Basin, from recorded agent sessions.",
        epilog="Any --basin-* flag replaces the demo's own Basin configuration.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="of sessions, arrivals and prompts (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where results go (default: out/demo)")
    parser.add_argument(
        "--arms",
        default="stock,basin",
        help="which arms, in order: stock, basin, lending, or an admission law without pausing: current, partial, peak "
        "(default: stock,basin)",
    )
    for name in ("rate_per_min", "surge_extra", "duration_s", "tail_s"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=float, default=getattr(demo, name), help=f"(default: {getattr(demo, name):g})")
    parser.add_argument("--prefill-pool-tokens", type=int, default=demo.prefill_pool_tokens)
    options = parser.parse_args(others)
    changed = {
        name: value for name, value in vars(options).items() if name in {f.name for f in dataclasses.fields(Demo)}
    }
    return options, dataclasses.replace(demo, **changed), config


def main(argv: Sequence[str]) -> int:
    console = Console(stderr=True)
    try:
        options, demo, config = parse(argv)
    except ConfigError as error:
        console.print(f"surge_demo: {error}")
        return 2
    basin = config or demo.basin()
    arms: dict[str, BasinConfig | None] = {"stock": None, "basin": basin}
    arms["lending"] = dataclasses.replace(basin, lending="on")
    # Pausing would make up for what a law lets in too many. With the band that goes with reserving growth.
    alone = dataclasses.replace(basin, pausing="off", adaptive_band=0.3)
    arms |= {law: dataclasses.replace(alone, admission=law) for law in ("current", "partial", "peak")}
    wanted = options.arms.split(",")
    if unknown := [name for name in wanted if name not in arms]:
        console.print(f"surge_demo: --arms: unknown {unknown[0]!r}, choose from {', '.join(arms)}")
        return 2

    started = time.monotonic()
    settings = DriveSettings(call_timeout_s=900.0)
    times: UnloadedTimes | None = None
    results: dict[str, RunResult] = {}
    try:
        for name in wanted:
            console.print(f"[bold]{name}[/bold]: starting one prefill, {demo.decodes} decodes and the router")
            with demo_node(demo, arms[name], options.out / "logs" / name, console) as node:
                if times is None:
                    times = asyncio.run(measure(demo, node, options.seed, settings, console))
                    console.print(f"  {times.describe()}")
                    flush_caches(node)
                out = options.out / f"{name}.jsonl"
                results[name] = asyncio.run(replay_arm(demo, node, options.seed, settings, times, out, console))
                keep_metrics(node, options.out / "logs" / name)
            if results[name].interrupted:
                break
    except (ChildDied, NotReady) as error:
        console.print(f"surge_demo: {error}")
        return 1

    assert times is not None  # measured on the first arm's node
    target = demo.target(times)
    summaries = {name: summarize(result, target=target) for name, result in results.items()}
    more: dict[str, Any] = {
        "seed": options.seed,
        "command": " ".join(["benchmarks/surge_demo.py", *argv]),
        "versions": versions(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "set_up": dataclasses.asdict(demo),
        "basin": dataclasses.asdict(basin),
        "unloaded_model": dataclasses.asdict(times.model),
        "target": dataclasses.asdict(target),
    }
    print(f"decode steps are on time within {1e3 * target.tpot_s:.0f} ms")
    print(report.text_table(summaries))
    report.write_json(options.out / "summary.json", summaries, results, **more)
    title = "A surge on a PD node: stock SGLang and Basin"
    report.write_png(options.out / "plots.png", results, cache_tokens=demo.prefill_pool_tokens)
    report.write_page(
        options.out / "page.html",
        results,
        title=title,
        target=target,
        cache_tokens=demo.prefill_pool_tokens,
        settings=more,
    )
    print(f"\n{title}: open {options.out / 'page.html'}; numbers in {options.out / 'summary.json'}")
    return 130 if any(result.interrupted for result in results.values()) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
