"""`python -m sglang_basin.fit_predictor`: fit the predictor of peak contexts, or score a fitted one on other traces."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_basin.predictor import report
from sglang_basin.predictor.evaluate import Score, predict, score
from sglang_basin.predictor.fitted import Frozen, Serving
from sglang_basin.predictor.model import OnlineSettings
from sglang_basin.predictor.model_file import ModelFileError, default_model_path, load_model, save_model
from sglang_basin.predictor.predictor import TrainedPredictor
from sglang_basin.predictor.recorded import Recorded, read_recorded
from sglang_basin.predictor.training import MIN_SESSIONS, TrainingSettings, fit_model
from sglang_basin.replay.quantities import positive_int
from sglang_basin.replay.trace import TraceError, shipped_traces

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """Flags that do not go together; the message names them."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.fit_predictor",
        description="Fit the predictor of sessions' peak contexts to recorded sessions, or score a fitted one.",
        epilog=f"FILE: a trace, Basin's own session log, or a shipped trace by name: {', '.join(shipped_traces())}. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trace", nargs="+", metavar="FILE", help="fit on these sessions; needs --out")
    add("--out", type=Path, metavar="MODEL", help="write the fitted model here")
    add("--eval", nargs="+", metavar="FILE", help="score --model on these sessions instead of fitting")
    add("--model", type=Path, metavar="MODEL", help="the model to score (the one that comes with Basin)")
    add("--json", type=Path, metavar="OUT", help="write the scores here; - for standard output")
    add("--plots", type=Path, metavar="DIR", help="with --trace: draw the report's plots into this folder")
    add("--report", action=argparse.BooleanOptionalAction, default=True, help="cross-validate before fitting (yes)")
    add("--folds", type=positive_int, default=8, metavar="N", help="of the cross-validation (8)")
    add(
        "--horizon",
        type=float,
        default=400.0,
        metavar="N",
        help="after N sessions the fit weighs 1/e of what it did (400)",
    )
    add("--seed", type=int, default=1, help="of folds and trees (1)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        _check(options)
        if options.eval:
            return _evaluate(options)
        return _fit(options, console)
    except UsageError as error:
        print(f"fit_predictor: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (TraceError, ModelFileError, ValueError) as error:
        print(f"fit_predictor: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"fit_predictor: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _check(options: argparse.Namespace) -> None:
    if bool(options.trace) == bool(options.eval):
        raise UsageError("give either --trace FILE… --out MODEL, to fit, or --eval FILE…, to score a fitted model")
    if options.trace and options.out is None:
        raise UsageError("--out: where the fitted model goes must be given")
    if options.trace and options.model is not None:
        raise UsageError("--model names the model to score: it goes with --eval")
    if options.eval and (options.out is not None or options.plots is not None):
        raise UsageError("--out and --plots go with --trace")
    if options.folds < 2:
        raise UsageError(f"--folds: at least 2, got {options.folds}")
    if options.out is not None and not options.out.parent.is_dir():
        raise UsageError(f"--out: the folder {options.out.parent} does not exist; make it first")


def _settings(options: argparse.Namespace) -> TrainingSettings:
    made = TrainingSettings(online=OnlineSettings(horizon_sessions=options.horizon), seed=options.seed)
    return dataclasses.replace(made, forest=dataclasses.replace(made.forest, seed=options.seed))


def _fit(options: argparse.Namespace, console: Console) -> int:
    files = {Path(name).name.removesuffix(".gz").removesuffix(".jsonl"): read_recorded(name) for name in options.trace}
    sessions = [session for part in files.values() for session in part]
    settings = _settings(options)
    if options.report:
        if len(sessions) < 2 * MIN_SESSIONS:
            raise ValueError(f"{len(sessions)} sessions are too few to judge a fit by; --no-report fits all the same")
        parts = report.cross_validations(
            sessions,
            settings=settings,
            folds=options.folds,
            seed=options.seed,
            progress=lambda text: console.print(f"[dim]{text}[/dim]"),
        )
        _write(options.json, {"fitted_on": report.counts_by_name(files), "parts": report.as_json(parts)})
        if options.json != Path("-"):
            print(report.text_report(parts))
        if options.plots is not None:
            for path in report.draw(parts, options.plots):
                console.print(f"drawn: {path}")
    save_model(fit_model(sessions, settings), options.out, fitted_on=report.counts_by_name(files))
    console.print(f"fitted on {len(sessions)} sessions: {options.out}")
    return EXIT_OK


def _evaluate(options: argparse.Namespace) -> int:
    path = options.model or default_model_path()
    results: dict[str, Any] = {}
    for name in options.eval:
        sessions = read_recorded(name)
        scored = score_model(path, sessions)
        results[name] = {kind: _rows(scores) for kind, scores in scored.items()}
        if options.json != Path("-"):
            for kind, scores in scored.items():
                print(f"{name}, {kind}\n{report.table(scores)}\n")
    _write(options.json, {"model": str(path), "files": results})
    return EXIT_OK


def score_model(path: Path, sessions: Sequence[Recorded]) -> dict[str, list[Score]]:
    """As it is in the file, and learning from each session after having predicted it. Raises ModelFileError."""
    return {
        "as fitted": score(predict(Frozen(load_model(path)), sessions)),
        "learning as it serves": score(predict(Serving(TrainedPredictor(load_model(path))), sessions)),
    }


def _rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in scores]


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(content, indent=1)
    if path == Path("-"):
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
