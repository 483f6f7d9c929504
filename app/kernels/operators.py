"""Our kernels as operators of `torch.library`, namespace `armature`: a compiled model holds them as what it may not look into.

Serving calls the Python functions themselves, since an operator costs more a call; here are only schemas, shapes, and what quantised
rows and packed weights are made of. Norm and gate have their torch twin where the library is missing; rows in tiles and weights in panels
exist only where it made them. Attention and the cache are no operators: what they read is described at an address, not in tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels import rowwise
from app.kernels.activations import Activations, Quantised, plain, quantise, tile_height
from app.kernels.best import Wanted
from app.kernels.int_panels import IntPacking, IntPanels
from app.kernels.native import native

Tiles = tuple[Tensor, Tensor, Tensor]  # codes, scales and sums, as activations.py has them


@torch.library.custom_op("armature::quantise", mutates_args=(), device_types="cpu")
def quantise_op(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, size] bf16."""
    return _tiles(quantise(x, group))


@quantise_op.register_fake
def _(x: Tensor, group: int) -> Tiles:
    return _shape_of_tiles(x, x.shape[0], x.shape[1], group)


@torch.library.custom_op("armature::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm_op(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden [rows, size] fp32 to bf16."""
    return plain(rowwise.rms_norm(hidden, weight, eps, torch.bfloat16))


@rms_norm_op.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden.new_empty(hidden.shape, dtype=torch.bfloat16)


@torch.library.custom_op("armature::rms_norm_quantised", mutates_args=(), device_types="cpu")
def rms_norm_quantised_op(hidden: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [rows, size] fp32."""
    return _tiles(rowwise.rms_norm(hidden, weight, eps, torch.bfloat16, group))


@rms_norm_quantised_op.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float, group: int) -> Tiles:
    return _shape_of_tiles(hidden, hidden.shape[0], hidden.shape[1], group)


@torch.library.custom_op("armature::gate", mutates_args=(), device_types="cpu")
def gate_op(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [rows, 2 * size] bf16 to [rows, size]."""
    return plain(rowwise.gate(gate_up, activation))


@gate_op.register_fake
def _(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@torch.library.custom_op("armature::gate_quantised", mutates_args=(), device_types="cpu")
def gate_quantised_op(gate_up: Tensor, activation: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up [rows, 2 * size] bf16 to rows of `size`."""
    return _tiles(rowwise.gate(gate_up, activation, group))


@gate_quantised_op.register_fake
def _(gate_up: Tensor, activation: str, group: int) -> Tiles:
    return _shape_of_tiles(gate_up, gate_up.shape[0], gate_up.shape[1] // 2, group)


@torch.library.custom_op("armature::linear_int", mutates_args=(), device_types="cpu")
def linear_int_op(
    tiles: list[Tensor], panels: Tensor, bias: Tensor | None, rows: int, sizes: list[int], zero_points: bool
) -> Tensor:
    """Quantised rows times panels, to [rows, outputs] bf16. sizes: inputs, outputs, bits, and inputs that share a scale (0: all)."""
    form = _form(panels, bias, sizes, zero_points)
    return form.multiply(_rows(tiles, rows, sizes[0], form.group))


@linear_int_op.register_fake
def _(tiles: list[Tensor], panels: Tensor, bias: Tensor | None, rows: int, sizes: list[int], zero_points: bool) -> Tensor:
    return panels.new_empty((rows, sizes[1]), dtype=torch.bfloat16)


@torch.library.custom_op("armature::best", mutates_args=(), device_types="cpu")
def best_op(tiles: list[Tensor], panels: Tensor, rows: int, sizes: list[int], zero_points: bool, k: int) -> tuple[Tensor, Tensor]:
    """Values [rows, k] fp32 and ids [rows, k] of the best outputs of such a product."""
    form = _form(panels, None, sizes, zero_points)
    best = form.best(_rows(tiles, rows, sizes[0], form.group), Wanted(k))
    return best.values, best.ids


@best_op.register_fake
def _(tiles: list[Tensor], panels: Tensor, rows: int, sizes: list[int], zero_points: bool, k: int) -> tuple[Tensor, Tensor]:
    return panels.new_empty((rows, k), dtype=torch.float32), panels.new_empty((rows, k), dtype=torch.int64)


def described(form: IntPanels) -> tuple[Tensor, Tensor | None, list[int], bool]:
    """A form as operators take it: panels, bias, sizes, zero points."""
    packing = form.packing
    return form.panels, form.bias, [form.inputs, form.outputs, packing.bits, packing.group or 0], packing.zero_points


def _form(panels: Tensor, bias: Tensor | None, sizes: list[int], zero_points: bool) -> IntPanels:
    inputs, outputs, bits, group = sizes
    return IntPanels(IntPacking(bits, group or None, zero_points), outputs, inputs, bias, panels)


def _tiles(rows: Activations) -> Tiles:
    assert isinstance(rows, Quantised), "a group was asked for"
    return rows.codes, rows.scales, rows.sums


def _rows(tiles: list[Tensor], rows: int, size: int, group: int) -> Quantised:
    codes, scales, sums = tiles
    return Quantised(codes, scales, sums, rows, size, group, tile_height(rows))


def _shape_of_tiles(like: Tensor, rows: int, size: int, group: int) -> Tiles:
    align, groups = native().align, -(-size // group)
    most = -(-rows // align) * align
    return (
        like.new_empty((most * groups * group,), dtype=torch.int8),
        like.new_empty((most * groups,), dtype=torch.float32),
        like.new_empty((most * groups,), dtype=torch.int32),
    )
