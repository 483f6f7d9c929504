"""Weights to integers: four bits with a scale for each group of inputs, or eight bits with one a row; to the nearest, by a searched scale.

Any rows may come alone, so a loader streams them. `equalise.py` says how channels should stand before; `csrc/ops.h` how codes are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-35  # a group whose largest magnitude is below this is zero: the inverse of its scale would not be a number
_CHUNK_ELEMENTS = 2**17  # rounded at a time: half a megabyte in FP32, which stays in the cache of its core
_DEVICE_CHUNK_ELEMENTS = (
    2**23
)  # elsewhere: enough that starting each of a hundred operations costs little, and 32 MiB held by some of them
# Steps from zero to the largest weight, the largest on the side of -8 where negative. These nine come within half a percent of the best of
# 48 in squared error, for Gaussian, heavy-tailed and trained weights at groups of 32 to 128; -8 alone (Q4_0) is 4 to 8% above it.
_DIVISORS = (-7.5, -8.2, -8.9, -9.6, -10.4, -11.3, 7.2, 8.0, 9.0)
_SPREADS = (1.0, 0.92, 0.85)  # with minimums: parts of a group's range that the sixteen codes span, about its middle


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [out, inputs]; value = scale * (code - 8), or scale * code + minimum. A scale may be negative: -8 reaches further than 7."""

    codes: Tensor  # uint8 [out, groups * group], 0 to 15; what pads the last group means zero where there are no minimums
    scales: Tensor  # bf16 [out, groups]
    minimums: Tensor | None  # bf16 [out, groups]
    group: int
    inputs: int

    def dequantise(self) -> Tensor:
        """fp32 [out, inputs]."""
        codes = self.codes.view(*self.scales.shape, self.group).float()
        scales = self.scales.float()[..., None]
        values = scales * (codes - 8) if self.minimums is None else scales * codes + self.minimums.float()[..., None]
        return values.flatten(1)[:, : self.inputs]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in]; value = scale * code."""

    codes: Tensor  # int8 [out, in], -127 to 127
    scales: Tensor  # bf16 [out, 1]

    def dequantise(self) -> Tensor:
        """fp32 [out, in]."""
        return self.scales.float() * self.codes.float()


def quantise_int4(weight: Tensor, group: int, zero_points: bool, importance: Tensor | None = None) -> Int4Weight:
    """weight [out, in] of any float dtype; `importance` [in] weighs the squared errors that the search minimises. Finite numbers only."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = torch.empty(outputs, groups * group, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, groups, dtype=torch.bfloat16, device=weight.device)
    minimums = torch.empty_like(scales) if zero_points else None
    weigh = None if importance is None else _grouped(importance.float()[None], group)
    for rows in _chunks(outputs, groups * group, weight.device):
        values = _grouped(weight[rows].float(), group)
        if minimums is None:
            scale = symmetric_scales(values, weigh)
            codes[rows] = (symmetric_codes(values, scale) + 8).flatten(1)
        else:
            scale, minimum = _ranges(values, weigh)
            codes[rows] = _codes_above(values, scale, minimum).flatten(1)
            minimums[rows] = minimum.squeeze(-1)
        scales[rows] = scale.squeeze(-1)
    return Int4Weight(codes, scales, minimums, group, inputs)


def quantise_int8(weight: Tensor) -> Int8Weight:
    """weight [out, in] of any float dtype, finite: to the nearest, the largest of a row at 127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.bfloat16, device=weight.device)
    for rows in _chunks(weight.shape[0], weight.shape[1], weight.device):
        values = weight[rows].float()
        scale = rounded(values.abs().amax(1, keepdim=True) / 127)
        codes[rows] = (values * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
        scales[rows] = scale
    return Int8Weight(codes, scales)


def symmetric_scales(values: Tensor, weigh: Tensor | None = None) -> Tensor:
    """The scale [..., 1] of each group [..., group], a number that BF16 has: the best of those tried, each fitted to its codes.

    For codes q, the best scale is s = <q, v> / <q, q>, and the squared error it leaves is smaller by <q, v>^2 / <q, q>.
    """
    top = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    shape = values * _inverse(top)  # within [-1, 1], so that no sum overflows
    weighed = shape if weigh is None else shape * weigh
    best, most, codes = torch.zeros_like(top), torch.full_like(top, -1.0), torch.empty_like(shape)
    for divisor in _DIVISORS:
        torch.mul(shape, divisor, out=codes).round_().clamp_(-8, 7)
        along = (codes * weighed).sum(-1, keepdim=True)
        length = (codes.square_() if weigh is None else codes.square_().mul_(weigh)).sum(-1, keepdim=True)
        scale = along / length.clamp_min(LEAST)
        gain = along * scale
        best = torch.where(gain > most, scale, best)
        most = torch.maximum(gain, most)
    return rounded(best * top)


def symmetric_codes(values: Tensor, scale: Tensor) -> Tensor:
    """The nearest of -8 to 7, in values' dtype."""
    return (values * _inverse(scale)).round_().clamp_(-8, 7)


def rounded(scale: Tensor) -> Tensor:
    """To the nearest number that BF16 has, in FP32; too small a one is zero."""
    near = scale.to(torch.bfloat16).float()
    return torch.where(near.abs() < LEAST, 0.0, near)


def _ranges(values: Tensor, weigh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale and minimum [..., 1] of each group: the best of a few spans, each fitted to its codes by least squares."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    weigh = torch.ones_like(values[:1, :1]) if weigh is None else weigh
    scale = minimum = torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for spread in _SPREADS:
        step = rounded((high / 15 - low / 15) * spread)
        begin = rounded(low + (high / 2 - low / 2) * (1 - spread))
        for _ in range(2):
            codes = _codes_above(values, step, begin)
            error = ((codes * step + begin - values) * _inverse(high.maximum(-low))).square_().mul_(weigh).sum(-1, keepdim=True)
            scale, minimum = torch.where(error < least, step, scale), torch.where(error < least, begin, minimum)
            least = torch.minimum(error, least)
            step, begin = _fitted(values, codes, weigh)
    return scale, torch.where(scale == 0, rounded(low / 2 + high / 2), minimum)


def _fitted(values: Tensor, codes: Tensor, weigh: Tensor) -> tuple[Tensor, Tensor]:
    """The line through (codes, values) that leaves the least squares."""
    total = weigh.sum(-1, keepdim=True).clamp_min(LEAST)
    middle, height = (codes * weigh).sum(-1, keepdim=True) / total, (values * (weigh / total)).sum(-1, keepdim=True)
    apart = codes - middle
    slope = (apart * weigh * (values - height)).sum(-1, keepdim=True) / (apart.square() * weigh).sum(-1, keepdim=True).clamp_min(
        LEAST
    )
    step = rounded(slope)
    return step, rounded(height - step * middle)


def _codes_above(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((values - minimum) * _inverse(scale)).round_().clamp_(0, 15)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, or zero where there is nothing to divide."""
    return torch.where(scale.abs() < LEAST, 0.0, 1 / scale)


def _grouped(weight: Tensor, group: int) -> Tensor:
    """[rows, in] to [rows, groups, group], padded with zeros."""
    return F.pad(weight, (0, -weight.shape[1] % group)).view(weight.shape[0], -1, group)


def _chunks(outputs: int, columns: int, device: torch.device) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, elements // max(1, columns))
    return (slice(first, first + step) for first in range(0, outputs, step))
