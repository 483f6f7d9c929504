"""Disks that are full: a pod's own volume, the folder of the cache, and a node's whole disk."""

from __future__ import annotations

from tools.proofs.cluster.disturbances import under_load
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.node import CACHE, USER, Node
from tools.proofs.cluster.service import NAMESPACE, ROLLOUT_SECONDS, Fleet
from tools.proofs.findings import Findings

EVICTION_SECONDS = 180  # the kubelet measures volumes once a minute
FULL = "No space left on device"
# More than the volume at /tmp may hold, in pieces: it is the disk that is to be full, not the memory.
FILL = """
with open('/tmp/full', 'wb') as file:
    for _ in range(200):
        file.write(bytes(1 << 20))
"""


def volume_beyond_its_limit(findings: Findings, fleet: Fleet) -> None:
    """Let a pod write more into a volume of its own than the volume's limit.

    Only the event tells of the eviction: the server ends with status 0, so Kubernetes counts the pod as succeeded.
    """
    fleet.rolled_out()
    pod = fleet.ready()[0]["metadata"]["name"]

    def filled() -> None:
        fleet.execute(pod, FILL)
        _replaced(fleet, pod)

    outcome, took = under_load(fleet, filled)
    said = _eviction(fleet, pod)
    findings.check(
        "a pod that writes beyond the limit of its own volume is evicted and replaced", "exceeds the limit" in said,
        f"{said or 'no event'} Replaced after {took:.0f} s", "an event Evicted, for that limit",
    )  # fmt: skip
    findings.check(
        "meanwhile the other pod answers", bool(outcome.answers), outcome, "answers; its own requests are lost"
    )


def full_cache(findings: Findings, fleet: Fleet, nodes: list[Node]) -> None:
    """Start pods that want to pack on nodes where the folder of the cache has no room."""
    for node in nodes:
        options = f"size=64k,uid={USER},gid={USER},mode=755"
        node.place.run("mount", "-t", "tmpfs", "-o", options, "full", CACHE)
        node.place.run("dd", "if=/dev/zero", f"of={CACHE}/somebody", "bs=4k", check=False)
    try:
        fleet.apply("ARMATURE_PRECISION=int4")
        fleet.rolled_out()
        names = [each["metadata"]["name"] for each in fleet.ready()]
        logs = [fleet.cluster.kubectl("-n", NAMESPACE, "logs", name) for name in names]
        warned = [[line for line in log.splitlines() if " WARNING " in line and CACHE in line] for log in logs]
        restarts = [each["status"]["containerStatuses"][0]["restartCount"] for each in fleet.ready()]
        left = [node.place.run("ls", "-A", CACHE, f"{CACHE}/packs", check=False) for node in nodes]
    finally:
        for node in nodes:
            node.place.run("umount", "--lazy", CACHE)
    findings.check(
        "the cache's folder on the nodes is full: pods serve without a pack, with one warning each",
        all(len(lines) == 1 and FULL in lines[0] for lines in warned) and not any(restarts),
        f"{[len(lines) for lines in warned]} warnings, {sum(restarts)} restarts: "
        f"{next((line.partition(' WARNING ')[2] for lines in warned for line in lines), 'nothing')}",
        f"one warning and {FULL}",
    )
    halves = [name for listed in left for name in listed.split() if "partial" in name or name.endswith(".pack")]
    findings.check("no unfinished file is left there", not halves, halves or "none", "none")


def full_node(findings: Findings, fleet: Fleet, nodes: list[Node]) -> None:
    """Fill the disk of a node with a pod: the kubelet evicts the pod, and the other node takes its place.

    This is the last check on that node, because the kubelet removes images that no pod uses.
    """
    fleet.rolled_out()
    pod = fleet.ready()[0]
    name = pod["metadata"]["name"]
    node = next(each for each in nodes if each.name == pod["spec"]["nodeName"])
    file = str(node.disk / "full")

    def filled() -> None:
        free = int(node.place.run("df", "--output=avail", "--block-size=1M", str(node.disk)).split()[-1])
        node.place.run("fallocate", "-l", f"{free * 95 // 100}M", file)  # of the image file nothing is written
        _replaced(fleet, name)

    outcome, took = under_load(fleet, filled)
    elsewhere = {each["spec"]["nodeName"] for each in fleet.ready()} - {node.name}
    said = _eviction(fleet, name)
    findings.check(
        "a node whose disk is full: its pod is evicted, and another node replaces it",
        "low on resource: ephemeral-storage" in said and _pressed(fleet, node) == "True" and bool(elsewhere),
        f"{said or 'no event'} DiskPressure {_pressed(fleet, node)}, replaced after {took:.0f} s",
        "an event Evicted, and DiskPressure",
    )
    findings.check(
        "meanwhile the other pod answers", bool(outcome.answers), outcome, "answers; its own requests are lost"
    )
    node.place.run("rm", file)
    try:
        wait(lambda: _pressed(fleet, node) == "False", EVICTION_SECONDS, "")
        found = "False"
    except TimeoutError:
        found = _pressed(fleet, node)
    findings.check("with room again the node takes pods again: DiskPressure", found == "False", found, "False")


def _replaced(fleet: Fleet, pod: str) -> None:
    wait(
        lambda: pod not in {each["metadata"]["name"] for each in fleet.ready()},
        EVICTION_SECONDS,
        f"{pod} was not evicted",
    )
    wait(lambda: len(fleet.ready()) >= len(fleet.pods()) > 1, ROLLOUT_SECONDS, f"{pod} was not replaced")


def _eviction(fleet: Fleet, pod: str) -> str:
    """Return what the kubelet said when it evicted this pod, in its status or an event, or ""."""
    status = fleet.cluster.get("pod", pod, "-n", NAMESPACE)["status"]
    if status.get("reason") == "Evicted":
        return str(status["message"])
    chosen = f"--field-selector=involvedObject.name={pod},reason=Evicted"
    return " ".join(each["message"] for each in fleet.cluster.get("events", "-n", NAMESPACE, chosen))


def _pressed(fleet: Fleet, node: Node) -> str:
    conditions = fleet.cluster.get("node", node.name)["status"]["conditions"]
    return str(next((each["status"] for each in conditions if each["type"] == "DiskPressure"), "unknown"))
