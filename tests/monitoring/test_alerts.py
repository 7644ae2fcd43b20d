"""Alert rules and dashboard: valid, tried out, and about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from sglang_basin.engine.metrics import TABLE, metrics
from sglang_basin.policy.decisions import Reason

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docker/prometheus/basin.rules.yml"
RULE_TESTS = ROOT / "docker/prometheus/basin.test.yml"
DASHBOARD = ROOT / "docker/grafana/basin.json"

WORDS_ON_A_METRIC = re.compile(r"\b(?:basin_|sglang:)[a-z0-9_]+")


def promtool(*arguments: str, given: str = "") -> None:
    path = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
    if path is None:
        pytest.fail("promtool is missing: run `make promtool`, or install the package prometheus")
    done = subprocess.run(
        [path, *arguments], cwd=ROOT, input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row")


def exported_by_basin() -> set[str]:
    suffixes = {"counter": ("",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    return {row.name + suffix for row in TABLE.values() for suffix in suffixes[row.kind]}


def exported_by_sglang() -> set[str]:
    """Metric names in SGLang's own source, histograms with their suffixes."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = "".join(
        path.read_text() for path in Path(spec.submodule_search_locations[0], "srt/observability").glob("*.py")
    )
    names = set(re.findall(r'"(sglang:[a-z0-9_]+)"', source))
    return names | {name + "_bucket" for name in names}


def test_metrics_are_named_as_prometheus_wants_them() -> None:
    for key in TABLE:
        getattr(metrics(), key)
    text = generate_latest().decode()
    ours = [line for line in text.splitlines() if "basin_" in line and "_created" not in line]
    promtool("check", "metrics", given="\n".join(ours) + "\n")


def test_the_rules_are_valid() -> None:
    promtool("check", "config", "docker/prometheus/prometheus.yml")


def test_the_rules_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(RULE_TESTS))


def test_every_alert_is_tried_out_firing_and_silent() -> None:
    tried: dict[str, set[bool]] = {}
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            tried.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert tried == {alert["alert"]: {True, False} for alert in alerts()}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_and_where_and_reads_metrics_that_exist(alert: dict[str, Any]) -> None:
    assert set(alert["annotations"]) == {"summary", "description"}
    assert "$labels.instance" in alert["annotations"]["summary"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    names = set(WORDS_ON_A_METRIC.findall(alert["expr"]))
    assert names
    assert names <= exported_by_basin()
    assert set(re.findall(r'reason="(\w+)"', alert["expr"])) <= {reason.value for reason in Reason}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_reads_metrics_that_exist(panel: dict[str, Any]) -> None:
    names = {name for target in panel["targets"] for name in WORDS_ON_A_METRIC.findall(target["expr"])}
    assert names
    assert names <= exported_by_basin() | exported_by_sglang()


def test_the_dashboard_shows_every_metric_of_admission() -> None:
    """But `basin_rooms`, which is for tests, and the parts of a histogram."""
    shown = set(WORDS_ON_A_METRIC.findall(DASHBOARD.read_text()))
    wanted = {name for name in exported_by_basin() if not name.endswith(("_sum", "_count"))} - {"basin_rooms"}
    held = {"basin_held_calls", "basin_reference_tokens"}
    assert wanted - shown == held, "either show it or name it here"


def test_the_dashboards_expressions_parse(tmp_path: Path) -> None:
    """Each as a recording rule, with Grafana's variables filled in."""
    variables = {"$__rate_interval": "1m", "$__interval": "1m", "$job": ".*", "$instance": ".*"}
    rules = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            rules.append({"record": f"panel:{panel['id']}_{target['refId'].lower()}", "expr": expression})
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert 0 <= x < 24
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]
