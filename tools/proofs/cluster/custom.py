"""Components whose kinds are not Kubernetes' own: the API server judges them by the definitions of these kinds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tools.proofs.cluster.control_plane import ControlPlane
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.service import K8S
from tools.proofs.findings import Findings

DEFINITIONS = Path(__file__).resolve().parents[3] / "build" / "checkers" / "crds"  # `make checkers` gets them
NAMESPACE = "custom"
ESTABLISHED_SECONDS = 60.0
# What is under the component, and the kinds that it brings.
COMPONENTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "gateway": ("base", ("gateway", "httproute", "inferencepool")),
    "autoscaling/keda": ("base", ("scaledobject",)),
    "monitoring": ("base", ("podmonitor", "prometheusrule")),
    "monitoring-service": ("base", ("servicemonitor", "prometheusrule")),
    "kserve": ("", ("clusterservingruntime", "inferenceservice")),
    "kserve-llm": ("", ("llminferenceservice",)),
}
MISTAKE = [{"op": "add", "path": "/spec/misspelt", "value": 1}]


def run(findings: Findings, cluster: ControlPlane) -> None:
    """Define the kinds, and let the API server judge every component as it would when it is applied."""
    files = sorted(DEFINITIONS.glob("*.yaml"))
    known = {yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["spec"]["names"]["singular"] for file in files}
    missing = sorted({kind for _, kinds in COMPONENTS.values() for kind in kinds} - known)
    if missing:
        findings.skipped.append(f"custom resources of {', '.join(missing)}: `make checkers` could not get definitions.")
    if files:
        cluster.kubectl("apply", "--server-side", *(f"--filename={file}" for file in files))
        wait(lambda: _established(cluster), ESTABLISHED_SECONDS, "the API server does not establish every kind")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for name, (under, kinds) in COMPONENTS.items():
        if not set(kinds) & set(missing):
            judged(findings, cluster, name, under, kinds)


def judged(findings: Findings, cluster: ControlPlane, name: str, under: str, kinds: Sequence[str]) -> None:
    folder = cluster.lab.folder / "custom" / name
    folder.mkdir(parents=True)
    said = _applied(cluster, folder, name, under)
    accepted = [kind for kind in kinds if f"{kind}." in said]
    findings.check(
        f"components/{name}: accepted by the API server", accepted == list(kinds),
        f"{len(said.splitlines())} objects, of them {', '.join(accepted)}" if accepted else said, ", ".join(kinds),
    )  # fmt: skip
    named = {each["spec"]["names"]["singular"]: each["spec"]["names"]["kind"] for each in cluster.get("crd")}
    mistaken = [{"target": {"kind": named[kind]}, "patch": yaml.safe_dump(MISTAKE)} for kind in kinds]
    said = _applied(cluster, folder, name, under, mistaken)
    refused = said.count("spec.misspelt")
    findings.check(
        f"components/{name}: with a field that does not exist", refused >= len(kinds),
        f"{refused} refused" if refused else said, "refused",
    )  # fmt: skip


def _applied(
    cluster: ControlPlane, folder: Path, name: str, under: str, patches: Sequence[Mapping[str, object]] = ()
) -> str:
    """Return what kubectl says of each object, or why it was refused. Nothing is kept."""
    up = os.path.relpath(K8S, folder)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [f"{up}/{under}"] if under else [],
        "components": [f"{up}/components/{name}"],
        "patches": list(patches),
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    words = ("--server-side", "--dry-run=server", "--validate=strict")
    try:
        return cluster.kubectl("apply", "-k", str(folder), *words)
    except RuntimeError as error:
        return str(error)


def _established(cluster: ControlPlane) -> bool:
    conditions = [each.get("status", {}).get("conditions") or [] for each in cluster.get("crd")]
    return all(
        {"Established": "True"}.items() <= {one["type"]: one["status"] for one in each}.items() for each in conditions
    )
