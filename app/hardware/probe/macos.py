"""Facts about a Mac, read with `sysctl` alone. Source: Apple's sysctlbyname documentation and xnu."""

from __future__ import annotations

from collections.abc import Mapping

from app.hardware.facts import Cache, CacheKind, Core, CoreKind, Cpu, Facts, PowerMeter, ThermalSensors
from app.hardware.probe.accelerators import CommandRunner
from app.hardware.probe.host_files import parse_fields
from app.hardware.thermal_sensors import PMSET

# Some Macs do not know the last two names; sysctl still prints the others.
SYSCTL = [
    "sysctl", "hw", "machdep.cpu.brand_string", "kern.osrelease", "vm.page_free_count", "vm.page_speculative_count",
    "iogpu.wired_limit_mb", "sysctl.proc_translated",
]  # fmt: skip

# hw.cpufamily (xnu osfmk/mach/machine.h, CPUFAMILY_ARM_*) to the chip that contains the cores.
_FAMILIES = {
    0x1B588BB3: "Apple M1",  # FIRESTORM_ICESTORM
    0xDA33D83D: "Apple M2",  # BLIZZARD_AVALANCHE
    0xFA33415E: "Apple M3",  # IBIZA
    0x5F4DEA93: "Apple M3",  # LOBOS, M3 Pro
    0x72015832: "Apple M3",  # PALMA, M3 Max
    0x6F5129AC: "Apple M4",  # DONAN
    0x17D5B93A: "Apple M4",  # BRAVA, M4 Pro and Max
    0x1D5A87E8: "Apple M5",  # HIDRA
    0xF76C5B1A: "Apple M5",  # SOTRA, M5 Pro and Max
}

# Names below hw.optional (developer.apple.com, "Determining instruction set characteristics"). The second name is
# macOS 11's.
_FEATURES = {
    "neon": ("AdvSIMD", "neon"),
    "fp16": ("arm.FEAT_FP16", "neon_fp16"),
    "fp16fml": ("arm.FEAT_FHM", "armv8_2_fhm"),
    "dotprod": ("arm.FEAT_DotProd",),
    "lse": ("arm.FEAT_LSE", "armv8_1_atomics"),
    "i8mm": ("arm.FEAT_I8MM",),
    "bf16": ("arm.FEAT_BF16",),
    "sme": ("arm.FEAT_SME",),
    "sme2": ("arm.FEAT_SME2",),
}
_INTEL_FEATURES = {"sse4_2": "sse4_2", "avx": "avx1_0", "avx2": "avx2_0", "fma": "fma", "avx512f": "avx512f"}
_ARM_CPU_TYPE = 0x0100000C  # CPU_TYPE_ARM64, xnu osfmk/mach/machine.h

# At least this share of a Mac's memory counts as available; the desktop needs the rest.
_AVAILABLE_SHARE = 0.75


def mac_facts(run: CommandRunner) -> Facts | None:
    """Return the facts; None if `sysctl` is missing or reports no `hw` values, because then this is no Mac."""
    values = parse_fields(run(SYSCTL))
    if "hw.memsize" not in values:
        return None
    is_arm = _number(values, "hw.cputype") == _ARM_CPU_TYPE
    cores = _cores(values)
    memory = _number(values, "hw.memsize")
    return Facts(
        os="macos",
        kernel=values.get("kern.osrelease", ""),
        architecture="arm64" if is_arm else "x86_64",
        cpu=_cpu(values, is_arm),
        isa=_isa(values, is_arm),
        cores=cores,
        caches=_caches(values),
        affinity=tuple(cpu for core in cores for cpu in core.cpu_ids),
        memory_bytes=memory,
        available_bytes=_available(values, memory),
        page_bytes=_number(values, "hw.pagesize") or 4096,
        mps=is_arm,  # every Apple silicon Mac has a GPU that torch's MPS supports
        mps_limit_bytes=_number(values, "iogpu.wired_limit_mb") * 2**20 or None,  # 0: macOS decides
        is_translated=_number(values, "sysctl.proc_translated") == 1,
        power=_power(run, is_arm),
        thermal=ThermalSensors(has_pmset=run(PMSET) is not None),
    )


def _power(run: CommandRunner, is_arm: bool) -> PowerMeter:
    if not is_arm:
        return PowerMeter(reason="Power is only measured on Macs with Apple silicon.")
    if (run(["id", "-u"]) or "").strip() != "0":
        return PowerMeter(reason="powermetrics reports the power of a Mac to root alone.")
    return PowerMeter(
        "powermetrics", reason="Power of processor, graphics and neural engine, reported by powermetrics."
    )


def _cpu(values: Mapping[str, str], is_arm: bool) -> Cpu:
    family = _number(values, "hw.cpufamily") & 0xFFFFFFFF  # sysctl prints it as a signed number
    chip = _FAMILIES.get(family)
    name = values.get("machdep.cpu.brand_string", chip or "Mac")
    return Cpu("Apple" if is_arm else "Intel", name, chip, chip)


def _isa(values: Mapping[str, str], is_arm: bool) -> frozenset[str]:
    if not is_arm:
        return frozenset(name for name, stated in _INTEL_FEATURES.items() if _number(values, f"hw.optional.{stated}"))
    return frozenset(
        name
        for name, stated in _FEATURES.items()
        if any(_number(values, f"hw.optional.{candidate}") for candidate in stated)
    )


def _cores(values: Mapping[str, str]) -> tuple[Core, ...]:
    """Return the cores, numbered here because macOS has no CPU IDs; level 0 of `hw.perflevelN` is the fastest."""
    levels = _number(values, "hw.nperflevels")
    counts = [
        (_number(values, f"hw.perflevel{n}.physicalcpu"), _number(values, f"hw.perflevel{n}.logicalcpu"))
        for n in range(levels)
    ]
    if not counts:
        counts = [(_number(values, "hw.physicalcpu"), _number(values, "hw.logicalcpu"))]
    found: list[Core] = []
    first = 0
    for level, (physical, logical) in enumerate(counts):
        kind: CoreKind = "efficiency" if level else "performance"
        siblings = max(1, logical // max(1, physical))
        for _ in range(physical):
            found.append(Core(tuple(range(first, first + siblings)), kind=kind))
            first += siblings
    return tuple(found)


def _caches(values: Mapping[str, str]) -> tuple[Cache, ...]:
    """Return the caches of the performance cores; older systems report one set for all cores."""
    prefix = "hw.perflevel0." if "hw.perflevel0.l2cachesize" in values else "hw."
    wanted: tuple[tuple[int, CacheKind, str], ...] = (
        (1, "data", "l1d"),
        (1, "instruction", "l1i"),
        (2, "unified", "l2"),
    )
    shared = max(1, _number(values, "hw.perflevel0.cpusperl2"))
    sizes = [(level, kind, _number(values, f"{prefix}{name}cachesize")) for level, kind, name in wanted]
    return tuple(Cache(level, kind, size, shared if level == 2 else 1) for level, kind, size in sizes if size)


def _available(values: Mapping[str, str], memory: int) -> int:
    """Return free and speculative pages, at least `_AVAILABLE_SHARE`, as the counters understate them."""
    pages = _number(values, "vm.page_free_count") + _number(values, "vm.page_speculative_count")
    return max(int(memory * _AVAILABLE_SHARE), pages * _number(values, "hw.pagesize"))


def _number(values: Mapping[str, str], name: str) -> int:
    try:
        return int(values.get(name, "0"))
    except ValueError:
        return 0
