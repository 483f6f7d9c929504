"""A node that is lost without notice, seen by clients of nginx as docs/fleet.md configures it, and of the Service.

Kubernetes takes a silent node for lost after 50 seconds. Until then a Service goes on to send connections there; nginx
asks another server after a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tools.peers.nginx import whole
from tools.proofs.cluster.disturbances import SETTLE_SECONDS
from tools.proofs.cluster.load import TIMEOUT_SECONDS, Load
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.node import Node
from tools.proofs.cluster.service import CLIENTS, NAMESPACE, REPLICAS, Fleet
from tools.proofs.findings import ROOT, Findings

PROXY, NGINX = "http://127.0.0.1:8001", "http://127.0.0.1:80"  # in the cluster's namespace
READ_SECONDS = 5  # between readings of weights and endpoints
LOST_SECONDS = 180.0  # until the node is taken for lost; 50 by default, and the controllers may be busy


def node_lost(findings: Findings, fleet: Fleet, node: Node) -> None:
    """Cut a node's link while clients ask its pod and another node's, through nginx and through the Service.

    The node must not be the first, which carries the Service's address for clients outside of the nodes.
    """
    fleet.apply()
    fleet.rolled_out()
    fleet.settled()
    places = [each["spec"]["nodeName"] for each in fleet.ready()]
    if places.count(node.name) != REPLICAS - 1:
        findings.skipped.append(
            f"a lost node: the pods are on {', '.join(places)}, none or all of them on {node.name}."
        )
        return
    with front(fleet), ExitStack() as both:
        behind = both.enter_context(Load(fleet.cluster.place, NGINX, CLIENTS, fleet.key))
        through = both.enter_context(fleet.load())
        time.sleep(SETTLE_SECONDS)
        fleet.cluster.place.run("ip", "link", "set", node.link, "down")
        began = time.monotonic()
        wait(lambda: len(fleet.ready()) < REPLICAS, LOST_SECONDS, f"{node.name} is not taken for lost")
        taken = time.monotonic() - began
        time.sleep(TIMEOUT_SECONDS)  # so that requests that were sent until now have their answer, or time out
    fleet.cluster.place.run("ip", "link", "set", node.link, "up")
    in_flight = behind.outcome.failures["TimeoutError"]
    findings.check(
        f"a node lost under load, {REPLICAS} replicas, {CLIENTS} clients of nginx",
        bool(behind.outcome.answers) and behind.outcome.failed == in_flight <= CLIENTS,
        f"{behind.outcome}; Kubernetes took the node for lost after {taken:.0f} s",
        "0 failed but those in flight there, at most one for each client, which time out",
    )
    findings.notes.append(
        f"Meanwhile {CLIENTS} clients of the Service, which has no retries, saw {through.outcome}: connections to the lost "
        "pod hang until Kubernetes takes the node for lost."
    )
    wait(lambda: len(fleet.ready()) >= REPLICAS, LOST_SECONDS, f"{node.name} is not taken back")


@contextmanager
def front(fleet: Fleet) -> Iterator[None]:
    """Run examples/nginx/nginx.conf and the tool that writes its servers, as found by Kubernetes' API, in the namespace."""
    cluster = fleet.cluster
    lab, place, folder = cluster.lab, cluster.place, cluster.lab.folder / "nginx"
    folder.mkdir()
    servers, configuration = folder / "armature-servers.conf", folder / "nginx.conf"
    text = (ROOT / "examples" / "nginx" / "nginx.conf").read_text().replace("/etc/nginx/", f"{folder}/")
    configuration.write_text(whole(folder, text))
    words = ("nginx", "-p", str(folder), "-c", str(configuration), "-e", "stderr")
    admin = str(cluster.keys / "admin.kubeconfig")
    lab.start("kubectl-proxy", place, "kubectl", "--kubeconfig", admin, "proxy")
    lab.until(lambda: bool(place.run("curl", "-sf", f"{PROXY}/version", check=False)), 30, "kubectl-proxy")
    reload = " ".join([str(lab.programs / words[0]), *words[1:], "-s", "reload"])
    lab.start(
        "upstream-weights", place, sys.executable, str(ROOT / "examples" / "nginx" / "upstream_weights.py"), "--out", str(servers),
        "--every", str(READ_SECONDS), "--kubernetes", PROXY, "--reload", reload, f"kubernetes:{NAMESPACE}/armature",
    )  # fmt: skip
    lab.until(servers.exists, 30, "upstream-weights")
    lab.start("nginx", place, *words)
    lab.until(lambda: bool(place.run("curl", "-s", f"{NGINX}/healthz", check=False)), 30, "nginx")
    try:
        yield
    finally:
        lab.end("nginx", "upstream-weights", "kubectl-proxy")
