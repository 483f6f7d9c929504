"""Recorded series and alerts: valid, tried with made series by promtool, explained; and the plain file is what the manifests say."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from external_tools import ROOT, built, of_kind, run, tool
from tests.deploy.rule_files import alerts, groups, rules, selectors
from tools.monitoring.plain_rules import MONITORING, plain_rules
from tools.monitoring.plain_rules import RUNBOOKS as RUNBOOK_PAGE

TRIED = sorted((ROOT / "tests" / "deploy" / "rules").glob("*.yaml"))
RUNBOOKS = ROOT / "docs" / "alerts.md"


@cache
def tried() -> list[dict[str, Any]]:
    return [test for file in TRIED for test in yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["tests"]]


def test_prometheus_takes_them_without_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "armature.rules.yml").write_text(plain_rules())
    told = run([tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "armature.rules.yml"])
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_plain_file_is_what_the_manifests_say() -> None:
    manifests = of_kind(built("components/monitoring"), "PrometheusRule")
    assert len(manifests) == len(list(MONITORING.glob("rules-*.yaml")))
    by_name = {group["name"]: group for each in manifests for group in each["spec"]["groups"]}
    assert {group["name"]: group for group in groups()} == by_name
    assert len(groups()) == len(by_name)


@pytest.mark.full
@pytest.mark.parametrize("file", TRIED, ids=lambda file: file.stem)
def test_each_rings_where_it_should_and_nowhere_else(file: Path, tmp_path: Path) -> None:
    """Of the rules the words are left out: tests of when an alert rings should not have to repeat what it says."""
    spec = yaml.safe_load((MONITORING / f"rules-{file.stem}.yaml").read_text())["spec"]
    for group in spec["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / f"rules-{file.stem}.yml").write_text(yaml.safe_dump(spec))
    (tmp_path / file.name).write_text(file.read_text())
    told = run([tool("promtool"), "test", "rules", file.name], cwd=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr


def test_each_alert_was_seen_silent_then_ringing_then_silent_or_less() -> None:
    for alert in alerts():
        courses = [
            [case["exp_alerts"] for case in test["alert_rule_test"] if case["alertname"] == alert["alert"]]
            for test in tried()
        ]
        assert any(_rises_and_falls([len(expected) for expected in course]) for course in courses), alert["alert"]


def _rises_and_falls(numbers: list[int]) -> bool:
    """A warning stays longer than what was critical."""
    return bool(numbers) and numbers[0] == 0 and max(numbers) > numbers[-1]


def test_what_an_alert_says_is_explained_and_findable() -> None:
    anchors = {
        re.sub(r"[^\w-]", "", title.lower()) for title in re.findall(r"^#+ (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    }
    for alert in alerts():
        told = alert["annotations"]
        assert set(told) == {"summary", "description", "runbook_url"}, alert["alert"]
        assert told["runbook_url"] == f"{RUNBOOK_PAGE}#{alert['alert'].lower()}"
        assert alert["alert"].lower() in anchors, f"{alert['alert']} has no section in {RUNBOOKS.name}"
    explained = {title for title in anchors if title.startswith("armature")}
    assert explained == {alert["alert"].lower() for alert in alerts()}


def test_runbooks_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    """Absolute, and set once: by the command, or by what docs/alerts.md says of an overlay."""
    assert RUNBOOK_PAGE.startswith("https://")
    mine = "https://wiki.example/armature/alerts.md"
    assert plain_rules(mine).count(f"runbook_url: {mine}#armature") == len(alerts())
    (block,) = re.findall(r"```yaml\n(configMapGenerator:.*?)```", RUNBOOKS.read_text(), re.DOTALL)
    component = Path(os.path.relpath(MONITORING, tmp_path))
    (tmp_path / "kustomization.yaml").write_text(f"components: [{component}]\n{block}")
    made = of_kind(built(os.path.relpath(tmp_path, ROOT / "k8s")), "PrometheusRule")
    links = re.findall(r"runbook_url: (\S+)#", yaml.safe_dump_all(made))
    assert links == [mine] * len(alerts())


def test_what_an_alert_says_has_the_labels_it_speaks_of() -> None:
    """A label that is not there reads as nothing; `pool` is spoken of only where it is there."""
    for alert in alerts():
        cases = [case for test in tried() for case in test["alert_rule_test"] if case["alertname"] == alert["alert"]]
        there = {label for case in cases for expected in case["exp_alerts"] for label in expected["exp_labels"]}
        told = " ".join(alert["annotations"].values())
        spoken = set(re.findall(r"\$labels\.(\w+)", told.replace("with $labels.pool", "")))
        assert spoken <= there, alert["alert"]


def test_the_panels_that_explanations_point_to_are_there() -> None:
    pointed = re.findall(r"\*(service|fleet|engine) → ([^*]+)\*", " ".join(RUNBOOKS.read_text().split()))
    assert len(pointed) > 10
    for dashboard, title in pointed:
        shown = json.loads((MONITORING / "dashboards" / f"{dashboard}.json").read_text())["panels"]
        assert title in {panel["title"] for panel in shown}, f"{dashboard} has no panel {title!r}"


def test_the_metrics_that_explanations_name_are_promised() -> None:
    promised = (ROOT / "docs" / "contract.md").read_text()
    for name in re.findall(r"armature_(\w+)", re.sub(r"armature_slo\w+", "", RUNBOOKS.read_text())):
        assert f"`{name}`" in promised, name


def test_each_alert_is_of_one_of_three_kinds() -> None:
    """Those of objectives are as their burn is; Alertmanager sends each kind another way."""
    for alert in alerts():
        severity = alert.get("labels", {}).get("severity")
        if severity is None:
            assert "pool:armature_slo_burn:alerting" in alert["expr"]
        else:
            assert severity in ("critical", "warning", "info"), alert["alert"]


def test_alerts_fire_by_name_and_names_are_of_one_form() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"Armature[A-Z]\w+", name) for name in names)
    for rule in rules():
        if "record" in rule:
            assert re.fullmatch(r"(pool|instance|armature):\w+(:\w+)?", rule["record"]), rule["record"]


def test_what_is_recorded_is_recorded_once() -> None:
    recorded = [(rule["record"], tuple(sorted(rule.get("labels", {}).items()))) for rule in rules() if "record" in rule]
    assert len(recorded) == len(set(recorded))
    names = {record for record, _ in recorded}
    own = {name for rule in rules() for each in selectors(rule["expr"]) if ":" in (name := each.partition("{")[0])}
    assert own <= names
