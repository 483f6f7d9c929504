"""The plan for the native library before it is loaded: its level, or torch's products."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import PlanImpossible
from app.hardware.facts import Core, Cpu, Facts, NativeLibrary
from app.hardware.probe import software
from app.hardware.probe.probe import probe
from armature_kernels.native.library import native_library

ALL_X86 = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "portable")
ALL_ARM = ("i8mm", "dotprod", "neon", "portable")
AVX512 = "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni"


def machine(isa: str, levels: tuple[str, ...] | None, forced: str | None = None) -> Facts:
    library = None if levels is None else NativeLibrary(levels, forced)
    return Facts(
        "linux", "any", Cpu("any", "any"), (Core((0,)),), 0, 0, (0,), isa=frozenset(isa.split()), native=library
    )


@pytest.mark.parametrize(
    ("isa", "levels", "level"),
    [
        (f"{AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8", ALL_X86, "amx"),
        (f"{AVX512} avx512_bf16 amx_tile", ALL_X86, "avx512bf16"),
        (f"{AVX512} avx512_bf16", ALL_X86[2:], "avx512"),
        (AVX512, ALL_X86, "avx512"),
        ("avx2 fma avx_vnni", ALL_X86, "avxvnni"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl", ALL_X86, "avx2"),
        ("avx sse4_2", ALL_X86, "portable"),
        ("neon dotprod i8mm bf16 sve", ALL_ARM, "i8mm"),
        ("neon dotprod i8mm", ALL_ARM, "dotprod"),
        ("neon lse", ALL_ARM, "neon"),
        ("neon", ("i8mm",), "torch"),
        ("neon", None, "torch"),
    ],
)
def test_the_best_level_that_is_there_and_runs(isa: str, levels: tuple[str, ...] | None, level: str) -> None:
    decision = software.decide_native_kernels(machine(isa, levels))
    assert decision.value == level
    assert ("torch's own products serve" in decision.reason) == (level == "torch")


def test_a_forced_level_serves_or_is_refused() -> None:
    assert software.decide_native_kernels(machine("avx2 fma avx_vnni", ALL_X86, "avx2")).value == "avx2"
    with pytest.raises(PlanImpossible, match=r"ARMATURE_ISA is avx512.*may be one of: avxvnni, avx2, portable\."):
        software.decide_native_kernels(machine("avx2 fma avx_vnni", ALL_X86, "avx512"))


def test_a_library_says_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF...\0armature levels: avx2 portable;\0...")
    monkeypatch.setenv("ARMATURE_NATIVE_LIBRARY", str(library))
    monkeypatch.setenv("ARMATURE_ISA", "avx2")
    assert software.find_native_library() == NativeLibrary(("avx2", "portable"), "avx2")
    library.write_bytes(b"no library")
    assert software.find_native_library() == NativeLibrary((), "avx2")
    library.unlink()
    assert software.find_native_library() is None


def test_what_is_planned_here_is_what_serves_here() -> None:
    """The plan decides from the kernel's flags, the library asks the processor: they must agree."""
    facts = probe()
    assert (facts.native is None) == (native_library().library is None)
    assert software.decide_native_kernels(facts).value == (native_library().level or software.TORCH_KERNELS)


def test_a_recorded_host_is_not_credited_with_this_machines_library(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor : 0\n")
    assert probe(tmp_path, lambda command: None, affinity=(0,)).native is None
