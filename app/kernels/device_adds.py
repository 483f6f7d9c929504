"""A half-precision product that adds to an fp32 stream in one kernel: CUDA's `addmm` with a wider `out_dtype`.

It saves one kernel launch and one rounding per product. Older versions of torch and other devices do not support
it, so support is tested once per device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def adds_to_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `fused_addmm` works on this device and dtype.

    The test waits for the device, so it runs while weights are loaded and never during a step.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return all(
        _adds(rows, device, dtype) for rows in (1, 16)
    )  # torch may treat a single row as a bias, which is another code path


def _adds(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    ones, stream = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(rows, 16, device=device)
    try:
        add_product(stream, ones[:rows], ones)
    except RuntimeError:  # not supported on this device, or not for an fp32 stream
        return False
    return bool((stream == 17).all())


def add_product(hidden: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [tokens, in] times weight [out, in], both of one half precision, to hidden [tokens, out] fp32 in place."""
    # Nothing is copied (out= is the input), and beta = 1 adds.
    torch.addmm(hidden, x, weight.t(), out_dtype=torch.float32, out=hidden)
