"""A node of the other architecture: its pods' programs are emulated, everything else is this machine's."""

from __future__ import annotations

import time
from contextlib import suppress

from tools.proofs.cluster import images
from tools.proofs.cluster.control_plane import ControlPlane
from tools.proofs.cluster.disturbances import under_load
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.node import join
from tools.proofs.cluster.service import NAMESPACE, POOL, REPLICAS, Fleet, asked
from tools.proofs.containers import Image
from tools.proofs.findings import Findings, progress

OTHER_POOL, MACHINE = "arm64", "aarch64"
READY_SECONDS = 600.0  # emulated
LOAD_SECONDS = 20.0


def run(findings: Findings, cluster: ControlPlane, fleet: Fleet, image: Image | None) -> None:
    """Give the pending pool a node, and ask the pods of both pools through one Service."""
    if image is None or image.architecture != OTHER_POOL:
        findings.skipped.append(
            f"a node of another architecture: no image of {OTHER_POOL} was given, so that pool stays pending throughout."
        )
        return
    # Quantizing and measuring take minutes in emulation. Pods of former settings would start too, so they are removed.
    fleet.apply("ARMATURE_PRECISION=fp32", "ARMATURE_CALIBRATE=off")
    fleet.rolled_out()
    cluster.kubectl("-n", NAMESPACE, "delete", "replicasets", "-l", f"pool={OTHER_POOL}")
    tar, model = cluster.lab.folder / "other.tar", cluster.lab.folder / "other-model.tar"
    images.server(image, tar)
    images.model(images.DEMO, fleet.model, model)
    node = join(cluster, 3, OTHER_POOL)
    node.give(tar, image.platform)
    node.give(model)
    for each in (tar, model):
        each.unlink()
    progress(f"waiting for emulated pods of {OTHER_POOL}, at most {READY_SECONDS:.0f} s; this takes all cores")
    began = time.monotonic()
    with suppress(TimeoutError):
        wait(lambda: len(fleet.ready(OTHER_POOL)) >= REPLICAS, READY_SECONDS, "")
    ready = fleet.ready(OTHER_POOL)
    enough = findings.check(
        f"a node labelled {OTHER_POOL} joins, its pods emulated: the pending pool becomes ready",
        len(ready) >= REPLICAS, f"{len(ready)} pods after {time.monotonic() - began:.0f} s", f">= {REPLICAS}",
    )  # fmt: skip
    if not enough:
        return
    names = [each["metadata"]["name"] for each in ready]
    machines = {fleet.execute(each, "import os; print(os.uname().machine)").strip() for each in names}
    findings.check("its pods run programs for", machines == {MACHINE}, ", ".join(machines), MACHINE)
    both = (*ready, *fleet.ready(POOL))
    said = [asked(cluster, f"http://{each['status']['podIP']}:8000", fleet.key) for each in both]
    findings.check("every pod of both pools answers", not any(said), said, ["" for _ in both])
    outcome, _ = under_load(fleet, lambda: time.sleep(LOAD_SECONDS))
    findings.check(
        "one Service in front of both pools, under load",
        bool(outcome.answers) and not outcome.failed,
        outcome,
        "0 failed",
    )
