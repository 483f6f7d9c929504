"""Launches of quantized weights as serving makes them, which tests/parity/gpu/test_quantized.py compiles."""

from __future__ import annotations

import torch

from armature_kernels.triton import elementwise
from armature_kernels.triton.linear import dequantize_codes, multiply_codes, quantize_rows


def launch_write_out() -> None:
    outputs, inputs = 4096, 14336
    packed, order = (
        torch.zeros(outputs // 8, inputs // 128, 32, 4, dtype=torch.int32),
        torch.zeros(8 * inputs, dtype=torch.int32),
    )
    for dtype in (torch.bfloat16, torch.float16):
        scales = torch.zeros(inputs // 64, outputs, 2, dtype=dtype)
        elementwise.dequantize(packed, order, scales, torch.empty(outputs, inputs, dtype=dtype))


def launch_int8() -> None:
    for outputs, inputs in ((2048, 2048), (28672, 4096)):
        codes, scales = torch.zeros(outputs, inputs, dtype=torch.int8), torch.zeros(outputs, dtype=torch.bfloat16)
        for rows in (1, 17, 128):
            multiply_codes(torch.zeros(rows, inputs, dtype=torch.bfloat16), codes, scales, (1, inputs))


def launch_fp8() -> None:
    for (outputs, inputs), (height, width) in (((2048, 2048), (128, 128)), ((28672, 4096), (1, 4096))):
        codes = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(outputs // height, inputs // width)
        dequantize_codes(codes, scales, (height, width), torch.empty(outputs, inputs, dtype=torch.bfloat16))
        for rows in (1, 17, 128):
            x = torch.zeros(rows, inputs, dtype=torch.bfloat16)
            multiply_codes(x, codes, scales, (height, width))


def launch_quantize_rows() -> None:
    for group in (None, 128):
        quantize_rows(torch.zeros(1022, 14336, dtype=torch.bfloat16), group, padding=2)
