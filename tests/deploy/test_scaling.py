"""Autoscalers of the pools: the same numbers everywhere, and queries that a live Prometheus answers as expected."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import yaml

from app.settings import Settings
from external_tools import ROOT, Manifest, built, of_kind
from tests.deploy.clusters import servers
from tests.deploy.live_prometheus import LivePrometheus

KEDA = "../tests/deploy/overlays/keda"
ADAPTER = yaml.safe_load((ROOT / "k8s/components/autoscaling/hpa/prometheus-adapter.yaml").read_text())["rules"]
COMPONENT = yaml.safe_load((ROOT / "k8s/components/autoscaling/hpa/horizontalpodautoscaler.yaml").read_text())["spec"]
# What KEDA's Prometheus scaler reads of a trigger; it passes over what it does not know.
KEDA_READS = {"serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues"}
OBJECTIVE = 2.361  # seconds to a first token: docs/alerts.md
PLACES = 64  # max_running_seqs of a CPU, if nothing is set (app/hardware/plan/capacity.py)
POD_START_SECONDS = 60 + 20 + 34.6  # a machine joins, the image is pulled, the model is loaded (docs/fleet.md)


def autoscalers() -> list[Manifest]:
    found = of_kind(built("overlays/mixed"), "HorizontalPodAutoscaler")
    assert len(found) == 2
    return found


def scaled_object() -> Manifest:
    (found,) = of_kind(built(KEDA), "ScaledObject")
    return found


def targets(spec: Manifest) -> dict[str, float]:
    """Metrics of pods, and how much of each a pod may have."""
    return {
        each["pods"]["metric"]["name"]: float(each["pods"]["target"]["averageValue"])
        for each in spec["metrics"]
        if each["type"] == "Pods"
    }


def test_an_autoscaler_scales_a_pool_and_nothing_else_says_how_many_pods_there_are() -> None:
    pools = {each["metadata"]["name"]: each for each in servers(built("overlays/mixed"))}
    assert {each["spec"]["scaleTargetRef"]["name"] for each in autoscalers()} == set(pools)
    assert not any("replicas" in each["spec"] for each in pools.values())


def test_a_suffix_reaches_what_keda_scales() -> None:
    (pool,) = servers(built(KEDA))
    assert scaled_object()["spec"]["scaleTargetRef"]["name"] == pool["metadata"]["name"] == "armature-small"
    assert "replicas" not in pool["spec"]


def test_pods_come_well_before_the_objective_is_missed_and_go_after_the_longest_request() -> None:
    assert targets(COMPONENT)["armature_predicted_wait_seconds"] <= OBJECTIVE / 2
    (cheap,) = [each for each in autoscalers() if each["metadata"]["name"] == "armature-arm64"]
    (dear,) = [each for each in autoscalers() if each["metadata"]["name"] == "armature-amd64"]
    (other,) = [each["external"] for each in dear["spec"]["metrics"] if each["type"] == "External"]
    assert other["metric"]["selector"] == {"matchLabels": {"pool": "arm64"}}
    assert targets(cheap["spec"])["armature_predicted_wait_seconds"] < float(other["target"]["value"]) < OBJECTIVE
    for scaler in autoscalers():
        down = scaler["spec"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] >= Settings.model_fields["request_timeout_seconds"].default
        assert [(each["type"], each["value"]) for each in down["policies"]] == [("Pods", 1), ("Percent", 2)]


def test_load_is_a_signal_before_anybody_waits() -> None:
    """Of every pool, and far below the places of a pod: at them the next request waits."""
    for scaler in autoscalers():
        assert targets(scaler["spec"])["armature_requests_running"] <= PLACES / 4
        (period,) = {each["periodSeconds"] for each in scaler["spec"]["behavior"]["scaleUp"]["policies"]}
        assert period >= POD_START_SECONDS + 60, "a machine, a start, and a minute until the mean shows the new pods"


def test_nothing_scales_by_cpu() -> None:
    assert {each["type"] for scaler in autoscalers() for each in scaler["spec"]["metrics"]} == {"Pods", "External"}
    assert {each["type"] for each in scaled_object()["spec"]["triggers"]} == {"prometheus"}


def test_keda_has_the_numbers_of_the_autoscaler() -> None:
    keda = scaled_object()["spec"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (COMPONENT["minReplicas"], COMPONENT["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == COMPONENT["behavior"]
    thresholds = {
        found: float(each["metadata"]["threshold"])
        for each in keda["triggers"]
        for found in names(each["metadata"]["query"])
    }
    assert thresholds == targets(COMPONENT)
    for trigger in keda["triggers"]:
        assert trigger["metadata"].keys() <= KEDA_READS
        assert "metricType" not in trigger  # AverageValue: the fallback has no other


def names(promql: str) -> list[str]:
    return sorted(set(re.findall(r"armature_\w+", promql)))


# ---- asked of a live Prometheus ------------------------------------------------------------------------------------


@pytest.mark.full
def test_keda_gets_one_number_from_each_query(prometheus: LivePrometheus) -> None:
    for trigger in scaled_object()["spec"]["triggers"]:
        (answer,) = prometheus.query(trigger["metadata"]["query"])
        assert float(answer["value"][1]) >= 0.0


@pytest.mark.full
def test_without_any_server_keda_falls_back_instead_of_scaling_down(prometheus: LivePrometheus) -> None:
    """An empty answer is an error to it (`ignoreNullValues`): of counts that every server exports. A wait may well be unknown."""
    queries = {
        each["name"]: each["metadata"]["query"].replace('namespace="armature"', 'namespace="nobody"')
        for each in scaled_object()["spec"]["triggers"]
    }
    assert queries.keys() == {"running", "waiting", "predicted-wait"}
    assert prometheus.query(queries["running"]) == prometheus.query(queries["waiting"]) == []
    assert [each["value"][1] for each in prometheus.query(queries["predicted-wait"])] == ["0"]
    assert all(each["metadata"]["ignoreNullValues"] == "false" for each in scaled_object()["spec"]["triggers"])


def rendered(rule: Manifest, series: str, matchers: str, group: str) -> str:
    """As the adapter fills in its template."""
    words = {"<<.Series>>": series, "<<.LabelMatchers>>": matchers, "<<.GroupBy>>": group}
    query = rule["metricsQuery"]
    for word, value in words.items():
        query = query.replace(word, value)
    assert "<<" not in query
    return str(query)


def discovered(prometheus: LivePrometheus, rule: Manifest) -> set[str]:
    answer: dict[str, Any] = httpx.get(
        f"{prometheus.url}/api/v1/series", params={"match[]": rule["seriesQuery"]}, timeout=30
    ).json()
    return {each["__name__"] for each in answer["data"]}


@pytest.mark.full
def test_the_adapter_finds_what_the_autoscalers_ask_for_of_every_pod(prometheus: LivePrometheus) -> None:
    (rule,) = ADAPTER["custom"]
    asked = {name for scaler in autoscalers() for name in targets(scaler["spec"])}
    assert asked == set(targets(COMPONENT)) == discovered(prometheus, rule)
    for series in asked:
        found = prometheus.query(
            rendered(rule, series, 'namespace="armature",pod=~"armature-amd64-0|armature-arm64-0"', "pod")
        )
        assert {each["metric"]["pod"] for each in found} == {"armature-amd64-0", "armature-arm64-0"}, series


@pytest.mark.full
def test_the_adapter_reports_one_pools_wait_as_one_number(prometheus: LivePrometheus) -> None:
    (rule,) = ADAPTER["external"]
    asked = {
        each["external"]["metric"]["name"]
        for scaler in autoscalers()
        for each in scaler["spec"]["metrics"]
        if each["type"] == "External"
    }
    assert asked == {rule["name"]["as"]}
    (series,) = discovered(prometheus, rule)
    (answer,) = prometheus.query(rendered(rule, series, 'namespace="armature",pool="arm64"', "namespace"))
    assert answer["metric"] == {}
