"""Quantisation of weights: four bits with one scale per group of inputs, or eight bits with one scale per output.

Double quantization rounds the scales of four-bit groups to eight bits: scale = own scale of the output * c * |c|. It
saves a quarter bit per weight (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, use 8-bit
floats). A square is precise for scales far below an output's largest; SmolLM2-135M loses 0.4% of perplexity by it.

Rows are independent, so a loader can stream them; `csrc/ops.h` describes the packing of codes. `quantise_int4` and
`quantise_int8` round codes to nearest; four-bit scales are found by a search. `gptq_int4` lets weights that are not
yet rounded compensate for the rounding error of those that are (Frantar et al., "GPTQ: Accurate Post-Training
Quantization for Generative Pre-trained Transformers", 2022); it needs the correlation of a product's inputs, collected
from text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.native.arguments import Int4GptqArguments, Int4ScalesArguments, OpCode
from armature_kernels.native.operations import has_kernel, run_operation

# A group whose largest magnitude is below this is zero, because the inverse of its scale would not be finite.
MIN_MAGNITUDE = 1e-35
_CHUNK_ELEMENTS = 2**17  # elements quantised at a time: half a megabyte in FP32, which fits the cache of a core
# Device value: large enough that a hundred kernel launches cost little. Some of these operations need 32 MiB.
_DEVICE_CHUNK_ELEMENTS = 2**23
# Number of steps from zero to the largest weight; negative: the largest weight gets a negative code.
# These nine are within 0.5% of the best of 48 in squared error, for Gaussian, heavy-tailed and trained weights and
# for groups of 32 to 128 inputs. -8 alone (Q4_0) is 4 to 8% above the best.
_DIVISORS = (-7.5, -8.2, -8.9, -9.6, -10.4, -11.3, 7.2, 8.0, 9.0)
_MOST_NATIVE_GROUP = 256  # csrc/ops.h
_SPREADS = (1.0, 0.92, 0.85)  # shares of a group's range, around its middle, that the sixteen codes span with minimums


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [out, inputs] with value = scale * (code - 8), or scale * code + minimum.

    A scale may be negative, because code -8 reaches further than 7. `double_scales` is given if scales are quantized;
    then `scales` are their values.
    """

    # uint8 [out, groups * group], 0 to 15; without minimums, padding of the last group has the value zero.
    codes: Tensor
    scales: Tensor  # bf16 [out, groups]; fp32 if they are quantized
    minimums: Tensor | None  # bf16 [out, groups]
    group: int
    inputs: int
    double_scales: DoubleScales | None = None

    def dequantise(self) -> Tensor:
        """Return the values, fp32 [out, inputs]."""
        codes = self.codes.view(*self.scales.shape, self.group).float()
        scales = self.scales.float()[..., None]
        values = scales * (codes - 8) if self.minimums is None else scales * codes + self.minimums.float()[..., None]
        return values.flatten(1)[:, : self.inputs]


