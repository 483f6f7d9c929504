"""Native kernels as operators of `torch.library`, namespace `armature`.

A compiled model can call them as opaque nodes. Serving calls the Python functions directly, because an operator
costs more per call. This module contains only schemas, output shapes, and the conversion of quantised rows and
packed weights to tensors. Norm and gate fall back to torch without the native library. Quantised rows and packed
weights exist only with it. Attention and the KV cache are not operators, because they read structures at an
address instead of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.elementwise import norms
from app.kernels.elementwise.activations import TopLogitsRequest
from app.kernels.linear.activations import (
    Activations,
    QuantisedActivations,
    quantise,
    tile_height,
    unquantised,
)
from app.kernels.linear.int_panels import (
    IntPanelFactory,
    IntPanelLinear,
)
from app.kernels.native.library import native_library

Tiles = tuple[Tensor, Tensor, Tensor]  # codes, scales and sums, as in `QuantisedActivations`


@torch.library.custom_op("armature::quantise", mutates_args=(), device_types="cpu")
def quantise_op(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x [rows, size] bf16."""
    return _tiles(quantise(x, group))


@quantise_op.register_fake
def _(x: Tensor, group: int) -> Tiles:
    return _empty_tiles(x, x.shape[0], x.shape[1], group)


@torch.library.custom_op("armature::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm_op(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the RMSNorm of hidden [rows, size] fp32 in bf16."""
    return unquantised(norms.rms_norm(hidden, weight, eps, torch.bfloat16))


@rms_norm_op.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden.new_empty(hidden.shape, dtype=torch.bfloat16)


@torch.library.custom_op("armature::rms_norm_quantised", mutates_args=(), device_types="cpu")
def rms_norm_quantised_op(hidden: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the RMSNorm of hidden [rows, size] fp32, quantised."""
    return _tiles(norms.rms_norm(hidden, weight, eps, torch.bfloat16, group))


@rms_norm_quantised_op.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float, group: int) -> Tiles:
    return _empty_tiles(hidden, hidden.shape[0], hidden.shape[1], group)


@torch.library.custom_op("armature::gate", mutates_args=(), device_types="cpu")
def gate_op(gate_up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up [rows, size] from gate_up [rows, 2 * size] bf16."""
    return unquantised(norms.gate(gate_up, activation))


@gate_op.register_fake
def _(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@torch.library.custom_op("armature::gate_quantised", mutates_args=(), device_types="cpu")
def gate_quantised_op(gate_up: Tensor, activation: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute act(gate) * up from gate_up [rows, 2 * size] bf16, quantised."""
    return _tiles(norms.gate(gate_up, activation, group))


@gate_quantised_op.register_fake
def _(gate_up: Tensor, activation: str, group: int) -> Tiles:
    return _empty_tiles(gate_up, gate_up.shape[0], gate_up.shape[1] // 2, group)


@torch.library.custom_op("armature::linear_int", mutates_args=(), device_types="cpu")
def linear_int_op(
    tiles: list[Tensor], panels: Tensor, bias: Tensor | None, rows: int, sizes: list[int], zero_points: bool
) -> Tensor:
    """Multiply quantised rows by panels, to [rows, outputs] bf16.

    `sizes` contains inputs, outputs, bits, and the inputs that share a scale (0: all).
    """
    form = _form(panels, bias, sizes, zero_points)
    return form.multiply(_rows(tiles, rows, sizes[0], form.group))


@linear_int_op.register_fake
def _(
    tiles: list[Tensor], panels: Tensor, bias: Tensor | None, rows: int, sizes: list[int], zero_points: bool
) -> Tensor:
    return panels.new_empty((rows, sizes[1]), dtype=torch.bfloat16)


@torch.library.custom_op("armature::best", mutates_args=(), device_types="cpu")
def top_logits_op(
    tiles: list[Tensor], panels: Tensor, rows: int, sizes: list[int], zero_points: bool, k: int
) -> tuple[Tensor, Tensor]:
    """Return values [rows, k] fp32 and ids [rows, k] int64 of the top outputs of a product."""
    form = _form(panels, None, sizes, zero_points)
    best = form.top_logits(_rows(tiles, rows, sizes[0], form.group), TopLogitsRequest(k))
    return best.values, best.ids


@top_logits_op.register_fake
def _(
    tiles: list[Tensor], panels: Tensor, rows: int, sizes: list[int], zero_points: bool, k: int
) -> tuple[Tensor, Tensor]:
    return panels.new_empty((rows, k), dtype=torch.float32), panels.new_empty((rows, k), dtype=torch.int64)


def form_arguments(form: IntPanelLinear) -> tuple[Tensor, Tensor | None, list[int], bool]:
    """Return a form as the arguments of the operators: panels, bias, sizes, zero points."""
    packing = form.packing
    return form.panels, form.bias, [form.inputs, form.outputs, packing.bits, packing.group or 0], packing.zero_points


def _form(panels: Tensor, bias: Tensor | None, sizes: list[int], zero_points: bool) -> IntPanelLinear:
    inputs, outputs, bits, group = sizes
    return IntPanelLinear(IntPanelFactory(bits, group or None, zero_points), outputs, inputs, bias, panels)


def _tiles(rows: Activations) -> Tiles:
    assert isinstance(rows, QuantisedActivations), "rows must be quantised, because a group was given"
    return rows.codes, rows.scales, rows.sums


def _rows(tiles: list[Tensor], rows: int, size: int, group: int) -> QuantisedActivations:
    codes, scales, sums = tiles
    return QuantisedActivations(codes, scales, sums, rows, size, group, tile_height(rows))


def _empty_tiles(like: Tensor, rows: int, size: int, group: int) -> Tiles:
    align, groups = native_library().align, -(-size // group)
    most = -(-rows // align) * align
    return (
        like.new_empty((most * groups * group,), dtype=torch.int8),
        like.new_empty((most * groups,), dtype=torch.float32),
        like.new_empty((most * groups,), dtype=torch.int32),
    )
