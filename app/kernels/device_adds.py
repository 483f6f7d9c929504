"""A product of half precision added to an fp32 stream by the product itself, where torch has that: CUDA's `addmm` with a wider `out_dtype`.

It saves a launch for each such product, and its rounding. Older torch and other devices do not have it, so a device is asked once.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def adds_to_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `add_product` serves there. Waits for the device, so it is asked while weights are loaded, never in a step."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return all(_adds(rows, device, dtype) for rows in (1, 16))  # torch may take one row for a bias, which has another road


def _adds(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    ones, stream = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(rows, 16, device=device)
    try:
        add_product(stream, ones[:rows], ones)
    except RuntimeError:  # not for this device, or not for a stream of another dtype
        return False
    return bool((stream == 17).all())


def add_product(hidden: Tensor, x: Tensor, weight: Tensor) -> None:
    """hidden [tokens, out] fp32 += x [tokens, in] times weight [out, in], both of one half precision."""
    torch.addmm(hidden, x, weight.t(), out_dtype=torch.float32, out=hidden)  # in place: nothing is copied, and β = 1 adds
