"""A whole PD node in one command: `python -m sglang_basin.launch_node --prefill 1 --decode 3 --model-path M …`

Engines, the `smg` router before them, and one owner for all: ready means that a request went through, and the end of
the launcher, however it comes, is the end of every process it started.

Flags that are not listed by --help go to every engine. Without a `--basin-*` flag the engines are stock SGLang.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_basin.config import BasinConfig, ConfigError, flag_parser, split_flags
from sglang_basin.launch_server import refuse_other_version
from sglang_basin.node import ChildDied, Node, NodeOptions, NotReady, Plan, PortError, Ports, make_plan
from sglang_basin.node.plan import ROUTER_ARGUMENTS, SPARE_DECODE_AT
from sglang_basin.platforms.profiles import PROFILES

_COLOURS = ("36", "33", "35", "32", "34", "31")  # ANSI: cyan, yellow, magenta, green, blue, red


class Stopped(BaseException):
    """A signal asked the launcher to end."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped by a signal or dry run, 1 a process died or did not come up, 2 wrong options."""
    try:
        config, others = split_flags(argv)
        known, engine_arguments = _parser().parse_known_args(others)
        if known.no_basin and config is not None:
            raise ConfigError("--no-basin contradicts the --basin-* flags; keep one of them")
        if config is None and not known.no_basin:
            config = BasinConfig.from_environment(os.environ)
        if config is not None:
            refuse_other_version()
        platform = known.platform or ("cuda" if visible_gpus(None) else "cpu")
        with Ports(known.host) as ports:
            options = NodeOptions(
                model_path=known.model_path,
                prefill=known.prefill,
                decode=known.decode,
                platform=platform,
                config=config,
                engine_arguments=tuple(engine_arguments),
                prefill_arguments=_words("--prefill-args", known.prefill_args),
                decode_arguments=_words("--decode-args", known.decode_args),
                router_arguments=_words("--router-args", known.router_args),
                spare_decode_at=known.spare_decode_at,
                host=known.host,
                port=known.port,
                cores=known.cores,
                gpus=visible_gpus(known.gpus) if platform == "cuda" else _listed(known.gpus or ""),
                log_dir=known.log_dir,
            )
            plan = make_plan(options, ports, sorted(os.sched_getaffinity(0)))
            if known.dry_run:
                print(plan.shell())
                return 0
            return _run(plan, known)
    except (ConfigError, PortError) as error:
        print(f"launch_node: {error}", file=sys.stderr)
        return 2


def _run(plan: Plan, known: argparse.Namespace) -> int:
    terminal = _Terminal([process.name for process in plan.processes])
    node = Node(
        plan,
        echo=terminal.child_line,
        progress=lambda elapsed_s, line: terminal.own_line(f"[{elapsed_s:5.1f} s] {line}"),
        ready_timeout_s=known.ready_timeout_s,
    )
    with _signals_raise():
        try:
            node.start()
            if known.ready_file:
                node.write_ready_file(known.ready_file)
            node.wait()
        except Stopped:
            terminal.own_line("stopping")
            return 0
        except (ChildDied, NotReady) as failure:
            print(f"launch_node: {failure}", file=sys.stderr, flush=True)
            return 1
        finally:
            _ignore_signals()
            node.stop()
            if known.ready_file:
                known.ready_file.unlink(missing_ok=True)
            terminal.own_line("every process has ended")
    return 0


def visible_gpus(asked: str | None) -> tuple[str, ...]:
    """The GPUs to use, in order: those asked for, else those that the environment or the driver shows."""
    if asked is not None:
        return _listed(asked)
    if (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return _listed(shown)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(index) for index in range(listing.stdout.count("GPU ")))


def _words(flag: str, text: str) -> tuple[str, ...]:
    """The words of a quoted list of flags, as a shell splits them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from None


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


class _Terminal:
    """Prints lines of several processes, each with its name in front; in colour on a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        self._width = max(map(len, names))
        self._colour = dict(zip(names, _COLOURS * len(names), strict=False)) if sys.stdout.isatty() else {}
        self._lock = threading.Lock()

    def child_line(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if colour := self._colour.get(name):
            prefix = f"\033[{colour}m{prefix}\033[0m"
        self._print(f"{prefix} {line}")

    def own_line(self, line: str) -> None:
        self._print(f"launch_node: {line}")

    def _print(self, text: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(text, flush=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        _ignore_signals()
        raise Stopped

    before = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ignore_signals() -> None:
    """The teardown is under way and bounded in time; a second Ctrl-C must not interrupt it."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _parser() -> argparse.ArgumentParser:
    router = "\n".join(f"  {' '.join(words)}: {why}" for words, why in ROUTER_ARGUMENTS)
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.launch_node",
        usage="%(prog)s --model-path M [--prefill N] [--decode N] [options] [--basin-* ...] [any SGLang flag]",
        description="Starts a PD node: prefill and decode engines and the router, until Ctrl-C.",
        epilog=f"Any --basin-* flag turns Basin on. Every flag not listed here goes to all engines.\n\n"
        f"The router's flags and why:\n{router}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[flag_parser()],
    )
    add = parser.add_argument_group("node").add_argument
    add("--model-path", "--model", required=True, metavar="M", help="model folder or Hugging Face name")
    add("--prefill", type=int, default=1, metavar="N", help="prefill engines (default: 1)")
    add("--decode", type=int, default=1, metavar="N", help="decode engines (default: 1)")
    add("--platform", choices=sorted(PROFILES), help="where engines compute (default: cuda with a GPU, else cpu)")
    add("--host", default="127.0.0.1", help="address of the router (default: 127.0.0.1)")
    add("--port", type=int, default=30000, help="port of the router, 0 for any free one (default: 30000)")
    add("--prefill-args", default="", metavar='"…"', help="SGLang flags for prefill engines only")
    add("--decode-args", default="", metavar='"…"', help="SGLang flags for decode engines only")
    add("--router-args", default="", metavar='"…"', help="smg flags, after the ones listed below")
    add(
        "--spare-decode-at",
        type=float,
        default=SPARE_DECODE_AT,
        metavar="PART",
        help="of a decode's KV pool in use by running calls, from which on its sessions' calls go to another decode "
        f"that has room; 0 is never, as in stock SGLang (default: {SPARE_DECODE_AT})",
    )
    add("--gpus", metavar="0,1,…", help="GPUs in order, tp-size for each engine; one named twice is shared")
    add(
        "--cores",
        default="auto",
        help='CPU platform: "auto", "none" or "PREFILL;DECODE" as in "0;1-3" (default: auto)',
    )
    add("--log-dir", type=Path, metavar="DIR", help="a log file per process too")
    add("--ready-file", type=Path, metavar="PATH", help="JSON with urls and pids, written once requests are routed")
    add("--ready-timeout-s", type=float, default=1800.0, metavar="S", help="give up the start (default: 1800)")
    add("--dry-run", action="store_true", help="print the exact commands and start nothing")
    add("--no-basin", action="store_true", help="stock SGLang, whatever BASIN_CONFIG says; so is leaving out --basin-*")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
