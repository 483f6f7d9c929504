"""The native library: plain C with kernels for several instruction sets, of which it picks one; without it torch's products serve.

It shares the libgomp.so.1 that torch brings, so torch is loaded first: two pools would fight for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from app.errors import PlanImpossible

SOURCES = Path(__file__).parent / "csrc"
# No -march: only a level's own file is compiled for its instructions. No -ffast-math: NaN must stay NaN.
FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-fvisibility=hidden")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mavx2")
LEVELS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avxvnni": ("-mavx2", "-mfma", "-mavxvnni"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
_SIZE, _POINTER, _INT, _FLOAT = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_float

_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "armature_level": (ctypes.c_char_p, ()),
    "armature_select": (_INT, (ctypes.c_char_p,)),
    "armature_has": (_INT, (ctypes.c_int64,)),
    "armature_tiles": (ctypes.c_int64, (ctypes.c_int64,)),
    "armature_run": (ctypes.c_int64, (_POINTER, ctypes.c_int64, ctypes.c_int64)),
    "armature_pack_int": (type(None), (_POINTER,)),
    "armature_has_bf16": (_INT, ()),
    "armature_pack_bf16": (type(None), (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE)),
    "armature_rows_bf16": (type(None), (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE)),
    "armature_linear_bf16": (type(None), (_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _INT, _SIZE, _SIZE, _POINTER)),
    "armature_attention_scratch": (ctypes.c_int64, (_POINTER,)),
    "armature_attention_bf16": (_INT, (_POINTER,)),
    "armature_rms_norm_bf16": (type(None), (_POINTER, _SIZE, _POINTER, _POINTER, _FLOAT, _POINTER, _SIZE, _SIZE)),
    "armature_gate_bf16": (type(None), (_POINTER, _POINTER, _SIZE, _SIZE, _INT)),
    "armature_turn_bf16": (type(None), (_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE)),
}


@dataclass(frozen=True, slots=True)
class Native:
    """What became of the library: `level` is the instruction set that serves, `bf16` the library where it has bf16 products as well.

    A tile of quantised rows has at most `tile_rows` rows, of which `align` go together, and `block` inputs lie together (csrc/ops.h).
    """

    library: ctypes.CDLL | None
    bf16: ctypes.CDLL | None
    level: str | None
    reason: str
    tile_rows: int = 1
    block: int = 4
    align: int = 1


def cache_folder() -> Path:
    """Where compiled code is kept: `ARMATURE_CACHE_DIR`, else the user's cache."""
    chosen = os.environ.get("ARMATURE_CACHE_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "armature"


@cache
def native() -> Native:
    """Finds and loads the library and lets it choose a level, or takes the one that `ARMATURE_ISA` names.

    Raises `PlanImpossible` where that one cannot run here, and nothing else.
    """
    given = os.environ.get("ARMATURE_NATIVE_LIBRARY")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if given is None and compiler is None:
        return Native(None, None, None, "no C compiler was found: torch's own products serve")
    try:
        library = _load(Path(given) if given else _compiled(compiler or "cc"))
    except (OSError, subprocess.SubprocessError) as error:
        return Native(
            None, None, None, f"the native kernels could not be loaded ({_first_line(error)}): torch's own products serve"
        )
    return _chosen(library, os.environ.get("ARMATURE_ISA"))


def _chosen(library: ctypes.CDLL, wanted: str | None) -> Native:
    if wanted and library.armature_select(wanted.encode()) != 0:
        raise PlanImpossible(
            f"ARMATURE_ISA is {wanted}, which this library or this processor does not have. Without it the best level serves: "
            f"{(library.armature_level() or b'none').decode()}."
        )
    name = library.armature_level()
    if name is None:
        return Native(None, None, None, "the library has no kernels for this processor: torch's own products serve")
    level, sizes = name.decode(), [int(library.armature_tiles(what)) for what in range(3)]
    bf16 = hasattr(library, "armature_has_bf16") and (level == "avx512" or level == "avx512bf16") and library.armature_has_bf16()
    return Native(library, library if bf16 else None, level, f"native kernels for {level}", *sizes)


def _compiled(compiler: str) -> Path:
    sources = sorted(SOURCES.glob("**/*.[ch]"))
    key = hashlib.sha256(" ".join((platform.machine(), os.path.realpath(compiler), *FLAGS, str(LEVELS))).encode())
    for source in sources:
        key.update(source.read_bytes())
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"armature-{os.getuid()}"):
        target = folder / f"native-{key.hexdigest()[:16]}.so"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _ours(folder):
                continue
            if target.exists() and _ours(target):
                return target
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                _compile(compiler, Path(unfinished))
                os.link(Path(unfinished) / "library.so", target)  # whole or not at all, whoever else compiles at the same time
        except FileExistsError:
            return target
        except PermissionError:
            continue
        return target
    raise OSError("neither the cache nor a temporary folder of our own can be written")


def _compile(compiler: str, folder: Path) -> None:
    built = [name for name in LEVELS if (SOURCES / "levels" / f"{name}.c").exists()]
    for name in built:
        command = [compiler, *FLAGS, *LEVELS[name], "-c", str(SOURCES / "levels" / f"{name}.c"), "-o", str(folder / f"{name}.o")]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
    files = [str(source) for source in sorted(SOURCES.glob("*.c"))] + [str(folder / f"{name}.o") for name in built]
    defined = [f"-DARMATURE_LEVEL_{name}=1" for name in built]
    subprocess.run(
        [compiler, *FLAGS, "-shared", *defined, *files, "-o", str(folder / "library.so")],
        check=True,
        capture_output=True,
        timeout=240,
    )


def _ours(path: Path) -> bool:
    """Whether nobody else could have written it: code is loaded from there. Root's is as good as our own."""
    status = path.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _load(path: Path) -> ctypes.CDLL:
    assert torch.__version__, "torch is loaded, and its libgomp with it"
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype = None if result is type(None) else result
            function.argtypes = arguments
    return library


def _first_line(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    text = output.decode(errors="replace") if output else str(error)
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)
