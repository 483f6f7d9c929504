"""Synthetic weights for a model that is not loaded: bytes are filled with a pattern of finite, small values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.models.decoders.decoder import Embedding
from app.models.decoders.layers import Filters, HeadNorm, MixtureOfExperts, Norm, StoredVector, Xielu
from app.models.decoders.shapes import is_router
from app.weights.form_choice import CacheablePacking, FormChoice
from app.weights.forms import OUTPUT_SOURCES
from armature_kernels.linear.activations import Activations, rows_of
from armature_kernels.linear.bf16_panels import HybridFactory
from armature_kernels.linear.fp32_panels import FloatPanelLinear
from armature_kernels.linear.linear import DevicePacking, FormFactory, Linear, LinearForm
from armature_kernels.linear.torchao_linear import TorchaoFactory
from armature_kernels.native.memory import allocate_weights

FILL_BYTE = 0x3C  # two bytes of it are 0.0115 in bf16; one is 60 in eight bits; its halves are 3 and 12 in four bits
FILL_WEIGHT = 0.0115  # the value where a form packs whole weights
# limit of the layers; filled in a fraction of a second and released before the model is loaded
MAX_LAYER_BYTES = 768 * 2**20
MAX_TOKEN_IDS = 4096  # number of different token ids in steps
MAX_ROUTED_ROWS = 8192  # rows of a step
NOISE_ELEMENTS = 2**23  # elements of a weight that are generated on a device at a time
# Address space of a region: enough for `MAX_LAYER_BYTES` and an output layer. Only what trials use takes memory.
REGION_BYTES = 2**30
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class TrialScope:
    """The part of a model that is built with synthetic weights.

    - `cache_bytes`: size of the largest cache, which the weights of a step must exceed.
    - `layers_share`: at least one layer in this many is built.
    - `most_outputs`: limit for the output layer; the rest of it is counted as layers.
    """

    cache_bytes: int
    layers_share: int
    most_outputs: int | None = None


class SyntheticMemory:
    """Memory that trials of different precisions use one after another, filled once with the pattern.

    A first write to memory costs several times as much as a step that reads it.
    """

    def __init__(self) -> None:
        self._region: Tensor | None = None
        self._filled = 0

    def filled(self, first: int, nbytes: int) -> Tensor | None:
        end = first + nbytes
        if end > REGION_BYTES:
            return None
        if self._region is None:
            try:
                self._region = allocate_weights(REGION_BYTES)
            except (OSError, MemoryError):  # the address space is limited
                return None
        if end > self._filled:
            self._region[self._filled : end].fill_(FILL_BYTE)
            self._filled = end
        return self._region[first:end]


class SyntheticForms:
    """The linear forms, one for each product of a layer, shared by all models of a trial."""

    def __init__(self, choice: FormChoice, memory: SyntheticMemory | None = None) -> None:
        self.choice = choice
        self._by_size: dict[tuple[tuple[str, ...], int], LinearForm] = {}
        self._memory, self._used = memory or SyntheticMemory(), 0

    def form(self, linear: Linear) -> LinearForm:
        key = (linear.sources, linear.out_features)
        if key not in self._by_size:
            if is_router(linear.sources[0]) and self.choice.device is None:
                self._by_size[key] = RandomLogits(linear.out_features)
                return self._by_size[key]
            bias = torch.zeros(linear.out_features, dtype=self.choice.dtype) if linear.has_bias else None
            self._by_size[key] = synthetic_form(
                self.choice.packing(linear), linear, bias, self.choice.dtype, self._take
            )
        return self._by_size[key]

    def tied_form(self, source: str, rows: int) -> LinearForm | None:
        """Return the form that holds an embedding of so many rows as well; None if no product does."""
        return self._by_size.get(((source,), rows))

    def _take(self, nbytes: int) -> Tensor:
        """Return bytes filled with the pattern that no other form of these has."""
        found = self._memory.filled(self._used, nbytes)
        if found is None:
            return _filled_bytes(nbytes)
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return found

    def read_sizes(self, modules: Iterable[nn.Module]) -> tuple[int, int]:
        """Return the bytes that products of one row read: those of the layers, and those of the output layer."""
        linears, shares = [], dict[Linear, float]()
        for module in modules:
            if isinstance(module, Linear):
                linears.append(module)
            elif isinstance(module, MixtureOfExperts):
                used = module.routing.top_k / module.routing.num_experts
                shares |= {one: used for one in module.experts.modules() if isinstance(one, Linear)}
        output = sum(self._read_bytes(one) for one in linears if one.sources in OUTPUT_SOURCES)
        return round(sum(shares.get(one, 1.0) * self._read_bytes(one) for one in linears)) - output, output

    def _read_bytes(self, linear: Linear) -> int:
        packing = self.choice.packing(linear)
        packing = packing.few if isinstance(packing, HybridFactory) else packing
        if isinstance(packing, CacheablePacking):
            return sum(packing.part_bytes(linear.out_features, linear.in_features))
        if isinstance(packing, DevicePacking):
            return packing.weight_bytes(linear.out_features, linear.in_features)
        if isinstance(packing, TorchaoFactory):
            return self.form(linear).nbytes
        return linear.out_features * linear.in_features * self.choice.dtype.itemsize


class RandomLogits:
    """In place of a router's weights: the same logits for each row at every step, since all synthetic rows are equal."""

    def __init__(self, outputs: int) -> None:
        generator = torch.Generator().manual_seed(outputs)
        self._logits = torch.randn(MAX_ROUTED_ROWS, outputs, generator=generator)

    @property
    def nbytes(self) -> int:
        return self._logits.nbytes

    def activation_group(self, rows: int) -> None: ...

    def multiply(self, x: Activations) -> Tensor:
        assert rows_of(x) <= MAX_ROUTED_ROWS, "a trial's steps have fewer rows"
        return self._logits[: rows_of(x)]

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        hidden += self.multiply(x)


