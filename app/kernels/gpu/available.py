"""Whether Triton's kernels serve a tensor: it lies on an NVIDIA GPU, and Triton can build what starts a kernel.

Importing this imports no Triton.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """For tensors of a processor the answer costs one comparison."""
    return tensor.device.type == "cuda" and why_not() is None


def keep_in_private() -> None:
    """What Triton keeps is code, which it loads unasked: nothing is kept, or found, where others could have written it."""
    named = os.environ.get("TRITON_CACHE_DIR")
    if named is None:
        return
    trouble = _trouble(Path(named))
    if trouble:
        logging.getLogger(__name__).warning("compiled kernels are kept for this process alone: %s %s", named, trouble)
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="armature-kernels-")


def _trouble(folder: Path) -> str:
    """Why this folder is not ours alone; empty where it is, or has just been made so."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}"
    return "may be written by others" if status.st_mode & 0o022 else ""


@cache
def why_not() -> str | None:
    """Why Triton cannot serve on this machine's GPU; None where it can. Torch's twins serve then, and the log says so once.

    Triton is asked for its driver, which is all that it builds beside the kernels themselves: a small module in C, which wants a compiler,
    Python's headers and a folder to write to, or lies in that folder since last time.
    """
    keep_in_private()
    try:
        importlib.import_module("triton.runtime").driver.active  # noqa: B018
    except (ImportError, RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        reason = f"Triton cannot start kernels here ({type(error).__name__}: {error}): torch's own serve, more slowly"
        logging.getLogger(__name__).warning(reason)
        return reason
    return None
