"""Differences between pools: architecture, machines, price, scaling, and memory nodes."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from external_tools import ROOT, Manifest, built, of_kind
from tests.deploy.clusters import environment, pod, quantity, server, servers

# The machines that the pools of overlays/mixed fill.
MACHINES = {"amd64": "c7i.2xlarge", "arm64": "c7g.2xlarge"}


def of(folder: str, name: str) -> Manifest:
    (found,) = [each for each in servers(built(folder)) if each["metadata"]["name"] == name]
    return found


def said(folder: str, name: str) -> dict[str, str]:
    return environment(built(folder), server(of(folder, name)))


def row(machine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    families = tomllib.loads((ROOT / "armature_bench" / "tco" / "instances.toml").read_text(encoding="utf-8"))["family"]
    return next((family, size) for family in families for size in family["sizes"] if size["name"] == machine)


@pytest.mark.parametrize("pool", MACHINES)
def test_each_pool_has_its_machines_price_and_watts(pool: str) -> None:
    """As the table of machines has them, so that a price that changes there is changed here as well."""
    family, size = row(MACHINES[pool])
    settings = said("overlays/mixed", f"armature-{pool}")
    assert float(settings["ARMATURE_HOURLY_PRICE"]) == size["hourly_price"]
    cores = size["vcpus"] / family["threads_per_core"]
    watts = family["power"]["watts"] * cores / family["power"]["of"]
    assert float(settings["ARMATURE_WATTS"]) == pytest.approx(watts, abs=0.5)


@pytest.mark.parametrize("pool", MACHINES)
def test_a_pod_fills_its_machine_and_divides_no_core(pool: str) -> None:
    family, size = row(MACHINES[pool])
    limits = server(of("overlays/mixed", f"armature-{pool}"))["resources"]["limits"]
    assert size["vcpus"] - 2 <= int(limits["cpu"]) < size["vcpus"]
    assert int(limits["cpu"]) % family["threads_per_core"] == 0
    memory = size["vcpus"] * family["memory_gib_per_vcpu"]
    assert memory / 2 < quantity(limits["memory"]) / 2**30 < memory


@pytest.mark.parametrize("pool", MACHINES)
def test_pools_are_kept_to_their_architecture(pool: str) -> None:
    manifest = of("overlays/mixed", f"armature-{pool}")
    wanted = pod(manifest)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    matching = [{"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": [pool]}]}]
    assert wanted["nodeSelectorTerms"] == matching
    assert manifest["spec"]["selector"]["matchLabels"]["pool"] == pool


def test_nodes_that_are_tainted_as_arm_are_none_too_many() -> None:
    taint = {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
    assert pod(of("overlays/mixed", "armature-arm64"))["tolerations"] == [taint]
    assert "tolerations" not in pod(of("overlays/mixed", "armature-amd64"))


def scaler(pool: str) -> Manifest:
    (found,) = of_kind(built("overlays/mixed"), "HorizontalPodAutoscaler", f"armature-{pool}")
    return dict(found["spec"])


@pytest.mark.parametrize("pool", MACHINES)
def test_each_pool_scales_itself(pool: str) -> None:
    spec = scaler(pool)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"armature-{pool}"}
    assert 1 <= spec["minReplicas"] < spec["maxReplicas"]
    assert "replicas" not in of("overlays/mixed", f"armature-{pool}")["spec"], "applying again would set them back"


def waits(pool: str) -> list[tuple[str, float]]:
    """Whose predicted wait a pool looks at, and from how many seconds on it grows."""
    found = []
    for metric in scaler(pool)["metrics"]:
        if metric["type"] == "Pods" and metric["pods"]["metric"]["name"] == "armature_predicted_wait_seconds":
            found.append((pool, float(metric["pods"]["target"]["averageValue"])))
        if metric["type"] == "External":
            selected = metric["external"]["metric"]["selector"]["matchLabels"]
            found.append((selected["pool"], float(metric["external"]["target"]["value"])))
    return found


def test_the_dearer_pool_grows_when_the_cheaper_one_cannot_keep_up() -> None:
    prices = {pool: float(said("overlays/mixed", f"armature-{pool}")["ARMATURE_HOURLY_PRICE"]) for pool in MACHINES}
    cheap, dear = sorted(prices, key=lambda pool: prices[pool])
    ((own, from_seconds),) = waits(cheap)
    ((looked_at, later_seconds),) = waits(dear)
    assert (own, looked_at) == (cheap, cheap)
    assert later_seconds > from_seconds, "the cheaper pool grows first"
    assert scaler(cheap)["minReplicas"] > scaler(dear)["minReplicas"]


@pytest.mark.parametrize("node", [0, 1])
def test_each_host_has_one_pod_for_each_memory_node(node: int) -> None:
    name = f"armature-numa-{node}"
    manifest = of("overlays/numa", name)
    assert said("overlays/numa", name)["ARMATURE_NUMA_NODE"] == str(node)
    (rule,) = pod(manifest)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"] == manifest["spec"]["selector"]["matchLabels"]
    assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
