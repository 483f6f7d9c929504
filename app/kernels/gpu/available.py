"""Whether Triton's kernels serve a tensor: it lies on an NVIDIA GPU, and Triton can build what starts a kernel.

Importing this imports no Triton.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
from functools import cache

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """For tensors of a processor the answer costs one comparison."""
    return tensor.device.type == "cuda" and why_not() is None


@cache
def why_not() -> str | None:
    """Why Triton cannot serve on this machine's GPU; None where it can. Torch's twins serve then, and the log says so once.

    Triton is asked for its driver, which is all that it builds beside the kernels themselves: a small module in C, which wants a compiler,
    Python's headers and a folder to write to, or lies in that folder since last time.
    """
    try:
        importlib.import_module("triton.runtime").driver.active  # noqa: B018
    except (ImportError, RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        reason = f"Triton cannot start kernels here ({type(error).__name__}: {error}): torch's own serve, more slowly"
        logging.getLogger(__name__).warning(reason)
        return reason
    return None
