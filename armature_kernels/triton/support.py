"""Detection of Triton: a tensor must be on an NVIDIA GPU, and Triton must be able to build its launcher.

Importing this module does not import Triton.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path

from torch import Tensor

_MOST_DIFFERENT = 0.05  # of the largest number of a row: some roundings of BF16


def triton_usable(tensor: Tensor) -> bool:
    """Return True if Triton's kernels can process this tensor; for CPU tensors this costs one comparison."""
    return tensor.device.type == "cuda" and unavailable_reason() is None


def secure_cache_folder() -> None:
    """Make sure that other users cannot write to Triton's cache, from which it loads code.

    If others can write to the folder named by `TRITON_CACHE_DIR`, a new private folder replaces it, and a warning
    is logged.
    """
    named = os.environ.get("TRITON_CACHE_DIR")
    if named is None:
        return
    trouble = _insecure_reason(Path(named))
    if trouble:
        logging.getLogger(__name__).warning("compiled kernels are kept for this process alone: %s %s", named, trouble)
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="armature-kernels-")


def _insecure_reason(folder: Path) -> str:
    """Return the reason why the folder is not private, or an empty string; the folder is created if necessary."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}"
    return "may be written by others" if status.st_mode & 0o022 else ""


_agreed: dict[tuple[str, Hashable], bool] = {}


def agrees_with_reference(kernel: str, case: Hashable, compare: Callable[[], float]) -> bool:
    """Return True if a kernel gives what its reference gives on this GPU, where it may never have run before.

    `compare` runs both, once for each case, and returns their relative difference. It waits for the device, so the first
    call for a case must not be captured.
    """
    if (kernel, case) not in _agreed:
        difference = compare()
        _agreed[kernel, case] = difference <= _MOST_DIFFERENT
        if not _agreed[kernel, case]:
            logging.getLogger(__name__).error(
                "The kernel of %s differs from its reference by %.2g on this GPU, so torch's kernels serve, more slowly. "
                "Please report this with the GPU's name and the versions of its driver and of torch.",
                kernel,
                difference,
            )
    return _agreed[kernel, case]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest number expected; infinite if a number is not finite."""
    difference = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-30))
    return difference if math.isfinite(difference) else math.inf


@cache
def unavailable_reason() -> str | None:
    """Return the reason why Triton cannot serve on this machine's GPU, or None if it can.

    If it cannot, torch's kernels serve, and a warning is logged once. Triton is asked for its driver, a small C
    module, which is all it builds in addition to the kernels. Building it needs a C compiler, Python's headers and
    a writable folder. Later runs find it in that folder.
    """
    secure_cache_folder()
    try:
        importlib.import_module("triton.runtime").driver.active  # noqa: B018
    except (ImportError, RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        reason = f"Triton cannot start kernels here ({type(error).__name__}: {error}): torch's own serve, more slowly"
        logging.getLogger(__name__).warning(reason)
        return reason
    return None
