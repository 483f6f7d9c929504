"""What `armature probe` prints, for people and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from app.cli.tables import format_cpu_ranges, render_probe
from app.hardware.facts import (
    Cgroup,
    Core,
    Cpu,
    CudaDevice,
    Facts,
    HugePages,
    NumaNode,
    PowerCounter,
    PowerMeter,
    TorchBuild,
)
from app.hardware.plan.plan import make_plan
from app.settings import Settings

RECIPES = [("cpu", "x86_64", "bf16"), ("cpu", "x86_64", "fp32")]
FACTS = Facts(
    os="linux",
    kernel="6.1.0",
    architecture="x86_64",
    cpu=Cpu("Intel", "Intel(R) Xeon(R)", "Sapphire Rapids"),
    isa=frozenset({"amx_bf16", "avx", "avx2", "popcnt", "sse4_2"}),
    cores=(Core((0, 2)), Core((1, 3), package=1, numa_node=1)),
    numa_nodes=(NumaNode(0, (0, 2), 2**33), NumaNode(1, (1, 3), 2**33)),
    memory_bytes=2**34,
    available_bytes=2**33,
    affinity=(0, 1, 2, 3),
    cgroup=Cgroup(2, quota_cores=1.5, cpuset=(0, 1, 2), memory_limit_bytes=2**32, memory_available_bytes=2**32),
    huge_pages=HugePages("madvise", 2**21, 10, 4),
    cuda=(
        CudaDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), 81559 * 2**20, 70 * 2**30, driver="580.65.06"),
        CudaDevice(1, "NVIDIA GB10", (12, 1)),
        CudaDevice(2, "NVIDIA L4"),
    ),
    torch=TorchBuild("2.13.0+cpu", onednn=True, mkl=True),
)


def printed(facts: Facts, *, with_plan: bool) -> str:
    plan = make_plan(facts, None, Settings(), None, RECIPES) if with_plan else None
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render_probe(facts, plan))
    return capture.get()


@pytest.mark.parametrize(
    "words",
    [
        "linux 6.1.0 x86_64",
        "Intel(R) Xeon(R) (Sapphire Rapids)",
        "amx_bf16 avx avx2 popcnt sse4_2",
        "2 physical, 4 logical, 2 packages",
        "CPUs 0-2, quota of 1.5 cores",
        "16.0 GiB, 8.0 GiB available, pages of 4 KiB",
        "1: CPUs 1,3, 8.0 GiB",
        "madvise, 4 of 10 explicit ones of 2 MiB free",
        "v2, 1.5 cores and 4.0 GiB of memory",
        "0: NVIDIA H100 80GB HBM3, 79.6 GiB, 70.0 GiB free, capability 9.0, driver 580.65.06",
        "1: NVIDIA GB10, the machine's memory, capability 12.1",
        "2: NVIDIA L4\n",
        "2.13.0+cpu, with oneDNN, MKL",
    ],
)
def test_facts_for_people(words: str) -> None:
    text = printed(FACTS, with_plan=False)
    assert words in "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_an_apple_gpu() -> None:
    m1 = replace(FACTS, cuda=(), mps=True, isa=frozenset({"neon"}))
    assert "Apple GPU (MPS), may hold 10.7 GiB of 16.0 GiB, FP16 but no BF16" in printed(m1, with_plan=False)
    m4 = replace(m1, isa=frozenset({"neon", "bf16"}), mps_limit_bytes=12 * 2**30)
    assert "Apple GPU (MPS), may hold 12.0 GiB of 16.0 GiB\n" in re.sub(" +\n", "\n", printed(m4, with_plan=False))


def test_what_reports_the_power_or_why_nothing_does() -> None:
    counters = (PowerCounter("package-0", "/0"), PowerCounter("dram-0", "/1"))
    counted = printed(replace(FACTS, power=PowerMeter("rapl", counters, "The processor's own.")), with_plan=False)
    assert "rapl (package-0, dram-0)" in counted
    assert "not counted: root alone may." in printed(
        replace(FACTS, power=PowerMeter(reason="root alone may.")), with_plan=False
    )
    assert "power" not in printed(FACTS, with_plan=False)


def test_every_decision_is_printed_with_its_reason() -> None:
    text = printed(FACTS, with_plan=True)
    for name, decision in make_plan(FACTS, None, Settings(), None, RECIPES).decisions.items():
        assert name in text
        assert decision.reason.split()[0] in text
    assert "1 physical core may be used on memory node 0" in text


def test_the_json_is_json() -> None:
    plan = make_plan(FACTS, None, Settings(), None, RECIPES)
    facts = json.loads(json.dumps(FACTS.to_json()))
    assert facts["isa"][:2] == ["amx_bf16", "avx"]
    assert facts["cgroup"]["quota_cores"] == 1.5
    assert facts["cores"][1] == {"cpu_ids": [1, 3], "package": 1, "numa_node": 1, "kind": "performance"}
    threads = json.loads(json.dumps(plan.to_json()))["threads"]
    assert threads["value"] == 1
    assert threads["reason"] == plan.decisions["threads"].reason


@pytest.mark.parametrize(("cpus", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8], "0-2,8"), ([1, 3, 5, 6], "1,3,5-6")])
def test_cpu_ranges(cpus: list[int], text: str) -> None:
    assert format_cpu_ranges(cpus) == text
