"""Every recorded host is seen for what it is: one table, and what is peculiar to each below it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from app.hardware.facts import Facts

Recorded = Callable[[str], Facts]
HOSTS = Path(__file__).parents[1] / "hosts"
NAMES = sorted(path.name for path in HOSTS.iterdir() if path.is_dir())

# host: architecture, vendor, microarchitecture, product, physical cores, logical CPUs, memory nodes
SEEN: dict[str, tuple[str, str, str | None, str | None, int, int, int]] = {
    "zen5-vm": ("x86_64", "AMD", "Zen 5", None, 2, 2, 1),
    "skylake": ("x86_64", "Intel", "Skylake-SP", None, 2, 4, 1),
    "cascade-lake": ("x86_64", "Intel", "Cascade Lake", None, 2, 2, 1),
    "ice-lake": ("x86_64", "Intel", "Ice Lake", None, 8, 16, 1),
    "zen2": ("x86_64", "AMD", "Zen 2", None, 8, 16, 1),
    "zen3": ("x86_64", "AMD", "Zen 3", None, 16, 32, 1),
    "zen4": ("x86_64", "AMD", "Zen 4", None, 8, 8, 1),
    "axion": ("arm64", "Arm", "Neoverse V2", "Axion", 8, 8, 1),
    "grace": ("arm64", "Arm", "Neoverse V2", "Grace", 72, 72, 1),
    "raspberry-pi-5": ("arm64", "Arm", "Cortex-A76", None, 4, 4, 1),
    "orion-o6": ("arm64", "Arm", "Cortex-A720", None, 12, 12, 1),
    "rock-5b": ("arm64", "Arm", "Cortex-A76", None, 8, 8, 1),
    "radxa-x4": ("x86_64", "Intel", "Gracemont", None, 4, 4, 1),
    "core-i7-1360p": ("x86_64", "Intel", "Raptor Lake", None, 12, 16, 1),
    "graviton2": ("arm64", "Arm", "Neoverse N1", "Graviton2", 2, 2, 1),
    "graviton3": ("arm64", "Arm", "Neoverse V1", "Graviton3", 8, 8, 1),
    "graviton3-old-kernel": ("arm64", "Arm", "Neoverse V1", "Graviton3", 8, 8, 1),
    "graviton4": ("arm64", "Arm", "Neoverse V2", "Graviton4", 96, 96, 1),
    "altra": ("arm64", "Arm", "Neoverse N1", "Altra", 64, 64, 1),
    "altra-cpuset": ("arm64", "Arm", "Neoverse N1", "Altra", 64, 64, 1),
    "altra-two-sockets": ("arm64", "Arm", "Neoverse N1", "Altra", 160, 160, 2),
    "raspberry-pi-4": ("arm64", "Arm", "Cortex-A72", None, 4, 4, 1),
    "xeon-amx": ("x86_64", "Intel", "Sapphire Rapids", None, 96, 192, 2),
    "xeon-avx2": ("x86_64", "Intel", "Broadwell", None, 44, 88, 2),
    "xeon-westmere": ("x86_64", "Intel", None, None, 1, 1, 1),
    "cgroup-v1": ("x86_64", "Intel", "Broadwell", None, 44, 88, 2),
    "cgroup-v2-nested": ("arm64", "Arm", "Neoverse V1", "Graviton3", 8, 8, 1),
    "h100": ("x86_64", "Intel", "Sapphire Rapids", None, 104, 208, 2),
    "h100-mig": ("x86_64", "AMD", "Zen 5", None, 2, 2, 1),
    "h200": ("x86_64", "AMD", "Zen 5", None, 2, 2, 1),
    "two-gpus": ("x86_64", "Intel", "Broadwell", None, 44, 88, 2),
    "t4": ("x86_64", "AMD", "Zen 5", None, 2, 2, 1),
    "dgx-spark": ("arm64", "Arm", "Cortex-X925", None, 10, 10, 0),
    "mac-m4-pro": ("arm64", "Apple", "Apple M4", "Apple M4", 12, 12, 0),
    "mac-m1": ("arm64", "Apple", "Apple M1", "Apple M1", 8, 8, 0),
    "mac-m2": ("arm64", "Apple", "Apple M2", "Apple M2", 8, 8, 0),
}

ISA = {
    "skylake": {"avx2", "avx512f", "avx512bw", "avx512vl"},
    "cascade-lake": {"avx512f", "avx512_vnni"},
    "ice-lake": {"avx512f", "avx512_vnni"},
    "zen2": {"avx2", "fma"},
    "zen3": {"avx2", "fma"},
    "zen4": {"avx512f", "avx512_vnni", "avx512_bf16"},
    "axion": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16"},
    "grace": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16"},
    "raspberry-pi-5": {"neon", "fp16", "dotprod", "lse"},
    "orion-o6": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16"},
    "rock-5b": {"neon", "fp16", "dotprod", "lse"},
    "radxa-x4": {"avx2", "fma", "avx_vnni"},
    "core-i7-1360p": {"avx2", "fma", "avx_vnni"},
    "zen5-vm": {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni"},
    "graviton2": {"neon", "fp16", "dotprod", "lse"},
    "graviton3": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16", "sve", "svei8mm", "svebf16"},
    "graviton3-old-kernel": {"neon", "fp16", "fp16fml", "dotprod", "lse", "sve"},
    "graviton4": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16"},
    "altra-two-sockets": {"neon", "fp16", "dotprod", "lse"},
    "raspberry-pi-4": {"neon"},
    "xeon-westmere": {"sse4_2", "popcnt"},
    "mac-m1": {"neon", "fp16", "fp16fml", "dotprod", "lse"},
    "mac-m2": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16"},
    "mac-m4-pro": {"neon", "fp16", "fp16fml", "dotprod", "lse", "i8mm", "bf16", "sme", "sme2"},
}


def test_no_host_without_a_source() -> None:
    for name in NAMES:
        source = (HOSTS / name / "SOURCE.md").read_text()
        assert re.search(r"https://\S+|message \S+@\S+|Recorded by this project|Derived from `", source), name
    assert set(NAMES) == set(SEEN), "each recorded host stands in the table above"


@pytest.mark.parametrize("name", SEEN)
def test_what_the_machine_is(recorded: Recorded, name: str) -> None:
    facts = recorded(name)
    cpu = facts.cpu
    assert SEEN[name] == (
        facts.architecture,
        cpu.vendor,
        cpu.microarchitecture,
        cpu.product,
        len(facts.cores),
        facts.num_logical_cpus,
        len(facts.numa_nodes),
    )


@pytest.mark.parametrize("name", ISA)
def test_instruction_sets(recorded: Recorded, name: str) -> None:
    isa = recorded(name).isa
    assert isa >= ISA[name]
    if recorded(name).architecture == "arm64":
        assert isa == ISA[name]


def test_amx_is_there_where_the_kernel_states_it_and_only_there(recorded: Recorded) -> None:
    assert recorded("xeon-amx").isa >= {"amx_bf16", "amx_int8", "amx_tile", "avx512_fp16"}
    same_core_with_amx_hidden = recorded("h100")
    assert same_core_with_amx_hidden.cpu.microarchitecture == "Sapphire Rapids"
    assert not {name for name in same_core_with_amx_hidden.isa if name.startswith("amx")}
    assert "avx2" in recorded("xeon-avx2").isa
    assert not {name for name in recorded("xeon-avx2").isa if name.startswith("avx512")}


@pytest.mark.parametrize(
    ("name", "bits"), [("graviton3", 256), ("graviton4", 128), ("orion-o6", 128), ("altra", None), ("zen5-vm", None)]
)
def test_sve_vector_length(recorded: Recorded, name: str, bits: int | None) -> None:
    assert recorded(name).sve_bits == bits


@pytest.mark.parametrize(
    ("name", "core"), [("xeon-amx", (0, 96)), ("xeon-avx2", (0, 44)), ("h100", (0, 1)), ("altra", (0,))]
)
def test_smt_siblings(recorded: Recorded, name: str, core: tuple[int, ...]) -> None:
    assert recorded(name).cores[0].cpu_ids == core


@pytest.mark.parametrize(
    ("name", "efficient"),
    [
        ("orion-o6", {1, 2, 3, 4}),
        ("rock-5b", {0, 1, 2, 3}),
        ("core-i7-1360p", set(range(8, 16))),
        ("mac-m2", {4, 5, 6, 7}),
        ("radxa-x4", set()),  # all four are of the small kind: none is the other's efficiency core
        ("raspberry-pi-5", set()),
    ],
)
def test_efficiency_cores(recorded: Recorded, name: str, efficient: set[int]) -> None:
    cores = recorded(name).cores
    assert {cpu for core in cores if core.kind == "efficiency" for cpu in core.cpu_ids} == efficient


def test_cores_stand_on_their_memory_nodes(recorded: Recorded) -> None:
    by_node = {core.cpu_ids: core.numa_node for core in recorded("xeon-avx2").cores}
    assert by_node[(0, 44)] == 0
    assert by_node[(1, 45)] == 1
    two = recorded("altra-two-sockets")
    assert [core.numa_node for core in two.cores] == [0] * 80 + [1] * 80
    assert [core.package for core in two.cores] == [0] * 80 + [1] * 80
    assert two.numa_nodes[1].available_bytes == 250 * 2**30, "the page cache of a node makes way"


def test_caches(recorded: Recorded) -> None:
    caches = [(cache.level, cache.kind, cache.size_bytes, cache.shared_by) for cache in recorded("altra").caches]
    assert caches == [
        (1, "data", 64 * 1024, 1),
        (1, "instruction", 64 * 1024, 1),
        (2, "unified", 2**20, 1),
        (3, "unified", 32 * 2**20, 64),
    ]
    assert [cache.level for cache in recorded("zen5-vm").caches] == [1, 1, 2, 3]


def test_memory_and_pages(recorded: Recorded) -> None:
    facts = recorded("zen5-vm")
    assert facts.memory_bytes == 24_684_092 * 1024
    assert facts.available_bytes == 19_089_628 * 1024
    assert (facts.page_bytes, facts.huge_pages.transparent, facts.huge_pages.page_bytes) == (4096, "madvise", 2 * 2**20)


def test_unlimited_groups_are_no_limits(recorded: Recorded) -> None:
    group = recorded("zen5-vm").cgroup
    assert (group.version, group.quota_cores, group.cpuset, group.memory_limit_bytes) == (1, None, (0, 1), None)


def test_cgroup_v1_with_a_core_and_a_half(recorded: Recorded) -> None:
    group = recorded("cgroup-v1").cgroup
    assert (group.version, group.quota_cores) == (1, 1.5)
    assert group.memory_limit_bytes == 6 * 2**30
    assert group.memory_available_bytes == 4 * 2**30, "3 GiB are used, of which 1 GiB of page cache makes way"


def test_nested_cgroup_v2_takes_the_tightest_level(recorded: Recorded) -> None:
    facts = recorded("cgroup-v2-nested")
    assert (facts.cgroup.version, facts.cgroup.quota_cores) == (2, 0.5)
    assert facts.cgroup.memory_limit_bytes == 3 * 2**30
    assert facts.usable_bytes == 3 * 2**30 - 384 * 2**20


def test_cpuset_of_three(recorded: Recorded) -> None:
    facts = recorded("altra-cpuset")
    assert facts.allowed_cpus == {5, 6, 7}
    assert facts.cgroup.quota_cores is None


def test_mac(recorded: Recorded) -> None:
    facts = recorded("mac-m2")
    assert (facts.os, facts.kernel, facts.cpu.name, facts.mps) == ("macos", "21.6.0", "Apple M2", True)
    assert [core.kind for core in facts.cores] == ["performance"] * 4 + ["efficiency"] * 4
    assert (facts.memory_bytes, facts.page_bytes) == (24 * 2**30, 16384)
    assert [(cache.level, cache.size_bytes, cache.shared_by) for cache in facts.caches] == [
        (1, 128 * 1024, 1),
        (1, 192 * 1024, 1),
        (2, 16 * 2**20, 4),
    ]
    assert facts.cgroup.version == 0
    assert recorded("mac-m1").cpu.name == "Apple M1"
