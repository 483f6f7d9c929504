"""Topology and memory of a Linux machine from sysfs and /proc. Without sysfs, each processor counts as a core."""

from __future__ import annotations

import os
import re

from app.hardware.facts import Cache, CacheKind, Core, CoreKind, HugePages, NumaNode
from app.hardware.probe.host_files import HostFiles, parse_cpu_list, parse_fields, parse_size

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_CACHE_KINDS: dict[str, CacheKind] = {"Data": "data", "Instruction": "instruction", "Unified": "unified"}

# Performance monitors of Intel's efficiency cores, each with the list of its CPUs: Linux arch/x86/events/intel/core.c
# (intel_hybrid_pmu_type_map). The second kind is a third kind of core, such as in Arrow Lake-H.
_INTEL_SMALL = ("cpu_atom", "cpu_lowpower")

_MAX_SIBLINGS = 8  # threads of a core; no processor has more

# A core below this share of the largest cpu_capacity (Linux Documentation/scheduler/sched-capacity.rst) is an
# efficiency core. Cores of one kind can differ by a few percent, if the firmware lists their best clocks.
_EFFICIENCY_SHARE = 0.8
_DEFAULT_PAGE_BYTES = 4096
_STRICT_OVERCOMMIT = 2  # Linux Documentation/mm/overcommit-accounting.rst


def online_cpus(files: HostFiles) -> tuple[int, ...]:
    listed_online = parse_cpu_list(files.text(f"{_CPUS}/online"))
    if listed_online:
        return listed_online
    listed = re.findall(r"^processor\s*:\s*(\d{1,6})$", files.text("/proc/cpuinfo") or "", re.MULTILINE)
    return tuple(int(cpu) for cpu in listed) or (0,)


def physical_cores(files: HostFiles, nodes: tuple[NumaNode, ...]) -> tuple[Core, ...]:
    """Return the physical cores, ordered by their first logical CPU."""
    online = online_cpus(files)
    node_of = {cpu: node.id for node in nodes for cpu in node.cpu_ids}
    efficient = _efficiency_cpus(files, online)
    found: dict[tuple[int, ...], Core] = {}
    for cpu in online:
        siblings = _siblings(files, cpu, online)
        package = files.number(f"{_CPUS}/cpu{cpu}/topology/physical_package_id") or 0
        kind: CoreKind = "efficiency" if cpu in efficient else "performance"
        found.setdefault(siblings, Core(siblings, max(package, 0), node_of.get(cpu, 0), kind))
    return tuple(sorted(found.values(), key=lambda core: core.cpu_ids))


def _siblings(files: HostFiles, cpu: int, online: tuple[int, ...]) -> tuple[int, ...]:
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the name before Linux 5.3
        stated = parse_cpu_list(files.text(f"{_CPUS}/cpu{cpu}/topology/{name}"))
        if cpu in stated and len(stated) <= _MAX_SIBLINGS:
            return tuple(sibling for sibling in stated if sibling in online)
    return (cpu,)


def _efficiency_cpus(files: HostFiles, online: tuple[int, ...]) -> frozenset[int]:
    """Return the efficiency CPUs: Intel's hybrids list them in files; Arm states each CPU's capacity."""
    small = [cpu for kind in _INTEL_SMALL for cpu in parse_cpu_list(files.text(f"/sys/devices/{kind}/cpus"))]
    if small:
        return frozenset(small)
    capacities = {cpu: files.number(f"{_CPUS}/cpu{cpu}/cpu_capacity") or 0 for cpu in online}
    largest = max(capacities.values())
    return frozenset(cpu for cpu, capacity in capacities.items() if 0 < capacity < _EFFICIENCY_SHARE * largest)


def numa_nodes(files: HostFiles) -> tuple[NumaNode, ...]:
    ids = sorted(int(match[1]) for name in files.names(_NODES) if (match := re.fullmatch(r"node(\d{1,6})", name)))
    return tuple(_node(files, node) for node in ids)


def _node(files: HostFiles, node: int) -> NumaNode:
    text = files.text(f"{_NODES}/node{node}/meminfo") or ""
    fields = parse_fields(text.replace(f"Node {node} ", ""))
    sizes = {name: parse_size(value) or 0 for name, value in fields.items()}
    droppable = sizes.get("Active(file)", 0) + sizes.get("Inactive(file)", 0)  # the page cache is freed on demand
    return NumaNode(
        id=node,
        cpu_ids=parse_cpu_list(files.text(f"{_NODES}/node{node}/cpulist")),
        memory_bytes=sizes.get("MemTotal", 0),
        available_bytes=sizes["MemFree"] + droppable if "MemFree" in sizes else None,
    )


def cpu_caches(files: HostFiles) -> tuple[Cache, ...]:
    directory = f"{_CPUS}/cpu{online_cpus(files)[0]}/cache"
    found = [_cache(files, f"{directory}/{name}") for name in files.names(directory) if name.startswith("index")]
    return tuple(cache for cache in found if cache is not None)


def _cache(files: HostFiles, directory: str) -> Cache | None:
    level, size = files.number(f"{directory}/level"), parse_size(files.text(f"{directory}/size"))
    kind = _CACHE_KINDS.get(files.text(f"{directory}/type") or "")
    if level is None or size is None or kind is None:
        return None
    return Cache(level, kind, size, max(1, len(parse_cpu_list(files.text(f"{directory}/shared_cpu_list")))))


def meminfo_bytes(files: HostFiles) -> dict[str, int]:
    return {
        name: size
        for name, value in parse_fields(files.text("/proc/meminfo")).items()
        if (size := parse_size(value)) is not None
    }


def physical_bytes() -> int:
    """Return the memory of this machine as the C library knows it, for a /proc that is masked; 0 if it does not."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def meminfo_available_bytes(meminfo: dict[str, int]) -> int:
    """Return the bytes that can be allocated without swapping: the kernel's estimate if it has one (Linux 3.14)."""
    return meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0))


def commit_left_bytes(files: HostFiles, meminfo: dict[str, int]) -> int | None:
    """Return the bytes that can still be reserved under strict overcommit (mode 2); None in other modes."""
    if files.number("/proc/sys/vm/overcommit_memory") != _STRICT_OVERCOMMIT or "CommitLimit" not in meminfo:
        return None
    return max(0, meminfo["CommitLimit"] - meminfo.get("Committed_AS", 0))


def page_bytes(files: HostFiles) -> int:
    """Return the page size, which is 4, 16 or 64 KiB on Arm; a recorded host states it in /proc/self/smaps."""
    if files.is_this_machine:
        return os.sysconf("SC_PAGE_SIZE")
    match = re.search(r"^KernelPageSize:\s*(\d+ kB)$", files.text("/proc/self/smaps") or "", re.MULTILINE)
    return (parse_size(match[1]) if match else None) or _DEFAULT_PAGE_BYTES


def huge_pages(files: HostFiles, meminfo: dict[str, int]) -> HugePages:
    """Return the huge pages; `always [madvise] never` marks the transparent mode (transhuge.rst)."""
    mode = re.search(r"\[(\w+)\]", files.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return HugePages(
        transparent=mode[1] if mode else None,
        page_bytes=meminfo.get("Hugepagesize", 0),
        total=meminfo.get("HugePages_Total", 0),
        free=meminfo.get("HugePages_Free", 0),
    )
