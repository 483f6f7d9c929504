"""Fills a model with a checkpoint's weights.

Weights that are used as stored are memory-mapped; the others are packed one at a time from the mapped file. Peak
memory is the finished weights plus one tensor; the largest are packed first, while little is loaded. For a model in
device memory, the host holds a few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from app.backends.base import Device
from app.hardware.plan import ServingPlan
from app.kernels.compensate import bonds_of
from app.kernels.device_linear import DeviceLinear
from app.kernels.equalise import column_maxima, gauge
from app.kernels.hybrid import HybridLinear
from app.kernels.int_panels import IntPanels
from app.kernels.linear import EmptyForm, Linear, LinearForm, Packing, host_architecture
from app.kernels.panels import PanelLinear
from app.models.decoder import Decoder
from app.models.distances import DistanceBias
from app.models.encoder import Encoder
from app.models.heads import Dense
from app.models.layer_norm import LayerNorm
from app.models.layers import Embedding, RMSNorm
from app.models.registry import build_encoder, build_model
from app.weights.checkpoint import Checkpoint
from app.weights.choice import Choice, KeptPacking, Layer
from app.weights.half import check_half
from app.weights.headers import TensorEntry
from app.weights.pack_cache import Kept, Packs
from app.weights.packed import Progress
from app.weights.recipes import FIXED, find_recipe, for_texts
from app.weights.streams import WeightStreams

Model = Decoder | Encoder
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    checkpoint: Checkpoint, plan: ServingPlan, backend: Device, progress: Progress | None = None, packs: Packs | None = None
) -> Model:
    """Return the model with its weights, ready to run.

    Args:
        checkpoint: The checkpoint.
        plan: The plan, which decides precision and device.
        backend: The device.
        progress: Called with (bytes done, bytes in total) after each tensor.
        packs: Where packed weights are kept; None: they are not kept.
    """
    loading = _Loading(checkpoint, plan, backend, progress or (lambda done, total: None))
    with closing(loading.streams):
        loading.fill(packs)
    return loading.model


def pack_weights(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    backend: Device,
    progress: Progress,
    packs: Packs,
    correlations: Mapping[tuple[str, ...], Tensor] | None = None,
) -> Kept | None:
    """Load as for serving, so that the weights are packed and kept.

    Args:
        checkpoint: The checkpoint.
        plan: The plan.
        backend: The device.
        progress: Called with (bytes done, bytes in total) after each tensor.
        packs: Where packed weights are kept.
        correlations: Sums of x xᵀ over the inputs x, [in, in], by a linear layer's sources. They improve the
            quantization (GPTQ); with them, the weights are packed again even if a pack exists.

    Returns:
        The pack file, or None if this form is not kept.
    """
    loading = _Loading(checkpoint, plan, backend, progress)
    loading.correlations = correlations or {}
    with closing(loading.streams):
        return loading.fill(packs)


def choice_of(plan: ServingPlan, texts: bool = False, device: torch.device | None = None) -> Choice:
    """Return how the plan's weights are held.

    Args:
        plan: The plan.
        texts: True for encoders.
        device: The backend's device.
    """
    precision, kind = plan.precision.value, plan.device.value
    recipe = FIXED[precision] if plan.deterministic.value else find_recipe(kind, host_architecture(), precision)
    recipe = for_texts(recipe) if texts else recipe
    own = None if kind == "cpu" else device
    return Choice(recipe, DTYPES[plan.dtype.value], plan.int8_copy.value, plan.most_few_rows.value, own)


def _build(checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Model:
    if checkpoint.kind == "encoder":
        return build_encoder(checkpoint.encoder, dtype, max_model_len, device)
    return build_model(checkpoint.decoder, dtype, max_model_len, device)


class _Loading:
    """The state of one load: the model, the progress, and the smooth scales of each layer."""

    def __init__(self, checkpoint: Checkpoint, plan: ServingPlan, backend: Device, progress: Progress) -> None:
        self.checkpoint, self.progress = checkpoint, progress
        self.choice = choice_of(plan, checkpoint.kind == "encoder", backend.device)
        self.model = _build(checkpoint, self.choice.dtype, plan.max_model_len.value, backend.device)
        self.streams = WeightStreams(checkpoint.tensors)
        self.factors: dict[tuple[str, ...], Tensor] = {}  # scales of the columns, by a layer's sources
        self.correlations: Mapping[tuple[str, ...], Tensor] = {}  # correlations of the inputs, by a layer's sources
        self.done, self.total = 0, sum(entry.nbytes for entry in checkpoint.tensors.values())

    @torch.inference_mode()
    def fill(self, packs: Packs | None) -> Kept | None:
        modules = list(self.model.modules())
        linears = [module for module in modules if isinstance(module, Linear)]
        norms = [module for module in modules if isinstance(module, RMSNorm)]
        for norm in norms:
            self._adopt(norm)
        layers = self._layers(linears, norms)
        kept = None if packs is None else packs.open(self.checkpoint, self.choice, layers)
        blobs = None if kept is None or self.correlations else kept.read(self._told)
        for layer in sorted(layers, key=lambda layer: -layer.linear.in_features * layer.linear.out_features):
            self._pack(layer, blobs)
        packed = {linear.sources: linear.form for linear in linears}
        for module in modules:
            if isinstance(module, Embedding):
                self._embed(module, packed.get((module.source,)))
            elif isinstance(module, LayerNorm | Dense | DistanceBias):
                self._adopt_both(module)
        self.progress(self.total, self.total)
        if kept is not None and blobs is None:
            kept.keep({name: part for layer in layers for name, part in layer.parts(self.factors.get(layer.linear.sources))})
        return kept

    def _layers(self, linears: Sequence[Linear], norms: Sequence[RMSNorm]) -> list[Layer]:
        """Return each linear layer with its packing and with the norm that is equalized with it."""
        feeding = {norm.feeds: norm for norm in norms if norm.feeds is not None}
        layers = []
        for linear in linears:
            packing = self.choice.packing(linear)
            layers.append(Layer(linear, packing, feeding.get(linear) if self.choice.evens(packing) else None))
        return layers

    def _told(self, done: int, total: int) -> None:
        """Report the progress of reading packed weights as the progress of the whole load."""
        self.done = self.total * done // max(1, total)
        self.progress(self.done, self.total)

    def _embed(self, embedding: Embedding, tied: LinearForm | None) -> None:
        if isinstance(tied, PanelLinear | IntPanels | HybridLinear | DeviceLinear):
            embedding.share(tied, self.factors.get((embedding.source,)))
            self._advance(self.streams.entries((embedding.source,)))
        else:
            self._adopt(embedding)

    def _adopt(self, module: Embedding | RMSNorm) -> None:
        (entry,) = self.streams.entries((module.source,))
        module.adopt(self.streams.held(entry, self.choice.device))
        self._advance((entry,))

    def _adopt_both(self, module: LayerNorm | Dense | DistanceBias) -> None:
        kinds = ("weight", "bias") if module.has_bias else ("weight",)
        entries = [entry for kind in kinds for entry in self.streams.entries((module.source,), kind)]
        module.adopt(*(self.streams.held(entry, self.choice.device) for entry in entries))
        self._advance(entries)

    def _pack(self, layer: Layer, blobs: Mapping[str, Tensor] | None) -> None:
        linear, entries = layer.linear, self.streams.entries(layer.linear.sources)
        factors = None
        if layer.norm is not None:
            factors = self._factors(layer.norm, layer, entries) if blobs is None else layer.factors(blobs)
            layer.norm.divide(factors)
            self.factors[linear.sources] = factors
        if blobs is not None and isinstance(layer.packing, KeptPacking):
            linear.form = layer.packing.restored(linear.out_features, linear.in_features, self._bias(linear), layer.of(blobs))
        else:
            linear.form = self._form(linear, layer.packing, entries, factors)
        self._advance(entries)

    def _factors(self, norm: RMSNorm, layer: Layer, entries: Sequence[TensorEntry]) -> Tensor:
        parts = (rows for _, rows in self._blocks(entries))
        return gauge(norm.weight, column_maxima(parts, layer.linear.in_features, self.choice.device))

    def _blocks(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, Tensor]]:
        """Yield the stacked rows of the entries on the model's device; each is valid until the next."""
        for first, rows in self.streams.blocks(entries):
            yield first, rows if self.choice.device is None else rows.to(self.choice.device)

    def _bias(self, linear: Linear) -> Tensor | None:
        if not linear.has_bias:
            return None
        self._advance(self.streams.entries(linear.sources, "bias"))
        for source, entry in zip(linear.sources, self.streams.entries(linear.sources, "bias"), strict=True):
            check_half(f"{source}.bias", self.streams.stored(entry), self.choice.dtype)
        return self.streams.bias(linear.sources, self.choice.dtype)

    def _form(self, linear: Linear, packing: Packing, entries: Sequence[TensorEntry], factors: Tensor | None) -> LinearForm:
        bias = self._bias(linear)
        empty = packing.room(linear.out_features, linear.in_features, bias)
        if empty is not None:
            fill, first = self._filling(empty, linear, factors), 0
            for source, entry in zip(linear.sources, entries, strict=True):
                for row, rows in self._blocks((entry,)):
                    check_half(f"{source}.weight", rows, self.choice.dtype)
                    fill(first + row, rows if factors is None else rows * factors)
                first += entry.shape[0]
            return empty
        weight, mapped = self.streams.whole(entries, self.choice.dtype, packing.keeps_weight)
        form = packing.pack(weight if factors is None else weight * factors, bias)
        if not (mapped and packing.keeps_weight):
            self.streams.drop(entries)
        return form

    def _filling(self, empty: EmptyForm, linear: Linear, factors: Tensor | None) -> Callable[[int, Tensor], None]:
        """Return the function that fills a form with rows; int4 forms also use the input correlations."""
        correlation = self.correlations.get(linear.sources)
        if correlation is None or not isinstance(empty, IntPanels | HybridLinear):
            return empty.fill
        return partial(empty.fill, bonds=bonds_of(correlation, factors))

    def _advance(self, entries: Sequence[TensorEntry]) -> None:
        self.done = min(self.total, self.done + sum(entry.nbytes for entry in entries))  # a tied embedding is counted twice
        self.progress(self.done, self.total)
