"""The service in the cluster as its users see it: applied, asked, and its pods' states."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import yaml

from tools.proofs.cluster.control_plane import ControlPlane
from tools.proofs.cluster.load import Load
from tools.proofs.cluster.namespaces import wait

K8S = Path(__file__).resolve().parents[3] / "k8s"
NAMESPACE, POOL = "armature", "amd64"
SERVERS = "app.kubernetes.io/component=server"
CLIENTS, REPLICAS = 8, 2
ROLLOUT_SECONDS = 420
# What the machine of a proof cannot give: a mixed pod takes six cores. Two pods a pool, so that one may be away.
SMALL = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "6Gi"}


class Fleet:
    """An overlay of `mixed` in a folder of its own, as k8s/README.md leads its reader to write one."""

    def __init__(self, cluster: ControlPlane, name: str, model: str) -> None:
        self.cluster, self.folder, self.model = cluster, cluster.lab.folder / name, model
        self.key = secrets.token_urlsafe(24)
        self.folder.mkdir()
        (self.folder / "keys").write_text(self.key + "\n")
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
        (self.folder / "namespace.yaml").write_text(yaml.safe_dump(namespace))

    def apply(self, *settings: str) -> None:
        """Write the kustomization with these further settings, and apply it."""
        up = os.path.relpath(K8S, self.folder)
        literals = [f"ARMATURE_MODEL=/models/{self.model}", "ARMATURE_API_KEY_FILE=/etc/armature/keys/keys", *settings]
        size = [{"op": "replace", "path": f"/spec/template/spec/containers/0/resources/{each}", "value": SMALL}
                for each in ("requests", "limits")]  # fmt: skip
        replicas = [{"op": "replace", "path": "/spec/minReplicas", "value": REPLICAS}]
        image = {"name": "models", "image": {"reference": f"{self.model}:1"}}
        volumes = {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "armature"},
            "spec": {"template": {"spec": {"volumes": [image]}}},
        }  # fmt: skip
        servers = {"kind": "Deployment", "labelSelector": SERVERS}
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": ["namespace.yaml", f"{up}/overlays/mixed"],
            "components": [f"{up}/components/{each}" for each in ("model-image", "cache/node", "priority")],
            "configMapGenerator": [{"name": "armature", "behavior": "merge", "literals": literals}],
            "secretGenerator": [{"name": "armature-keys", "files": ["keys"]}],
            "patches": [
                {"target": servers, "patch": json.dumps(size)},
                {"target": servers, "patch": yaml.safe_dump(volumes)},
                {"target": {"kind": "HorizontalPodAutoscaler"}, "patch": json.dumps(replicas)},
            ],
        }
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        self.cluster.kubectl("apply", "-k", str(self.folder))

    def rolled_out(self) -> None:
        """Wait until the pool has all its pods, of the newest template and ready."""
        self.cluster.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/armature-{POOL}",
                             f"--timeout={ROLLOUT_SECONDS}s", seconds=ROLLOUT_SECONDS + 30)  # fmt: skip
        wait(lambda: len(self.ready()) >= REPLICAS, ROLLOUT_SECONDS, f"less than {REPLICAS} pods were ready")

    def pods(self) -> list[dict[str, Any]]:
        """Return the pool's pods that are not ending."""
        found = self.cluster.get("pods", "-n", NAMESPACE, "-l", f"{SERVERS},pool={POOL}")
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def ready(self) -> list[dict[str, Any]]:
        return [each for each in self.pods() if is_ready(each)]

    def url(self) -> str:
        return address(self.cluster, NAMESPACE)

    def load(self, clients: int = CLIENTS) -> Load:
        return Load(self.cluster.place, self.url(), clients, self.key)

    def execute(self, pod: str, script: str) -> None:
        """Run a script in the pod's interpreter; how it ends does not matter."""
        self.cluster.kubectl("-n", NAMESPACE, "exec", pod, "--", "python3", "-c", script, check=False)


def is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def address(cluster: ControlPlane, namespace: str) -> str:
    """Return the URL of the Service by its own address: names need a DNS server in the cluster."""
    return f"http://{cluster.get('service', 'armature', '-n', namespace)['spec']['clusterIP']}:8000"


def asked(cluster: ControlPlane, url: str, key: str = "") -> str:
    """Ask once, from the cluster's namespace. Returns "" after an answer, else what failed."""
    with Load(cluster.place, url, 1, key) as load:
        time.sleep(0.1)
    return "" if load.outcome.answers else next(iter(load.outcome.failures), "nothing")
