"""`python -m sglang_basin.capacity`: where a deployment's trap is, from a description by a dozen numbers.

Reads a TOML file with the fields of `policy.capacity.Deployment` as top-level keys, flags of the same names, or both
(flags win); prints the limits, the stable and the tipping point and what a surge does; draws the completion curve.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_basin.policy import capacity
from sglang_basin.policy.capacity import Deployment, DeploymentError, Fate, Surge
from sglang_basin.replay.quantities import QuantityError, duration_s, format_duration, rate_per_s, surge_extra

EXIT_OK = 0
EXIT_USAGE = 2

EXAMPLE = """\
# One prefill and one decode instance on H100-class GPUs under coding agents with contexts of 26K tokens on average.
# Round numbers that show the phenomenon; measure your own.
cache_tokens = 700_000            # prefill's KV pool (+ host tier + lent decode memory)
mean_context_tokens = 26_000
calls_per_session = 40
new_tokens_per_call = 600
output_tokens_per_call = 250
tool_s = 11.0
prefill_new_token_s = 4e-5        # 25,000 tokens/s uncached
prefill_cached_token_s = 1e-7
prefill_fixed_s = 0.03
decode_step_s = 0.01
decode_tokens = 700_000
shared_tokens = 2_000             # system prompt and tools
"""
"""What `--example` prints: a description to start from."""


class UsageError(Exception):
    """Wrong arguments or files; the message names the argument and the mend."""


def number(text: str) -> float:
    """A number, with k, M or G for thousands, millions and billions: `700k`, `1.5M`, `4e-5`."""
    match = re.fullmatch(r"([-+]?[\d_]*\.?\d[\d_]*(?:[eE][-+]?\d+)?)\s*([kMG]?)", text.strip())
    if match is None:
        raise QuantityError(f"{text!r} is not a number; write 26000, 26k, 0.7M or 4e-5")
    return float(match[1].replace("_", "")) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sglang_basin.capacity",
        description="Where a deployment stops coming back from a surge: the fluid model of agent serving.",
        epilog="Start from an example: --example > deployment.toml",
        allow_abbrev=False,
    )
    made.add_argument("--example", action="store_true", help="print a deployment description and stop")
    made.add_argument("--deployment", type=Path, metavar="FILE", help="TOML file with any of the fields below")
    made.add_argument("--rate", type=rate_per_s, metavar="RATE", help="sessions that arrive, as 3.3/min or 200/h")
    made.add_argument("--surge", type=surge_extra, metavar="CHANGE", help="what a surge adds to the rate, as +100%%")
    made.add_argument("--for", dest="surge_s", type=duration_s, metavar="TIME", help="how long it lasts (default: 10m)")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the completion curve, as PNG, SVG or PDF")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON; - for standard output")
    fields = made.add_argument_group("the deployment and its load")
    for field in dataclasses.fields(Deployment):
        unit = f", in {field.metadata['unit']}" if field.metadata["unit"] else ""
        default = "" if field.default is dataclasses.MISSING else f" (default: {field.default:g})"
        fields.add_argument(
            "--" + field.name.replace("_", "-"),
            type=number,
            metavar="X",
            default=argparse.SUPPRESS,
            help=f"{field.metadata['help']}{unit}{default}",
        )
    return made


def read_deployment(path: Path | None, flags: dict[str, Any]) -> Deployment:
    """The file's fields and the flags over them. Raises UsageError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--deployment {path}: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"--deployment {path}: not TOML ({error})") from None
    try:
        return Deployment.from_mapping({**values, **flags}, f"--deployment {path}" if path is not None else "flags")
    except DeploymentError as error:
        hint = "" if path is not None else "\nstart from an example: python -m sglang_basin.capacity --example"
        raise UsageError(f"{error}{hint}") from None


