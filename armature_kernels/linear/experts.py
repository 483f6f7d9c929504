"""The experts of a mixture: MLPs, with gates or without, of which each row uses some, with the products of all experts in one operation.

Rows are grouped by expert, so an expert's weights are read once for all of its rows (csrc/experts.h; on a GPU
triton/experts.py, for a block of its rows). `run_experts_torch`
computes one expert after the other; it is the reference implementation and serves forms without the operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armature_kernels.elementwise.activations import activate
from armature_kernels.elementwise.embedding import TableLayout
from armature_kernels.elementwise.norms import gate
from armature_kernels.linear.activations import ROW_DTYPES, Activations
from armature_kernels.linear.bf16_panels import Bf16PanelLinear
from armature_kernels.linear.bf16_product import WideRows
from armature_kernels.linear.device import DeviceLinear, StackedWeights
from armature_kernels.linear.device_int8 import DeviceInt8Linear
from armature_kernels.linear.fp32_panels import Fp32PanelLinear
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.layout import FEW_CODE_ROWS
from armature_kernels.linear.linear import LinearForm
from armature_kernels.native.arguments import ACTIVATION_CODES, ExpertsArguments, ExpertWeights, OpCode
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation
from armature_kernels.triton.support import agrees_with_reference, relative_difference, triton_usable

PanelForm = IntPanelLinear | Bf16PanelLinear | Fp32PanelLinear


class ExpertForms(NamedTuple):
    """The forms of an MLP: gate and up [2 * inner, hidden] as one product, or up alone, and down [hidden, inner].

    `scales_inputs`: the weight, one for each token, is multiplied with the input in place of the result.
    """

    gate_up: LinearForm
    down: LinearForm
    has_gates: bool = True
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class ProductStack:
    """The packed weights of one product of all experts, as the native operation reads them."""

    forms: tuple[PanelForm, ...]
    panels: ctypes.Array[ctypes.c_void_p]
    biases: ctypes.Array[ctypes.c_void_p] | None

    @classmethod
    def of(cls, forms: Sequence[LinearForm]) -> ProductStack | None:
        """Return the stack of these forms; None if they are not panels of one layout."""
        panels = [form for form in forms if isinstance(form, PanelForm)]
        if len(panels) < len(forms) or len({_layout(form) for form in panels}) != 1:
            return None
        addresses = ctypes.c_void_p * len(panels)
        biases = [None if form.bias is None else form.bias.data_ptr() for form in panels]
        return cls(
            tuple(panels),
            addresses(*(form.panels.data_ptr() for form in panels)),
            addresses(*biases) if biases[0] is not None else None,
        )

    def arguments(self) -> ExpertWeights:
        """Return the C structure."""
        biases = None if self.biases is None else ctypes.addressof(self.biases)
        return ExpertWeights(ctypes.addressof(self.panels), biases, *_layout(self.forms[0])[:-1])


def _layout(form: PanelForm) -> tuple[int, int, int, int, int, int, bool, bool, int, bool]:
    """Return the numbers of `expert_weights` in csrc/ops.h, and whether there is a bias."""
    sizes, has_bias = (form.outputs, form.inputs), form.bias is not None
    if isinstance(form, IntPanelLinear):
        wide, packing = form.packing.wide, form.packing
        wide_from = {WideRows.NEVER: 0, WideRows.ALWAYS: 1, WideRows.MANY: native_library().wide_rows}[wide]
        wide_from = wide_from if native_library().wide_rows else 0
        return (
            *sizes,
            packing.bits,
            form.group,
            packing.layout.header,
            wide_from,
            False,
            False,
            form.row_groups.shared,
            has_bias,
        )
    if isinstance(form, Bf16PanelLinear):
        return (*sizes, TableLayout.BF16_PANELS, 0, 0, 0, form.fixed, False, 1, has_bias)
    return (*sizes, TableLayout.FP32_PANELS, 0, 0, 0, False, form.is_narrow, 1, has_bias)


class ExpertStack:
    """All experts of a layer in forms that the native operation multiplies."""

    __slots__ = ("down", "gate_up", "scales_inputs")

    def __init__(self, gate_up: ProductStack, down: ProductStack, scales_inputs: bool) -> None:
        self.gate_up, self.down, self.scales_inputs = gate_up, down, scales_inputs

    @classmethod
    def of(cls, experts: Sequence[ExpertForms]) -> ExpertStack | None:
        """Return the stack of these experts; None if a form has no native operation."""
        if not has_kernel(OpCode.EXPERTS):
            return None
        gate_up, down = (
            ProductStack.of(forms) for forms in ([one.gate_up for one in experts], [one.down for one in experts])
        )
        return None if gate_up is None or down is None else cls(gate_up, down, experts[0].scales_inputs)

    def add_to(self, hidden: Tensor, x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> None:
        """Add each row's experts of x to hidden (`run_experts_torch`)."""
        assert x.dtype in ROW_DTYPES and x.stride(1) == 1 and hidden.stride(1) == 1, "rows must be contiguous"
        addresses = (x.data_ptr(), hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), None)
        sizes = (x.stride(0), hidden.stride(0), len(x), len(self.gate_up.forms), ids.shape[1])
        arguments = ExpertsArguments(
            *addresses, self.gate_up.arguments(), self.down.arguments(), *sizes, x.dtype == torch.float32,
            ACTIVATION_CODES[activation], self.scales_inputs,
        )  # fmt: skip
        library = native_library().library
        assert library is not None, "a stack requires the native library"
        scratch = empty((int(library.armature_experts_scratch(ctypes.byref(arguments))),), torch.uint8)
        arguments.scratch = scratch.data_ptr()
        run_operation(arguments)


