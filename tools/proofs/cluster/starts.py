"""The second start of a pod on its node: a new pod finds packed weights and calibration that an old one left there."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tools.proofs.cluster.control_plane import ControlPlane
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.node import Node
from tools.proofs.cluster.service import NAMESPACE, SERVERS, Fleet
from tools.proofs.findings import Findings, progress

LARGE_MEMORY = "4Gi"
SECOND_START_SECONDS, WAIT_SECONDS = 6.0, 600.0
REPEATS = 3
SCHEDULED, READY = "PodScheduled", "Ready"
# A line for each state of a pod: its name, and whether it is scheduled and ready ("True", "False", or nothing).
STATES = "".join(f'{{.status.conditions[?(@.type=="{each}")].status}} ' for each in (SCHEDULED, READY))


def second_start(findings: Findings, cluster: ControlPlane, nodes: list[Node], checkpoint: Path | None) -> None:
    """Serve this checkpoint in int4, delete a pod, and time its replacement; three times.

    The checkpoint must be readable by every user. It is mounted by a claim, so that a large one is not copied.
    """
    if checkpoint is None:
        findings.skipped.append("the second start of a pod: no checkpoint was given (`--model DIR`).")
        return
    name = "checkpoint"
    for node in nodes:
        node.mount_model(checkpoint, name)
    fleet = Fleet(cluster, "large", name, claim=True, memory=LARGE_MEMORY)
    fleet.apply("ARMATURE_PRECISION=int4")
    fleet.rolled_out()
    progress(f"timing second starts of {checkpoint.name}; nothing else should compute on this machine now")
    with watched(cluster) as moments:
        seen = [_seconds_of_replacement(fleet, moments) for _ in range(REPEATS)]
    middle = statistics.median(seen)
    findings.check(
        f"{checkpoint.name} in int4: a new pod is ready, its node having the cache", middle <= SECOND_START_SECONDS,
        f"{middle:.1f} s after it was scheduled (median of {', '.join(f'{each:.1f}' for each in seen)})",
        f"<= {SECOND_START_SECONDS:g} s",
    )  # fmt: skip


def _seconds_of_replacement(fleet: Fleet, moments: Mapping[tuple[str, str], float]) -> float:
    """Delete a pod. Returns the seconds from the scheduling of its replacement to its readiness."""
    fleet.rolled_out()
    fleet.settled()
    gone, deleted = min(each["metadata"]["name"] for each in fleet.pods()), time.monotonic()
    fleet.cluster.kubectl("-n", NAMESPACE, "delete", "pod", gone, "--wait=false")
    wait(lambda: bool(seconds_of_new_pods(moments, deleted)), WAIT_SECONDS, f"no pod that replaces {gone} is ready")
    return seconds_of_new_pods(moments, deleted)[0]


def seconds_of_new_pods(moments: Mapping[tuple[str, str], float], since: float) -> list[float]:
    """Return the seconds to readiness of the pods that were scheduled after `since` and are ready.

    Pods of a former rollout may be among those that were seen, as they ended.
    """
    scheduled = {name: moment for (name, condition), moment in list(moments.items()) if condition == SCHEDULED}
    return [moments[name, READY] - at for name, at in scheduled.items() if at > since and (name, READY) in moments]


@contextmanager
def watched(cluster: ControlPlane) -> Iterator[Mapping[tuple[str, str], float]]:
    """Yield the moments at which pods were first seen in a condition, by pod and condition, while they are watched.

    Kubernetes itself dates conditions in whole seconds.
    """
    template = f'jsonpath={{.metadata.name}} {STATES}{{"\\n"}}'
    words = cluster.command("-n", NAMESPACE, "get", "pods", "-l", SERVERS, "--watch", "-o", template)
    moments: dict[tuple[str, str], float] = {}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=note, args=(process.stdout, moments))
    reader.start()
    try:
        wait(lambda: bool(moments), WAIT_SECONDS, "kubectl shows no pods")
        yield moments
    finally:
        process.terminate()
        process.wait()
        reader.join()


def note(lines: IO[str], moments: dict[tuple[str, str], float]) -> None:
    for line in lines:
        name, *states = line.rstrip("\n").split(" ")
        for condition, state in zip((SCHEDULED, READY), states, strict=False):
            if state == "True":
                moments.setdefault((name, condition), time.monotonic())