def num_trial_layers(
    num_layers: int, scope: TrialScope, layer_bytes: float, output_bytes: int, held: float = 1.0
) -> int:
    """Return the number of layers to build, so that they and the output layer exceed the cache twice.

    At least two, so that the cost of one more layer can be measured. A layer holds `held` times what a step reads.
    """
    beyond = math.ceil((2 * scope.cache_bytes - output_bytes) / layer_bytes)
    wanted = max(2, beyond, math.ceil(num_layers / scope.layers_share))
    return min(num_layers, wanted, max(2, int(MAX_LAYER_BYTES / (held * layer_bytes))))


def synthetic_table(rows: int, size: int, device: torch.device | None = None) -> Tensor:
    """Return the table of an untied embedding, [rows, size] bf16: only the rows that steps look up."""
    return torch.full((rows, size), FILL_WEIGHT, dtype=torch.bfloat16, device=device)


def fill_vectors(model: nn.Module, device: torch.device) -> None:
    """Fill what is no product and no table: norms, filters, sinks and factors of activations."""
    for module in model.modules():
        if isinstance(module, Norm | Filters | HeadNorm | StoredVector | Xielu):
            module.fill(1.0, device)


def fill_table(embedding: Embedding, vocab_size: int, device: torch.device) -> None:
    is_token_table = embedding.absent_first or len(embedding.weight) == vocab_size
    rows = len(embedding.weight) + embedding.first
    rows = min(rows, MAX_TOKEN_IDS) if is_token_table else rows
    embedding.set_weight(synthetic_table(rows, embedding.weight.shape[1], device))


def synthetic_form(
    packing: FormFactory,
    linear: Linear,
    bias: Tensor | None,
    dtype: torch.dtype,
    filled_bytes: Callable[[int], Tensor] | None = None,
) -> LinearForm:
    """Return a form as `packing` makes it from a weight of the layer's size, over bytes of `filled_bytes`."""
    outputs, inputs, filled_bytes = linear.out_features, linear.in_features, filled_bytes or _filled_bytes
    if isinstance(packing, CacheablePacking):
        parts = [filled_bytes(nbytes) for nbytes in packing.part_bytes(outputs, inputs)]
        return packing.from_parts(outputs, inputs, bias, parts)
    if isinstance(packing, DevicePacking):
        return _noise_form(packing, outputs, inputs, bias)
    empty = packing.empty_form(outputs, inputs, bias)
    if isinstance(empty, FloatPanelLinear):
        empty.panels = filled_bytes(empty.panels.nbytes)
        return empty
    return packing.pack(torch.full((outputs, inputs), FILL_WEIGHT, dtype=dtype), bias)


def _noise_form(packing: DevicePacking, outputs: int, inputs: int, bias: Tensor | None) -> LinearForm:
    """Build the form filled with noise: a GPU's power, and so its speed, depends on how many bits change."""
    form, step = packing.empty_form(outputs, inputs, bias), max(1, NOISE_ELEMENTS // inputs)
    generator = torch.Generator(packing.device).manual_seed(0)
    for first in range(0, outputs, step):
        size = (min(step, outputs - first), inputs)
        form.fill(
            first, torch.randn(size, generator=generator, dtype=packing.dtype, device=packing.device).mul_(FILL_WEIGHT)
        )
    return form


def _filled_bytes(nbytes: int) -> Tensor:
    return allocate_weights(nbytes).fill_(FILL_BYTE)
