"""The inference gateway: what it lets in, whom it sends it to, and by which of our gauges its picker chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.api.application import ROUTES
from app.settings import Settings
from external_tools import Manifest, built, of_kind, run, tool
from tests.deploy.clusters import pod, pod_labels, selects, server, servers
from tests.deploy.live_prometheus import LivePrometheus
from tests.deploy.test_manifests import VERSIONS

GATEWAY = "../tests/deploy/overlays/gateway"
INSIDE = {
    "/",
    "/healthz",
    "/readyz",
    "/health",
    "/ping",
    "/info",
    "/info/steps",
    "/metrics",
    "/slots",
}  # the cluster's own business
# Of llm-d's picker 0.10: plugins that it loads only with --allow-experimental-plugins, and the others that we name.
EXPERIMENTAL = {"endpoint-attribute-scorer"}
STABLE = {
    "core-metrics-extractor",
    "active-request-scorer",
    "prefix-cache-scorer",
    "openai-parser",
    "passthrough-parser",
}


def only(kind: str, name: str = "armature") -> Manifest:
    (found,) = of_kind(built(GATEWAY), kind, name)
    return found


def picker() -> Manifest:
    return only("Deployment", "armature-epp")


def configuration() -> dict[str, Any]:
    """What the picker reads where its arguments say that it lies."""
    (container,) = pod(picker())["containers"]
    (file,) = [each.removeprefix("--config-file=") for each in container["args"] if each.startswith("--config-file=")]
    (mount,) = container["volumeMounts"]
    (volume,) = pod(picker())["volumes"]
    data = only("ConfigMap", volume["configMap"]["name"])["data"]
    found: dict[str, Any] = yaml.safe_load(data[str(Path(file).relative_to(mount["mountPath"]))])
    return found


def plugins() -> dict[str, dict[str, Any]]:
    return {each.get("name", each["type"]): each for each in configuration()["plugins"]}


def engine() -> dict[str, Any]:
    parameters = plugins()["core-metrics-extractor"]["parameters"]
    (found,) = parameters["engineConfigs"]
    assert parameters["defaultEngine"] == found["name"]
    return dict(found)


# ---- what comes in, and where it goes ------------------------------------------------------------------------------


def test_every_route_of_the_api_comes_in_and_nothing_of_the_inside() -> None:
    (rule,) = only("HTTPRoute")["spec"]["rules"]
    paths = [each["path"] for each in rule["matches"]]

    def comes_in(path: str) -> bool:
        return any(
            path == each["value"] or (each["type"] == "PathPrefix" and path.startswith(each["value"] + "/"))
            for each in paths
        )

    routes = {each.path.rstrip("/") or "/" for each in ROUTES}
    assert {path for path in routes if not comes_in(path)} == INSIDE
    exact = {each["value"] for each in paths if each["type"] == "Exact"}
    assert exact <= routes


def test_the_server_is_the_one_to_end_a_request() -> None:
    (rule,) = only("HTTPRoute")["spec"]["rules"]
    assert (
        float(rule["timeouts"]["request"].removesuffix("s")) > Settings.model_fields["request_timeout_seconds"].default
    )


def test_the_route_leads_from_the_gateway_to_all_servers_and_only_them() -> None:
    route, pool = only("HTTPRoute")["spec"], only("InferencePool")
    assert [each["name"] for each in route["parentRefs"]] == [only("Gateway")["metadata"]["name"]]
    (backend,) = route["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (
        pool["apiVersion"].split("/")[0],
        "InferencePool",
        "armature",
    )
    selector = pool["spec"]["selector"]["matchLabels"]
    for deployment in [*servers(built(GATEWAY)), *servers(built("overlays/mixed"))]:
        assert selects(selector, pod_labels(deployment))
        assert {each["containerPort"] for each in server(deployment)["ports"]} == {
            each["number"] for each in pool["spec"]["targetPorts"]
        }
    assert not selects(selector, pod_labels(picker()))


def test_the_pool_finds_its_picker_and_the_picker_its_pool() -> None:
    service = only("Service", only("InferencePool")["spec"]["endpointPickerRef"]["name"])
    assert selects(service["spec"]["selector"], pod_labels(picker()))
    assert not any(selects(service["spec"]["selector"], pod_labels(each)) for each in servers(built(GATEWAY)))
    (port,) = [
        each
        for each in service["spec"]["ports"]
        if each["port"] == only("InferencePool")["spec"]["endpointPickerRef"]["port"]["number"]
    ]
    (container,) = pod(picker())["containers"]
    assert port["targetPort"] in {each["name"] for each in container["ports"]}
    assert f"--pool-name={only('InferencePool')['metadata']['name']}" in container["args"]


def test_the_network_lets_the_gateway_and_a_scrape_in() -> None:
    policy = only("NetworkPolicy", "armature-epp")["spec"]
    assert selects(policy["podSelector"]["matchLabels"], pod_labels(picker()))
    (rule,) = policy["ingress"]
    targets = {each["targetPort"] for each in only("Service", "armature-epp")["spec"]["ports"]}
    assert {each["port"] for each in rule["ports"]} == targets


def test_the_picker_may_read_what_it_watches_and_change_nothing() -> None:
    (binding,) = of_kind(built(GATEWAY), "RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == [pod(picker())["serviceAccountName"]]
    rules = only("Role", binding["roleRef"]["name"])["rules"]
    assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= {
        (group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]
    }
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}


# ---- how it picks --------------------------------------------------------------------------------------------------


def test_the_picker_has_every_plugin_that_it_is_configured_to_use() -> None:
    found = configuration()
    assert (found["apiVersion"], found["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    (profile,) = found["schedulingProfiles"]
    used = [
        *(each["pluginRef"] for each in profile["plugins"]),
        *(each["pluginRef"] for each in found["requestHandler"]["parsers"]),
    ]
    assert {*used, "core-metrics-extractor"} == set(plugins())
    types = {each["type"] for each in plugins().values()}
    assert types == EXPERIMENTAL | STABLE
    (container,) = pod(picker())["containers"]
    assert "--allow-experimental-plugins" in container["args"]
    assert used[-1] == "passthrough-parser"  # it takes what is left; the picker passes over parsers behind it


def test_every_weight_is_in_seconds_of_waiting() -> None:
    (profile,) = configuration()["schedulingProfiles"]
    weights = {each["pluginRef"]: each["weight"] for each in profile["plugins"]}
    wait = plugins()["predicted-wait"]["parameters"]["algorithm"]
    reach = wait["normalization"]["fixedRange"]
    assert wait["type"] == "linear_lower_is_better"
    assert weights.pop("predicted-wait") / (reach["max"] - reach["min"]) == 1.0
    assert set(weights.values()) == {1}
    assert plugins()["capacity"]["parameters"]["algorithm"]["type"] == "linear_higher_is_better"


def test_a_scorer_ranks_by_what_is_extracted() -> None:
    extracted = {each["attributeKey"] for each in engine()["customMetrics"]}
    ranked = {
        each["parameters"]["attributeKey"] for each in plugins().values() if each["type"] == "endpoint-attribute-scorer"
    }
    assert ranked == extracted


@pytest.mark.full
def test_a_live_server_shows_every_series_that_the_picker_reads(prometheus: LivePrometheus) -> None:
    text = httpx.get(f"{prometheus.servers['amd64']}/metrics").text
    shown = [
        sample for family in text_string_to_metric_families(text) if family.type == "gauge" for sample in family.samples
    ]
    specs = [value for key, value in engine().items() if key.endswith("Spec")] + [
        each["metricSpec"] for each in engine()["customMetrics"]
    ]
    assert len(specs) == 6
    for spec in specs:
        name, _, rest = spec.partition("{")
        labels = dict(pair.split("=") for pair in rest.rstrip("}").split(",") if pair)
        found = [sample for sample in shown if sample.name == name and labels.items() <= sample.labels.items()]
        assert len(found) == 1, (spec, found)


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_field_of_the_picker(tmp_path: Path, version: str) -> None:
    validator = tool("kubernetes-validate")
    ours = [
        each
        for each in built(GATEWAY)
        if each["metadata"]["labels"].get("app.kubernetes.io/component") == "endpoint-picker"
    ]
    assert len(ours) == 7
    (tmp_path / "picker.yaml").write_text(yaml.safe_dump_all(ours))
    told = run([validator, "--strict", "--kubernetes-version", version, tmp_path / "picker.yaml"])
    assert told.returncode == 0, told.stdout + told.stderr
