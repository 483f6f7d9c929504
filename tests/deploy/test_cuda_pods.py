"""Pods with an NVIDIA GPU: the image with CUDA's libraries, one device each, and nodes that are kept for such pods."""

from __future__ import annotations

import re

from app.version import VERSION
from external_tools import ROOT, built
from tests.deploy.clusters import pod, pod_labels, server, servers


def test_a_pod_asks_for_one_device_and_tolerates_nodes_that_have_them() -> None:
    (deployment,) = servers(built("overlays/cuda"))
    resources = server(deployment)["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    assert pod(deployment)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod_labels(deployment)["pool"] == "cuda"


def test_no_device_waits_idle_for_a_rollout() -> None:
    (deployment,) = servers(built("overlays/cuda"))
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_its_image_is_the_one_that_bake_tags() -> None:
    (deployment,) = servers(built("overlays/cuda"))
    assert server(deployment)["image"] == f"armature:{VERSION}-cuda"
    target = re.search(r'target "cuda" \{(.*?)\n\}', (ROOT / "docker-bake.hcl").read_text(encoding="utf-8"), re.DOTALL)
    assert target is not None
    assert "armature:${VERSION}-cuda" in target[1]
    assert 'KIND = "cuda-"' in target[1]


def test_the_image_asks_the_toolkit_for_what_serving_needs() -> None:
    """`compute` is CUDA itself, `utility` nvidia-smi and NVML: who is there, and how many joules it takes."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stage = text[text.index("FROM cpu AS cuda") :]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in stage
    assert stage.rstrip().endswith("USER 10001:10001")
