"""Identification of x86 processors on Linux: microarchitecture and instruction sets.

The microarchitecture comes from the vendor, family and model of CPUID, the instruction sets from the kernel's
flags. The brand string is only displayed, because a virtual machine can set it to anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.hardware.facts import Cpu

# The kernel's flags (arch/x86/include/asm/cpufeatures.h) that matter for matrix products or for torch's dispatch.
INSTRUCTION_SETS = frozenset(
    "sse4_2 popcnt avx f16c fma avx2 bmi2 avx_vnni avx_vnni_int8 avx_ifma avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi"
    " avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16 amx_fp16 amx_complex".split()
)

_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "HygonGenuine": "Hygon"}

# (family, model), with the names in Linux arch/x86/include/asm/intel-family.h: first servers, then clients, then small cores.
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
    (6, 0x5F): "Goldmont",
    (6, 0x86): "Tremont",
}

# (family, first model, last model, name), from Linux arch/x86/kernel/cpu/amd.c, which sets X86_FEATURE_ZEN1 to ZEN5 by them.
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


def cpu(fields: Mapping[str, str]) -> Cpu:
    """Return the processor described by the first block of /proc/cpuinfo."""
    stated = fields.get("vendor_id", "")
    return Cpu(
        vendor=_VENDORS.get(stated, stated or "unknown"),
        name=fields.get("model name", "x86-64"),
        microarchitecture=microarchitecture(
            stated, _number(fields, "cpu family"), _number(fields, "model"), _number(fields, "stepping")
        ),
    )


def microarchitecture(vendor: str, family: int, model: int, stepping: int) -> str | None:
    """Return the name of the microarchitecture; None if the model is unknown. `vendor` is the CPUID vendor string."""
    if vendor == "AuthenticAMD":
        return next((name for known, first, last, name in _AMD if family == known and first <= model <= last), None)
    if vendor != "GenuineIntel":
        return None
    if (family, model) == (6, 0x55) and stepping >= 5:  # three cores share this model number (intel-family.h, SKYLAKE_X)
        return "Cascade Lake" if stepping <= 7 else "Cooper Lake"
    return _INTEL.get((family, model))


def instruction_sets(fields: Mapping[str, str]) -> frozenset[str]:
    """Return the kernel's flags that are in `INSTRUCTION_SETS`."""
    return frozenset(fields.get("flags", "").split()) & INSTRUCTION_SETS


def _number(fields: Mapping[str, str], name: str) -> int:
    text = fields.get(name, "")
    return int(text) if text.isdigit() else -1
