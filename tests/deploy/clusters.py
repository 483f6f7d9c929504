"""The kustomizations that tests read, and the containers, variables and quantities of a pod."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from external_tools import Manifest, built, of_kind

# Each a whole service: what a person would apply; the last six have components, as k8s/README.md adds them.
CLAIM, PER_POD, GATEWAY, IMAGE, HUB, S3 = (
    f"../tests/deploy/overlays/{name}" for name in ("claim", "per-pod", "gateway", "image", "hub", "s3")
)
DEMO = "overlays/demo"
SERVICES = (
    "base",
    DEMO,
    "overlays/mixed",
    "overlays/numa",
    "overlays/cuda",
    "overlays/several",
    CLAIM,
    PER_POD,
    GATEWAY,
    IMAGE,
    HUB,
    S3,
)
FETCHING = (HUB, S3)  # their pods reach a hub or a store
# Custom resources, which Kubernetes' own schemas know nothing of: they are held to theirs where they are tested.
_CUSTOM = ("monitoring.coreos.com/", "gateway.networking.k8s.io/", "inference.networking.k8s.io/", "keda.sh/")
_BYTES = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def servers(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The Deployments of the server: every pool's."""
    return [
        each for each in of_kind(manifests, "Deployment") if labels(each).get("app.kubernetes.io/component") == "server"
    ]


def custom(manifest: Manifest) -> bool:
    return str(manifest["apiVersion"]).startswith(_CUSTOM)


def all_servers() -> list[Manifest]:
    return [deployment for folder in SERVICES for deployment in servers(built(folder))]


def labels(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"].get("labels", {}))


def pod(deployment: Manifest) -> Manifest:
    return dict(deployment["spec"]["template"]["spec"])


def pod_labels(deployment: Manifest) -> dict[str, str]:
    return labels(deployment["spec"]["template"])


def server(deployment: Manifest) -> Manifest:
    (container,) = [each for each in pod(deployment)["containers"] if each["name"] == "server"]
    return dict(container)


def containers(deployment: Manifest) -> Iterator[Manifest]:
    yield from pod(deployment).get("initContainers", [])
    yield from pod(deployment)["containers"]


def selects(selector: dict[str, str], pod_with: dict[str, str]) -> bool:
    return selector.items() <= pod_with.items()


def environment(manifests: Sequence[Manifest], container: Manifest) -> dict[str, str]:
    """As the kubelet makes it: the ConfigMaps in turn, then the container's own; without what Secrets have."""
    found: dict[str, str] = {}
    for source in [each for each in container.get("envFrom", []) if "configMapRef" in each]:
        (settings,) = of_kind(manifests, "ConfigMap", source["configMapRef"]["name"])
        found |= settings["data"]
    return found | {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def quantity(text: str) -> int:
    """`6Gi` in bytes."""
    match = re.fullmatch(r"(\d+)([KMG]i)?", text)
    assert match is not None, f"{text} is no quantity as ours are written"
    return int(match[1]) * _BYTES[match[2] or ""]
