"""The files of examples/eks: manifests, values and policies, checked as far as that goes without AWS."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings
from external_tools import ROOT, Manifest, of_kind, run, tool
from tests.deploy.clusters import custom, environment, pod, server, servers
from tests.deploy.custom_resources import complaints_of_definition
from tests.deploy.test_chart import MIXED, made
from tests.deploy.test_pools import MACHINES

FOLDER = ROOT / "examples" / "eks"
FILES = {file.name: file.read_text(encoding="utf-8") for file in sorted(FOLDER.iterdir())}
MANIFESTS: list[Manifest] = [
    each for name in ("nodes.yaml", "storage-class.yaml") for each in yaml.safe_load_all(FILES[name])
]
VALUES: Any = yaml.safe_load(FILES["values.yaml"])
POLICIES = [json.loads(FILES[name]) for name in ("bucket-policy.json", "pod-identity.json")]


def rendered() -> tuple[Manifest, ...]:
    """As `-f mixed.yaml -f values.yaml` does: maps are merged, lists are replaced."""
    return made(MIXED | VALUES | {"settings": MIXED["settings"] | VALUES["settings"]})


def node_pools() -> dict[str, Manifest]:
    """By the architecture of their nodes."""
    found = {}
    for each in of_kind(MANIFESTS, "NodePool"):
        needs = {one["key"]: one["values"] for one in each["spec"]["template"]["spec"]["requirements"]}
        (architecture,) = needs["kubernetes.io/arch"]
        found[architecture] = each["spec"]["template"] | {"types": needs["node.kubernetes.io/instance-type"]}
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["NodePool", "EC2NodeClass"])
def test_karpenter_knows_every_field(tmp_path: Path, kind: str) -> None:
    found = of_kind(MANIFESTS, kind)
    assert found
    assert complaints_of_definition(found, tmp_path) == ""


@pytest.mark.full
def test_kubernetes_takes_the_rest(tmp_path: Path) -> None:
    plain = [*of_kind(MANIFESTS, "StorageClass"), *(each for each in rendered() if not custom(each))]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(plain))
    told = run([tool("kubernetes-validate"), "--strict", "--kubernetes-version", "1.34", tmp_path / "all.yaml"])
    assert told.returncode == 0, told.stdout + told.stderr
    assert (told.stdout + told.stderr).count(" passed ") == len(plain)


def test_there_is_nothing_else_to_check() -> None:
    assert {each["kind"] for each in MANIFESTS} == {"NodePool", "EC2NodeClass", "StorageClass"}
    (node_class,) = of_kind(MANIFESTS, "EC2NodeClass")
    assert yaml.safe_load(node_class["spec"]["userData"])["kind"] == "NodeConfig"


def test_nodes_are_of_both_architectures_and_of_the_machines_that_pods_fill() -> None:
    assert {name: each["types"] for name, each in node_pools().items()} == {
        name: [machine] for name, machine in MACHINES.items()
    }


def test_each_pools_pods_go_to_its_nodes() -> None:
    deployments = {each["metadata"]["labels"]["pool"]: each for each in servers(rendered())}
    assert deployments.keys() == node_pools().keys()
    for name, nodes in node_pools().items():
        spec = pod(deployments[name])
        assert nodes["metadata"]["labels"].items() <= spec["nodeSelector"].items()
        tolerated = {(each["key"], each.get("value"), each["effect"]) for each in spec["tolerations"]}
        assert {(each["key"], each["value"], each["effect"]) for each in nodes["spec"]["taints"]} <= tolerated
        (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchExpressions"][0]["values"] == [name]
        minutes = int(nodes["spec"]["terminationGracePeriod"].removesuffix("m"))
        assert 60 * minutes > spec["terminationGracePeriodSeconds"]


def test_pods_are_as_large_as_in_the_chart() -> None:
    for ours, theirs in zip(VALUES["pools"], MIXED["pools"], strict=True):
        assert (ours["name"], ours["settings"]) == (theirs["name"], theirs["settings"])
        assert ours["resources"]["cpu"] == theirs["resources"]["cpu"]
        assert ours["resources"]["memory"] == theirs["resources"]["memory"]


def test_no_answer_is_cut_by_the_load_balancer() -> None:
    (ingress,) = of_kind(rendered(), "Ingress")
    attributes = " ".join(ingress["metadata"]["annotations"].values())
    idle, delay = (
        int(re.search(rf"{name}\.timeout_seconds=(\d+)", attributes)[1])  # type: ignore[index]
        for name in ("idle_timeout", "deregistration_delay")
    )
    for deployment in servers(rendered()):
        said = environment(rendered(), server(deployment))
        (sleep,) = server(deployment)["lifecycle"]["preStop"].values()
        assert idle > int(said["ARMATURE_REQUEST_TIMEOUT_SECONDS"])
        assert delay > sleep["seconds"] + int(said["ARMATURE_DRAIN_SECONDS"])


def test_settings_are_ours() -> None:
    known = {f"ARMATURE_{name.upper()}" for name in Settings.model_fields}
    assert (
        set(
            re.findall(
                r"ARMATURE_[A-Z_]+", (ROOT / "docs" / "eks.md").read_text(encoding="utf-8") + "".join(FILES.values())
            )
        )
        <= known
    )


def test_the_role_is_given_to_pods_and_reads_the_models_bucket_alone() -> None:
    reading, trusting = POLICIES
    resources = {each["Resource"] for each in reading["Statement"]}
    bucket = VALUES["models"]["s3"]["source"].removeprefix("s3:").partition("/")[0]
    assert resources == {f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"}
    assert {each["Action"] for each in reading["Statement"]} == {"s3:ListBucket", "s3:GetObject"}
    (trust,) = trusting["Statement"]
    assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert trust["Action"] == ["sts:AssumeRole", "sts:TagSession"]
