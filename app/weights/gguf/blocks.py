"""Computes the values of quantized GGUF blocks in FP32, with the operations and the order of ggml.

Each function takes blocks as bytes, uint8 [blocks, bytes of a block], and returns FP32 [blocks, values]. The layouts are
those of ggml-common.h in llama.cpp. `d` is a scale, `m` a minimum; K types have scales of scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from app.weights.quantized.values import E2M1

_E2M1 = torch.tensor(E2M1, dtype=torch.int8)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the FP16 number at a byte of each block as FP32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """Return uint8 [..., 2, n]: the low four bits of n bytes, then the high ones."""
    return torch.stack((codes & 15, codes >> 4), dim=-2)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return bit i of the 32-bit number at a byte of each block as 16 or 0, uint8 [blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).flatten(1) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _halves(blocks, 0)


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """Codes uint8 [blocks, groups, 32] of four bits, with scales and minimums FP32 [blocks, groups, 1].

    A value is scale * code + minimum, or scale * (code - 8) without minimums.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None

    def values(self) -> Tensor:
        codes = self.codes.float()
        centered = codes - 8 if self.minimums is None else codes
        products = centered * self.scales
        return (products if self.minimums is None else products + self.minimums).flatten(1)


@dataclass(frozen=True, slots=True)
class SignedCodes:
    """Codes int8 [blocks, 32] with scales FP32 [blocks, 1]; a value is scale * code."""

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        return self.codes.float() * self.scales


def _mxfp4(blocks: Tensor) -> SignedCodes:
    """Return E2M1 values as doubled integers -12 to 12, and halved scales, which are powers of two."""
    codes = _E2M1[_nibbles(blocks[:, 1:]).flatten(1).int()]
    return SignedCodes(codes, torch.exp2(blocks[:, :1].double() - 128).float())


def _q4_0(blocks: Tensor) -> GroupCodes:
    return GroupCodes(_nibbles(blocks[:, 2:]).view(-1, 1, 32), _halves(blocks, 0)[..., None], None)


def _q4_1(blocks: Tensor) -> GroupCodes:
    codes = _nibbles(blocks[:, 4:]).view(-1, 1, 32)
    return GroupCodes(codes, _halves(blocks, 0)[..., None], _halves(blocks, 2)[..., None])


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks, 2)
    return (codes.float() - 16) * _halves(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks, 4)
    return codes.float() * _halves(blocks, 0) + _halves(blocks, 2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of the eight groups of 32, each FP32 [blocks, 8, 1].

    They have six bits each: 12 bytes hold the low six bits of the first four scales and minima, and in their upper two
    bits the upper bits of the last four, whose lower four bits follow.
    """
    first, second, lower = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (lower & 15) | (first >> 6 << 4)), dim=1)
    minima = torch.cat((second & 63, (lower >> 4) | (second >> 6 << 4)), dim=1)
    return (_halves(blocks, 0) * scales.float())[..., None], (_halves(blocks, 2) * minima.float())[..., None]


def _q4_k(blocks: Tensor) -> GroupCodes:
    d, m = _k_scales(blocks)
    return GroupCodes(_nibbles(blocks[:, 16:].view(-1, 4, 32)).reshape(-1, 8, 32), d, -m)


def _q5_k(blocks: Tensor) -> Tensor:
    d, m = _k_scales(blocks)
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    upper = (blocks[:, None, 16:48] >> groups & 1) << 4
    codes = _nibbles(blocks[:, 48:].view(-1, 4, 32)).reshape(-1, 8, 32) | upper
    return (codes.float() * d - m).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    lower = _nibbles(blocks[:, :128].view(-1, 2, 64)).reshape(-1, 2, 4, 32)
    upper = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3) << 4
    codes = (lower | upper).float().view(-1, 16, 16) - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _halves(blocks, 208)
    return (codes * scales[..., None]).flatten(1)


# Types whose values are four-bit codes in groups of 32.
FOUR_BIT_CODES: Mapping[str, Callable[[Tensor], GroupCodes]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
# Types whose values are codes in groups of 32 that eight bits hold, and whose largest code is not 127.
EIGHT_BIT_CODES: Mapping[str, Callable[[Tensor], SignedCodes]] = {"MXFP4": _mxfp4}
DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.view(torch.float32),
    "F16": lambda blocks: blocks.view(torch.float16),
    "BF16": lambda blocks: blocks.view(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": lambda blocks: _mxfp4(blocks).values(),
}


def dequantize_blocks(kind: str, blocks: Tensor) -> Tensor:
    """Return the values of blocks (uint8, contiguous) in FP32, or in the dtype of a type that is not quantized."""
    four_bits = FOUR_BIT_CODES.get(kind)
    return DEQUANTIZE[kind](blocks) if four_bits is None else four_bits(blocks).values()
