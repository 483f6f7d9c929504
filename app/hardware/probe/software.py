"""Facts about the installed software before it is loaded: the native kernel library and torch's build options.

They are read from files: importing torch would load its thread pools before the plan has set their sizes.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from app.errors import PlanImpossible
from app.hardware.decision import Decision
from app.hardware.facts import Facts, NativeLibrary, TorchBuild
from app.hardware.probe.host_files import HostFiles

TORCH_KERNELS = "torch"
# Levels that multiply many rows of int8 and int4 weights in BF16: there the products of BF16 are the fastest.
WIDENING_LEVELS = frozenset({"amx"})
_DEFAULT_PATH = (
    Path(__file__).parents[3]
    / "armature_kernels"
    / ("libarmature.dylib" if sys.platform == "darwin" else "libarmature.so")
)
_LEVELS = re.compile(rb"armature levels: ([a-z0-9 ]*);")  # csrc/dispatch.c

# Instruction sets that a level needs, in the names of `Facts.isa`. A level that is missing here runs on any processor
# of its architecture.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma"})
_REQUIRED_ISA = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avxvnni": frozenset({"avx2", "fma", "avx_vnni"}),
    "avx2": frozenset({"avx2", "fma"}),
    "i8mm": frozenset({"dotprod", "i8mm", "bf16"}),
    "dotprod": frozenset({"dotprod"}),
}
# Every wheel contains the header that its build was configured with.
_HEADER = "include/ATen/Config.h"


def find_native_library() -> NativeLibrary | None:
    """Return the levels of the library in the kernels folder, or at `ARMATURE_NATIVE_LIBRARY`; None without."""
    try:
        found = _LEVELS.search(_library_path().read_bytes())
    except OSError:
        return None
    levels = tuple(found[1].decode().split()) if found else ()
    return NativeLibrary(levels=levels, forced=os.environ.get("ARMATURE_ISA") or None)


def native_library_hash() -> str:
    try:
        return hashlib.sha256(_library_path().read_bytes()).hexdigest()
    except OSError:
        return ""


def _library_path() -> Path:
    return Path(os.environ.get("ARMATURE_NATIVE_LIBRARY") or _DEFAULT_PATH)


def available_levels(facts: Facts) -> tuple[str, ...]:
    """Return the levels of the native library that this processor supports, the best first."""
    levels = facts.native.levels if facts.native is not None else ()
    return tuple(level for level in levels if _REQUIRED_ISA.get(level, frozenset()) <= facts.isa)


def decide_native_kernels(facts: Facts) -> Decision[str]:
    """Decide the level of the native kernels, or torch's. Raises `PlanImpossible` for a bad `ARMATURE_ISA`."""
    library = facts.native
    if library is None:
        return Decision(
            TORCH_KERNELS, "The native library was not built (no GCC at installation?): torch's own products serve."
        )
    levels = available_levels(facts)
    if library.forced:
        if library.forced not in levels:
            raise PlanImpossible(
                f"ARMATURE_ISA is {library.forced}, which this library or this processor does not have. "
                f"Here it may be one of: {', '.join(levels) or 'none'}."
            )
        return Decision(library.forced, "ARMATURE_ISA asks for it.")
    if not levels:
        return Decision(
            TORCH_KERNELS, "The native library has no kernels for this processor: torch's own products serve."
        )
    return Decision(levels[0], "The best level of the native library that this processor supports.")


def installed_torch() -> Path | None:
    """Return the folder of the installed torch without importing it; None if there is none."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def read_torch_build(directory: Path) -> TorchBuild | None:
    """Return the build options of the torch in `directory`; None if there is no torch."""
    files = HostFiles(directory)
    source, header = files.text("version.py") or "", files.text(_HEADER) or ""
    version = _assigned(source, "__version__")
    if version is None:
        return None
    return TorchBuild(
        version=version,
        cuda=_assigned(source, "cuda"),
        onednn=_enabled(header, "MKLDNN"),
        acl=_enabled(header, "MKLDNN_ACL"),
        kleidiai=_enabled(header, "KLEIDIAI"),
        mkl=_enabled(header, "MKL"),
    )


def _assigned(source: str, name: str) -> str | None:
    match = re.search(rf"^{name}(?:: [^=]+)? = ['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return match[1] if match else None


def _enabled(header: str, name: str) -> bool | None:
    match = re.search(rf"#define AT_{name}_ENABLED\(\) ([01])", header)
    return match[1] == "1" if match else None