class DeviceExpertStack:
    """All experts of a layer in the memory of a GPU, one after the other."""

    __slots__ = ("down", "experts", "gate_up")

    def __init__(self, gate_up: StackedWeights, down: StackedWeights, experts: Sequence[ExpertForms]) -> None:
        self.gate_up, self.down, self.experts = gate_up, down, tuple(experts)

    @classmethod
    def of(cls, experts: Sequence[ExpertForms]) -> DeviceExpertStack | None:
        """Return the stack of these experts; None if the operation does not multiply their form, or there is no GPU."""
        gate_up, down = (_stacked(forms) for forms in ([one.gate_up for one in experts], [one.down for one in experts]))
        return None if gate_up is None or down is None else cls(gate_up, down, experts)

    def add_to(self, hidden: Tensor, x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> None:
        """Add each row's experts of x to hidden (`run_experts_torch`)."""
        is_few = ids.numel() <= FEW_CODE_ROWS * len(self.experts)
        case = (self.gate_up.weights.shape, self.gate_up.weights.dtype, self.gate_up.block, x.dtype, activation, is_few)
        if agrees_with_reference("experts", case, lambda: self._difference(x, ids, activation)):
            self._add_to(hidden, x, ids, weights, activation)
        else:
            run_experts_torch(self.experts, hidden, x, ids, weights, activation)

    def _difference(self, x: Tensor, ids: Tensor, activation: str) -> float:
        """Return the relative difference of as many random rows, with random experts, by the kernels and one by one."""
        generator = torch.Generator(x.device).manual_seed(0)
        rows = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        scores = torch.rand(len(x), len(self.experts), generator=generator, device=x.device)
        weights, chosen = scores.topk(ids.shape[1], 1)
        found = [torch.zeros(len(x), self.down.weights.shape[1], device=x.device) for _ in "ab"]
        run_experts_torch(self.experts, found[0], rows, chosen, weights, activation)
        self._add_to(found[1], rows, chosen, weights, activation)
        return relative_difference(found[1], found[0])

    def _add_to(self, hidden: Tensor, x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> None:
        from armature_kernels.triton.experts import ExpertBlocks

        first = self.experts[0]
        if first.scales_inputs:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        blocks = ExpertBlocks.of(ids, len(self.gate_up.weights))
        gate_up = blocks.multiply(x, self.gate_up, is_sorted=False)
        gated = (gate if first.has_gates else activate)(gate_up, activation)
        assert isinstance(gated, Tensor), "it is not quantized"
        sorted_results = blocks.multiply(gated, self.down, is_sorted=True)
        results = torch.empty_like(sorted_results).index_copy_(0, blocks.order, sorted_results)
        hidden += (results.view(*ids.shape, -1).float() * weights[..., None]).sum(1)


def _stacked(forms: Sequence[LinearForm]) -> StackedWeights | None:
    """Return the weights of these forms, each of which has a part of them now; None if a GPU does not multiply them."""
    plain = [form for form in forms if isinstance(form, DeviceLinear)]
    rounded = [form for form in forms if isinstance(form, DeviceInt8Linear)]
    found = [form.weight for form in plain] or [form.codes for form in rounded]
    if len(found) < len(forms) or len({one.block for one in rounded}) > 1 or not triton_usable(found[0]):
        return None
    weights, scales = torch.stack(found), torch.stack([form.scales for form in rounded]) if rounded else None
    for form, weight in zip(plain, weights, strict=False):
        form.weight = weight
    for number, one in enumerate(rounded):
        assert scales is not None
        one.codes, one.scales = weights[number], scales[number]
    held: list[DeviceLinear | DeviceInt8Linear] = [*plain, *rounded]
    biases = [form.bias for form in held if form.bias is not None]
    block = rounded[0].block if rounded else None
    return StackedWeights(weights, torch.stack(biases) if biases else None, scales, block)


def run_experts_torch(
    experts: Sequence[ExpertForms], hidden: Tensor, x: Tensor, ids: Tensor, weights: Tensor, activation: str
) -> None:
    """Add the sum of weights[i, j] times expert ids[i, j] of x[i] to row i of hidden, in the order of j.

    Args:
        experts: The experts.
        hidden: fp32 [tokens, hidden], changed in place.
        x: [tokens, hidden] in the model's dtype.
        ids: int64 [tokens, top_k], all different within a row.
        weights: fp32 [tokens, top_k].
        activation: Of the gates, or of the inner values of experts without gates.
    """
    if experts[0].scales_inputs:
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    results = torch.empty(*ids.shape, hidden.shape[1], device=hidden.device)
    for number, expert in enumerate(experts):
        rows, places = (ids == number).nonzero(as_tuple=True)
        if len(rows):
            results[rows, places] = _run(expert, x[rows], activation).float()
    hidden += (results * weights[..., None]).sum(1)


def _run(expert: ExpertForms, x: Tensor, activation: str) -> Tensor:
    gate_up = expert.gate_up.multiply(x)
    group = expert.down.activation_group(len(gate_up))
    gated: Activations = (gate if expert.has_gates else activate)(gate_up, activation, group)
    return expert.down.multiply(gated)
