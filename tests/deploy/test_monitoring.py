"""Monitoring: the PodMonitor finds the pods, and the programs accept the examples without Kubernetes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from external_tools import ROOT, built, of_kind, run, tool
from tests.deploy.clusters import SERVICES, pod_labels, selects, server, servers
from tests.deploy.custom_resources import complaints_of_models
from tests.deploy.rule_files import alerts
from tools.monitoring.plain_rules import plain_rules

COMPONENT, BY_SERVICE = "components/monitoring", "components/monitoring-service"
EXAMPLES = ROOT / "docs" / "monitoring"
PER_OBJECT_BYTES = 256 * 1024  # of annotations, one of which is `kubectl apply`'s copy


@pytest.mark.full
def test_the_operators_definitions_know_every_field(tmp_path: Path) -> None:
    kinds = ("PodMonitor", "PrometheusRule")
    manifests = [each for kind in kinds for each in of_kind(built(COMPONENT), kind)]
    manifests += of_kind(built(BY_SERVICE), "ServiceMonitor")
    assert complaints_of_models(manifests, tmp_path) == ""


@pytest.mark.parametrize("folder", SERVICES)
def test_every_pod_is_scraped_at_a_port_that_it_has(folder: str) -> None:
    (monitor,) = of_kind(built(COMPONENT), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for deployment in servers(built(folder)):
        assert selects(monitor["spec"]["selector"]["matchLabels"], pod_labels(deployment))
        assert endpoint["port"] in {port["name"] for port in server(deployment)["ports"]}
        assert pod_labels(deployment)[monitor["spec"]["jobLabel"]] == "armature", "rules ask for job armature"
    assert endpoint["path"] == "/metrics"


def test_a_servicemonitor_scrapes_the_same_in_place_of_the_podmonitor() -> None:
    """Pods that are loading too, which a Service leaves out unless it says otherwise."""
    (by_pod,) = of_kind(built(COMPONENT), "PodMonitor")
    (by_service,) = of_kind(built(BY_SERVICE), "ServiceMonitor")
    (service,) = of_kind(built(BY_SERVICE), "Service")
    assert not of_kind(built(BY_SERVICE), "PodMonitor"), "each pod would be scraped twice"
    assert by_service["spec"]["endpoints"] == by_pod["spec"]["podMetricsEndpoints"]
    assert by_service["spec"]["podTargetLabels"] == by_pod["spec"]["podTargetLabels"]
    assert selects(by_service["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
    assert service["metadata"]["labels"][by_service["spec"]["jobLabel"]] == "armature", "rules ask for job armature"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (port,) = service["spec"]["ports"]
    assert port["name"] == by_service["spec"]["endpoints"][0]["port"]
    for deployment in servers(built("overlays/mixed")):
        assert selects(service["spec"]["selector"], pod_labels(deployment))


def test_pools_are_distinguished() -> None:
    (monitor,) = of_kind(built(COMPONENT), "PodMonitor")
    label, objective = monitor["spec"]["podTargetLabels"]
    assert objective == "objective", "the rules of turn-taking count pods with this label"
    assert {pod_labels(deployment)[label] for deployment in servers(built("overlays/mixed"))} == {"amd64", "arm64"}


def test_dashboards_are_where_grafanas_sidecar_looks_and_small_enough() -> None:
    maps = of_kind(built(COMPONENT), "ConfigMap")
    assert [each["metadata"]["name"] for each in maps] == [
        f"armature-dashboard-{name}" for name in ("cost", "engine", "fleet", "service")
    ]
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(yaml.safe_dump(each)) < PER_OBJECT_BYTES


def test_prometheus_takes_the_example_beside_the_plain_rules(tmp_path: Path) -> None:
    promtool = tool("promtool")
    shutil.copy(EXAMPLES / "prometheus.yml", tmp_path)
    (tmp_path / "armature.rules.yml").write_text(plain_rules())
    told = run([promtool, "check", "config", "--lint=all", "--lint-fatal", tmp_path / "prometheus.yml"])
    assert told.returncode == 0, told.stdout + told.stderr
    assert "1 rule files found" in told.stdout


def test_the_example_scrapes_as_the_podmonitor_does() -> None:
    (monitor,) = of_kind(built(COMPONENT), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    example = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    (job,) = example["scrape_configs"]
    assert job["job_name"] == "armature"
    assert example["global"]["scrape_interval"] == endpoint["interval"]
    assert job["scrape_timeout"] == endpoint["scrapeTimeout"]


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "on-call"), ("warning", "by-day"), ("info", "nobody")])
def test_alertmanager_sends_each_kind_its_own_way(severity: str, receiver: str) -> None:
    amtool = tool("amtool")
    name = next(
        (each["alert"] for each in alerts() if each.get("labels", {}).get("severity") == severity),
        "ArmatureFirstTokenLate",
    )
    file = f"--config.file={EXAMPLES / 'alertmanager.yml'}"
    told = run([amtool, "config", "routes", "test", file, f"alertname={name}", f"severity={severity}", "pool=arm64"])
    assert (told.returncode, told.stdout.strip()) == (0, receiver), told.stderr


def test_alertmanager_takes_the_example() -> None:
    told = run([tool("amtool"), "check-config", EXAMPLES / "alertmanager.yml"])
    assert told.returncode == 0, told.stdout + told.stderr
