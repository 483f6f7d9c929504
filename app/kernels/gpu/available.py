"""Whether Triton's kernels serve a tensor: it lies on an NVIDIA GPU, and Triton is there. Importing this imports no Triton."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """For tensors of a processor the answer costs one comparison."""
    return tensor.device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
