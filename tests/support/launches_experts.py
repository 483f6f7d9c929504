"""Launches of the experts' products as in serving, which tests/parity/gpu/test_experts.py compiles."""

from __future__ import annotations

import torch

from armature_kernels.linear.device import StackedWeights
from armature_kernels.triton.experts import ExpertBlocks

BF16 = torch.bfloat16


def _launch(rows: int, dtype: torch.dtype, has_bias: bool, codes: torch.dtype | None = None) -> None:
    experts, top_k, inputs, outputs = 32, 4, 2048, 768
    ids = torch.zeros((rows, top_k), dtype=torch.int64)
    biases = torch.zeros((experts, outputs), dtype=dtype) if has_bias else None
    weights = torch.zeros((experts, outputs, inputs), dtype=codes or dtype)
    stacked = StackedWeights(weights, biases)
    if codes == torch.int8:
        stacked = StackedWeights(weights, biases, torch.zeros((experts, outputs), dtype=dtype), (1, inputs))
    elif codes is not None:
        scales = torch.zeros((experts, outputs // 128, inputs // 128))
        stacked = StackedWeights(weights, biases, scales, (128, 128))
    blocks = ExpertBlocks.of(ids, experts)
    blocks.multiply(torch.zeros((rows, inputs), dtype=dtype), stacked, is_sorted=False)
    blocks.multiply(torch.zeros((rows * top_k, inputs), dtype=dtype), stacked, is_sorted=True)


def launch_few() -> None:
    _launch(4, BF16, has_bias=True)


def launch_many() -> None:
    _launch(512, BF16, has_bias=False)


def launch_fp32() -> None:
    _launch(4, torch.float32, has_bias=False)


def launch_int8_few() -> None:
    _launch(4, BF16, has_bias=False, codes=torch.int8)


def launch_int8_many() -> None:
    _launch(512, BF16, has_bias=False, codes=torch.int8)


def launch_fp8_few() -> None:
    _launch(4, BF16, has_bias=False, codes=torch.float8_e4m3fn)


def launch_fp8_many() -> None:
    _launch(512, BF16, has_bias=False, codes=torch.float8_e4m3fn)
