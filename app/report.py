"""Tables of a machine's facts and its serving plan: the output of `armature probe` without `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from app.hardware.decision import count, gib
from app.hardware.device_memory import mac_budget_bytes
from app.hardware.facts import Cache, CudaDevice, Facts, NumaNode, PowerMeter, TorchBuild
from app.hardware.plan import ServingPlan
from app.hardware.trials import rate

_BYTES = ("kv_cache_bytes", "weight_bytes")
_UNKNOWN_AS_ZERO = ("weight_bytes", "max_model_len")  # 0 means unknown without a model


def render_probe(facts: Facts, plan: ServingPlan | None) -> RenderableType:
    """Return two tables, the machine's facts and the plan with its reasons; without a plan, the facts alone."""
    return Group(render_facts(facts), "", render_plan(plan)) if plan else render_facts(facts)


def render_facts(facts: Facts) -> Table:
    """Return the table of facts about this machine."""
    table = Table(title="This machine", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _fact_rows(facts):
        if value:
            table.add_row(name, value)
    return table


def render_plan(plan: ServingPlan) -> Table:
    """Return the table of the plan's decisions with values and reasons."""
    table = Table(title="Serving plan", title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("decision", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=28)
    table.add_column("reason", ratio=1)
    for name, decision in plan.decisions():
        table.add_row(name, value_of(name, decision.value), decision.reason)
    return table


def _fact_rows(facts: Facts) -> list[tuple[str, str]]:
    return [
        ("system", " ".join(part for part in (facts.os, facts.kernel, facts.architecture) if part)),
        ("processor", processor(facts)),
        ("instruction sets", " ".join(sorted(facts.isa)) + (f" (SVE {facts.sve_bits} bits)" if facts.sve_bits else "")),
        ("cores", _cores(facts)),
        ("may run on", _allowed(facts)),
        ("caches", ", ".join(_cache(cache) for cache in facts.caches)),
        ("memory", f"{gib(facts.memory_bytes)}, {gib(facts.available_bytes)} available, pages of {facts.page_bytes // 1024} KiB"),
        ("memory nodes", "; ".join(_node(node) for node in facts.numa_nodes) if len(facts.numa_nodes) > 1 else ""),
        ("huge pages", _huge_pages(facts)),
        ("control group", _cgroup(facts)),
        ("power", _power(facts.power)),
        ("GPUs", "\n".join(gpu(device) for device in facts.cuda) or apple_gpu(facts)),
        ("torch", _torch(facts.torch)),
        ("native kernels", " ".join(facts.native.levels) if facts.native else "not built"),
    ]


def processor(facts: Facts) -> str:
    """Return the processor's name with its vendor, product and microarchitecture."""
    cpu = facts.cpu
    inside = ", ".join(part for part in (cpu.product, cpu.microarchitecture) if part and part not in cpu.name)
    return (cpu.name if cpu.vendor in cpu.name else f"{cpu.vendor} {cpu.name}") + (f" ({inside})" if inside else "")


def _cores(facts: Facts) -> str:
    kinds = Counter(core.kind for core in facts.cores)
    packages = len({core.package for core in facts.cores})
    text = f"{len(facts.cores)} physical, {facts.num_logical_cpus} logical, {count(packages, 'package')}"
    return text + (f" ({kinds['performance']} performance, {kinds['efficiency']} efficiency)" if kinds["efficiency"] else "")


def _allowed(facts: Facts) -> str:
    quota = facts.cgroup.quota_cores
    limit = f", quota of {quota:g} cores" if quota is not None else ""
    return f"CPUs {cpu_ranges(sorted(facts.allowed_cpus))}{limit}"


def _cache(cache: Cache) -> str:
    name = f"L{cache.level}{'' if cache.kind == 'unified' else cache.kind[0]}"
    return f"{name} {_small(cache.size_bytes)}" + (f" shared by {cache.shared_by}" if cache.shared_by > 1 else "")


def _node(node: NumaNode) -> str:
    return f"{node.id}: CPUs {cpu_ranges(list(node.cpu_ids))}, {gib(node.memory_bytes)}"


def _huge_pages(facts: Facts) -> str:
    pages = facts.huge_pages
    explicit = f", {pages.free} of {pages.total} explicit ones of {_small(pages.page_bytes)} free" if pages.total else ""
    return f"transparent: {pages.transparent}{explicit}" if pages.transparent else explicit.lstrip(", ")


def _cgroup(facts: Facts) -> str:
    group = facts.cgroup
    if not group.version:
        return ""
    limits = [f"{group.quota_cores:g} cores"] if group.quota_cores is not None else []
    limits += [f"{gib(group.memory_limit_bytes)} of memory"] if group.memory_limit_bytes is not None else []
    return f"v{group.version}, " + (" and ".join(limits) if limits else "no limit on CPU time or memory")


def _power(meter: PowerMeter) -> str:
    names = ", ".join(counter.name for counter in meter.counters)
    return (
        f"{meter.source}{f' ({names})' if names else ''}"
        if meter.source
        else f"not counted: {meter.reason}"
        if meter.reason
        else ""
    )


def gpu(device: CudaDevice) -> str:
    """Return text such as `0: NVIDIA H200, 140.4 GiB, 139.7 GiB free, capability 9.0, driver 580.65.06`."""
    free = f", {gib(device.free_bytes)} free" if device.free_bytes is not None else ""
    size = (
        f", {gib(device.memory_bytes)}{free}"
        if device.memory_bytes is not None
        else ", the machine's memory"
        if device.capability
        else ""
    )
    capability = f", capability {device.capability[0]}.{device.capability[1]}" if device.capability else ""
    return f"{device.index}: {device.name}{size}{capability}" + (f", driver {device.driver}" if device.driver else "")


def apple_gpu(facts: Facts) -> str:
    """Describe the Apple GPU and its memory budget, or return an empty string."""
    if not facts.mps:
        return ""
    units = "" if "bf16" in facts.isa else ", FP16 but no BF16"
    return f"Apple GPU (MPS), may hold {gib(mac_budget_bytes(facts))} of {gib(facts.memory_bytes)}{units}"


def _torch(build: TorchBuild | None) -> str:
    if build is None:
        return "not installed"
    names = {"oneDNN": build.onednn, "MKL": build.mkl, "Arm Compute Library": build.acl, "KleidiAI": build.kleidiai}
    inside = [name for name, there in names.items() if there]
    return build.version + (f", CUDA {build.cuda}" if build.cuda else "") + (f", with {', '.join(inside)}" if inside else "")


def value_of(name: str, value: Any) -> str:
    """Format a decision's value for people."""
    if value is None or (value == 0 and name in _UNKNOWN_AS_ZERO):
        return "–"
    if name in _BYTES:
        return gib(value)
    if name == "cpu_ids":
        return cpu_ranges(list(value)) or "–"
    if isinstance(value, Mapping):
        return _table(value) or "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _table(value: Mapping[Any, Any]) -> str:
    """Format a table such as `decode 1: 20.4, 8: 120; prefill 512: 900` or `decode 0.81, prefill 0.64`."""
    flat = [f"{key} {number:.2f}" for key, number in value.items() if not isinstance(number, Mapping)]
    deep = [
        f"{key} " + ", ".join(f"{size}: {rate(number)}" for size, number in inner.items())
        for key, inner in value.items()
        if isinstance(inner, Mapping)
    ]
    return ", ".join(flat) or "; ".join(deep)


def _small(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def cpu_ranges(cpus: list[int]) -> str:
    """Format CPU ids as ranges: [0, 1, 2, 8] becomes `0-2,8`."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(str(end) for end in part) for part in parts)
