"""The native library: plain C, compiled on this machine at the first start and kept in the cache; without it torch's products serve.

A library is found by the hash of its sources, compiler and flags, so an old one is never loaded. It says itself what the processor runs.
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

import torch  # before the library: both must use the libgomp.so.1 that torch brings, two pools would fight for the cores

SOURCES = Path(__file__).parent / "csrc"
# No -march: each kernel names the instructions it uses and is called only where the processor has them. No -ffast-math: NaN must stay NaN.
FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden")
_SIZE, _POINTER, _INT, _FLOAT = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_float

_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
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
    """What became of the library: `bf16` holds its kernels where this processor runs them; `reason` is for people."""

    bf16: ctypes.CDLL | None
    reason: str


def cache_folder() -> Path:
    """Where compiled code is kept: `ARMATURE_CACHE_DIR`, else the user's cache."""
    chosen = os.environ.get("ARMATURE_CACHE_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "armature"


@cache
def native() -> Native:
    """Compiles where need be (about two seconds, once), loads, and asks the library what this processor can run. Never raises."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return Native(None, f"no native kernels for {platform.machine()} yet: torch's own products serve")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return Native(None, "no C compiler was found: torch's own products serve")
    try:
        library = _load(_compiled(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        return Native(None, f"the native kernels could not be compiled ({_first_line(error)}): torch's own products serve")
    if not library.armature_has_bf16():
        return Native(None, "this processor has no AVX512-BF16: torch's own products serve")
    return Native(library, "native kernels for AVX512-BF16")


def _compiled(compiler: str) -> Path:
    sources = sorted(SOURCES.glob("*.[ch]"))
    key = hashlib.sha256(" ".join((platform.machine(), os.path.realpath(compiler), *FLAGS)).encode())
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
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".so") as unfinished:
                files = [str(source) for source in sources if source.suffix == ".c"]
                subprocess.run([compiler, *FLAGS, *files, "-o", unfinished.name], check=True, capture_output=True, timeout=120)
                os.link(unfinished.name, target)  # whole or not at all, whoever else compiles at the same time
        except FileExistsError:
            return target
        except PermissionError:
            continue
        return target
    raise OSError("neither the cache nor a temporary folder of our own can be written")


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