@dataclasses.dataclass(frozen=True)
class Answer:
    """All that is computed for one deployment, rate and surge."""

    deployment: Deployment
    limits: capacity.Limits
    peak: capacity.Peak
    arrivals_per_s: float | None
    equilibria: list[capacity.Equilibrium]
    largest_surge: float | None
    surge: Surge
    fate: Fate | None

    @property
    def stable(self) -> float | None:
        return self.equilibria[0].sessions if self.equilibria else None

    @property
    def tipping(self) -> float | None:
        return self.equilibria[1].sessions if len(self.equilibria) > 1 else None

    def verdict(self) -> str:
        """One sentence for people in a hurry."""
        if self.arrivals_per_s is None:
            return f"{self.limits.first} is full first"
        if self.stable is None:
            return "overload: more sessions arrive than can ever finish; add capacity or shed"
        if self.tipping is None:
            return "safe: every surge is worked off at this rate"
        return f"metastable: a surge to {self.tipping:.0f} live sessions or more does not end by itself"

    def as_json(self) -> dict[str, Any]:
        per_min = self.arrivals_per_s * 60 if self.arrivals_per_s is not None else None
        return {
            "deployment": _finite(dataclasses.asdict(self.deployment)),
            "limits": {**dataclasses.asdict(self.limits), "first": self.limits.first},
            "peak": {"sessions": self.peak.sessions, "completions_per_min": self.peak.completions_per_s * 60},
            "arrivals_per_min": per_min,
            "equilibria": [dataclasses.asdict(point) for point in self.equilibria],
            "surge": dataclasses.asdict(self.surge),
            "fate": None if self.fate is None else dataclasses.asdict(self.fate),
            "largest_surge": None if self.largest_surge is None else _finite({"_": self.largest_surge})["_"],
            "verdict": self.verdict(),
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: None stands for "no limit"."""
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in values.items()}


def answer(deployment: Deployment, arrivals_per_s: float | None, surge: Surge) -> Answer:
    rate = arrivals_per_s
    return Answer(
        deployment=deployment,
        limits=capacity.limits(deployment),
        peak=capacity.peak(deployment),
        arrivals_per_s=rate,
        equilibria=[] if rate is None else capacity.equilibria(deployment, rate),
        largest_surge=None if rate is None else capacity.largest_surge(deployment, rate, surge.to_s - surge.from_s),
        surge=surge,
        fate=None if rate is None else capacity.fate(deployment, rate, surge),
    )


def table(found: Answer) -> str:
    """The answer as lines for a terminal."""
    deployment = found.deployment
    rows = [
        ("live sessions the cache carries", f"{found.limits.cache_sessions:.1f}"),
        ("live sessions decode carries", f"{found.limits.decode_sessions:.1f}"),
        ("share of a session's time it is served", f"{found.limits.served_share:.1%}"),
        ("which is full first", found.limits.first),
        ("most sessions finished", f"{found.peak.completions_per_s * 60:.2f}/min at {found.peak.sessions:.1f} live"),
        ("sessions finished once collapsed", f"{deployment.completions_at_the_end_per_s * 60:.2f}/min"),
    ]
    if found.arrivals_per_s is not None:
        rows.append(("sessions that arrive", f"{found.arrivals_per_s * 60:.2f}/min"))
        for name, sessions in (("stable point", found.stable), ("tipping point", found.tipping)):
            if sessions is not None:
                hit_rate = deployment.hit_rate(sessions)
                rows.append((name, f"{sessions:.1f} live sessions, hit rate {hit_rate:.2f}"))
            else:
                rows.append((name, "none"))
    if found.fate is not None:
        length = format_duration(found.surge.to_s - found.surge.from_s)
        largest = found.largest_surge
        rows.append(
            (f"largest surge of {length} that it recovers from", "any" if largest == math.inf else f"{largest:+.0%}")
        )
        if found.surge.extra:
            rows.append((f"a surge of {found.surge.extra:+.0%} for {length}", _fate_text(found.fate)))
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows), "", found.verdict()])


def _fate_text(fate: Fate) -> str:
    grown = f"{fate.sessions_before:.1f} live sessions become {fate.sessions_after:.1f}"
    if fate.recovered_s is None:
        return f"{grown}: stuck"
    return f"{grown}: recovers within {format_duration(max(1.0, fate.recovered_s))}"


def draw(found: Answer, path: Path) -> None:
    """The completion curve with the arrival rate across it and, given a rate, live sessions over time beside it."""
    from matplotlib.figure import Figure  # only those who draw pay for it

    rate = found.arrivals_per_s
    figure = Figure(figsize=(13 if rate else 7.5, 5.2), layout="constrained")
    panels = figure.subplots(1, 2 if rate else 1, squeeze=False)[0]
    _draw_curve(panels[0], found)
    if rate is not None and found.stable is not None:
        _draw_surges(panels[1], found)
    elif rate is not None:
        panels[1].axis("off")
        panels[1].text(0.5, 0.5, "overload: no stable point", ha="center", va="center", fontsize=12)
    title = f"{found.verdict()[0].upper()}{found.verdict()[1:]}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


_CURVE, _ARRIVAL, _GOOD, _BAD, _QUIET = "#1f5f99", "#444444", "#2a8a4a", "#c0392b", "#8a97a3"


def _draw_curve(axes: Any, found: Answer) -> None:
    deployment, rate = found.deployment, found.arrivals_per_s
    highest = max(
        2.2 * found.limits.cache_sessions, 1.5 * found.peak.sessions, 1.4 * (found.tipping or found.stable or 0.0)
    )
    sessions = [highest * i / 800 for i in range(801)]
    axes.plot(sessions, [60 * deployment.completions_per_s(n) for n in sessions], color=_CURVE, lw=2.4, zorder=3)
    axes.axvline(found.limits.cache_sessions, color=_QUIET, lw=1, ls=":")
    top = 60 * found.peak.completions_per_s
    axes.annotate(
        "cache knee",
        (found.limits.cache_sessions, 0),
        xytext=(4, 4),
        textcoords="offset points",
        color=_QUIET,
        rotation=90,
        va="bottom",
    )
    if rate is not None:
        axes.axhline(60 * rate, color=_ARRIVAL, lw=1.4, ls="--")
        axes.annotate(
            f"arrivals {60 * rate:.2g}/min",
            (highest, 60 * rate),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=_ARRIVAL,
        )
        top = max(top, 60 * rate)
        for name, colour, point, side in (
            ("stable point", _GOOD, found.stable, "right"),
            ("tipping point", _BAD, found.tipping, "left"),
        ):
            if point is not None:
                axes.plot([point], [60 * rate], "o", ms=9, color=colour, zorder=4)
                axes.annotate(
                    f"{name}\n{point:.0f} live",
                    (point, 60 * rate),
                    xytext=(9 if side == "left" else -9, 7),
                    textcoords="offset points",
                    ha=side,
                    va="bottom",
                    color=colour,
                )
    axes.set(xlim=(0, highest), ylim=(0, 1.15 * top), xlabel="live sessions N", ylabel="sessions per minute")
    axes.set_title("Completion curve X(N)/K", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_surges(axes: Any, found: Answer) -> None:
    """Live sessions over time under the surge, and under the largest one that still recovers."""
    deployment, rate, stable, surge = found.deployment, found.arrivals_per_s, found.stable, found.surge
    assert rate is not None
    assert stable is not None
    length_s = surge.to_s - surge.from_s
    lead_s, until_s = 0.5 * length_s, 5 * length_s
    surges = [(surge.extra, _CURVE)] if surge.extra else []
    if found.largest_surge is not None and math.isfinite(found.largest_surge):
        surges.append((found.largest_surge, _GOOD))
    highest = max(found.tipping or 0.0, stable) * 1.6
    for extra, colour in surges:
        path = capacity.trajectory(
            deployment,
            _rate(rate, extra, lead_s, lead_s + length_s),
            start_sessions=stable,
            until_s=until_s,
            breaks_s=(lead_s, lead_s + length_s),
            step_s=length_s / 200,
        )
        highest = max(highest, min(4 * highest, 1.1 * max(sessions for _, sessions in path)))
        label = f"{extra:+.0%}" if colour == _CURVE else f"{extra:+.0%}, the largest that recovers"
        axes.plot([t / 60 for t, _ in path], [n for _, n in path], color=colour, lw=2.2, label=label)
    axes.axvspan(lead_s / 60, (lead_s + length_s) / 60, color="#f3e3c0", zorder=0, label="surge")
    for name, colour, point, above in (
        ("stable point", _GOOD, found.stable, -13),
        ("tipping point", _BAD, found.tipping, 4),
    ):
        if point is not None:
            axes.axhline(point, color=colour, lw=1, ls="--")
            axes.annotate(
                name, (until_s / 60, point), xytext=(-4, above), textcoords="offset points", ha="right", color=colour
            )
    axes.set(xlim=(0, until_s / 60), ylim=(0, highest), xlabel="minutes", ylabel="live sessions N")
    axes.set_title("Live sessions through a surge", loc="left", fontsize=11)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _rate(base: float, extra: float, from_s: float, to_s: float) -> Callable[[float], float]:
    return lambda t: base * (1 + extra) if from_s <= t < to_s else base


def run(argv: Sequence[str]) -> int:
    known = parser().parse_args(argv)
    if known.example:
        print(EXAMPLE, end="")
        return EXIT_OK
    names = {field.name for field in dataclasses.fields(Deployment)}
    deployment = read_deployment(known.deployment, {key: value for key, value in vars(known).items() if key in names})
    if known.rate is None and (known.surge is not None or known.surge_s is not None):
        raise UsageError("--surge, --for: a surge changes an arrival rate; add --rate, as --rate 3.3/min")
    surge_s = 600.0 if known.surge_s is None else known.surge_s
    if not surge_s > 0:
        raise UsageError("--for: must be longer than 0s")
    found = answer(deployment, known.rate, Surge(extra=known.surge or 0.0, from_s=0.0, to_s=surge_s))
    to_stdout = known.json is not None and str(known.json) == "-"
    if not to_stdout:
        print(table(found))
    try:
        if known.plot is not None:
            draw(found, known.plot)
        if known.json is not None:
            text = json.dumps(found.as_json(), indent=2, allow_nan=False) + "\n"
            if to_stdout:
                print(text, end="")
            else:
                known.json.parent.mkdir(parents=True, exist_ok=True)
                known.json.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--plot {known.plot}: {error}") from None
    return EXIT_OK


def main(argv: Sequence[str]) -> int:
    try:
        return run(argv)
    except UsageError as error:
        print(f"sglang_basin.capacity: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
