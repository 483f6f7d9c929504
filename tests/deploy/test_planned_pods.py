"""The plan for pods with the manifests' limits: the threads and memory that the manifests' comments name."""

from __future__ import annotations

import dataclasses

import pytest

from app.errors import PlanImpossible
from app.hardware.facts import Cgroup, Facts, Needs
from app.hardware.plan.plan import ServingPlan
from external_tools import built
from planned_machines import GIB, machine, plan
from tests.deploy.clusters import quantity, server, servers

# A Llama of 1.2 billion parameters, which the comments reckon with.
NEEDS = Needs(
    kind="decoder",
    architecture="LlamaForCausalLM",
    num_parameters=1_235_814_400,
    weight_bytes=2_471_628_800,
    bytes_by_precision={"fp32": 4_943_257_600, "bf16": 2_471_628_800, "int8": 1_237_027_328, "int4": 656_760_832},
    kv_elements_per_token=16_384,
    max_model_len=8_192,
    num_layers=16,
    hidden_size=2_048,
    vocab_size=128_256,
    stored_dtype="bfloat16",
    num_kv_heads=8,
)
KV_BYTES_PER_TOKEN = 2 * NEEDS.kv_elements_per_token
ROOMY = machine(cores=16)
C7I_2XLARGE = machine(cores=4, siblings=2, memory=16 * GIB)
C7G_2XLARGE = machine(cores=8, memory=16 * GIB)
TWO_NODES = machine(cores=96, siblings=2, nodes=2, memory=384 * GIB)
TWO_NODES_OF_SINGLE_THREADS = machine(cores=192, nodes=2, memory=384 * GIB)


def planned(
    folder: str, name: str, on: Facts, cpuset: tuple[int, ...] | None = None, numa_node: int | None = None
) -> ServingPlan:
    (deployment,) = [each for each in servers(built(folder)) if each["metadata"]["name"] == name]
    limits = server(deployment)["resources"]["limits"]
    memory = quantity(limits["memory"])
    group = Cgroup(2, float(limits["cpu"]), cpuset, memory_limit_bytes=memory, memory_available_bytes=memory)
    settings = {} if numa_node is None else {"numa_node": numa_node}
    return plan(dataclasses.replace(on, cgroup=group), NEEDS, precision="bf16", **settings)


@pytest.mark.parametrize(
    ("folder", "name", "on", "threads"),
    [
        ("base", "armature", ROOMY, 4),
        ("overlays/mixed", "armature-amd64", C7I_2XLARGE, 4),
        ("overlays/mixed", "armature-arm64", C7G_2XLARGE, 7),
        ("overlays/numa", "armature-numa-1", TWO_NODES, 48),
        ("overlays/numa", "armature-numa-1", TWO_NODES_OF_SINGLE_THREADS, 92),
    ],
)
def test_cores_of_a_pod_are_threads(folder: str, name: str, on: Facts, threads: int) -> None:
    assert planned(folder, name, on, numa_node=1 if "numa" in name else None).cpu.threads == threads


def test_exclusive_cores_are_threads_without_a_setting() -> None:
    """The static CPU policy: six logical CPUs of an x86 node are three cores, and nothing needs to be set."""
    made = planned("overlays/mixed", "armature-amd64", C7I_2XLARGE, cpuset=tuple(range(2, 8)))
    assert made.cpu.threads == 3


def test_a_kubelet_that_pins_knows_the_memory_node_better() -> None:
    """With the topology policy single-numa-node a pod has CPUs of one node, whichever: a node that is asked for may be the other."""
    of_node_1 = tuple(range(96, 188))
    made = planned("overlays/numa", "armature-numa-1", TWO_NODES, cpuset=of_node_1)
    assert (made.cpu.numa_node, made.cpu.threads) == (None, 46)
    with pytest.raises(PlanImpossible, match="numa_node is 0"):
        planned("overlays/numa", "armature-numa-0", TWO_NODES, cpuset=of_node_1, numa_node=0)


def test_memory_is_enough_for_what_the_comment_says() -> None:
    tokens = planned("base", "armature", ROOMY).memory.kv_cache_bytes / KV_BYTES_PER_TOKEN
    assert tokens == pytest.approx(92_000, rel=0.01)
