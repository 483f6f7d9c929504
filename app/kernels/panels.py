"""A linear form of our own: bf16 weights in panels that our kernels stream, the same bytes for one row and for five hundred.

Layout and product are described in `csrc/armature.h` and `csrc/tile_bf16.h`. Its twin is torch's `F.linear`.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from app.kernels.memory import scratch, weights_bytes
from app.kernels.native import native

PANEL_WIDTH = 32  # outputs


class PanelLinear:
    """At one row it reads at the speed of memory (0.98 of a plain read loop); against oneDNN's packed bf16 it is ahead up to 32 rows, and
    within a tenth of it at 512 (8192 x 2048, two Zen 5 cores)."""

    keeps_weight: ClassVar[bool] = False

    __slots__ = ("bias", "inputs", "library", "outputs", "panels")

    def __init__(self, library: ctypes.CDLL, panels: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> None:
        self.library, self.panels, self.bias, self.outputs, self.inputs = library, panels, bias, outputs, inputs

    @classmethod
    def suits(cls, rows: int, columns: int, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and native().bf16 is not None

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """weight [out, in] bf16, its rows contiguous."""
        library = native().bf16
        assert library is not None and weight.dtype == torch.bfloat16 and weight.is_contiguous(), "suits() was asked"
        outputs, inputs = weight.shape
        num_panels = -(-outputs // PANEL_WIDTH)
        panels = weights_bytes(num_panels * PANEL_WIDTH * -(-inputs // 2) * 4)
        if outputs % PANEL_WIDTH:  # the last panel is padded with zeros
            panels[-panels.numel() // num_panels :].zero_()
        library.armature_pack_bf16(weight.data_ptr(), panels.data_ptr(), outputs, inputs, 0)
        return cls(library, panels, None if bias is None else bias.to(torch.float32, copy=True), outputs, inputs)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def multiply(self, x: Tensor) -> Tensor:
        """x [tokens, in] bf16 to [tokens, out] bf16, summed in fp32."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.outputs, dtype=torch.bfloat16)
        bias = None if self.bias is None else self.bias.data_ptr()
        tiles = scratch(rows * -(-self.inputs // 2) * 4)
        self.library.armature_linear_bf16(
            x.data_ptr(),
            x.stride(0),
            self.panels.data_ptr(),
            bias,
            y.data_ptr(),
            self.outputs,
            rows,
            self.inputs,
            self.outputs,
            tiles,
        )
        return y
