"""Torch's int4 operators as CUDA has them, on the CPU: codes in tiles of eight outputs in the order that its tensor cores read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from armature_kernels.linear import device_fp8, device_int4, device_int8
from armature_kernels.linear.layout import DEVICE_GROUP


class TiledCodes:
    """Stands for `_convert_weight_to_int4pack` and `_weight_int4pack_mm`, with what they check. `multiplied`: rows of each product."""

    def __init__(self) -> None:
        self.multiplied: list[int] = []

    def pack(self, digits: Tensor, inner: int) -> Tensor:
        """As described in aten's int4mm.cu: a word of thread t has inputs 2 (t % 4) + {0, 1, 8, 9} of two tiles of 16, evens first."""
        assert digits.dtype == torch.uint8 and digits.is_contiguous() and inner in (2, 4, 8)
        outputs, inputs = len(digits), 2 * digits.shape[1]
        assert outputs % 8 == 0 and inputs % (16 * inner) == 0
        codes = torch.stack((digits >> 4, digits & 15), -1).flatten(1).int()
        packed = torch.zeros(outputs // 8, inputs // (16 * inner), 32, inner // 2, dtype=torch.int32)
        for thread in range(32):
            for half in range(inner // 2):
                for place, offset in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                    column = 32 * half + 2 * (thread % 4) + offset
                    packed[:, :, thread, half] |= codes[thread // 4 :: 8, column :: 16 * inner] << (4 * place)
        return packed

    def multiply(self, x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        """Codes are found by the same rule, not by what was learnt of it."""
        assert x.dtype == scales.dtype == torch.bfloat16 and x.is_contiguous() and x.dim() == 2 and len(x) > 0
        tiles, along, _, halves = packed.shape
        codes = torch.zeros(8 * tiles, 32 * halves * along, dtype=torch.int32)
        for thread in range(32):
            for half in range(halves):
                for place, offset in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                    column = 32 * half + 2 * (thread % 4) + offset
                    codes[thread // 4 :: 8, column :: 32 * halves] = (packed[:, :, thread, half] >> (4 * place)) & 15
        scale, zero = scales.float().transpose(0, 1).unbind(-1)
        every = (one.repeat_interleave(DEVICE_GROUP, 1) for one in (scale, zero))
        weight = ((codes - 8) * next(every) + next(every)).bfloat16()
        self.multiplied.append(len(x))
        return (x.float() @ weight.float().T).bfloat16()


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> TiledCodes:
    """In place of the operators, and nothing learnt yet or afterwards."""
    codes = TiledCodes()
    monkeypatch.setattr(device_int4, "pack_code_pairs", codes.pack)
    monkeypatch.setattr(device_int4, "multiply_packed", codes.multiply)
    scratch = fresh_scratch()
    for module in (device_int4, device_int8, device_fp8):
        monkeypatch.setattr(module, "shared_scratch", scratch)
    return codes


def fresh_scratch() -> Callable[[torch.device, torch.dtype], device_int4.DequantizeScratch]:
    """In place of `shared_scratch`: shared within one test."""
    make = device_int4.DequantizeScratch
    made: dict[object, device_int4.DequantizeScratch] = {}

    def shared(device: torch.device, dtype: torch.dtype) -> device_int4.DequantizeScratch:
        return made.setdefault((device, dtype), make(device, dtype))

    return shared
