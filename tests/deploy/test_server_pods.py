"""The pods of the server: time to start and to stop, whole cores, memory, and no unneeded privilege."""

from __future__ import annotations

import os
import re

import pytest

from app.cli.parser import setting_rows
from app.server.startup import STOP_SECONDS
from app.settings import PREFIX, Settings, load_settings
from external_tools import ROOT, Manifest, built, of_kind
from tests.deploy.clusters import (
    CLAIM,
    DEMO,
    GATEWAY,
    HUB,
    IMAGE,
    PER_POD,
    S3,
    SERVICES,
    all_servers,
    containers,
    environment,
    pod,
    quantity,
    server,
    servers,
)

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# The volume types that the restricted pod security standard allows, of those that we might use.
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "image", "persistentVolumeClaim", "projected", "secret"}
FETCHED_BY = {"HF_HOME", "MODEL_SOURCE"}  # what huggingface_hub and the init container read
LONGEST_DRAIN_SECONDS = 600  # after which the cluster autoscaler, by default, takes the node away
NAMES = {
    "base": ["armature"],
    DEMO: ["armature"],
    "overlays/mixed": ["armature-amd64", "armature-arm64"],
    "overlays/numa": ["armature-numa-0", "armature-numa-1"],
    "overlays/cuda": ["armature"],
    "overlays/several": ["armature"],
    CLAIM: ["armature-amd64", "armature-arm64"],
    PER_POD: ["armature-numa-0", "armature-numa-1"],
    GATEWAY: ["armature"],
    IMAGE: ["armature-amd64", "armature-arm64"],
    HUB: ["armature-amd64", "armature-arm64"],
    S3: ["armature-amd64", "armature-arm64"],
}
each_server = pytest.mark.parametrize(
    ("folder", "deployment"), [(folder, name) for folder in NAMES for name in NAMES[folder]]
)


def of(folder: str, name: str) -> Manifest:
    (found,) = [each for each in servers(built(folder)) if each["metadata"]["name"] == name]
    return found


def settings_of(folder: str, deployment: Manifest, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, list[str]]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment(built(folder), server(deployment)).items():
        monkeypatch.setenv(name, value)
    return load_settings()


def test_these_are_all_there_are() -> None:
    assert {folder: sorted(each["metadata"]["name"] for each in servers(built(folder))) for folder in SERVICES} == NAMES


