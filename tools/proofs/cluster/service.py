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
from tools.proofs.cluster.load import MAX_TOKENS, Load
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.node import MODELS

K8S = Path(__file__).resolve().parents[3] / "k8s"
NAMESPACE, POOL = "armature", "amd64"
SERVERS = "app.kubernetes.io/component=server"
CLIENTS, REPLICAS = 8, 2
ROLLOUT_SECONDS = 420
# What the machine of a proof cannot give: a mixed pod takes six cores. Two pods a pool, so that one may be away.
SMALL = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "6Gi"}

VOLUME: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "armature-models"},
    "spec": {
        "storageClassName": "",
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "50Gi"},
        "hostPath": {"path": MODELS},
    },
}


class Fleet:
    """An overlay of `mixed` in a folder of its own, as k8s/README.md leads its reader to write one.

    The model is mounted from its image or, with `claim`, from a claim on a folder of the nodes.
    """

    def __init__(
        self, cluster: ControlPlane, name: str, model: str, claim: bool = False, memory: str = SMALL["memory"]
    ) -> None:
        self.cluster, self.folder, self.model = cluster, cluster.lab.folder / name, model
        self.claim, self.size = claim, SMALL | {"memory": memory}
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
        size = [{"op": "replace", "path": f"/spec/template/spec/containers/0/resources/{each}", "value": self.size}
                for each in ("requests", "limits")]  # fmt: skip
        replicas = [{"op": "replace", "path": "/spec/minReplicas", "value": REPLICAS}]
        servers = {"kind": "Deployment", "labelSelector": SERVERS}
        (self.folder / "models.yaml").write_text(yaml.safe_dump(VOLUME))
        own = ["models.yaml"] if self.claim else []
        models = "model-claim" if self.claim else "model-image"
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": ["namespace.yaml", *own, f"{up}/overlays/mixed"],
            "components": [f"{up}/components/{each}" for each in (models, "cache/node", "priority")],
            "configMapGenerator": [{"name": "armature", "behavior": "merge", "literals": literals}],
            "secretGenerator": [{"name": "armature-keys", "files": ["keys"]}],
            "patches": [
                {"target": servers, "patch": json.dumps(size)},
                self._claim() if self.claim else {"target": servers, "patch": yaml.safe_dump(self._image())},
                {"target": {"kind": "HorizontalPodAutoscaler"}, "patch": json.dumps(replicas)},
            ],
        }
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        self.cluster.kubectl("apply", "-k", str(self.folder))

    def _image(self) -> dict[str, Any]:
        volumes = [{"name": "models", "image": {"reference": f"{self.model}:1"}}]
        return {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "armature"},
            "spec": {"template": {"spec": {"volumes": volumes}}},
        }  # fmt: skip

    def _claim(self) -> dict[str, Any]:
        name = VOLUME["metadata"]["name"]
        spec = {"storageClassName": "", "volumeName": name}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        return {"patch": yaml.safe_dump(claim)}

    def rolled_out(self) -> None:
        """Wait until the pool has all its pods, of the newest template and ready."""
        self.cluster.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/armature-{POOL}",
                             f"--timeout={ROLLOUT_SECONDS}s", seconds=ROLLOUT_SECONDS + 30)  # fmt: skip
        wait(lambda: len(self.ready()) >= REPLICAS, ROLLOUT_SECONDS, f"less than {REPLICAS} pods were ready")

    def settled(self) -> None:
        """Wait until the pods that are ending have ended."""
        wait(lambda: len(self._present()) == REPLICAS, ROLLOUT_SECONDS, "old pods do not end")

    def pods(self, pool: str = POOL) -> list[dict[str, Any]]:
        """Return the pool's pods that have not ended and are not ending."""
        return [each for each in self._present(pool) if "deletionTimestamp" not in each["metadata"]]

    def _present(self, pool: str = POOL) -> list[dict[str, Any]]:
        found = self.cluster.get("pods", "-n", NAMESPACE, "-l", f"{SERVERS},pool={pool}")
        ended = {"Succeeded", "Failed"}  # an evicted pod stays as one of these
        return [each for each in found if each["status"]["phase"] not in ended]

    def ready(self, pool: str = POOL) -> list[dict[str, Any]]:
        ready = {"type": "Ready", "status": "True"}.items()
        return [
            pod for pod in self.pods(pool) if any(ready <= each.items() for each in pod["status"].get("conditions", []))
        ]

    def url(self) -> str:
        return address(self.cluster, NAMESPACE)

    def load(self, clients: int = CLIENTS, max_tokens: int = MAX_TOKENS) -> Load:
        return Load(self.cluster.place, self.url(), clients, self.key, max_tokens)

    def execute(self, pod: str, script: str) -> str:
        """Run a script in the pod's interpreter and return its output; how it ends does not matter."""
        return self.cluster.kubectl("-n", NAMESPACE, "exec", pod, "--", "python3", "-c", script, check=False)


def address(cluster: ControlPlane, namespace: str) -> str:
    """Return the URL of the Service by its own address: names need a DNS server in the cluster."""
    return f"http://{cluster.get('service', 'armature', '-n', namespace)['spec']['clusterIP']}:8000"


def asked(cluster: ControlPlane, url: str, key: str = "") -> str:
    """Ask once, from the cluster's namespace. Returns "" after an answer, else what failed."""
    with Load(cluster.place, url, 1, key) as load:
        time.sleep(0.1)
    return "" if load.outcome.answers else next(iter(load.outcome.failures), "nothing")
