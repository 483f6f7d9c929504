"""Facts about the native kernel library before it is loaded, and the choice of its instruction set level.

The library file lists the levels that were compiled into it. `kernels/native.py` loads the library after torch;
the library then checks the processor again.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from app.errors import PlanImpossible
from app.hardware.decision import Decision
from app.hardware.facts import Facts, NativeLibrary

TWINS = "torch"
_BESIDE = Path(__file__).parents[1] / "kernels" / ("libarmature.dylib" if sys.platform == "darwin" else "libarmature.so")
_LEVELS = re.compile(rb"armature levels: ([a-z0-9 ]*);")  # csrc/dispatch.c

# Instruction sets that a level needs, in the names of `Facts.isa`. A level that is missing here runs on any processor of its architecture.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma"})
_WANTS = {
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avxvnni": frozenset({"avx2", "fma", "avx_vnni"}),
    "avx2": frozenset({"avx2", "fma"}),
    "i8mm": frozenset({"dotprod", "i8mm", "bf16"}),
    "dotprod": frozenset({"dotprod"}),
}


def look() -> NativeLibrary | None:
    """Return the library's levels; None if there is no library.

    The library is in the kernels folder, or at the path in `ARMATURE_NATIVE_LIBRARY`.
    """
    try:
        found = _LEVELS.search(_path().read_bytes())
    except OSError:
        return None
    levels = tuple(found[1].decode().split()) if found else ()
    return NativeLibrary(levels=levels, forced=os.environ.get("ARMATURE_ISA") or None)


def content() -> str:
    """Return the SHA-256 of the library's bytes; empty if there is no library."""
    try:
        return hashlib.sha256(_path().read_bytes()).hexdigest()
    except OSError:
        return ""


def _path() -> Path:
    return Path(os.environ.get("ARMATURE_NATIVE_LIBRARY") or _BESIDE)


def kernels(facts: Facts) -> Decision[str]:
    """Decide the level of the native kernels, or torch's products without any.

    Raises:
        PlanImpossible: `ARMATURE_ISA` names a level that cannot run here.
    """
    library = facts.native
    if library is None:
        return Decision(TWINS, "The native library was not built (no GCC at installation?): torch's own products serve.")
    levels = [level for level in library.levels if _WANTS.get(level, frozenset()) <= facts.isa]
    if library.forced:
        if library.forced not in levels:
            raise PlanImpossible(
                f"ARMATURE_ISA is {library.forced}, which this library or this processor does not have. "
                f"Here it may be one of: {', '.join(levels) or 'none'}."
            )
        return Decision(library.forced, "ARMATURE_ISA asks for it.")
    if not levels:
        return Decision(TWINS, "The native library has no kernels for this processor: torch's own products serve.")
    return Decision(levels[0], "The best level of the native library that this processor supports.")
