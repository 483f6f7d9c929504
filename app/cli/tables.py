"""Output of `armature probe` without `--json`: the machine's facts, the plan, and one model's choices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from app.hardware.decision import Measurements, TrialTimes, format_bytes, format_count
from app.hardware.facts import (
    Cache,
    CudaDevice,
    Facts,
    Needs,
    NumaNode,
    PowerMeter,
    ThermalSensors,
    TorchBuild,
    to_json_value,
)
from app.hardware.plan.memory_budget import mac_gpu_bytes
from app.hardware.plan.plan import DECLARED, ServingPlan
from app.hardware.plan.precision import INT4_PRECISIONS
from app.hardware.plan.speed import format_rate
from app.server.model_source import open_or_fetch_model
from app.server.prepare import Prepared, with_kept_calibration
from app.settings import Settings

_MAX_COLUMNS = 6  # per phase in the table of speeds: the number that fits into 120 columns with the names
_MAX_TRIALS = 6


def render_probe(facts: Facts, plan: ServingPlan | None) -> RenderableType:
    """Return two tables, the machine's facts and the plan with its reasons; without a plan, the facts alone."""
    return Group(render_facts(facts), "", render_plan(plan)) if plan else render_facts(facts)


def render_facts(facts: Facts) -> Table:
    table = _plain("This machine")
    for name, value in _fact_rows(facts):
        if value:
            table.add_row(name, value)
    return table


