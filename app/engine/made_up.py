"""Weights of a model that is not loaded: nothing is read and nothing is rounded, bytes are filled with a pattern.

Its codes and scales are finite and small, so what is computed with it takes as long as what is computed with real weights.
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

PATTERN = 0x3C  # twice, it is 0.0115 in bf16; once, 60 in eight bits; half of it 12 or 3 in four
WEIGHT = 0.0115  # where a form packs whole weights
MOST_BYTES = 768 * 2**20  # of made-up layers: filled in a fraction of a second, and free again before the model comes
MOST_IDS = 4096  # different tokens in steps
NOISE_ELEMENTS = 2**23  # of a weight that is made on a device, at a time
OnDevice = DevicePacking | DeviceInt4Packing


class Forms:
    """One form for each layer's product, whichever model asks."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.made: dict[tuple[str, ...], LinearForm] = {}

    def of(self, linear: Linear) -> LinearForm:
        if linear.sources not in self.made:
            bias = torch.zeros(linear.out_features, dtype=self.choice.dtype) if linear.has_bias else None
            self.made[linear.sources] = made_up_form(self.choice.packing(linear), linear, bias, self.choice.dtype)
        return self.made[linear.sources]

    def sizes(self, modules: Iterable[nn.Module]) -> tuple[int, int]:
        """Bytes that products of few rows read, of the layers and of the output layer."""
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
    """So many that they and the output layer exceed the cache twice; at least two, so that one more can be told from one."""
    beyond = math.ceil((2 * extent.cache_bytes - output_bytes) / layer_bytes)
    wanted = max(2, beyond, math.ceil(num_layers / extent.layers_share))
    return min(num_layers, wanted, max(2, MOST_BYTES // layer_bytes))


def table_of(rows: int, size: int, device: torch.device | None = None) -> Tensor:
    """Of an embedding of its own: only the rows that steps look up."""
    return torch.full((rows, size), WEIGHT, dtype=torch.bfloat16, device=device)


def made_up_form(packing: Packing, linear: Linear, bias: Tensor | None, dtype: torch.dtype) -> LinearForm:
    """As that packing makes it of a weight of the layer's size."""
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
    """Made where it lies. Noise, since what a GPU draws depends on how many bits change, and how quickly it runs on what it draws."""
    form, step = packing.room(outputs, inputs, bias), max(1, NOISE_ELEMENTS // inputs)
    generator = torch.Generator(packing.device).manual_seed(0)
    for first in range(0, outputs, step):
        size = (min(step, outputs - first), inputs)
        form.fill(first, torch.randn(size, generator=generator, dtype=packing.dtype, device=packing.device).mul_(WEIGHT))
    return form


def _filled(nbytes: int) -> Tensor:
    return weights_bytes(nbytes).fill_(PATTERN)
