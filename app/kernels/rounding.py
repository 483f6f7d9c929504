"""Quantisation of weights: four bits with one scale per group of inputs, or eight bits with one scale per output.

Codes are rounded to nearest. Four-bit scales are found by a search. Rows are independent, so a loader can stream
them. `smooth_scales` balances channels before this step. `csrc/ops.h` describes the packing of codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# A group whose largest magnitude is below this is zero, because the inverse of its scale would not be finite.
LEAST = 1e-35
_CHUNK_ELEMENTS = 2**17  # elements quantised at a time: half a megabyte in FP32, which fits the cache of a core
# Device value: large enough that a hundred kernel launches cost little. Some of these operations need 32 MiB.
_DEVICE_CHUNK_ELEMENTS = 2**23
# Number of steps from zero to the largest weight; negative: the largest weight gets a negative code.
# These nine are within 0.5% of the best of 48 in squared error, for Gaussian, heavy-tailed and trained weights and
# for groups of 32 to 128 inputs. -8 alone (Q4_0) is 4 to 8% above the best.
_DIVISORS = (-7.5, -8.2, -8.9, -9.6, -10.4, -11.3, 7.2, 8.0, 9.0)
_SPREADS = (1.0, 0.92, 0.85)  # shares of a group's range, around its middle, that the sixteen codes span with minimums


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [out, inputs] with value = scale * (code - 8), or scale * code + minimum.

    A scale may be negative, because code -8 reaches further than 7.
    """

    # uint8 [out, groups * group], 0 to 15; without minimums, padding of the last group has the value zero.
    codes: Tensor
    scales: Tensor  # bf16 [out, groups]
    minimums: Tensor | None  # bf16 [out, groups]
    group: int
    inputs: int

    def dequantise(self) -> Tensor:
        """Return the values, fp32 [out, inputs]."""
        codes = self.codes.view(*self.scales.shape, self.group).float()
        scales = self.scales.float()[..., None]
        values = scales * (codes - 8) if self.minimums is None else scales * codes + self.minimums.float()[..., None]
        return values.flatten(1)[:, : self.inputs]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in] with value = scale * code."""

    codes: Tensor  # int8 [out, in], -127 to 127
    scales: Tensor  # bf16 [out, 1]

    def dequantise(self) -> Tensor:
        """Return the values, fp32 [out, in]."""
        return self.scales.float() * self.codes.float()


def quantise_int4(weight: Tensor, group: int, zero_points: bool, importance: Tensor | None = None) -> Int4Weight:
    """Quantise weight [out, in] of any float dtype to four bits; all values must be finite.

    Args:
        weight: [out, in].
        group: Inputs that share a scale.
        zero_points: Use a minimum per group instead of the fixed zero at code 8.
        importance: [in]; weights of the squared errors that the search minimises.
    """
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
    """Quantise weight [out, in] of any float dtype, finite, to nearest; the largest of a row has code ±127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.bfloat16, device=weight.device)
    for rows in _chunks(weight.shape[0], weight.shape[1], weight.device):
        values = weight[rows].float()
        scale = rounded(values.abs().amax(1, keepdim=True) / 127)
        codes[rows] = (values * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
        scales[rows] = scale
    return Int8Weight(codes, scales)


def symmetric_scales(values: Tensor, weigh: Tensor | None = None) -> Tensor:
    """Return the scale [..., 1] of each group [..., group], rounded to bf16: the best of the candidates.

    Each candidate is fitted to its codes. For codes q, the best scale is s = <q, v> / <q, q>. It reduces the
    squared error by <q, v>^2 / <q, q>.
    """
    top = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    shape = values * _inverse(top)  # scaled to [-1, 1], so that no sum overflows
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
    """Return the nearest codes from -8 to 7, in the dtype of the values."""
    return (values * _inverse(scale)).round_().clamp_(-8, 7)


def rounded(scale: Tensor) -> Tensor:
    """Round to the nearest bf16 number, in fp32; numbers that are too small become zero."""
    near = scale.to(torch.bfloat16).float()
    return torch.where(near.abs() < LEAST, 0.0, near)


def _ranges(values: Tensor, weigh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scale and minimum [..., 1] of each group: the best of a few spans, fitted by least squares."""
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
    """Return the step and offset of the least-squares line through (codes, values)."""
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
    """Return 1 / scale, or zero for scales that are too small."""
    return torch.where(scale.abs() < LEAST, 0.0, 1 / scale)


def _grouped(weight: Tensor, group: int) -> Tensor:
    """Reshape [rows, in] to [rows, groups, group], padded with zeros."""
    return F.pad(weight, (0, -weight.shape[1] % group)).view(weight.shape[0], -1, group)


def _chunks(outputs: int, columns: int, device: torch.device) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, elements // max(1, columns))
    return (slice(first, first + step) for first in range(0, outputs, step))
