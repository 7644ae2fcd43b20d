"""The README's table of faults, made from the tests that inject them.

A test marked `@pytest.mark.fault(what, how)` says in its `seen` fixture what it observed and how long recovery took.
`make fault-table` runs those tests and writes the rows between the README's two markers, if all of them pass; faults
that were not run (`FAULT_ARGS="-k frozen"`) keep their rows. A test holds the README to the marks, so that the table
names exactly the faults that are tested.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- faults: made by `make fault-table` -->", "<!-- end of faults -->"
HEAD = "| fault | how it is injected | what is seen | over after |\n| --- | --- | --- | --- |"


@dataclass(slots=True)
class Seen:
    """What a fault's test observed. `recovered_s` is the time from the fault's end until everything was as before."""

    text: str | None = None
    recovered_s: float | None = None

    def note(self, text: str, recovered_s: float) -> None:
        self.text, self.recovered_s = text, recovered_s


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """For a test marked `fault`: it must note what it saw."""
    seen = Seen()
    yield seen
    mark = request.node.get_closest_marker("fault")
    if seen.text is not None and mark is not None:
        rows = request.config.stash.setdefault(_ROWS, {})
        rows[mark.args] = f"| {' | '.join(mark.args)} | {seen.text} | {seen.recovered_s:.1f} s |"


_ROWS = pytest.StashKey[dict[tuple[str, ...], str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="write what the fault tests saw into README.md")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for row in config.stash.get(_ROWS, {}).values():
        terminalreporter.line(row)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--fault-table") and exitstatus == 0:
        rows = dict(zip(in_readme(), _readme_rows(), strict=True)) | session.config.stash.get(_ROWS, {})
        ordered = [rows[fault] for fault in marked() if fault in rows]
        text = README.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        table = "\n".join([BEGIN, HEAD, *ordered, END])
        README.write_text(before + table + after, encoding="utf-8")


def marked() -> list[tuple[str, ...]]:
    """(what, how) of every fault mark in the test files, in the order they stand there. Marks are read, not run."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: node.lineno):
            if ast.unparse(call.func) == "pytest.mark.fault":
                found.append(tuple(ast.literal_eval(argument) for argument in call.args))
    return found


def in_readme() -> list[tuple[str, ...]]:
    """(what, how) of every row of the README's table."""
    return [tuple(cell.strip() for cell in row.strip("|").split("|")[:2]) for row in _readme_rows()]


def _readme_rows() -> list[str]:
    return README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
