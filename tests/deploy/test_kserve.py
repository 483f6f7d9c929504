"""KServe's runtime is our image as our own manifests run it, and its two services are two pools."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from app.api.application import ROUTES
from app.cli.parser import setting_rows
from app.version import VERSION
from external_tools import Manifest, built, of_kind, run, tool
from tests.deploy.clusters import server, servers
from tests.deploy.live_prometheus import LivePrometheus
from tests.deploy.test_manifests import VERSIONS

KSERVE, KSERVE_LLM = (f"../tests/deploy/overlays/{name}" for name in ("kserve", "kserve-llm"))
MODEL_FOLDER = "/mnt/models"  # KServe's, for every runtime
KSERVES_PRESTOP_SECONDS = 15


def runtime() -> Manifest:
    (found,) = of_kind(built(KSERVE), "ClusterServingRuntime")
    return dict(found["spec"])


def container() -> Manifest:
    (found,) = runtime()["containers"]
    return dict(found)


def services() -> dict[str, Manifest]:
    return {
        each["metadata"]["labels"]["pool"]: each["spec"]["predictor"]
        for each in of_kind(built(KSERVE), "InferenceService")
    }


def llm() -> Manifest:
    (found,) = of_kind(built(KSERVE_LLM), "LLMInferenceService")
    return dict(found["spec"])


def llm_container() -> Manifest:
    (found,) = llm()["template"]["containers"]
    return dict(found)


def queries(predictor: Manifest) -> list[tuple[str, float]]:
    return [
        (each["external"]["metric"]["query"], float(each["external"]["target"]["value"]))
        for each in predictor["autoScaling"]["metrics"]
    ]


def test_the_llm_service_replaces_what_kserve_would_start() -> None:
    """KServe lays it over its own template for vLLM, by the container's name: what is not said stays vLLM's."""
    spec, given = llm(), llm_container()
    assert (given["name"], given["image"]) == ("main", f"armature:{VERSION}")
    assert given["command"] == ["python3", "-P", "-m", "app", "serve"]
    environment = {each["name"]: each["value"] for each in given["env"]}
    assert set(environment) <= {row.variable for row in setting_rows()}
    assert environment["ARMATURE_MODEL"] == MODEL_FOLDER
    assert environment["ARMATURE_SERVED_MODEL_NAME"] == spec["model"]["name"]
    longest = float(environment["ARMATURE_DRAIN_SECONDS"])
    assert longest >= float(environment["ARMATURE_REQUEST_TIMEOUT_SECONDS"])
    assert spec["template"]["terminationGracePeriodSeconds"] >= longest + KSERVES_PRESTOP_SECONDS + 20
    assert given["resources"]["requests"] == given["resources"]["limits"]


def test_the_llm_service_is_as_hardened_and_probed_as_the_base() -> None:
    (deployment,) = servers(built("base"))
    base, given = server(deployment), llm_container()
    assert base["securityContext"].items() <= given["securityContext"].items()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert given[probe]["httpGet"] == {**base[probe]["httpGet"], "port": 8000, "scheme": "HTTP"}, probe
        assert {**given[probe], "httpGet": None} == {**base[probe], "httpGet": None}, probe
    mounted = {each["name"]: each["mountPath"] for each in given["volumeMounts"]}
    assert mounted == {"cache": "/var/cache/armature", "tmp": "/tmp"}
    assert {each["name"] for each in llm()["template"]["volumes"]} == set(mounted)


def test_the_image_is_this_version_and_finds_its_model() -> None:
    assert container()["image"] == f"armature:{VERSION}"
    environment = {each["name"]: each["value"] for each in container()["env"]}
    assert environment["ARMATURE_MODEL"] == MODEL_FOLDER
    assert environment["ARMATURE_SERVED_MODEL_NAME"] == "{{.Name}}"
    known = {row.variable for row in setting_rows()}
    assert set(environment) <= known


def test_it_is_as_hardened_and_as_patient_as_the_base() -> None:
    (deployment,) = servers(built("base"))
    base = server(deployment)
    hardened = container()["securityContext"]
    assert base["securityContext"].items() <= hardened.items()
    assert (hardened["runAsNonRoot"], hardened["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        ours = {key: value for key, value in container()[probe].items() if key != "httpGet"}
        assert ours == {key: value for key, value in base[probe].items() if key != "httpGet"}, probe
        assert container()[probe]["httpGet"]["path"] in {each.path for each in ROUTES}
        assert container()[probe]["httpGet"]["port"] == container()["ports"][0]["containerPort"] == 8000
    assert container()["lifecycle"] == base["lifecycle"]
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert {each["terminationGracePeriodSeconds"] for each in services().values()} == {grace}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.full
def test_its_pod_is_one_that_kubernetes_takes(tmp_path: Path, version: str) -> None:
    """As KServe puts it together: the runtime's containers and volumes under the service's own words on pods."""
    validator = tool("kubernetes-validate")
    named = (
        "affinity",
        "tolerations",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "terminationGracePeriodSeconds",
    )
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pool, "labels": predictor["labels"]},
            "spec": {
                **{key: predictor[key] for key in named if key in predictor},
                "containers": [container()],
                "volumes": runtime()["volumes"],
            },
        }
        for pool, predictor in services().items()
    ]
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    told = run([validator, "--strict", "--kubernetes-version", version, tmp_path / "pods.yaml"])
    assert told.returncode == 0, told.stdout + told.stderr


def test_there_is_a_pool_for_each_architecture_with_whole_cores() -> None:
    assert set(services()) == {"amd64", "arm64"}
    for pool, predictor in services().items():
        (term,) = predictor["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchExpressions"] == [{"key": "kubernetes.io/arch", "operator": "In", "values": [pool]}]
        resources = predictor["model"]["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"]["cpu"].isdigit()
        assert predictor["model"]["runtime"] == "armature"
        assert predictor["model"]["modelFormat"]["name"] in {
            each["name"] for each in runtime()["supportedModelFormats"]
        }
        assert predictor["model"]["protocolVersion"] in runtime()["protocolVersions"]


def test_kserve_hands_on_values_alone() -> None:
    """Its `averageValue` would be passed over, and the threshold be 0."""
    for predictor in services().values():
        for each in predictor["autoScaling"]["metrics"]:
            assert set(each["external"]["target"]) == {"type", "value"}
            assert each["external"]["metric"]["backend"] == "prometheus"


@pytest.mark.full
def test_a_live_prometheus_answers_each_query_with_one_number(prometheus: LivePrometheus) -> None:
    for predictor in services().values():
        for query, threshold in queries(predictor):
            (answer,) = prometheus.query(query)
            assert float(answer["value"][1]) >= 0.0
            assert threshold > 0.0
