"""Identification of x86 and Arm processors on Linux: core or microarchitecture, and instruction sets.

On x86, the microarchitecture comes from CPUID and instruction sets from the kernel's flags; a virtual machine can set
the brand string to anything. Arm cores are identified by the MIDR register. One core is sold in several products, so
the product comes from what the firmware reports.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from app.hardware.facts import Cpu
from app.hardware.probe.host_files import DIGITS, HostFiles

# The kernel's flags (arch/x86/include/asm/cpufeatures.h) that matter for matrix products or for torch's dispatch.
INSTRUCTION_SETS = frozenset(
    "sse4_2 popcnt avx f16c fma avx2 bmi2 avx_vnni avx_vnni_int8 avx_ifma avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi"
    " avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16 amx_fp16 amx_complex".split()
)

_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "HygonGenuine": "Hygon"}

# (family, model), with the names in Linux arch/x86/include/asm/intel-family.h: first servers, then clients, then small
# cores.
_INTEL: Mapping[tuple[int, int], str] = {
    (6, 0x2D): "Sandy Bridge",
    (6, 0x3E): "Ivy Bridge",
    (6, 0x3F): "Haswell",
    (6, 0x4F): "Broadwell",
    (6, 0x56): "Broadwell",
    (6, 0x55): "Skylake-SP",  # stepping 5 to 7: Cascade Lake, 10 and 11: Cooper Lake; see `microarchitecture`
    (6, 0x6A): "Ice Lake",
    (6, 0x6C): "Ice Lake",
    (6, 0x8F): "Sapphire Rapids",
    (6, 0xCF): "Emerald Rapids",
    (6, 0xAD): "Granite Rapids",
    (6, 0xAE): "Granite Rapids",
    (19, 0x01): "Diamond Rapids",
    (6, 0x2A): "Sandy Bridge",
    (6, 0x3A): "Ivy Bridge",
    (6, 0x3C): "Haswell",
    (6, 0x45): "Haswell",
    (6, 0x46): "Haswell",
    (6, 0x3D): "Broadwell",
    (6, 0x47): "Broadwell",
    (6, 0x4E): "Skylake",
    (6, 0x5E): "Skylake",
    (6, 0x8E): "Kaby Lake",
    (6, 0x9E): "Kaby Lake",
    (6, 0x7D): "Ice Lake",
    (6, 0x7E): "Ice Lake",
    (6, 0xA7): "Rocket Lake",
    (6, 0x8C): "Tiger Lake",
    (6, 0x8D): "Tiger Lake",
    (6, 0x97): "Alder Lake",
    (6, 0x9A): "Alder Lake",
    (6, 0xB7): "Raptor Lake",
    (6, 0xBA): "Raptor Lake",
    (6, 0xBF): "Raptor Lake",
    (6, 0xD7): "Bartlett Lake",
    (6, 0xAC): "Meteor Lake",
    (6, 0xAA): "Meteor Lake",
    (6, 0xB5): "Arrow Lake",
    (6, 0xC5): "Arrow Lake",
    (6, 0xC6): "Arrow Lake",
    (6, 0xBD): "Lunar Lake",
    (6, 0xBE): "Gracemont",
    (6, 0xAF): "Crestmont",
    (6, 0xB6): "Crestmont",
    (6, 0x5F): "Goldmont",
    (6, 0x86): "Tremont",
}

# (family, first model, last model, name), from Linux arch/x86/kernel/cpu/amd.c, which sets X86_FEATURE_ZEN1 to ZEN5 by
# them.
_AMD: tuple[tuple[int, int, int, str], ...] = (
    (0x17, 0x00, 0x2F, "Zen"),
    (0x17, 0x50, 0x5F, "Zen"),
    (0x17, 0x30, 0x4F, "Zen 2"),
    (0x17, 0x60, 0x7F, "Zen 2"),
    (0x17, 0x90, 0x91, "Zen 2"),
    (0x17, 0xA0, 0xAF, "Zen 2"),
    (0x19, 0x00, 0x0F, "Zen 3"),
    (0x19, 0x20, 0x5F, "Zen 3"),
    (0x19, 0x10, 0x1F, "Zen 4"),
    (0x19, 0x60, 0xAF, "Zen 4"),
    (0x1A, 0x00, 0x2F, "Zen 5"),
    (0x1A, 0x40, 0x4F, "Zen 5"),
    (0x1A, 0x60, 0x7F, "Zen 5"),
)


_WITH_AMX = ("Sapphire Rapids", "Emerald Rapids", "Granite Rapids", "Diamond Rapids")
# Linux arch/arm64/include/asm/cputype.h (ARM_CPU_IMP_*)
_IMPLEMENTERS = {
    0x41: "Arm",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0xC0: "Ampere",
}
# (implementer, part): Linux cputype.h (*_CPU_PART_*) and, for cores missing there, util-linux sys-utils/lscpu-arm.c.
_CORES: Mapping[tuple[int, int], str] = {
    (0x41, 0xD0C): "Neoverse N1",
    (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD8E): "Neoverse N3",
    (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD4F): "Neoverse V2",
    (0x41, 0xD84): "Neoverse V3",
    (0x41, 0xD83): "Neoverse V3AE",
    (0x41, 0xD4A): "Neoverse E1",
    (0x6D, 0xD49): "Neoverse N2",  # Azure Cobalt 100: Microsoft's implementer number on Arm's core
    (0xC0, 0xAC3): "AmpereOne",
    (0xC0, 0xAC4): "AmpereOne",  # Ampere-1A
    (0x48, 0xD01): "TaiShan v110",
    (0x48, 0xD02): "TaiShan v120",
    (0x43, 0x0AF): "ThunderX2",
    (0x46, 0x001): "A64FX",
    (0x4E, 0x010): "Olympus",
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD80): "Cortex-A520",
    (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x61, 0x022): "Apple M1",
    (0x61, 0x023): "Apple M1",
    (0x61, 0x024): "Apple M1",
    (0x61, 0x025): "Apple M1",
    (0x61, 0x028): "Apple M1",
    (0x61, 0x029): "Apple M1",
    (0x61, 0x032): "Apple M2",
    (0x61, 0x033): "Apple M2",
    (0x61, 0x034): "Apple M2",
    (0x61, 0x035): "Apple M2",
    (0x61, 0x038): "Apple M2",
    (0x61, 0x039): "Apple M2",
}
# Names in /proc/cpuinfo (Linux Documentation/arch/arm64/elf_hwcaps.rst) and the names in `Facts.isa`.
_FEATURES = {
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimdfhm": "fp16fml",
    "asimddp": "dotprod",
    "atomics": "lse",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "svei8mm": "svei8mm",
    "svebf16": "svebf16",
    "sme": "sme",
    "sme2": "sme2",
}
# Bits of AT_HWCAP (16) and AT_HWCAP2 (26) in the auxiliary vector: Linux arch/arm64/include/uapi/asm/hwcap.h.
_HWCAPS = {
    16: {1: "neon", 8: "lse", 10: "fp16", 20: "dotprod", 22: "sve", 23: "fp16fml"},
    26: {1: "sve2", 9: "svei8mm", 12: "svebf16", 13: "i8mm", 14: "bf16", 23: "sme", 37: "sme2"},
}
# (vendor, core) to product. The vendor is sys_vendor or the chassis tag in DMI, which cloud-init's ds-identify reads
# too.
_CLOUD_PRODUCTS: Mapping[tuple[str, str], str] = {
    ("Amazon EC2", "Cortex-A72"): "Graviton",  # aws-graviton-getting-started: A1
    ("Amazon EC2", "Neoverse N1"): "Graviton2",
    ("Amazon EC2", "Neoverse V1"): "Graviton3",
    ("Amazon EC2", "Neoverse V2"): "Graviton4",
    ("Amazon EC2", "Neoverse V3"): "Graviton5",
    ("Google", "Neoverse N1"): "Altra",  # Tau T2A
    ("Google", "Neoverse V2"): "Axion",  # C4A
    ("Google", "Neoverse N3"): "Axion",  # N4A
    ("Microsoft Corporation", "Neoverse N1"): "Altra",  # Dpsv5
    ("Microsoft Corporation", "Neoverse N2"): "Cobalt 100",  # Dpsv6
    ("OracleCloud.com", "Neoverse N1"): "Altra",  # A1
    ("Hetzner", "Neoverse N1"): "Altra",  # CAX
    ("Alibaba Cloud", "Neoverse N2"): "Yitian 710",  # g8y
}
# SMCCC SOC_ID (/sys/devices/soc0/soc_id: JEP-106 manufacturer and part) to product.
_SOC_PRODUCTS = {"jep106:036b:0241": "Grace", "jep106:0a16:0001": "Altra"}
# (implementer, part) to product, for implementers that sell one product with that core.
_IMPLEMENTER_PRODUCTS = {
    (0x6D, 0xD49): "Cobalt 100",
    (0xC0, 0xAC3): "AmpereOne",
    (0xC0, 0xAC4): "AmpereOne",
    (0x48, 0xD01): "Kunpeng 920",
}


def x86_cpu(fields: Mapping[str, str]) -> Cpu:
    """Return the processor described by the first block of /proc/cpuinfo."""
    stated = fields.get("vendor_id", "")
    core = microarchitecture(
        stated, _number(fields, "cpu family"), _number(fields, "model"), _number(fields, "stepping")
    )
    if "amx_tile" in fields.get("flags", "").split() and core not in _WITH_AMX:
        core = None  # a hypervisor shows the model of another processor
    return Cpu(
        vendor=_VENDORS.get(stated, stated or "unknown"),
        name=fields.get("model name", "x86-64"),
        microarchitecture=core,
    )


def microarchitecture(vendor: str, family: int, model: int, stepping: int) -> str | None:
    """Return the name of the microarchitecture; None if the model is unknown. `vendor` is the CPUID vendor string."""
    if vendor == "AuthenticAMD":
        return next((name for known, first, last, name in _AMD if family == known and first <= model <= last), None)
    if vendor != "GenuineIntel":
        return None
    if (family, model) == (
        6,
        0x55,
    ) and stepping >= 5:  # three cores share this model number (intel-family.h, SKYLAKE_X)
        return "Cascade Lake" if stepping <= 7 else "Cooper Lake"
    return _INTEL.get((family, model))


def x86_instruction_sets(fields: Mapping[str, str]) -> frozenset[str]:
    return frozenset(fields.get("flags", "").split()) & INSTRUCTION_SETS


def _number(fields: Mapping[str, str], name: str) -> int:
    text = fields.get(name, "")
    return int(text) if re.fullmatch(DIGITS, text) else -1


def arm_cpu(fields: Mapping[str, str], files: HostFiles) -> Cpu:
    """Return the processor described by a performance core's block of /proc/cpuinfo and by the firmware's files."""
    implementer, part = _parse_hexadecimal(fields.get("CPU implementer")), _parse_hexadecimal(fields.get("CPU part"))
    core = _CORES.get((implementer, part))
    return Cpu(
        vendor=_IMPLEMENTERS.get(implementer, f"implementer {implementer:#x}" if implementer >= 0 else "unknown"),
        name=core or (f"Arm part {part:#x}" if part >= 0 else "Arm"),
        microarchitecture=core,
        product=_IMPLEMENTER_PRODUCTS.get((implementer, part)) or _product(core, files),
    )


def _product(core: str | None, files: HostFiles) -> str | None:
    """Return the product with this core, if the firmware names the vendor; no cloud metadata service is queried."""
    for soc in files.names("/sys/devices"):
        if soc.startswith("soc") and (known := _SOC_PRODUCTS.get(files.text(f"/sys/devices/{soc}/soc_id") or "")):
            return known
    for name in ("sys_vendor", "chassis_asset_tag"):
        stated = files.text(f"/sys/class/dmi/id/{name}") or files.text(f"/sys/devices/virtual/dmi/id/{name}")
        if known := _CLOUD_PRODUCTS.get((stated or "", core or "")):
            return known
    return None


def arm_instruction_sets(fields: Mapping[str, str], files: HostFiles) -> frozenset[str]:
    """Return the instruction sets in the Features line, else in the auxiliary vector, right in emulators."""
    stated = fields.get("Features")
    if stated is None:
        return _from_auxiliary_vector(files.read_bytes("/proc/self/auxv"))
    return frozenset(_FEATURES[name] for name in stated.split() if name in _FEATURES)


def _from_auxiliary_vector(octets: bytes) -> frozenset[str]:
    pairs = dict(struct.iter_unpack("<QQ", octets[: len(octets) // 16 * 16]))
    return frozenset(
        name for kind, bits in _HWCAPS.items() for bit, name in bits.items() if pairs.get(kind, 0) >> bit & 1
    )


def sve_bits(files: HostFiles, isa: frozenset[str]) -> int | None:
    """Return the SVE vector length in bits (the default of a new process); None without SVE."""
    length = files.number("/proc/sys/abi/sve_default_vector_length")
    return length * 8 if length is not None and "sve" in isa else None


def _parse_hexadecimal(text: str | None) -> int:
    try:
        return int(text or "", 16)
    except ValueError:
        return -1