def render_plan(plan: ServingPlan) -> Table:
    table = Table(title="Serving plan", title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("decision", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=28)
    table.add_column("reason", ratio=1)
    for name, decision in plan.decisions.items():
        table.add_row(name, format_decision(name, decision.value), decision.reason)
    return table


def _fact_rows(facts: Facts) -> list[tuple[str, str]]:
    return [
        ("system", " ".join(part for part in (facts.os, facts.kernel, facts.architecture) if part)),
        ("processor", describe_processor(facts)),
        ("instruction sets", " ".join(sorted(facts.isa)) + (f" (SVE {facts.sve_bits} bits)" if facts.sve_bits else "")),
        ("cores", _cores(facts)),
        ("may run on", _allowed(facts)),
        ("caches", ", ".join(_cache(cache) for cache in facts.caches)),
        (
            "memory",
            f"{format_bytes(facts.memory_bytes)}, {format_bytes(facts.available_bytes)} available, pages of {facts.page_bytes // 1024} KiB",
        ),
        ("memory nodes", "; ".join(_node(node) for node in facts.numa_nodes) if len(facts.numa_nodes) > 1 else ""),
        ("huge pages", _huge_pages(facts)),
        ("control group", _cgroup(facts)),
        ("power", _power(facts.power)),
        ("heat", _thermal(facts.thermal)),
        ("GPUs", "\n".join(describe_gpu(device) for device in facts.cuda) or describe_apple_gpu(facts)),
        ("torch", _torch(facts.torch)),
        ("native kernels", " ".join(facts.native.levels) if facts.native else "not built"),
    ]


def describe_processor(facts: Facts) -> str:
    cpu = facts.cpu
    inside = ", ".join(part for part in (cpu.product, cpu.microarchitecture) if part and part not in cpu.name)
    return (cpu.name if cpu.vendor in cpu.name else f"{cpu.vendor} {cpu.name}") + (f" ({inside})" if inside else "")


def _cores(facts: Facts) -> str:
    kinds = Counter(core.kind for core in facts.cores)
    packages = len({core.package for core in facts.cores})
    text = f"{len(facts.cores)} physical, {facts.num_logical_cpus} logical, {format_count(packages, 'package')}"
    return text + (
        f" ({kinds['performance']} performance, {kinds['efficiency']} efficiency)" if kinds["efficiency"] else ""
    )


def _allowed(facts: Facts) -> str:
    quota = facts.cgroup.quota_cores
    limit = f", quota of {quota:g} cores" if quota is not None else ""
    return f"CPUs {format_cpu_ranges(sorted(facts.allowed_cpus))}{limit}"


def _cache(cache: Cache) -> str:
    name = f"L{cache.level}{'' if cache.kind == 'unified' else cache.kind[0]}"
    return f"{name} {_format_small_size(cache.size_bytes)}" + (
        f" shared by {cache.shared_by}" if cache.shared_by > 1 else ""
    )


def _node(node: NumaNode) -> str:
    return f"{node.id}: CPUs {format_cpu_ranges(list(node.cpu_ids))}, {format_bytes(node.memory_bytes)}"


def _huge_pages(facts: Facts) -> str:
    pages = facts.huge_pages
    explicit = (
        f", {pages.free} of {pages.total} explicit ones of {_format_small_size(pages.page_bytes)} free"
        if pages.total
        else ""
    )
    return f"transparent: {pages.transparent}{explicit}" if pages.transparent else explicit.lstrip(", ")


def _cgroup(facts: Facts) -> str:
    group = facts.cgroup
    if not group.version:
        return ""
    limits = [f"{group.quota_cores:g} cores"] if group.quota_cores is not None else []
    limits += [f"{format_bytes(group.memory_limit_bytes)} of memory"] if group.memory_limit_bytes is not None else []
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


def _thermal(sensors: ThermalSensors) -> str:
    if not sensors.has_sources:
        return "neither frequency nor temperature can be read here; virtual machines show none"
    limit = f" of at most {sensors.max_hertz / 1e9:g} GHz" if sensors.max_hertz is not None else ""
    throttling = sensors.throttle_files or sensors.cooling_files or sensors.has_pmset
    parts = (
        f"frequency{limit} ({sensors.frequency_source})" if sensors.frequency_source else "",
        f"temperature ({', '.join(sensor.name for sensor in sensors.temperatures)})" if sensors.temperatures else "",
        "throttling by heat" if throttling else "",
    )
    return ", ".join(part for part in parts if part)


def describe_gpu(device: CudaDevice) -> str:
    """Return text such as `0: NVIDIA H200, 140.4 GiB, 139.7 GiB free, capability 9.0, driver 580.65.06`."""
    free = f", {format_bytes(device.free_bytes)} free" if device.free_bytes is not None else ""
    size = (
        f", {format_bytes(device.memory_bytes)}{free}"
        if device.memory_bytes is not None
        else ", the machine's memory"
        if device.capability
        else ""
    )
    capability = f", capability {device.capability[0]}.{device.capability[1]}" if device.capability else ""
    return f"{device.index}: {device.name}{size}{capability}" + (f", driver {device.driver}" if device.driver else "")


def describe_apple_gpu(facts: Facts) -> str:
    """Describe the Apple GPU and its memory budget, or return an empty string."""
    if not facts.mps:
        return ""
    units = "" if "bf16" in facts.isa else ", FP16 but no BF16"
    return (
        f"Apple GPU (MPS), may hold {format_bytes(mac_gpu_bytes(facts))} of {format_bytes(facts.memory_bytes)}{units}"
    )


def _torch(build: TorchBuild | None) -> str:
    if build is None:
        return "not installed"
    names = {"oneDNN": build.onednn, "MKL": build.mkl, "Arm Compute Library": build.acl, "KleidiAI": build.kleidiai}
    inside = [name for name, there in names.items() if there]
    return (
        build.version
        + (f", CUDA {build.cuda}" if build.cuda else "")
        + (f", with {', '.join(inside)}" if inside else "")
    )


def format_decision(name: str, value: Any) -> str:
    declared = DECLARED[name]
    if value is None or (value == 0 and declared.zero_is_unknown):
        return "–"
    if declared.unit == "bytes":
        return format_bytes(value)
    if name in ("cpu_ids", "service_cpu_ids"):
        return format_cpu_ranges(list(value)) or "–"
    if name == "keep_layers":
        return ", ".join(f"{pattern}={precision}" for pattern, precision in value) or "–"
    if isinstance(value, Mapping):
        return _table(value) or "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _table(value: Mapping[Any, Any]) -> str:
    """Format a table such as `decode 1: 20.4, 8: 120; prefill 512: 900` or `decode 0.81, prefill 0.64`."""
    flat = [f"{key} {number:.2f}" for key, number in value.items() if not isinstance(number, Mapping)]
    deep = [
        f"{key} " + ", ".join(f"{size}: {format_rate(number)}" for size, number in inner.items())
        for key, inner in value.items()
        if isinstance(inner, Mapping)
    ]
    return ", ".join(flat) or "; ".join(deep)


def _format_small_size(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def format_cpu_ranges(cpus: list[int]) -> str:
    """Format CPU ids as ranges: [0, 1, 2, 8] becomes `0-2,8`."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(str(end) for end in part) for part in parts)


@dataclass(frozen=True, slots=True)
class StepKindColumns:
    """A kind of step: the heading of its first column, that of the others, and its table of step times."""

    first: str
    other_heading: str
    read: Callable[[TrialTimes], Mapping[int, float]]

    def columns(self, shown: Sequence[TrialTimes]) -> Iterator[tuple[str, int]]:
        for index, size in enumerate(_shown_sizes([self.read(trial) for trial in shown])):
            yield (self.other_heading if index else self.first).format(size), size


STEP_KINDS = (
    StepKindColumns("decode ×{}", "×{}", lambda trial: trial.decode_seconds),
    StepKindColumns("prompt of {}", "{}", lambda trial: trial.prefill_seconds),
    StepKindColumns("texts of {}", "{}", lambda trial: trial.encode_seconds),
)
_PROGRAM_STEPS = StepKindColumns(
    "steps of {}", "{}", lambda trial: trial.encode_seconds
)  # steps of an exported program


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """A plan for a model, and everything it was made from. `origin`: when it was measured, or how it can be."""

    name: str
    facts: Facts
    needs: Needs
    plan: ServingPlan
    measurements: Measurements | None
    origin: str

    def to_json(self) -> dict[str, Any]:
        parts = {"facts": self.facts, "needs": self.needs, "measurements": self.measurements}
        return {**{name: to_json_value(part) for name, part in parts.items()}, "plan": self.plan.to_json()}


def explain_plan(settings: Settings, facts: Facts) -> PlanExplanation:
    """Return the plan that a start would make, with cached measurements. Raises `StartupError`."""
    checkpoint = open_or_fetch_model(settings)
    found = with_kept_calibration(facts, settings, checkpoint)
    measurements = None if found.calibration is None else found.calibration.measurements
    return PlanExplanation(checkpoint.name, facts, checkpoint.needs(), found.plan, measurements, _origin(found))


def _origin(found: Prepared) -> str:
    if found.calibration is not None:
        age, seconds = time.time() - found.calibration.measured_at, found.calibration.measurements.seconds
        return f"{_age(age)}, in {seconds:.1f} s, with this model's shapes"
    if found.is_final:
        return f"no. {found.plan.decisions['calibrate'].reason}"
    return f"not yet: a start measures in a few seconds; to measure now: armature calibrate --model {found.checkpoint.location}"


def _age(seconds: float) -> str:
    for size, one in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{format_count(int(seconds // size), one)} ago"
    return "just now"


def render_explanation(explained: PlanExplanation) -> RenderableType:
    parts: list[RenderableType] = [_head(explained)]
    believed = explained.measurements if explained.measurements and not explained.measurements.fallback else None
    shown = [] if believed is None else _shown_trials(believed, explained.plan)
    if shown:
        parts += ["", _speeds(shown, explained)]
    return Group(*parts, "", _decision_table(explained), *_performance_table(explained.plan))


def _head(explained: PlanExplanation) -> Table:
    facts, needs = explained.facts, explained.needs
    limits = f"; the quota is {facts.cgroup.quota_cores:g} cores" if facts.cgroup.quota_cores is not None else ""
    table = _plain(f"{explained.name} on this machine")
    stored = needs.stored_quantization or needs.stored_dtype
    table.add_row(
        "model",
        f"{needs.architecture}, {needs.num_parameters / 1e6:,.0f}M parameters, {format_bytes(needs.weight_bytes)} of {stored}"
        + ("" if needs.kind == "program" else f", made for {needs.max_model_len:,} tokens"),
    )
    table.add_row("processor", f"{describe_processor(facts)}, {format_count(len(facts.cores), 'core')}{limits}")
    table.add_row("memory", f"{format_bytes(facts.usable_bytes)} available of {format_bytes(facts.memory_limit_bytes)}")
    device = _device(explained)
    if device:
        table.add_row("device", device)
    fallback = explained.measurements.fallback if explained.measurements else ""
    table.add_row("measured", f"{explained.origin}; not used, since {fallback}" if fallback else explained.origin)
    if explained.plan.speed.speed_source == "noisy":
        table.add_row("noisy", explained.plan.decisions["speed_source"].reason)
    return table


def _device(explained: PlanExplanation) -> str:
    facts, plan = explained.facts, explained.plan
    if plan.placement.device == "mps":
        return describe_apple_gpu(facts)
    chosen = plan.gpu(facts)
    return "" if chosen is None else describe_gpu(chosen)


def _speeds(shown: list[TrialTimes], explained: PlanExplanation) -> Table:
    """Return the table of tokens (or rows) per second of each trial, with almost no context; the choice is marked."""
    phases, unit = ((_PROGRAM_STEPS,), "rows") if explained.needs.kind == "program" else (STEP_KINDS, "tokens")
    columns = [(phase, *column) for phase in phases for column in phase.columns(shown)]
    table = Table(title=f"Measured {unit}/s", title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in shown:
        table.add_row(
            _trial_label(trial, explained.plan), *(_speed(phase.read(trial), size) for phase, _, size in columns)
        )
    return table


def _shown_trials(measurements: Measurements, plan: ServingPlan) -> list[TrialTimes]:
    timed = [
        trial
        for trial in measurements.trials
        if (trial.decode_seconds and trial.prefill_seconds) or trial.encode_seconds
    ]
    known = sorted(timed, key=lambda trial: -sum(len(phase.read(trial)) for phase in STEP_KINDS))
    return sorted(known, key=lambda trial: not _is_chosen(trial, plan))[:_MAX_TRIALS]


def _shown_sizes(tables: list[Mapping[int, float]]) -> list[int]:
    """Return at most `_MAX_COLUMNS` sizes: those that all trials share, then the largest."""
    sizes = sorted({size for table in tables for size in table})
    shared = [size for size in sizes if all(size in table for table in tables)]
    rest = [size for size in reversed(sizes) if size not in shared]
    return sorted((shared + rest)[:_MAX_COLUMNS])


def _speed(table: Mapping[int, float], size: int) -> str:
    return format_rate(size / table[size]) if table.get(size, 0) > 0 else "–"


def _is_chosen(trial: TrialTimes, plan: ServingPlan) -> bool:
    wanted = (plan.weights.precision, plan.cpu.threads, plan.weights.int8_copy)
    return (trial.precision, trial.threads, trial.int8_copy) == wanted


def _trial_label(trial: TrialTimes, plan: ServingPlan) -> str:
    copy = " + int8" if trial.int8_copy else ""
    return f"{'▸' if _is_chosen(trial, plan) else ' '} {trial.precision}{copy}, {format_count(trial.threads, 'thread')}"


def _decision_table(explained: PlanExplanation) -> Table:
    plan, needs = explained.plan, explained.needs
    table = Table(title="Chosen", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for name, decision in plan.decisions.items():
        shown = needs.kind in DECLARED[name].show_for
        shown = shown and (name != "device" or bool(explained.facts.cuda) or explained.facts.mps)
        shown = shown and (name != "cuda_device" or decision.value is not None)
        shown = shown and (
            name not in ("keep_layers", "engine_process", "state_bytes", "rank_devices") or bool(decision.value)
        )
        shown = shown and (name not in ("api_processes", "data_parallel", "tensor_parallel") or decision.value != 1)
        shown = shown and (name != "engine" or decision.value != "native")
        if shown and (name != "int8_copy" or plan.weights.precision in INT4_PRECISIONS):
            table.add_row(
                name, "auto" if decision.value is None else format_decision(name, decision.value), decision.reason
            )
    return table


def _performance_table(plan: ServingPlan) -> Iterator[RenderableType]:
    if not plan.speed.capacity_tokens_per_second:
        return
    table = _plain("Expected performance")
    table.add_row("capacity", plan.decisions["capacity_tokens_per_second"].reason)
    table.add_row("ceilings", plan.decisions["roofline_ratio"].reason)
    yield ""
    yield table


def _plain(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table
