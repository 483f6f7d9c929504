"""Launches that write a weight of four bits out, as serving makes them: what tests/parity/gpu/test_int4.py compiles."""

from __future__ import annotations

import torch

from armature_kernels.triton import elementwise


def launch_write_out() -> None:
    outputs, inputs = 4096, 14336
    packed, order = (
        torch.zeros(outputs // 8, inputs // 128, 32, 4, dtype=torch.int32),
        torch.zeros(8 * inputs, dtype=torch.int32),
    )
    for dtype in (torch.bfloat16, torch.float16):
        scales = torch.zeros(inputs // 64, outputs, 2, dtype=dtype)
        elementwise.dequantise(packed, order, scales, torch.empty(outputs, inputs, dtype=dtype))
