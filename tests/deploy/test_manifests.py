"""The manifests as kustomize renders them: valid for Kubernetes, hardened according to checkov, and complete."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from app.version import VERSION
from external_tools import ROOT, Manifest, built, of_kind, run, tool
from tests.deploy.clusters import (
    DEMO,
    FETCHING,
    HUB,
    S3,
    SERVICES,
    all_servers,
    containers,
    custom,
    environment,
    labels,
    pod,
    pod_labels,
    selects,
    server,
    servers,
)

VERSIONS = ("1.30", "1.37")  # the oldest that k8s/README.md promises, and the newest that the validator knows
# What checkov asks and we do not do, each with the reason.
SKIPPED = {
    "CKV_K8S_15": "Always pulling makes a start depend on the registry; a tag of ours is never moved",
    "CKV_K8S_21": "the namespace is of the person who applies it",
    "CKV_K8S_35": "huggingface_hub and rclone take a token and keys from variables",
    "CKV_K8S_38": "the endpoint picker watches pods, so it needs its token; the server has none",
    "CKV_K8S_43": "a digest is the registry's of the person who pushed the image: k8s/README.md says where it goes",
}


def everything() -> list[Manifest]:
    return [manifest for folder in SERVICES for manifest in built(folder)]


def has_image_volume(manifest: Manifest) -> bool:
    """True for what k8s/README.md promises on Kubernetes 1.35 and newer alone."""
    return manifest["kind"] == "Deployment" and any("image" in volume for volume in pod(manifest).get("volumes", ()))


@pytest.mark.full
@pytest.mark.parametrize(
    "version", [*(pytest.param(one, marks=pytest.mark.nightly) for one in VERSIONS[:-1]), VERSIONS[-1]]
)
def test_kubernetes_takes_every_field(tmp_path: Path, version: str) -> None:
    """Strict: a field that this version does not know is refused, where a cluster would drop it without a word."""
    validator = tool("kubernetes-validate")
    promised = [each for each in everything() if version != VERSIONS[0] or not has_image_volume(each)]
    assert any(map(has_image_volume, promised)) == (version != VERSIONS[0])
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(promised))
    told = run([validator, "--strict", "--kubernetes-version", version, tmp_path / "all.yaml"])
    assert told.returncode == 0, told.stdout + told.stderr
    own = [each for each in promised if not custom(each)]
    assert (told.stdout + told.stderr).count(" passed ") == len(own)


@pytest.mark.full
def test_checkov_finds_nothing_but_what_is_answered(tmp_path: Path) -> None:
    checkov = tool("checkov")
    for folder in SERVICES:
        (tmp_path / f"{Path(folder).name}.yaml").write_text(yaml.safe_dump_all(built(folder)))
    for dockerfile in ("Dockerfile", "docker/check.Dockerfile"):  # what is answered there stands in them
        shutil.copy(ROOT / dockerfile, tmp_path)
    frameworks = ["kubernetes", "dockerfile"]
    told = run(
        [checkov, "-d", tmp_path, "--framework", *frameworks, "--skip-download", "--quiet", "--compact", "-o", "json"]
    )
    reports = {report["check_type"]: report["results"]["failed_checks"] for report in json.loads(told.stdout)}
    assert sorted(reports) == sorted(frameworks)
    failed = {f"{each['check_id']} {each['check_name']}" for report in reports.values() for each in report}
    assert {each.split()[0] for each in failed} == set(SKIPPED), failed


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("folder", SERVICES)
def test_no_two_manifests_have_one_name(folder: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in built(folder)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("folder", SERVICES)
def test_everything_is_labelled_as_ours(folder: str) -> None:
    ours = {"app.kubernetes.io/name": "armature", "app.kubernetes.io/part-of": "armature"}
    for manifest in [each for each in built(folder) if not custom(each)]:
        assert labels(manifest).items() >= ours.items(), manifest["metadata"]["name"]


@pytest.mark.parametrize("folder", SERVICES)
def test_one_service_stands_before_every_pool(folder: str) -> None:
    (service,) = of_kind(built(folder), "Service", "armature")
    (port,) = service["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"]) == ("http", 8000, "http")
    for deployment in servers(built(folder)):
        assert selects(service["spec"]["selector"], pod_labels(deployment))
        assert {"name": "http", "containerPort": 8000} in server(deployment)["ports"]


@pytest.mark.parametrize("folder", SERVICES)
def test_the_policy_is_about_every_pod_and_each_pool_has_a_budget(folder: str) -> None:
    """Two budgets for one pod would refuse every eviction; one for two pools blocks one pool by the other's pods."""
    budgets = of_kind(built(folder), "PodDisruptionBudget")
    (policy,) = of_kind(built(folder), "NetworkPolicy", "armature")
    for deployment in servers(built(folder)):
        (budget,) = [
            each for each in budgets if selects(each["spec"]["selector"]["matchLabels"], pod_labels(deployment))
        ]
        assert budget["spec"]["selector"] == deployment["spec"]["selector"]
        assert budget["metadata"]["name"] == deployment["metadata"]["name"]
        assert selects(policy["spec"]["podSelector"]["matchLabels"], pod_labels(deployment))
    assert len(budgets) == len(servers(built(folder)))


@pytest.mark.parametrize("folder", SERVICES)
def test_no_deployment_takes_another_ones_pods(folder: str) -> None:
    deployments = servers(built(folder))
    for one in deployments:
        assert selects(one["spec"]["selector"]["matchLabels"], pod_labels(one))
    for one, other in itertools.permutations(deployments, 2):
        assert not selects(one["spec"]["selector"]["matchLabels"], pod_labels(other))


