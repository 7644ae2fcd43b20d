"""Makes `benchmarks/README.md` of the findings in `benchmarks/results/`.

.venv/bin/python benchmarks/sim_readme.py            # write it
.venv/bin/python benchmarks/sim_readme.py --check    # exit code 1 if it is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sim_rooms import RESULTS, WORKLOADS

PAGE = RESULTS.parent / "README.md"

HEAD = """# Benchmarks

Scripts named `sim_*` run the policies that run in the engine, the published rivals among them, against a simulated
PD deployment at the article's scale, on a laptop. Each prints the article's figure beside ours, leaves
`results/NAME.json` and a plot, and can be run alone:

    .venv/bin/python benchmarks/sim_surge.py [--quick] [--seeds 1,2,3] [--jobs 2]
    .venv/bin/python benchmarks/sim_readme.py                # this page, made of the results
    .venv/bin/python benchmarks/sim_all.py [--jobs 2]        # all, and the page; a quarter of an hour

Runs are kept in `out/benchmarks/`, named by all that decides them, so that an interrupted script goes on where it was.
Every result says with which command, seeds, traces, versions and code it was made. The workloads are in
`sim_rooms.py`; the hardware profiles and what they were fitted to in `sglang_basin/simulator/profiles/`.

*Stuck* means, on this page: in the last half hour of a run sessions leave at less than three quarters of the rate at
which they come. *Goodput* and *within target* are the article's: a session counts if it took at most 4 times its
unloaded time and at least 95 % of its decode steps met 50 ms.

Basin runs with the defaults that engine and simulator share and, unless a row says otherwise, with the predictor that
comes with it, on tasks that it has not seen (`sim_held_out.py`). The defaults were chosen with seeds 1 and 2 on six
scenarios (pausing, whose shares are its source's, on twelve); they are compared with others on seeds 4 and 5 of twelve,
and in the law study on loads held out as well.

`surge_demo.py` (`make demo`) and `gate_overhead.py` measure real engines and print their results themselves;
`sim_lending.py` prints what lending is worth on the demo's load. How well peaks are predicted, and could be, is on a
page of its own: [PREDICTOR.md](PREDICTOR.md), by `predictor_study.py`.
"""


NEWEST = "scenarios"


def read_findings(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    found = [finding for finding in found if "rank" in finding]
    return sorted(found, key=lambda finding: (finding["rank"], finding["name"]))


def page(findings: Sequence[Mapping[str, Any]]) -> str:
    parts = [HEAD, "\n".join(_overview(findings)), "\n".join(_workloads(findings))]
    parts += ["\n".join(_section(finding)) for finding in findings]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _overview(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## The article's figures beside ours\n"
    yield from _table(
        ["", "figure", "article", "ours", "holds"],
        [
            [f"[{finding['name']}](#{anchor(finding['title'])})", f["what"], f["article"], f["ours"], f["holds"]]
            for finding in findings
            for f in finding["figures"]
        ],
    )
    yield "\nWhere a figure does not hold, or only partly, its section says why."
    if earlier := _made_otherwise(findings):
        yield (
            f"\nNot made with the policies and the simulator that made *{NEWEST}*: {', '.join(earlier)}. What they say "
            "of Basin is true of the state that is named under each."
        )


def _made_otherwise(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the findings whose code was another than that of the comparison with all rivals."""
    code = {finding["name"]: finding["made_with"]["versions"]["policies and simulator"] for finding in findings}
    return [name for name, made in code.items() if made != code.get(NEWEST, made)]


def _workloads(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    used: dict[str, str] = {}
    for finding in findings:
        used |= finding["made_with"]["traces"]
    says = {workload.name: workload.says for workload in WORKLOADS}
    yield "## Workloads\n"
    yield from _table(
        ["name", "trace", "what it is"], [[n, f"`{t}`", says.get(n, "")] for n, t in sorted(used.items())]
    )
    fallen = sorted({name for finding in findings for name in finding["made_with"]["fallbacks"]})
    if fallen:
        yield f"\nThe recorded trace was not at hand for: {', '.join(fallen)}. A shipped one stands in for it."


def _section(finding: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {finding['title']}\n"
    yield finding["method"] + "\n"
    if finding["figures"]:
        yield from _table(
            ["figure", "article", "ours", "holds"],
            [[f["what"], f["article"], f["ours"], f["holds"]] for f in finding["figures"]],
        )
        causes = [f"- *{f['what']}*: {f['cause']}" for f in finding["figures"] if f["cause"]]
        yield "\n".join(["", *causes, ""]) if causes else ""
    for table in finding["tables"]:
        yield f"**{table['title']}**\n"
        yield from _table(table["columns"], table["rows"])
        yield ""
    for note in finding["notes"]:
        yield f"{note}\n"
    for plot in finding["plots"]:
        yield f"![{finding['title']}](results/{plot})\n"
    made = finding["made_with"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    seeds = ", ".join(map(str, made["seeds"]))
    yield f"<sub>`{made['command']}` · seeds {seeds} · {made['runs']:,} runs · {versions}</sub>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def anchor(title: str) -> str:
    """As GitHub makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    options = parser.parse_args(argv)
    made = page(read_findings(RESULTS))
    if options.check:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made
        print("up to date" if fresh else f"{PAGE.name} is stale: run benchmarks/sim_readme.py")
        return 0 if fresh else 1
    PAGE.write_text(made, encoding="utf-8")
    print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
