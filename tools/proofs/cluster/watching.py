"""Prometheus over the cluster's pods, and prometheus-adapter, which serves its figures to the autoscaler.

Debian's Prometheus has no discovery of Kubernetes, so the pods' addresses are written into its file of targets, with
the labels that k8s/components/monitoring/podmonitor.yaml gives them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from tools.proofs.cluster.control_plane import API, ControlPlane
from tools.proofs.cluster.programs import ADAPTER

RULES = Path(__file__).resolve().parents[3] / "k8s" / "components" / "autoscaling" / "hpa" / "prometheus-adapter.yaml"
URL, PORT = "http://127.0.0.1:9090", 6444
SCRAPE_SECONDS = 5
VERSIONS = ("v1beta1.custom", "v1beta2.custom", "v1beta1.external")


@contextmanager
def watching(cluster: ControlPlane, namespace: str) -> Iterator[Prometheus]:
    """Run Prometheus over that namespace's pods; its targets follow them until the end."""
    lab, folder = cluster.lab, cluster.lab.folder / "prometheus"
    folder.mkdir()
    targets = folder / "targets.json"
    targets.write_text("[]")
    job = {"job_name": "armature", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}]}
    timing = {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": "4s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": timing, "scrape_configs": [job]}))
    over = threading.Event()
    finder = threading.Thread(target=_find, args=(cluster, namespace, targets, over))
    finder.start()
    try:
        lab.start("prometheus", cluster.place, "prometheus", f"--config.file={folder / 'prometheus.yml'}",
                  f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:9090")  # fmt: skip
        prometheus = Prometheus(cluster)
        lab.until(lambda: bool(prometheus.ask("/-/ready")), 60, "prometheus")
        yield prometheus
    finally:
        over.set()
        finder.join()


class Prometheus:
    def __init__(self, cluster: ControlPlane) -> None:
        self.place = cluster.place

    def ask(self, path: str) -> str:
        """Return the body of an answer, or "" without one."""
        script = (
            f"import sys, urllib.request as u; sys.stdout.write(u.urlopen('{URL}{path}', timeout=10).read().decode())"
        )
        return self.place.run("python3", "-c", script, check=False)

    def query(self, query: str) -> list[dict[str, Any]]:
        answer = self.ask(f"/api/v1/query?query={quote(query)}")
        found: list[dict[str, Any]] = json.loads(answer)["data"]["result"] if answer else []
        return found


def _find(cluster: ControlPlane, namespace: str, targets: Path, over: threading.Event) -> None:
    while not over.wait(2):
        try:
            pods = cluster.get("pods", "-n", namespace)
        except (RuntimeError, ValueError):
            continue  # the API server is busy; the targets stay
        groups = [
            {
                "targets": [f"{pod['status']['podIP']}:8000"],
                "labels": {
                    "namespace": namespace,
                    "pod": pod["metadata"]["name"],
                    "instance": pod["metadata"]["name"],
                    "pool": pod["metadata"]["labels"].get("pool", ""),
                },
            }
            for pod in pods
            if pod["status"].get("podIP") and pod["status"]["phase"] == "Running"
        ]
        fresh = targets.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.replace(targets)


def adapt(cluster: ControlPlane) -> None:
    """Start the adapter with the rules of k8s/, and register it as the API of custom and external metrics."""
    lab, folder = cluster.lab, cluster.lab.folder
    values = yaml.safe_load(RULES.read_text())
    rules = {"rules": values["rules"]["custom"], "externalRules": values["rules"]["external"]}
    (folder / "adapter.yaml").write_text(yaml.safe_dump(rules))
    admin = f"{cluster.keys / 'admin.kubeconfig'}"
    lab.start(
        ADAPTER, cluster.place, ADAPTER, f"--config={folder / 'adapter.yaml'}", f"--prometheus-url={URL}/",
        "--metrics-relist-interval=10s", f"--bind-address={API}", f"--secure-port={PORT}",
        f"--cert-dir={folder / 'adapter'}", f"--lister-kubeconfig={admin}", f"--authentication-kubeconfig={admin}",
        f"--authorization-kubeconfig={admin}",
    )  # fmt: skip
    name = {"name": "metrics-adapter", "namespace": "kube-system"}
    port = {"name": "https", "port": 443, "targetPort": PORT}
    slices = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": name | {"labels": {"kubernetes.io/service-name": name["name"]}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": PORT}],
        "endpoints": [{"addresses": [API], "conditions": {"ready": True}}],
    }
    services = [
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{each}.metrics.k8s.io"},
            "spec": {
                "service": name,
                "group": f"{each.partition('.')[2]}.metrics.k8s.io",
                "version": each.partition(".")[0],
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
        for each in VERSIONS
    ]
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": {"ports": [port]}}, slices, *services
    )
    cluster.kubectl(
        "wait",
        "--for=condition=Available",
        "--timeout=90s",
        *(f"apiservice/{each}.metrics.k8s.io" for each in VERSIONS),
    )
