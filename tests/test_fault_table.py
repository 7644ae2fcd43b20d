"""The README's fault table names exactly the faults that tests inject."""

from __future__ import annotations

from fault_table import in_readme, marked


def test_the_readme_names_exactly_the_faults_that_are_tested() -> None:
    assert in_readme() == marked(), "run `make fault-table`"


def test_every_fault_is_marked_once() -> None:
    assert len(set(marked())) == len(marked()) > 5
