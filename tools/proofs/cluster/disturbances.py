"""What is done to a running service: a rollout, pods deleted and killed, a drained node, and more load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tools.proofs.cluster.load import MAX_TOKENS, Outcome
from tools.proofs.cluster.namespaces import wait
from tools.proofs.cluster.programs import ADAPTER
from tools.proofs.cluster.service import CLIENTS, NAMESPACE, POOL, REPLICAS, ROLLOUT_SECONDS, Fleet
from tools.proofs.cluster.watching import SCRAPE_SECONDS, Prometheus, adapt, watching
from tools.proofs.findings import Findings

SETTLE_SECONDS = 5.0  # under load before something is done, and after it
RUNNING = 4  # sequences at once in a pod, so that the demo has a queue
BUSY_CLIENTS = 48  # enough for four waiting requests a pod, which is where the autoscaler adds pods
LONG_TOKENS = 400  # of clients whose requests take longer to run than to be sent, so that most of them run
SCALE_SECONDS, EVENT_SECONDS = 150.0, 30.0
# Takes all memory of the container. The server is made the kernel's first choice, since it is what this is about.
EXHAUST = """
open('/proc/1/oom_score_adj', 'w').write('1000')
held = []
while True:
    held.append(bytearray(64 << 20))
"""


def run(findings: Findings, fleet: Fleet) -> None:
    rollout(findings, fleet)
    deletion(findings, fleet)
    drain(findings, fleet)
    with watching(fleet.cluster, NAMESPACE) as prometheus:
        scraping(findings, fleet, prometheus)
        autoscaling(findings, fleet)
    memory(findings, fleet)


def under_load(fleet: Fleet, act: Callable[[], None]) -> tuple[Outcome, float]:
    """Run `act` while clients send requests. Returns what they saw, and the seconds that it took."""
    with fleet.load() as load:
        time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        act()
        took = time.monotonic() - began
        time.sleep(SETTLE_SECONDS)
    return load.outcome, took


def none_failed(findings: Findings, what: str, outcome: Outcome, took: float) -> None:
    findings.check(
        f"{what}, {REPLICAS} replicas, {CLIENTS} clients", bool(outcome.answers) and not outcome.failed,
        f"{outcome} in {took:.0f} s", "0 failed",
    )  # fmt: skip


def rollout(findings: Findings, fleet: Fleet) -> None:
    def changed() -> None:
        fleet.apply(f"ARMATURE_MAX_RUNNING_SEQS={RUNNING}")
        fleet.rolled_out()
        fleet.settled()

    none_failed(findings, "a rolling update under load", *under_load(fleet, changed))


def deletion(findings: Findings, fleet: Fleet) -> None:
    def deleted() -> None:
        pod = fleet.ready()[0]["metadata"]["name"]
        fleet.cluster.kubectl("-n", NAMESPACE, "delete", "pod", pod)
        fleet.rolled_out()

    none_failed(findings, "a pod deleted under load", *under_load(fleet, deleted))


def drain(findings: Findings, fleet: Fleet) -> None:
    """Drain the node of one pod while the other pool is pending; its pods count against their own budget alone."""
    node = fleet.ready()[0]["spec"]["nodeName"]

    def drained() -> None:
        words = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={ROLLOUT_SECONDS}s")
        fleet.cluster.kubectl("drain", node, *words, seconds=ROLLOUT_SECONDS + 30)
        fleet.rolled_out()

    try:
        none_failed(findings, "a node drained under load, the other pool pending", *under_load(fleet, drained))
    except RuntimeError as error:
        findings.check("a node is drained", False, error, "drained")
    left = [each for each in fleet.pods() if each["spec"].get("nodeName") == node]
    findings.check("no pod is left on it", not left, f"{len(left)} pods", "0 pods")
    fleet.cluster.kubectl("uncordon", node)


def scraping(findings: Findings, fleet: Fleet, prometheus: Prometheus) -> None:
    def up() -> int:
        return len(prometheus.query(f'up{{pool="{POOL}"}} == 1'))

    wait(lambda: up() >= REPLICAS, 120, "Prometheus does not reach every pod")
    with fleet.load():
        time.sleep(3 * SCRAPE_SECONDS)
    tokens = prometheus.query(f'sum by (pod) (increase(armature_tokens_total{{pool="{POOL}"}}[1m])) > 0')
    findings.check(
        "Prometheus scrapes the pods", up() >= REPLICAS, f"{up()} up, {len(tokens)} with tokens", f">= {REPLICAS} up"
    )


def autoscaling(findings: Findings, fleet: Fleet) -> None:
    """Let the autoscaler add pods twice: because requests wait, and before any does, because many run."""
    if not (fleet.cluster.lab.programs / ADAPTER).exists():
        findings.skipped.append(f"autoscaling by our metrics: no {ADAPTER} in the folder of Kubernetes' programs.")
        return
    adapt(fleet.cluster)
    _pods_added(findings, fleet, f"of pods that run {RUNNING} sequences, by our metrics", "above target", MAX_TOKENS)
    # A new autoscaler, because what the old one changed within the last four minutes limits it.
    fleet.cluster.kubectl("-n", NAMESPACE, "delete", "hpa", f"armature-{POOL}")
    fleet.apply()
    fleet.rolled_out()
    running = "before any waits: pods that run all their requests"
    _pods_added(findings, fleet, running, "armature_requests_running above target", LONG_TOKENS)


def _pods_added(findings: Findings, fleet: Fleet, what: str, reason: str, max_tokens: int) -> None:
    """Load the pool until it has more pods, and then limit it again."""
    with fleet.load(BUSY_CLIENTS, max_tokens):
        found = _growth(fleet)
    what = f"the autoscaler adds pods for {BUSY_CLIENTS} clients {what}"
    findings.check(what, reason in found, found, f"> {REPLICAS}, {reason}")
    _shrink(fleet)


def _growth(fleet: Fleet) -> str:
    """Wait until the autoscaler wants more pods. Returns how many, when, and the reason that its event gives."""
    cluster, name, began = fleet.cluster, f"armature-{POOL}", time.monotonic()

    def scaler() -> dict[str, Any]:
        found: dict[str, Any] = cluster.get("hpa", name, "-n", NAMESPACE)
        return found

    def wanted() -> int:
        return int(scaler()["status"].get("desiredReplicas", 0))

    try:
        wait(lambda: wanted() > REPLICAS, SCALE_SECONDS, "")
    except TimeoutError:
        return f"{wanted()} replicas, metrics {scaler()['status'].get('currentMetrics')}"
    took = time.monotonic() - began
    own = f"--field-selector=involvedObject.uid={scaler()['metadata']['uid']},reason=SuccessfulRescale"
    events: list[str] = []

    def told() -> bool:
        said = [each["message"] for each in cluster.get("events", "-n", NAMESPACE, own)]
        events[:] = [each for each in said if "above target" in each]  # not of the minimum, at its beginning
        return bool(events)

    wait(told, EVENT_SECONDS, f"the autoscaler of {POOL} gives no reason for its pods")
    return f"{REPLICAS} to {wanted()} after {took:.0f} s: {events[0].partition('reason: ')[2]}"


def _shrink(fleet: Fleet) -> None:
    """Limit the pool to the pods of the other checks: ten quiet minutes would be needed to see it shrink by itself."""
    fleet.cluster.kubectl("-n", NAMESPACE, "patch", "hpa", f"armature-{POOL}", "--type=merge",
                          "-p", f'{{"spec": {{"maxReplicas": {REPLICAS}}}}}')  # fmt: skip
    wait(lambda: len(fleet.pods()) == REPLICAS, ROLLOUT_SECONDS, "the pool does not shrink to its maximum")
    fleet.rolled_out()


def memory(findings: Findings, fleet: Fleet) -> None:
    """Let the kernel kill a server for its memory: its container starts again, and the other pod serves."""
    pod = fleet.ready()[0]["metadata"]["name"]
    why = ""

    def killed() -> None:
        nonlocal why
        fleet.execute(pod, EXHAUST)

        def restarted() -> bool:
            nonlocal why
            (status,) = fleet.cluster.get("pod", pod, "-n", NAMESPACE)["status"]["containerStatuses"]
            why = status.get("lastState", {}).get("terminated", {}).get("reason", "")
            return bool(status["restartCount"]) and bool(status["ready"])

        wait(restarted, ROLLOUT_SECONDS, f"{pod} was not restarted")

    outcome, took = under_load(fleet, killed)
    found = f"{why}, ready after {took:.0f} s"
    findings.check("a server killed for its memory starts again", why == "OOMKilled", found, "OOMKilled")
    wanted = "answers; requests on the killed pod are lost"
    findings.check("meanwhile the other pod answers", bool(outcome.answers), outcome, wanted)
