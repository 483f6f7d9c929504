"""Machines that no one has, for plans: `machine(cores=8, memory=...)`, and `plan(machine(), needs, precision="int4")` of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from app.hardware.decision import RecipeKey
from app.hardware.facts import Core, Cpu, Facts, Needs, NumaNode
from app.hardware.plan.plan import ServingPlan, make_plan
from app.settings import Settings

GIB = 2**30
RECIPES = [
    ("cpu", architecture, name) for architecture in ("x86_64", "arm64") for name in ("fp32", "bf16", "int8", "int4")
]
# What is built on GPUs too.
ON_GPUS = [
    *RECIPES,
    *(("cuda", architecture, name) for architecture in ("x86_64", "arm64") for name in ("fp32", "bf16", "fp8", "int4")),
    *(("mps", "arm64", name) for name in ("fp32", "bf16", "fp16", "int4")),
]


def machine(cores: int = 8, siblings: int = 1, nodes: int = 1, memory: int = 64 * GIB, **changes: Any) -> Facts:
    """A Linux machine with AVX-512 BF16, numbered core by core."""
    ids = [tuple(range(core * siblings, (core + 1) * siblings)) for core in range(cores)]
    made = [Core(cpus, numa_node=number * nodes // cores) for number, cpus in enumerate(ids)]
    of_node = [tuple(cpu for core in made if core.numa_node == node for cpu in core.cpu_ids) for node in range(nodes)]
    facts = Facts(
        os="linux",
        architecture="x86_64",
        cpu=Cpu("AMD", "EPYC", "Zen 5"),
        isa=frozenset({"avx", "avx2", "avx512_bf16", "sse4_2", "popcnt"}),
        cores=tuple(made),
        numa_nodes=tuple(NumaNode(node, cpus, memory // nodes, memory // nodes) for node, cpus in enumerate(of_node)),
        memory_bytes=memory,
        available_bytes=memory,
        affinity=tuple(range(cores * siblings)),
    )
    return dataclasses.replace(facts, **changes)


def plan(
    facts: Facts, needs: Needs | None = None, recipes: Collection[RecipeKey] = RECIPES, **settings: Any
) -> ServingPlan:
    return make_plan(facts, None, Settings(**settings), needs, recipes)


def bare_plan(**values: Any) -> ServingPlan:
    """A plan that decides these values; every other one is None."""
    made = plan(machine())
    return made.changed(**{name: values.get(name) for name in made.decisions})