@each_server
def test_every_variable_is_a_setting_and_is_taken(
    folder: str, deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = environment(built(folder), server(of(folder, deployment)))
    assert names.keys() - FETCHED_BY <= {row.variable for row in setting_rows()}
    _, warnings = settings_of(folder, of(folder, deployment), monkeypatch)
    assert warnings == []


@each_server
def test_open_answers_are_drained_before_the_pod_is_killed(
    folder: str, deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = of(folder, deployment)
    settings, _ = settings_of(folder, manifest, monkeypatch)
    waits = server(manifest)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits >= 5  # balancers hear of it by watching: seconds, not milliseconds
    grace = pod(manifest)["terminationGracePeriodSeconds"]
    assert LONGEST_DRAIN_SECONDS >= grace > waits + settings.drain_seconds + STOP_SECONDS
    assert settings.drain_seconds >= settings.request_timeout_seconds, "no answer that may take as long is cut"


def budget(probe: Manifest) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@each_server
def test_a_start_has_as_long_as_the_image_says(folder: str, deployment: str) -> None:
    manifest = of(folder, deployment)
    starting = server(manifest)["startupProbe"]
    said = re.search(r"--start-period=(\d+)m", DOCKERFILE)
    assert said is not None
    assert budget(starting) == (3600 if folder == HUB else 60 * int(said[1]))  # it downloads the model
    assert starting["httpGet"] == {"path": "/readyz", "port": "http"}
    assert starting["periodSeconds"] == 1, "a pod that is ready serves a second later"
    assert manifest["spec"]["progressDeadlineSeconds"] > budget(starting)


@each_server
def test_a_pod_without_time_on_its_cores_is_not_killed(folder: str, deployment: str) -> None:
    container = server(of(folder, deployment))
    alive, ready = container["livenessProbe"], container["readinessProbe"]
    assert alive["httpGet"] == {"path": "/healthz", "port": "http"}
    assert ready["httpGet"] == {"path": "/readyz", "port": "http"}
    assert budget(alive) >= 60
    assert alive["timeoutSeconds"] >= 10
    assert ready["timeoutSeconds"] >= 5
    assert budget(alive) > budget(ready), "a pod is left alone before it is killed"


@each_server
def test_pods_are_restricted(folder: str, deployment: str) -> None:
    manifest = of(folder, deployment)
    spec = pod(manifest)
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user is not None
    together = spec["securityContext"]
    assert together["runAsNonRoot"] is True
    assert (together["runAsUser"], together["runAsGroup"]) == (int(user[1]), int(user[2]))
    assert together["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys()
    for volume in spec["volumes"]:
        assert volume.keys() - {"name"} <= RESTRICTED_VOLUMES
    for container in containers(manifest):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_server
def test_cores_are_whole_and_the_pods_own(folder: str, deployment: str) -> None:
    for container in containers(of(folder, deployment)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests == limits, "Guaranteed: what the static CPU policy pins"
        assert int(requests["cpu"]) >= 1
        assert quantity(requests["memory"]) > 400 * 2**20, "the process alone"


@each_server
def test_volumes_fit_the_disk_that_is_asked_for(folder: str, deployment: str) -> None:
    manifest = of(folder, deployment)
    sizes = [quantity(each["emptyDir"]["sizeLimit"]) for each in pod(manifest)["volumes"] if "emptyDir" in each]
    assert sum(sizes) < quantity(server(manifest)["resources"]["limits"]["ephemeral-storage"])


@each_server
def test_no_pack_is_larger_than_the_volume_of_the_cache(folder: str, deployment: str) -> None:
    """The kubelet evicts a pod whose volume is beyond its limit, and the next pod would pack again."""
    manifest = of(folder, deployment)
    volumes = {each["name"]: each["emptyDir"] for each in pod(manifest)["volumes"] if "emptyDir" in each}
    if "cache" not in volumes:
        pytest.skip("a claim, whose limit nobody measures")
    weights = quantity(server(manifest)["resources"]["limits"]["memory"]) - 2**30  # the process and its activations
    if "models" in volumes:
        weights = min(weights, quantity(volumes["models"]["sizeLimit"]))
    assert quantity(volumes["cache"]["sizeLimit"]) >= weights


def test_what_is_written_is_mounted_and_models_are_only_read() -> None:
    cache = re.search(r"ARMATURE_CACHE_DIR=(\S+)", DOCKERFILE)
    assert cache is not None
    for deployment in all_servers():
        mounts = {each["mountPath"]: each for each in server(deployment)["volumeMounts"]}
        written = {path for path, each in mounts.items() if not each.get("readOnly")}
        assert written - {"/var/cache/huggingface"} == {cache[1], "/tmp"}


@pytest.mark.parametrize("folder", [CLAIM, PER_POD, IMAGE])
def test_models_are_mounted_where_the_setting_looks(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for deployment in servers(built(folder)):
        settings, _ = settings_of(folder, deployment, monkeypatch)
        (models,) = [each for each in server(deployment)["volumeMounts"] if each["name"] == "models"]
        assert models == {"name": "models", "mountPath": "/models", "readOnly": True}
        assert str(settings.model).startswith("/models/")


def test_a_cache_on_the_node_is_a_claim_since_pod_security_forbids_folders() -> None:
    (volume,) = of_kind(built(IMAGE), "PersistentVolume")
    (claim,) = of_kind(built(IMAGE), "PersistentVolumeClaim")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert "hostPath" in volume["spec"]
    for deployment in servers(built(IMAGE)):
        (cache,) = [each for each in pod(deployment)["volumes"] if each["name"] == "cache"]
        assert cache == {"name": "cache", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        (priority,) = of_kind(built(IMAGE), "PriorityClass", pod(deployment)["priorityClassName"])
        assert 0 < priority["value"] < 10**9
