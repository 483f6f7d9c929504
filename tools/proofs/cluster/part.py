"""Apply the manifests to a real Kubernetes and disturb what they made: a schema does not show that they serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from app.version import VERSION
from tools.proofs.cluster import custom, disks, disturbances, loss, starts
from tools.proofs.cluster.control_plane import ControlPlane
from tools.proofs.cluster.namespaces import Lab, wait
from tools.proofs.cluster.node import PAUSE_IMAGE, Node, join
from tools.proofs.cluster.programs import Missing, gather
from tools.proofs.cluster.service import K8S, NAMESPACE, SERVERS, Fleet, address, asked
from tools.proofs.containers import Image, docker
from tools.proofs.findings import Findings, TooLong

DEMO = Path(__file__).resolve().parents[3] / "app" / "demo" / "llama"
SERVER_TAGS = ("armature:dev", f"armature:{VERSION}")  # of overlays/demo, and of the base
IMAGE_SECONDS = 900.0
# Not below /run, /var/lib, /var/log or /var/cache, which the nodes have to themselves.
KEPT = Path(__file__).resolve().parents[3] / "build" / "cluster"
FIRST_ANSWER_SECONDS = 90.0
WAIT_SECONDS = 600.0


def run(findings: Findings, image: Image, kubernetes: Path | None, model: Path | None) -> None:
    """Bring the cluster up, run every check, and take it down.

    `kubernetes` is the folder of Kubernetes' server programs. `model` is a checkpoint with a second start to time.
    """
    if kubernetes is None or os.geteuid() != 0:
        findings.skipped.append(
            "a cluster: it needs root, and `--kubernetes DIR`, a folder with Kubernetes' server programs, which no "
            "Debian release has."
        )
        return
    try:
        programs = gather(KEPT, kubernetes)
    except Missing as error:
        findings.skipped.append(f"a cluster: {error}.")
        return
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=KEPT))
    lab = Lab(folder, programs)
    try:
        save_pause(programs, folder / "pause.tar")
        save_server(image, folder / "server.tar")
        began = time.monotonic()
        cluster = ControlPlane(lab)
        nodes = [join(cluster, number) for number in (1, 2)]
        _tell(findings, cluster, time.monotonic() - began)
        give(nodes, folder / "server.tar")
        first_apply(findings, cluster)
        custom.run(findings, cluster)
        fleet = apply(findings, cluster, nodes)
        steps: dict[str, Callable[[], None]] = {
            "disturbances": lambda: disturbances.run(findings, fleet),
            "second starts": lambda: starts.second_start(findings, cluster, nodes, model),
            "a volume beyond its limit": lambda: disks.volume_beyond_its_limit(findings, settled(fleet)),
            "a full cache": lambda: disks.full_cache(findings, fleet, nodes),
            "a lost node": lambda: loss.node_lost(findings, fleet, nodes[1]),
            "a full node": lambda: disks.full_node(findings, fleet, nodes),
        }
        for name, act in steps.items():
            attempt(findings, name, act)
    finally:
        lab.close()


def attempt(findings: Findings, name: str, act: Callable[[], None]) -> None:
    """Run a step. One that breaks off has failed, and the next is tried."""
    try:
        act()
    except TooLong:
        raise
    except (RuntimeError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        findings.check(f"{name}: the step ran to its end", False, f"{type(error).__name__}: {error}")


def settled(fleet: Fleet) -> Fleet:
    """Return the fleet with its usual settings and pods; those of another fleet, with another key, have ended."""
    fleet.apply()
    fleet.rolled_out()
    fleet.settled()
    return fleet


def give(nodes: list[Node], image: Path) -> None:
    for node in nodes:
        node.give(image)
    image.unlink()


def _tell(findings: Findings, cluster: ControlPlane, seconds: float) -> None:
    version = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    runtimes = {each["status"]["nodeInfo"]["containerRuntimeVersion"] for each in cluster.get("nodes")}
    findings.notes.append(
        f"Kubernetes {version}, {', '.join(sorted(runtimes))}, two nodes on one machine, up after {seconds:.0f} s. Both "
        "say that they have all of the machine's cores, and each has a disk of its own. No NetworkPolicy is enforced."
    )


def first_apply(findings: Findings, cluster: ControlPlane) -> None:
    """Apply the demo to an empty cluster, unedited, and ask it."""
    began = time.monotonic()
    cluster.kubectl("apply", "-k", str(K8S / "overlays" / "demo"))
    url = address(cluster, "default")
    try:
        wait(lambda: not asked(cluster, url), WAIT_SECONDS, "no answer")
        took = time.monotonic() - began
        findings.check(
            "`kubectl apply -k k8s/overlays/demo`, nothing prepared or edited: first answer", took <= FIRST_ANSWER_SECONDS,
            f"after {took:.0f} s", f"<= {FIRST_ANSWER_SECONDS:.0f} s",
        )  # fmt: skip
    except TimeoutError:
        pods = cluster.get("pods", "-n", "default")
        states = "; ".join(f"{each['metadata']['name']} {each['status']['phase']}" for each in pods)
        findings.check("`kubectl apply -k k8s/overlays/demo`: first answer", False, states or "no pods", "an answer")
    cluster.kubectl("delete", "-k", str(K8S / "overlays" / "demo"), "--wait", "--timeout=120s", check=False)
    wait(lambda: not cluster.get("pods", "-l", SERVERS), WAIT_SECONDS, "the demo's pods do not end")


def apply(findings: Findings, cluster: ControlPlane, nodes: list[Node]) -> Fleet:
    """Apply the two pools as k8s/README.md does, in a namespace with restricted pod security."""
    tar = cluster.lab.folder / "model.tar"
    save_model(DEMO, "my-model", tar)
    give(nodes, tar)
    fleet = Fleet(cluster, "fleet", "my-model")
    began = time.monotonic()
    fleet.apply()
    fleet.rolled_out()
    took = time.monotonic() - began
    findings.check(
        "two pools, pod security `restricted`: the pool with nodes is ready", True, f"after {took:.0f} s", "ready"
    )
    pods = cluster.get("pods", "-n", NAMESPACE, "-l", SERVERS)
    pending = [each for each in pods if each["status"]["phase"] == "Pending"]
    findings.check("the other pool is pending meanwhile", bool(pending), f"{len(pending)} pods pending", "pending")
    root = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root", "namespace": NAMESPACE},
            "spec": {"containers": [{"name": "a", "image": "armature:dev", "securityContext": {"privileged": True}}]}}  # fmt: skip
    try:
        cluster.apply(root)
        refused = "it was admitted"
    except RuntimeError as error:
        refused = "refused" if "violates PodSecurity" in str(error) else str(error)
    findings.check("a privileged pod in that namespace", refused == "refused", refused, "refused")
    model = next(each for each in fleet.pods()[0]["spec"]["volumes"] if each["name"] == "models")
    findings.check("the model is mounted from its image", "image" in model, model, "an image volume")
    answers = (asked(cluster, fleet.url(), fleet.key), asked(cluster, fleet.url()))
    findings.check("a request with the key, and one without", answers == ("", "401"), answers, ("", "401"))
    return fleet


def save_pause(programs: Path, into: Path) -> None:
    """Save an image that does nothing, which holds a pod's namespaces open."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(programs / "busybox", folder)
        entry = 'ENTRYPOINT ["/busybox", "sleep", "2147483647"]'
        _build(Path(folder), f"FROM scratch\nCOPY busybox /busybox\n{entry}\n", PAUSE_IMAGE)
    docker("save", PAUSE_IMAGE, "-o", str(into))


def save_server(image: Image, into: Path) -> None:
    """Save the server's image for its platform alone, under the names that the manifests have."""
    for each in SERVER_TAGS:
        if each != image.tag:
            docker("tag", image.tag, each)
    docker("save", f"--platform={image.platform}", *SERVER_TAGS, "-o", str(into), seconds=IMAGE_SECONDS)


def save_model(checkpoint: Path, name: str, into: Path) -> str:
    """Save an image of this checkpoint alone, in the folder `name`. Returns its tag."""
    tag = f"{name}:1"
    _build(checkpoint, f"FROM scratch\nCOPY --chmod=755 . /{name}\n", tag)
    docker("save", tag, "-o", str(into), seconds=IMAGE_SECONDS)
    return tag


def _build(context: Path, dockerfile: str, tag: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
        file.write(dockerfile)
        file.flush()
        docker("buildx", "build", "--load", f"--tag={tag}", f"--file={file.name}", str(context), seconds=IMAGE_SECONDS)
