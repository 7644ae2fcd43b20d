"""Many runs: all combinations of swept settings, over seeds and cores, kept one file each so that a sweep resumes.

A result's file is named by `StudySettings.key()`: its settings, the trace's and profile's contents, and the code. A
run whose file exists is not run again; a file is complete or absent (it is renamed into place).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_basin.replay.quantities import duration_s, rate_per_s, surge_extra
from sglang_basin.simulator.study import StudySettings, run_study, to_json


class SweepError(ValueError):
    """A sweep that cannot be run; the message names the setting."""


@dataclass(frozen=True)
class Variant:
    """One combination. `changed` is what sets it apart, as text."""

    changed: Mapping[str, str]
    settings: StudySettings

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changed.items()) or "(as given)"


def with_setting(settings: StudySettings, key: str, text: str) -> StudySettings:
    """The settings with one changed: `policy`, `policy.OPTION`, `profile`, `profile.FIELD`, `trace`, `rate`, `surge`
    or `retries`. Raises SweepError, or QuantityError for a value that cannot be read."""
    replace = dataclasses.replace
    head, _, rest = key.partition(".")
    if rest and head == "policy":
        return replace(settings, policy_options=settings.policy_options | {rest: text})
    if rest and head == "profile":
        return replace(settings, profile_changes=settings.profile_changes | {rest: text})
    if key == "policy":
        return replace(settings, policy=text)
    if key == "profile":
        return replace(settings, profile=text)
    if key == "trace":
        return replace(settings, trace=text)
    if key == "rate":
        return replace(settings, rate_per_s=rate_per_s(text))
    if key == "surge":
        if settings.surge is None:
            raise SweepError("surge: give --surge, --from and --to, so that its window is known")
        return replace(settings, surge=replace(settings.surge, extra=surge_extra(text)))
    if key == "retries" and text.isdigit():
        return replace(settings, client=replace(settings.client, retries=int(text)))
    if key == "call-timeout":
        return replace(settings, client=replace(settings.client, call_timeout_s=duration_s(text)))
    raise SweepError(
        f"{key}={text}: not a setting; write policy, policy.OPTION, profile, profile.FIELD, trace, rate, surge, "
        "call-timeout or retries"
    )


def variants(base: StudySettings, swept: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[Variant]:
    """All combinations, seeds innermost."""
    made = []
    for values in itertools.product(*swept.values()):
        changed = dict(zip(swept, values, strict=True))
        settings = base
        for key, text in changed.items():
            settings = with_setting(settings, key, text)
        made += [Variant(changed, dataclasses.replace(settings, seed=seed)) for seed in seeds]
    return made


def _run_into(settings: StudySettings, path: Path) -> None:
    """In a worker process."""
    study = run_study(settings)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(to_json(study.result(), study.cost()), encoding="utf-8")
    part.replace(path)


def run_sweep(
    runs: Sequence[Variant], folder: Path, *, jobs: int, on_done: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Run what has no result yet and return all results, in the order of `runs`.

    `on_done(done, total)` counts those found as done. Interrupted, it stops the workers and keeps what is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{run.settings.key()}.json" for run in runs]
    missing = {path: run.settings for path, run in zip(paths, runs, strict=True) if not path.exists()}
    total = len(set(paths))
    done = total - len(missing)
    if on_done is not None:
        on_done(done, total)
    if missing:
        pool = ProcessPoolExecutor(max_workers=min(jobs, len(missing)))
        try:
            futures = [pool.submit(_run_into, settings, path) for path, settings in missing.items()]
            for future in as_completed(futures):
                future.result()
                done += 1
                if on_done is not None:
                    on_done(done, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


SHOWN = (
    "goodput_per_hour",
    "completed_share",
    "hit_rate_last_third",
    "first_call_wait_p50_s",
    "first_call_wait_p99_s",
    "ttft_p50_s",
    "steps_on_time_share",
)


def table(runs: Sequence[Variant], results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(label, seeds, mean of each shown figure, and the least and most goodput), one row a combination."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for run, result in zip(runs, results, strict=True):
        rows.setdefault(run.label, []).append(result["result"]["summary"])
    for label, summaries in rows.items():
        means: dict[str, Any] = {}
        for name in SHOWN:
            known = [summary[name] for summary in summaries if summary[name] is not None]
            means[name] = statistics.fmean(known) if known else None
        good = [summary["goodput_per_hour"] for summary in summaries]
        means["goodput_range"] = (min(good), max(good))
        yield label, len(summaries), means
