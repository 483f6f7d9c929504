"""Launches of products of few rows as serving makes them, which tests/parity/gpu/test_few_rows.py compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from armature_kernels.linear.device import CodesAndScales
from armature_kernels.linear.layout import DEVICE_GROUP
from armature_kernels.triton.linear import multiply_few

_SHAPES = ((4096, 14336),)


def _launch(weight: CodesAndScales, outputs: int, inputs: int) -> None:
    norm, x = (torch.zeros(inputs), 1e-5), torch.zeros(4, inputs, dtype=torch.bfloat16)
    for rows in (1, 4):
        wide, narrow = torch.zeros(rows, inputs), torch.zeros(rows, outputs // 2, dtype=torch.bfloat16)
        multiply_few(wide, weight, narrow, norm, activation="silu")
        multiply_few(x[:rows], weight, torch.zeros(rows, outputs), add=True)


def launch_bf16() -> None:
    for outputs, inputs in _SHAPES:
        _launch((torch.zeros(outputs, inputs, dtype=torch.bfloat16), None, (1, 1)), outputs, inputs)


def launch_int8() -> None:
    for outputs, inputs in _SHAPES:
        codes, scales = torch.zeros(outputs, inputs, dtype=torch.int8), torch.zeros(outputs, dtype=torch.bfloat16)
        _launch((codes, scales, (1, inputs)), outputs, inputs)


def _fp8(outputs: int, inputs: int, block: tuple[int, int]) -> CodesAndScales:
    scales: Tensor = torch.zeros(-(-outputs // block[0]), -(-inputs // block[1]))
    return (torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn), scales, block)


def launch_fp8() -> None:
    for outputs, inputs in _SHAPES:
        for block in ((1, inputs), (128, 128)):
            _launch(_fp8(outputs, inputs, block), outputs, inputs)


def launch_int4() -> None:
    for outputs, inputs in _SHAPES:
        packed = torch.zeros(outputs // 8, inputs // 128, 32, 4, dtype=torch.int32)
        scales = torch.zeros(inputs // DEVICE_GROUP, outputs, 2, dtype=torch.bfloat16)
        _launch((packed, scales, (1, DEVICE_GROUP)), outputs, inputs)