@pytest.mark.parametrize("folder", SERVICES)
def test_what_pods_name_is_there(folder: str) -> None:
    manifests = built(folder)
    for deployment in servers(manifests):
        spec = pod(deployment)
        assert of_kind(manifests, "ServiceAccount", spec["serviceAccountName"])
        for source in server(deployment)["envFrom"]:
            assert of_kind(manifests, "ConfigMap", source["configMapRef"]["name"])
        for volume in spec["volumes"]:
            check_volume(manifests, volume)
        mounts = {each["name"] for container in containers(deployment) for each in container["volumeMounts"]}
        assert mounts == {each["name"] for each in spec["volumes"]}


def check_volume(manifests: Sequence[Manifest], volume: Manifest) -> None:
    if "persistentVolumeClaim" in volume:
        assert of_kind(manifests, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    if "configMap" in volume:
        assert of_kind(manifests, "ConfigMap", volume["configMap"]["name"])
    if "secret" in volume:  # keys are the operator's own to make
        assert volume["secret"]["optional"] is True


@pytest.mark.parametrize("folder", [folder for folder in SERVICES if folder not in FETCHING])
def test_in_comes_the_one_port_and_nothing_goes_out(folder: str) -> None:
    (policy,) = of_kind(built(folder), "NetworkPolicy", "armature")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    assert policy["spec"]["egress"] == []


@pytest.mark.parametrize("folder", FETCHING)
def test_who_fetches_asks_for_names_and_speaks_https(folder: str) -> None:
    (policy,) = of_kind(built(folder), "NetworkPolicy", "armature")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    anywhere, *more = policy["spec"]["egress"]
    assert anywhere.keys() == {"ports"}
    assert [(each["protocol"], each["port"]) for each in anywhere["ports"]] == [("UDP", 53), ("TCP", 53), ("TCP", 443)]
    agents = [each["to"][0]["ipBlock"]["cidr"] for each in more]
    assert agents == ([] if folder == HUB else ["169.254.170.23/32"])


def test_the_hubs_cache_is_the_claim_and_its_token_a_secret() -> None:
    manifests = built(HUB)
    assert of_kind(manifests, "PersistentVolumeClaim", "armature-hub")
    for deployment in servers(manifests):
        said = environment(manifests, server(deployment))
        assert (said["ARMATURE_OFFLINE"], said["ARMATURE_MODEL"]) == ("off", "Qwen/Qwen2.5-0.5B-Instruct")
        assert {"name": "hub", "mountPath": said["HF_HOME"]} in server(deployment)["volumeMounts"]
        (token,) = [each for each in server(deployment)["env"] if each["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "armature-hub", "key": "token", "optional": True}
        assert server(deployment)["startupProbe"]["failureThreshold"] < deployment["spec"]["progressDeadlineSeconds"]


def test_a_stores_keys_are_the_init_containers_alone() -> None:
    for deployment in servers(built(S3)):
        (fetching,) = pod(deployment)["initContainers"]
        assert {"secretRef": {"name": "armature-s3", "optional": True}} in fetching["envFrom"]
        assert not [each for each in server(deployment)["envFrom"] if "secretRef" in each]
        assert re.fullmatch(r"docker\.io/rclone/rclone:\d+\.\d+\.\d+", fetching["image"])


def test_one_precision_can_be_set_for_both_pools() -> None:
    manifests = built("overlays/mixed")
    said = [environment(manifests, server(each))["ARMATURE_PRECISION"] for each in servers(manifests)]
    assert said == ["auto", "auto"]
    assert not [each for pool in servers(manifests) for each in server(pool)["env"] if "PRECISION" in each["name"]]


def test_changed_settings_are_a_rollout() -> None:
    """A ConfigMap whose name stays the same changes under running pods, which read it only at their start."""
    for folder in SERVICES:
        for each in of_kind(built(folder), "ConfigMap"):
            assert each["metadata"]["name"] != "armature"
            assert each["metadata"]["name"].startswith("armature-")


def test_the_image_is_of_this_version() -> None:
    assert {server(each)["image"] for each in all_servers()} == {
        f"armature:{VERSION}",
        f"armature:{VERSION}-cuda",
        server(servers(built(DEMO))[0])["image"],
    }


def test_the_demo_is_what_the_documented_command_builds_and_needs_nothing_else() -> None:
    """`docker buildx bake cpu-here --load` tags it with the file's own VERSION; no claim, no key, no other image."""
    bake = (ROOT / "docker-bake.hcl").read_text(encoding="utf-8")
    version = re.search(r'variable "VERSION" \{ default = "(\w+)" \}', bake)
    assert version is not None
    for deployment in servers(built(DEMO)):
        assert [each["image"] for each in containers(deployment)] == [f"armature:{version[1]}"]
        assert all(volume.keys() & {"emptyDir", "secret"} for volume in pod(deployment)["volumes"])
        assert server(deployment)["resources"]["requests"]["cpu"] == "1"
    assert not of_kind(built(DEMO), "PersistentVolumeClaim")


def test_the_versions_are_those_that_the_readme_promises() -> None:
    readme = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    assert f"Kubernetes {VERSIONS[0]} or newer" in readme
    assert f"checked against {' and '.join(VERSIONS)}." in readme
