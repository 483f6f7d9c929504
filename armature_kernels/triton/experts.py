"""Products of a mixture's experts on a GPU: each row of a step with the weights of the experts that it uses.

Rows are sorted by expert and cut into blocks of one expert each, so an expert's weights are read once for up to a block of
rows. How many blocks there may be follows from the shapes alone, and nothing waits for the device, so a graph can capture
it. The reference is `run_experts_torch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.linear.device import StackedWeights
from armature_kernels.triton.launch import launch_options, wait_for_inputs
from armature_kernels.triton.linear import as_bytes, code_values, inputs_of_block

_FEW_ROWS, _MANY_ROWS = 16, 64  # of a block; the least that a product takes, and enough to be bound by arithmetic
_OUTPUTS, _INPUTS = 64, 64  # of a block


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Rows of a step sorted by expert: `order` int64 [rows * top_k] has the place of each in the ids, row by row.

    Block b is of expert `experts[b]` int32 (-1: there is no such block) and begins at `firsts[b]` of the sorted rows, which
    end at `ends[expert]`.
    """

    order: Tensor
    experts: Tensor
    firsts: Tensor
    ends: Tensor
    top_k: int
    rows: int

    @classmethod
    def of(cls, ids: Tensor, num_experts: int) -> ExpertBlocks:
        """Sort ids int64 [rows, top_k] of experts."""
        total = ids.numel()
        rows = _FEW_ROWS if total <= _FEW_ROWS * num_experts else _MANY_ROWS
        sorted_ids, order = ids.flatten().sort(stable=True)
        bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
        blocks = (bounds.diff() + (rows - 1)) // rows
        last = blocks.cumsum(0)
        numbers = torch.arange(triton.cdiv(total, rows) + min(num_experts, total), device=ids.device)
        found = torch.searchsorted(last, numbers, right=True)
        expert = found.clamp(max=num_experts - 1)
        firsts = bounds[expert] + (numbers - last[expert] + blocks[expert]) * rows
        experts = torch.where(found < num_experts, expert, -1).int()
        return cls(order, experts, firsts, bounds[1:], ids.shape[1], rows)

    def multiply(self, x: Tensor, stacked: StackedWeights, is_sorted: bool) -> Tensor:
        """Return the products [rows * top_k, outputs] of the sorted rows with their experts' weights.

        Args:
            x: [rows, inputs], or [rows * top_k, inputs] if `is_sorted`; elements of a row are contiguous.
            stacked: All of them contiguous; weights in the dtype of x, or codes (int8, E4M3) with scales.
            is_sorted: x has the sorted rows already.
        """
        weights, biases, scales, block = stacked
        _, outputs, inputs = weights.shape
        height, width = block or (1, inputs)
        assert weights.is_contiguous() and x.stride(1) == 1 and x.shape[1] == inputs, "weights are addressed by shape"
        out = x.new_empty((len(self.order), outputs))
        grid = (len(self.experts), triton.cdiv(outputs, _OUTPUTS))
        _multiply[grid](
            x, as_bytes(weights), biases, scales, out, self.order, self.experts, self.firsts, self.ends, x.stride(0),
            inputs, outputs, height, width, 0 if is_sorted else self.top_k,
            self.rows, _OUTPUTS, inputs_of_block(inputs, width, _INPUTS), num_warps=4,
            **launch_options(),
        )  # fmt: skip
        return out


@triton.jit
def _multiply(
    x, weights, biases, scales, out, order, experts, firsts, ends, stride,
    inputs: tl.constexpr, outputs: tl.constexpr, height: tl.constexpr, width: tl.constexpr, top_k: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    block, at = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(firsts + block) + tl.arange(0, ROWS)
    inside, there = rows < tl.load(ends + expert), at < outputs
    source = rows
    if top_k > 0:
        source = tl.load(order + rows, mask=inside, other=0) // top_k
    row_pointers = x + source[:, None] * stride
    weight_pointers = weights + expert * outputs * inputs + at[None, :] * inputs
    scale_places = (expert * tl.cdiv(outputs, height) + at // height) * tl.cdiv(inputs, width)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        is_input = place < inputs
        left = tl.load(row_pointers + place[None, :], mask=inside[:, None] & is_input[None, :], other=0.0)
        right = tl.load(weight_pointers + place[:, None], mask=is_input[:, None] & there[None, :], other=0)
        right = code_values(right, left.dtype)
        if width < inputs:
            scale = tl.load(scales + scale_places + first // width, mask=there, other=0.0).to(tl.float32)
            total += tl.dot(left, right, input_precision="ieee") * scale[None, :]
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
    if scales is not None and width >= inputs:
        total *= tl.load(scales + scale_places, mask=there, other=0.0).to(tl.float32)[None, :]
    if weights.dtype.element_ty == tl.uint8:
        total *= 256
    if biases is not None:
        total += tl.load(biases + expert * outputs + at, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out + rows[:, None] * outputs + at[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])
