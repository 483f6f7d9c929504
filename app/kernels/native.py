"""The native library: plain C with kernels for several instruction sets, of which it picks one; without it torch's products serve.

It shares the libgomp.so.1 that torch brings, so torch is loaded first: two pools would fight for the cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from app.errors import PlanImpossible

# Built when the package is installed, and by `make native` in a checkout (csrc/CMakeLists.txt).
BESIDE = Path(__file__).parent / ("libarmature.dylib" if platform.system() == "Darwin" else "libarmature.so")
_SIZE, _POINTER, _INT = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int

_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "armature_level": (ctypes.c_char_p, ()),
    "armature_select": (_INT, (ctypes.c_char_p,)),
    "armature_has": (_INT, (ctypes.c_int64,)),
    "armature_tiles": (ctypes.c_int64, (ctypes.c_int64,)),
    "armature_size": (ctypes.c_int64, (ctypes.c_int64,)),
    "armature_read": (ctypes.c_uint64, (_POINTER, ctypes.c_int64)),
    "armature_run": (ctypes.c_int64, (_POINTER, ctypes.c_int64, ctypes.c_int64)),
    "armature_resize": (type(None), (_POINTER, ctypes.c_int64, _POINTER)),
    "armature_run_lanes": (type(None), (_POINTER,)),
    "armature_pack_int": (type(None), (_POINTER,)),
    "armature_pack_bf16": (type(None), (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE)),
    "armature_attention_scratch": (ctypes.c_int64, (_POINTER,)),
}


@dataclass(frozen=True, slots=True)
class Native:
    """What became of the library: `level` is the instruction set that serves; what it can do, `operations.has` says.

    A tile of quantised rows has at most `tile_rows` rows, of which `align` go together, and `block` inputs lie together (csrc/ops.h).
    """

    library: ctypes.CDLL | None
    level: str | None
    reason: str
    tile_rows: int = 1
    block: int = 4
    align: int = 1


@cache
def native() -> Native:
    """Finds and loads the library and lets it choose a level, or takes the one that `ARMATURE_ISA` names.

    `ARMATURE_NATIVE_LIBRARY` names another file. Raises `PlanImpossible` where what is named cannot be had, and nothing else.
    """
    named, wanted = os.environ.get("ARMATURE_NATIVE_LIBRARY"), os.environ.get("ARMATURE_ISA")
    path = Path(named) if named else BESIDE
    if not path.exists() and not named and not wanted:
        return Native(None, None, "the native library was not built (no C compiler at install?): torch's own products serve")
    try:
        library = _load(path)
    except OSError as error:
        if named or wanted:
            raise PlanImpossible(f"The native library {path} cannot be loaded: {error}.") from error
        return Native(None, None, f"the native library cannot be loaded ({error}): torch's own products serve")
    return _chosen(library, wanted)


def _chosen(library: ctypes.CDLL, wanted: str | None) -> Native:
    if wanted and library.armature_select(wanted.encode()) != 0:
        raise PlanImpossible(
            f"ARMATURE_ISA is {wanted}, which this library or this processor does not have. Without it the best level serves: "
            f"{(library.armature_level() or b'none').decode()}."
        )
    name = library.armature_level()
    if name is None:
        return Native(None, None, "the library has no kernels for this processor: torch's own products serve")
    level, sizes = name.decode(), [int(library.armature_tiles(what)) for what in range(3)]
    return Native(library, level, f"native kernels for {level}", *sizes)


def _load(path: Path) -> ctypes.CDLL:
    assert torch.__version__, "torch is loaded, and its libgomp with it"
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype = None if result is type(None) else result
            function.argtypes = arguments
    return library