@dataclass(frozen=True, slots=True)
class DoubleScales:
    """Quantized scales of groups: scale = output_scale * code * |code|."""

    codes: Tensor  # int8 [out, groups], -127 to 127
    output_scales: Tensor  # bf16 [out, 1]

    @classmethod
    def of(cls, scales: Tensor) -> DoubleScales:
        """Quantize scales fp32 [out, groups]: the largest of an output gets the code 127."""
        own = round_to_bf16(scales.abs().amax(1, keepdim=True) / 127**2)
        codes = (scales.abs() * _inverse(own)).sqrt_().round_().clamp_(max=127).mul_(scales.sign())
        return cls(codes.to(torch.int8), own.to(torch.bfloat16))

    @property
    def values(self) -> Tensor:
        """The scales, fp32 [out, groups]."""
        codes = self.codes.float()
        return self.output_scales.float() * (codes * codes.abs())


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in] with value = scale * code."""

    codes: Tensor  # int8 [out, in], -127 to 127; -128 too if a checkpoint has it
    scales: Tensor  # bf16 [out, 1]; [out, groups] of a checkpoint's codes

    def dequantise(self) -> Tensor:
        """Return the values, fp32 [out, in]."""
        return self.scales.float() * self.codes.float()


def quantise_int4(
    weight: Tensor, group: int, zero_points: bool, importance: Tensor | None = None, *, double_quantized: bool = False
) -> Int4Weight:
    """Quantise weight [out, in] of any float dtype to four bits; all values must be finite.

    Args:
        weight: [out, in].
        group: Inputs that share a scale.
        zero_points: Use a minimum per group instead of the fixed zero at code 8.
        importance: [in]; weights of the squared errors that the search minimises.
        double_quantized: Quantize the scales too; not with zero points.
    """
    assert not (zero_points and double_quantized), "double quantization is for symmetric codes"
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = torch.empty(outputs, groups * group, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, groups, dtype=torch.bfloat16, device=weight.device)
    minimums = torch.empty_like(scales) if zero_points else None
    double = _empty_double_scales(scales) if double_quantized else None
    weigh = None if importance is None else _group_inputs(importance.float()[None], group)
    for rows in _chunks(outputs, groups * group, weight.device):
        values = _group_inputs(weight[rows].float(), group)
        if minimums is None:
            scale = symmetric_scales(values, weigh)
            if double is not None:
                own = DoubleScales.of(scale.squeeze(-1))
                double.codes[rows], double.output_scales[rows] = own.codes, own.output_scales
                scale = own.values[..., None]
            codes[rows] = (symmetric_codes(values, scale) + 8).flatten(1)
        else:
            scale, minimum = _ranges(values, weigh)
            codes[rows] = _codes_above(values, scale, minimum).flatten(1)
            minimums[rows] = minimum.squeeze(-1)
        scales[rows] = scale.squeeze(-1)
    return Int4Weight(codes, scales if double is None else double.values, minimums, group, inputs, double)


def _empty_double_scales(scales: Tensor) -> DoubleScales:
    return DoubleScales(torch.empty_like(scales, dtype=torch.int8), torch.empty_like(scales[:, :1]))


def quantise_int8(weight: Tensor) -> Int8Weight:
    """Quantise weight [out, in] of any float dtype, finite, to nearest; the largest of a row has code ±127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.bfloat16, device=weight.device)
    for rows in _chunks(weight.shape[0], weight.shape[1], weight.device):
        values = weight[rows].float()
        scale = round_to_bf16(values.abs().amax(1, keepdim=True) / 127)
        codes[rows] = (values * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
        scales[rows] = scale
    return Int8Weight(codes, scales)


def symmetric_scales(values: Tensor, weigh: Tensor | None = None) -> Tensor:
    """Return the scale [..., 1] of each group [..., group], rounded to bf16: the best of the candidates.

    Each candidate is fitted to its codes. For codes q, the best scale is s = <q, v> / <q, q>. It reduces the
    squared error by <q, v>^2 / <q, q>. On a processor the native kernel searches, if there is no `weigh`.
    """
    known = weigh is None and values.device.type == "cpu" and values.shape[-1] <= _MOST_NATIVE_GROUP
    if known and has_kernel(OpCode.INT4_SCALES):
        return round_to_bf16(_native_scales(values.contiguous()))
    return symmetric_scales_torch(values, weigh)


def _native_scales(values: Tensor) -> Tensor:
    """Return the scales [..., 1], not rounded, of contiguous fp32 values [..., group]."""
    group = values.shape[-1]
    scales, divisors = torch.empty(*values.shape[:-1], 1), torch.tensor(_DIVISORS)
    run_operation(
        Int4ScalesArguments(
            values.data_ptr(), divisors.data_ptr(), scales.data_ptr(), scales.numel(), group, len(divisors)
        ),
        OpCode.INT4_SCALES,
    )
    return scales


def symmetric_scales_torch(values: Tensor, weigh: Tensor | None = None) -> Tensor:
    """Return the result of `symmetric_scales` by torch's operations; it is the reference of the native kernel."""
    top = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    shape = values * _inverse(top)  # scaled to [-1, 1], so that no sum overflows
    weighed = shape if weigh is None else shape * weigh
    best, most, codes = torch.zeros_like(top), torch.full_like(top, -1.0), torch.empty_like(shape)
    for divisor in _DIVISORS:
        torch.mul(shape, divisor, out=codes).round_().clamp_(-8, 7)
        along = (codes * weighed).sum(-1, keepdim=True)
        length = (codes.square_() if weigh is None else codes.square_().mul_(weigh)).sum(-1, keepdim=True)
        scale = along / length.clamp_min(MIN_MAGNITUDE)
        gain = along * scale
        best = torch.where(gain > most, scale, best)
        most = torch.maximum(gain, most)
    return round_to_bf16(best * top)


def symmetric_codes(values: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest codes from -8 to 7, in the dtype of the values."""
    return (values * _inverse(scale)).round_().clamp_(-8, 7)


def round_to_bf16(scale: Tensor) -> Tensor:
    """Round to the nearest bf16 number, in fp32; numbers that are too small become zero."""
    near = scale.to(torch.bfloat16).float()
    return torch.where(near.abs() < MIN_MAGNITUDE, 0.0, near)


def _ranges(values: Tensor, weigh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scale and minimum [..., 1] of each group: the best of a few spans, fitted by least squares."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    weigh = torch.ones_like(values[:1, :1]) if weigh is None else weigh
    scale = minimum = torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for spread in _SPREADS:
        step = round_to_bf16((high / 15 - low / 15) * spread)
        begin = round_to_bf16(low + (high / 2 - low / 2) * (1 - spread))
        for _ in range(2):
            codes = _codes_above(values, step, begin)
            error = (
                ((codes * step + begin - values) * _inverse(high.maximum(-low)))
                .square_()
                .mul_(weigh)
                .sum(-1, keepdim=True)
            )
            scale, minimum = torch.where(error < least, step, scale), torch.where(error < least, begin, minimum)
            least = torch.minimum(error, least)
            step, begin = _fit_line(values, codes, weigh)
    return scale, torch.where(scale == 0, round_to_bf16(low / 2 + high / 2), minimum)


def _fit_line(values: Tensor, codes: Tensor, weigh: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step and offset of the least-squares line through (codes, values)."""
    total = weigh.sum(-1, keepdim=True).clamp_min(MIN_MAGNITUDE)
    middle, height = (codes * weigh).sum(-1, keepdim=True) / total, (values * (weigh / total)).sum(-1, keepdim=True)
    apart = codes - middle
    slope = (apart * weigh * (values - height)).sum(-1, keepdim=True) / (apart.square() * weigh).sum(
        -1, keepdim=True
    ).clamp_min(MIN_MAGNITUDE)
    step = round_to_bf16(slope)
    return step, round_to_bf16(height - step * middle)


def _codes_above(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((values - minimum) * _inverse(scale)).round_().clamp_(0, 15)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, or zero for scales that are too small."""
    return torch.where(scale.abs() < MIN_MAGNITUDE, 0.0, 1 / scale)


def _group_inputs(weight: Tensor, group: int) -> Tensor:
    """Reshape [rows, in] to [rows, groups, group], padded with zeros."""
    missing = -weight.shape[1] % group
    whole = F.pad(weight, (0, missing)) if missing else weight  # padding by nothing copies too
    return whole.reshape(weight.shape[0], -1, group)


def _chunks(outputs: int, columns: int, device: torch.device) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, elements // max(1, columns))
    return (slice(first, first + step) for first in range(0, outputs, step))


# Added to the diagonal, as a share of its mean: correlations that the text did not show are not relied on. With few rows
# for many inputs most of what they show is chance. Measured on SmolLM2-135M: with 610 rows 0.1 raised perplexity by
# 4.8%, inputs / rows by 3.9% and twice that by 4.3%; with 5,600 rows all are equal.
DAMPING = 0.1
_BLOCK = 64  # inputs whose errors are propagated together, in one product
FITTED_ROWS = 2048  # with fewer, as of large models, fitting scales to the importance of inputs would take seconds
# csrc/ops.h has the same limit.
MAX_CORRELATED = 512  # inputs whose rounding errors compensate for each other: 1024 were no better on SmolLM2-135M


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """What a calibration text shows of a product's inputs x.

    `mean_squares` fp32 [in]. `correlations` are the sums of x xᵀ, fp32 [n, n], of consecutive blocks of at most
    `MAX_CORRELATED` inputs; empty if they were not collected. `num_rows` is the number of inputs x.
    """

    mean_squares: Tensor
    correlations: tuple[Tensor, ...] = ()
    num_rows: int = 0

    def gptq_factors(self, factors: Tensor | None, group: int) -> tuple[GptqFactors, ...]:
        """Return the factors of each block of inputs; empty without correlations.

        Args:
            factors: [in], by which the weight's columns were multiplied.
            group: Inputs that share a scale; blocks that do not begin at a group are not used.
        """
        return tuple(job() for job in self.gptq_jobs(factors, group))

    def gptq_jobs(self, factors: Tensor | None, group: int) -> list[Callable[[], GptqFactors]]:
        """Return a function for each block of inputs, which computes its result of `gptq_factors`."""
        if not self.correlations or (len(self.correlations) > 1 and MAX_CORRELATED % group):
            return []
        parts = [None] * len(self.correlations) if factors is None else torch.split(factors, MAX_CORRELATED)
        pairs = zip(self.correlations, parts, strict=True)
        fits = self.num_rows >= FITTED_ROWS
        return [partial(compute_gptq_factors, sums, own, self.damping(len(sums)), fits) for sums, own in pairs]

    def damping(self, inputs: int) -> float:
        """Return the damping of the correlation of this many inputs."""
        return max(DAMPING, inputs / max(1, self.num_rows))


@dataclass(frozen=True, slots=True)
class GptqFactors:
    """The order in which inputs are rounded, and the factor that propagates rounding errors.

    `rounding_order` int64 [in] lists inputs in rounding order. `inverse_root` fp32 [in, in], in that order, is the
    upper triangular factor of the inverse Hessian. `importance` fp32 [in] is the diagonal of the Hessian, in the order
    of the inputs; None: all inputs count alike in scales.
    """

    rounding_order: Tensor
    inverse_root: Tensor
    importance: Tensor | None


def compute_gptq_factors(
    correlation: Tensor, factors: Tensor | None = None, damping: float = DAMPING, fits_scales: bool = True
) -> GptqFactors:
    """Compute the rounding order and the error propagation factor from the sum of x xᵀ [in, in] over inputs x.

    With `factors` [in], the inputs are x / factors. Inputs with the largest mean square are rounded first, while
    most other inputs can still compensate for them. The root is the upper triangular U with UᵀU = C⁻¹, where C is
    the damped correlation.
    """
    scaled = correlation if factors is None else correlation / factors / factors[:, None]
    order = scaled.diagonal().argsort(descending=True)
    mean = scaled.diagonal().mean()
    if not mean > 0:
        return GptqFactors(order, torch.eye(len(scaled)), None)
    # With inputs in reverse, C = LLᵀ is the Cholesky decomposition, and U is L⁻¹ with rows and columns in reverse.
    reverse = order.flip(0)
    damped = scaled.index_select(0, reverse).index_select(1, reverse).div_(mean)
    damped.diagonal().add_(damping)
    lower = _inverse_of_lower(torch.linalg.cholesky(damped))
    importance = (scaled.diagonal() / mean + damping).float() if fits_scales else None
    return GptqFactors(order, lower.T.flip(0, 1).contiguous().T, importance)  # the kernel reads U by columns


_WHOLE = 64  # rows of a triangular matrix that are solved at once


def _inverse_of_lower(matrix: Tensor) -> Tensor:
    """Return the inverse of a lower triangular matrix; products of its quarters are faster than solving for all rows."""
    half = len(matrix) // 2
    if half < _WHOLE:
        inverse: Tensor = torch.linalg.solve_triangular(matrix, torch.eye(len(matrix), dtype=matrix.dtype), upper=False)
        return inverse
    inverse = torch.zeros_like(matrix)
    inverse[:half, :half] = first = _inverse_of_lower(matrix[:half, :half])
    inverse[half:, half:] = second = _inverse_of_lower(matrix[half:, half:])
    inverse[half:, :half] = (second @ (matrix[half:, :half] @ first)).neg_()
    return inverse


def gptq_int4(
    weight: Tensor, group: int, zero_points: bool, blocks: Sequence[GptqFactors], *, double_quantized: bool = False
) -> Int4Weight:
    """Quantise weight [out, in] of any float dtype to four bits, with codes chosen by GPTQ.

    `blocks` are the factors of consecutive blocks of inputs, which are rounded independently. Minimums and their scales
    are those of `quantise_int4`; other scales are fitted to the importance of the inputs, if known. All values must be finite.
    """
    longest = max(len(block.rounding_order) for block in blocks)
    if zero_points or longest > MAX_CORRELATED or not has_kernel(OpCode.INT4_GPTQ):
        return gptq_int4_torch(weight, group, zero_points, blocks, double_quantized=double_quantized)
    values = weight.float().contiguous()
    rounded, first = _before_gptq(values, group, blocks, double_quantized), 0
    for block in blocks:
        _gptq_block(values, rounded, first, block)
        first += len(block.rounding_order)
    return rounded


def gptq_int4_torch(
    weight: Tensor, group: int, zero_points: bool, blocks: Sequence[GptqFactors], *, double_quantized: bool = False
) -> Int4Weight:
    """Return the result of `gptq_int4` by torch's operations; it is the reference of the native kernel."""
    if zero_points:
        rounded, first = quantise_int4(weight, group, zero_points), 0
    else:
        rounded, first = _before_gptq(weight.float(), group, blocks, double_quantized), 0
    for block in blocks:
        _gptq_block_torch(weight, rounded, first, block)
        first += len(block.rounding_order)
    return rounded


def _before_gptq(weight: Tensor, group: int, blocks: Sequence[GptqFactors], double_quantized: bool) -> Int4Weight:
    """Return the scales of a weight [out, in] fp32, with all codes at zero."""
    weights = [block.importance for block in blocks if block.importance is not None]
    if len(weights) < len(blocks):
        scales = symmetric_scales(_group_inputs(weight, group)).squeeze(-1)
    else:
        weigh = _group_inputs(torch.cat(weights)[None], group)
        parts = _chunks(len(weight), weight.shape[1], weight.device)
        scales = torch.cat([fitted_scales(_group_inputs(weight[rows], group), weigh).squeeze(-1) for rows in parts])
    double = DoubleScales.of(scales) if double_quantized else None
    stored = scales.to(torch.bfloat16) if double is None else double.values
    codes = torch.full((len(weight), scales.shape[1] * group), 8, dtype=torch.uint8)
    return Int4Weight(codes, stored, None, group, weight.shape[1], double)


def fitted_scales(values: Tensor, weigh: Tensor) -> Tensor:
    """Return `symmetric_scales` [..., 1] of groups [..., group], fitted to weights w > 0 of the squared errors.

    For its codes q, the best scale is <wq, v> / <wq, q>.
    """
    scale = symmetric_scales(values)
    codes = symmetric_codes(values, scale)
    weighed = codes * weigh
    length = weighed.mul(codes).sum(-1, keepdim=True)
    fitted = round_to_bf16(weighed.mul_(values).sum(-1, keepdim=True) / length.clamp_min(MIN_MAGNITUDE))
    return torch.where(fitted * scale > 0, fitted, scale)  # weights may differ so much that the sign would change


def _gptq_block(weight: Tensor, rounded: Int4Weight, first: int, gptq_factors: GptqFactors) -> None:
    """Choose the codes of the inputs of one block, which begins at input `first`, by the native kernel.

    `weight` is contiguous fp32.
    """
    order, group = gptq_factors.rounding_order, rounded.group
    root = gptq_factors.inverse_root.T.contiguous()
    scales = rounded.scales[:, first // group : first // group + -(-len(order) // group)].float().contiguous()
    run_operation(
        Int4GptqArguments(
            weight[:, first:].data_ptr(), scales.data_ptr(), root.data_ptr(), order.data_ptr(),
            rounded.codes[:, first:].data_ptr(),
            len(order), len(weight), scales.shape[1], group, weight.stride(0), root.stride(0), rounded.codes.stride(0),
        ),
        OpCode.INT4_GPTQ,
    )  # fmt: skip


def _gptq_block_torch(weight: Tensor, rounded: Int4Weight, first: int, gptq_factors: GptqFactors) -> None:
    """Choose the codes of the inputs of one block by torch's operations."""
    root, group, count = gptq_factors.inverse_root, rounded.group, len(gptq_factors.rounding_order)
    at = slice(first // group, first // group + -(-count // group))
    grouped = rounded.scales[:, at].float().T.contiguous()  # [groups, out]: contiguous for one input, like its weights
    begins = (grouped * -8 if rounded.minimums is None else rounded.minimums[:, at].float().T.contiguous()).unbind()
    inverses = torch.where(grouped.abs() < MIN_MAGNITUDE, 0.0, 1 / grouped).unbind()
    scales = grouped.unbind()
    # [in, out]: weights still to be rounded, with the errors so far added. Single inputs are views, made at once.
    remaining = weight[:, first : first + count].float().T[gptq_factors.rounding_order]
    order, diagonal = gptq_factors.rounding_order.tolist(), root.diagonal().tolist()
    codes = rounded.codes[:, first : first + count].T.contiguous()
    targets, columns = codes.unbind(), remaining.unbind()
    for begin in range(0, len(remaining), _BLOCK):
        block = slice(begin, min(begin + _BLOCK, len(remaining)))
        errors = torch.empty_like(remaining[block])
        for j, error in zip(range(begin, block.stop), errors.unbind(), strict=True):
            of = order[j] // group
            code = torch.sub(columns[j], begins[of], out=error).mul_(inverses[of]).round_().clamp_(0, 15)
            targets[order[j]].copy_(code)
            error.mul_(scales[of]).add_(begins[of]).sub_(columns[j]).mul_(-1 / diagonal[j])
            remaining[j + 1 : block.stop].addr_(root[j, j + 1 : block.stop], error, alpha=-1)
        remaining[block.stop :].addmm_(root[block, block.stop :].T, errors, alpha=-1)
    rounded.codes[:, first : first + count] = codes.T
