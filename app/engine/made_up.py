"""Synthetic weights for a model that is not loaded: nothing is read or quantized, bytes are filled with a pattern.

Codes and scales are finite and small, so computing with them takes as long as with real weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from app.engine.looks import Extent
from app.kernels.device_int4 import DeviceInt4Packing
from app.kernels.device_linear import DevicePacking
from app.kernels.hybrid import HybridPacking
from app.kernels.linear import Linear, LinearForm, Packing
from app.kernels.memory import weights_bytes
from app.kernels.panels import PanelLinear
from app.weights.choice import OUTPUT_SOURCES, Choice, KeptPacking

PATTERN = 0x3C  # two bytes of it are 0.0115 in bf16; one is 60 in eight bits; its halves are 3 and 12 in four bits
WEIGHT = 0.0115  # the value where a form packs whole weights
# limit of the layers; filled in a fraction of a second and released before the model is loaded
MOST_BYTES = 768 * 2**20
MOST_IDS = 4096  # number of different token ids in steps
NOISE_ELEMENTS = 2**23  # elements of a weight that are generated on a device at a time
OnDevice = DevicePacking | DeviceInt4Packing


class Forms:
    """The linear forms, one for each product of a layer, shared by all models of a trial."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.made: dict[tuple[str, ...], LinearForm] = {}

    def of(self, linear: Linear) -> LinearForm:
        """Return the form of this product, made on first use."""
        if linear.sources not in self.made:
            bias = torch.zeros(linear.out_features, dtype=self.choice.dtype) if linear.has_bias else None
            self.made[linear.sources] = made_up_form(self.choice.packing(linear), linear, bias, self.choice.dtype)
        return self.made[linear.sources]

    def sizes(self, modules: Iterable[nn.Module]) -> tuple[int, int]:
        """Return the bytes that products of few rows read: those of the layers, and those of the output layer."""
        linears = [module for module in modules if isinstance(module, Linear)]
        output = sum(self._read_bytes(one) for one in linears if one.sources in OUTPUT_SOURCES)
        return sum(self._read_bytes(one) for one in linears) - output, output

    def _read_bytes(self, linear: Linear) -> int:
        packing = self.choice.packing(linear)
        packing = packing.few if isinstance(packing, HybridPacking) else packing
        if isinstance(packing, KeptPacking):
            return sum(packing.part_bytes(linear.out_features, linear.in_features))
        if isinstance(packing, OnDevice):
            return packing.held_bytes(linear.out_features, linear.in_features)
        return linear.out_features * linear.in_features * self.choice.dtype.itemsize


def few_layers(num_layers: int, extent: Extent, layer_bytes: int, output_bytes: int) -> int:
    """Return the number of layers to build, so that they and the output layer exceed the cache twice.

    At least two, so that the cost of one more layer can be measured.
    """
    beyond = math.ceil((2 * extent.cache_bytes - output_bytes) / layer_bytes)
    wanted = max(2, beyond, math.ceil(num_layers / extent.layers_share))
    return min(num_layers, wanted, max(2, MOST_BYTES // layer_bytes))


def table_of(rows: int, size: int, device: torch.device | None = None) -> Tensor:
    """Return the table of an untied embedding, [rows, size] bf16: only the rows that steps look up."""
    return torch.full((rows, size), WEIGHT, dtype=torch.bfloat16, device=device)


def made_up_form(packing: Packing, linear: Linear, bias: Tensor | None, dtype: torch.dtype) -> LinearForm:
    """Return a form as `packing` makes it from a weight of the layer's size."""
    outputs, inputs = linear.out_features, linear.in_features
    if isinstance(packing, KeptPacking):
        return packing.restored(outputs, inputs, bias, [_filled(nbytes) for nbytes in packing.part_bytes(outputs, inputs)])
    if isinstance(packing, OnDevice):
        return _of_noise(packing, outputs, inputs, bias)
    empty = packing.room(outputs, inputs, bias)
    if isinstance(empty, PanelLinear):
        empty.panels.fill_(PATTERN)
        return empty
    return packing.pack(torch.full((outputs, inputs), WEIGHT, dtype=dtype), bias)


def _of_noise(packing: OnDevice, outputs: int, inputs: int, bias: Tensor | None) -> LinearForm:
    """Build the form on its device, filled with noise.

    The power that a GPU draws depends on how many bits change, and its speed depends on that power.
    """
    form, step = packing.room(outputs, inputs, bias), max(1, NOISE_ELEMENTS // inputs)
    generator = torch.Generator(packing.device).manual_seed(0)
    for first in range(0, outputs, step):
        size = (min(step, outputs - first), inputs)
        form.fill(first, torch.randn(size, generator=generator, dtype=packing.dtype, device=packing.device).mul_(WEIGHT))
    return form


def _filled(nbytes: int) -> Tensor:
    return weights_bytes(nbytes).fill_(PATTERN)
