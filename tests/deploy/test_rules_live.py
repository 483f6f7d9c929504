"""The rules on live servers: the metrics in their queries exist, and Prometheus evaluates them without errors."""

from __future__ import annotations

import subprocess

import httpx
import pytest

from app.hardware.probe.probe import probe
from external_tools import tool
from tests.deploy.live_prometheus import LivePrometheus
from tests.deploy.rule_files import grouped_by, rules, selectors

pytestmark = pytest.mark.full

# Where nobody may make a control group there is no quota to read.
OF_QUOTAS = {"armature_cpu_quota_cores", "process_cgroup_cpu_throttled_seconds_total"}
OF_SENSORS = {"armature_cpu_thermal_throttles_total"}  # virtual machines have none
# What promtool would have otherwise, and the contract has so: names that gateways look for, and quantiles of the last minute, which no
# summary has.
PROMISED = ("vllm:", 'armature_latency_quantile_seconds non-summary metrics should not have "quantile" label')


def test_every_metric_and_label_of_a_rule_is_there(prometheus: LivePrometheus) -> None:
    asked = {each for rule in rules() for each in selectors(rule["expr"])}
    assert "armature_ready" in asked
    assert 'armature_time_to_first_token_seconds_bucket{le="2.361"}' in asked
    own, sensors = {rule["record"] for rule in rules() if "record" in rule}, probe().thermal
    for selector in sorted(asked):
        name = selector.partition("{")[0]
        if name in own or (name in OF_QUOTAS and not prometheus.has_quota):
            continue
        if name in OF_SENSORS and not (sensors.throttle_files or sensors.cooling_files):
            continue
        assert prometheus.query(selector), f"nothing has {selector}"


def test_every_label_that_rules_group_by_is_there(prometheus: LivePrometheus) -> None:
    labels = set(httpx.get(f"{prometheus.url}/api/v1/labels").json()["data"])
    assert {label for rule in rules() for label in grouped_by(rule["expr"])} <= labels


def test_each_is_evaluated_without_an_error(prometheus: LivePrometheus) -> None:
    """Joins of many with many come to light with real series only."""
    told = httpx.get(f"{prometheus.url}/api/v1/rules").json()["data"]["groups"]
    found = [rule for group in told for rule in group["rules"]]
    assert len(found) == len(rules())
    assert {rule["name"]: rule["lastError"] for rule in found if rule.get("lastError")} == {}
    assert {rule["health"] for rule in found} == {"ok"}


def test_all_is_well_with_the_servers(prometheus: LivePrometheus) -> None:
    """Of what rings at once, nothing does; the rest wants to see a fault for minutes."""
    for name in ("ArmatureStepHangs", "ArmatureRestarts"):
        assert prometheus.query(f'ALERTS{{alertname="{name}"}}') == []


def test_promtool_would_have_nothing_otherwise_but_what_is_promised(prometheus: LivePrometheus) -> None:
    promtool = tool("promtool")
    for server in prometheus.servers.values():
        scraped = httpx.get(f"{server}/metrics").text
        told = subprocess.run(
            [promtool, "check", "metrics"], input=scraped, capture_output=True, text=True, check=False
        )
        assert {line for line in (told.stdout + told.stderr).splitlines() if not line.startswith(PROMISED)} == set()
