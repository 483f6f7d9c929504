"""The native library: kernels in plain C for several instruction set levels, one of which it selects at load time.

Without the library torch's products serve. It uses the libgomp.so.1 that torch contains, so torch is loaded first.
Two thread pools would compete for the cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from armature_kernels.errors import KernelError

# Built when the package is installed, and by `make native` in a checkout (csrc/CMakeLists.txt).
LIBRARY_PATH = Path(__file__).parents[1] / ("libarmature.dylib" if platform.system() == "Darwin" else "libarmature.so")
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
    "armature_pack_fp32": (type(None), (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE)),
    "armature_attention_scratch": (ctypes.c_int64, (_POINTER,)),
    "armature_experts_scratch": (ctypes.c_int64, (_POINTER,)),
}


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The loaded library, or the reason why there is none.

    `level` is the selected instruction set level. `operations.has_kernel` reports which operations it supports. A tile
    of quantised rows has at most `tile_rows` rows, in groups of `align` rows, and `block` inputs are contiguous
    (csrc/ops.h). From `wide_rows` rows on, integer weights are multiplied with rows of bf16 (0: never).
    """

    library: ctypes.CDLL | None
    level: str | None
    reason: str
    tile_rows: int = 1
    block: int = 4
    align: int = 1
    wide_rows: int = 0


@cache
def native_library() -> NativeKernels:
    """Load the library once and let it select a level, or the level that `ARMATURE_ISA` names.

    `ARMATURE_NATIVE_LIBRARY` names another file.

    Raises:
        KernelError: If a file or level that these variables name is not available. No other error is raised.
    """
    named, level = os.environ.get("ARMATURE_NATIVE_LIBRARY"), os.environ.get("ARMATURE_ISA")
    path = Path(named) if named else LIBRARY_PATH
    if not path.exists() and not named and not level:
        return NativeKernels(
            None, None, "the native library was not built (no C compiler at install?): torch's own products serve"
        )
    try:
        library = load_library(path)
    except OSError as error:
        if named or level:
            raise KernelError(f"The native library {path} cannot be loaded: {error}.") from error
        return NativeKernels(None, None, f"the native library cannot be loaded ({error}): torch's own products serve")
    return _select_level(library, level)


def _select_level(library: ctypes.CDLL, requested: str | None) -> NativeKernels:
    if requested and library.armature_select(requested.encode()) != 0:
        raise KernelError(
            f"ARMATURE_ISA is {requested}, which this library or this processor does not have. Without it the best level serves: "
            f"{(library.armature_level() or b'none').decode()}."
        )
    name = library.armature_level()
    if name is None:
        return NativeKernels(None, None, "the library has no kernels for this processor: torch's own products serve")
    level, sizes = name.decode(), [int(library.armature_tiles(what)) for what in range(4)]
    return NativeKernels(library, level, f"native kernels for {level}", *sizes)


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library of kernels, and declare its functions.

    Raises:
        OSError: If the file is no library.
    """
    assert torch.__version__, "torch must be loaded first, because it brings libgomp"
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype = None if result is type(None) else result
            function.argtypes = arguments
    return library
