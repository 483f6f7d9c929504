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

from app.backends.base import BaseBackend
from app.hardware.plan.plan import ServingPlan
from app.kernels.linear.bf16_panels import Bf16PanelLinear, HybridLinear
from app.kernels.linear.device import DeviceLinear
from app.kernels.linear.int_panels import IntPanelLinear
from app.kernels.linear.linear import EmptyForm, FormFactory, Linear, LinearForm, host_architecture
from app.kernels.linear.quantization import column_maxima, compute_gptq_factors, smooth_scales
from app.models.decoders.decoder import Decoder, Embedding, RMSNorm
from app.models.encoders.encoder import DistanceBias, Encoder
from app.models.encoders.heads import DenseLayer, LayerNorm
from app.models.registry import build_decoder_model, build_encoder_model
from app.weights.checkpoint import Checkpoint
from app.weights.form_choice import CacheablePacking, FormChoice, LayerPacking
from app.weights.forms import DETERMINISTIC_RECIPES, find_recipe, for_encoder
from app.weights.packs import PackFile, PackFolder, Progress
from app.weights.safetensors import TensorEntry
from app.weights.tensor_reader import TensorReader, check_fp16

Model = Decoder | Encoder
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    backend: BaseBackend,
    progress: Progress | None = None,
    packs: PackFolder | None = None,
) -> Model:
    """Return the model with its weights, ready to run.

    Args:
        checkpoint: The checkpoint.
        plan: The plan, which decides precision and device.
        backend: The device.
        progress: Called with (bytes done, bytes in total) after each tensor.
        packs: Where packed weights are kept; None: they are not kept.
    """
    loading = _ModelLoader(checkpoint, plan, backend, progress or (lambda done, total: None))
    with closing(loading.streams):
        loading.fill(packs)
    return loading.model


def pack_weights(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    backend: BaseBackend,
    progress: Progress,
    packs: PackFolder,
    correlations: Mapping[tuple[str, ...], Tensor] | None = None,
) -> PackFile | None:
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
    loading = _ModelLoader(checkpoint, plan, backend, progress)
    loading.correlations = correlations or {}
    with closing(loading.streams):
        return loading.fill(packs)


def form_choice(plan: ServingPlan, texts: bool = False, device: torch.device | None = None) -> FormChoice:
    """Return how the plan's weights are held.

    Args:
        plan: The plan.
        texts: True for encoders.
        device: The backend's device.
    """
    precision, kind = plan.precision.value, plan.device.value
    recipe = (
        DETERMINISTIC_RECIPES[precision]
        if plan.deterministic.value
        else find_recipe(kind, host_architecture(), precision)
    )
    recipe = for_encoder(recipe) if texts else recipe
    own = None if kind == "cpu" else device
    return FormChoice(recipe, DTYPES[plan.dtype.value], plan.int8_copy.value, plan.most_few_rows.value, own)


def _build(checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Model:
    if checkpoint.kind == "encoder":
        return build_encoder_model(checkpoint.encoder, dtype, max_model_len, device)
    return build_decoder_model(checkpoint.decoder, dtype, max_model_len, device)


class _ModelLoader:
    """The state of one load: the model, the progress, and the smooth scales of each layer."""

    def __init__(self, checkpoint: Checkpoint, plan: ServingPlan, backend: BaseBackend, progress: Progress) -> None:
        self.checkpoint, self.progress = checkpoint, progress
        self.choice = form_choice(plan, checkpoint.kind == "encoder", backend.device)
        self.model = _build(checkpoint, self.choice.dtype, plan.max_model_len.value, backend.device)
        self.streams = TensorReader(checkpoint.tensors)
        self.smooth_scales: dict[tuple[str, ...], Tensor] = {}  # scales of the columns, by a layer's sources
        self.correlations: Mapping[tuple[str, ...], Tensor] = {}  # correlations of the inputs, by a layer's sources
        self.done, self.total = 0, sum(entry.nbytes for entry in checkpoint.tensors.values())

    @torch.inference_mode()
    def fill(self, packs: PackFolder | None) -> PackFile | None:
        modules = list(self.model.modules())
        linears = [module for module in modules if isinstance(module, Linear)]
        norms = [module for module in modules if isinstance(module, RMSNorm)]
        for norm in norms:
            self._set_weight(norm)
        layers = self._layers(linears, norms)
        pack_file = None if packs is None else packs.open(self.checkpoint, self.choice, layers)
        blobs = None if pack_file is None or self.correlations else pack_file.read(self._report_pack_progress)
        for layer in sorted(layers, key=lambda layer: -layer.linear.in_features * layer.linear.out_features):
            self._pack(layer, blobs)
        packed = {linear.sources: linear.form for linear in linears}
        for module in modules:
            if isinstance(module, Embedding):
                self._embed(module, packed.get((module.source,)))
            elif isinstance(module, LayerNorm | DenseLayer | DistanceBias):
                self._set_weight_and_bias(module)
        self.progress(self.total, self.total)
        if pack_file is not None and blobs is None:
            pack_file.write(
                {
                    name: part
                    for layer in layers
                    for name, part in layer.blobs(self.smooth_scales.get(layer.linear.sources))
                }
            )
        return pack_file

    def _layers(self, linears: Sequence[Linear], norms: Sequence[RMSNorm]) -> list[LayerPacking]:
        """Return each linear layer with its packing and with the norm that is equalized with it."""
        feeding = {norm.feeds: norm for norm in norms if norm.feeds is not None}
        layers = []
        for linear in linears:
            packing = self.choice.packing(linear)
            layers.append(
                LayerPacking(linear, packing, feeding.get(linear) if self.choice.equalizes(packing) else None)
            )
        return layers

    def _report_pack_progress(self, done: int, total: int) -> None:
        """Report the progress of reading packed weights as the progress of the whole load."""
        self.done = self.total * done // max(1, total)
        self.progress(self.done, self.total)

    def _embed(self, embedding: Embedding, tied: LinearForm | None) -> None:
        if isinstance(tied, Bf16PanelLinear | IntPanelLinear | HybridLinear | DeviceLinear):
            embedding.tie(tied, self.smooth_scales.get((embedding.source,)))
            self._advance(self.streams.entries((embedding.source,)))
        else:
            self._set_weight(embedding)

    def _set_weight(self, module: Embedding | RMSNorm) -> None:
        (entry,) = self.streams.entries((module.source,))
        module.set_weight(self.streams.resident(entry, self.choice.device))
        self._advance((entry,))

    def _set_weight_and_bias(self, module: LayerNorm | DenseLayer | DistanceBias) -> None:
        kinds = ("weight", "bias") if module.has_bias else ("weight",)
        entries = [entry for kind in kinds for entry in self.streams.entries((module.source,), kind)]
        module.set_weight(*(self.streams.resident(entry, self.choice.device) for entry in entries))
        self._advance(entries)

    def _pack(self, layer: LayerPacking, blobs: Mapping[str, Tensor] | None) -> None:
        linear, entries = layer.linear, self.streams.entries(layer.linear.sources)
        factors = None
        if layer.norm is not None:
            factors = self._smooth_scales(layer.norm, layer, entries) if blobs is None else layer.smooth_scales(blobs)
            layer.norm.divide_weight(factors)
            self.smooth_scales[linear.sources] = factors
        if blobs is not None and isinstance(layer.packing, CacheablePacking):
            linear.form = layer.packing.from_parts(
                linear.out_features, linear.in_features, self._bias(linear), layer.form_parts(blobs)
            )
        else:
            linear.form = self._form(linear, layer.packing, entries, factors)
        self._advance(entries)

    def _smooth_scales(self, norm: RMSNorm, layer: LayerPacking, entries: Sequence[TensorEntry]) -> Tensor:
        parts = (rows for _, rows in self._blocks(entries))
        return smooth_scales(norm.weight, column_maxima(parts, layer.linear.in_features, self.choice.device))

    def _blocks(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, Tensor]]:
        """Yield the stacked rows of the entries on the model's device; each is valid until the next."""
        for first, rows in self.streams.row_blocks(entries):
            yield first, rows if self.choice.device is None else rows.to(self.choice.device)

    def _bias(self, linear: Linear) -> Tensor | None:
        if not linear.has_bias:
            return None
        self._advance(self.streams.entries(linear.sources, "bias"))
        for source, entry in zip(linear.sources, self.streams.entries(linear.sources, "bias"), strict=True):
            check_fp16(f"{source}.bias", self.streams.stored(entry), self.choice.dtype)
        return self.streams.bias(linear.sources, self.choice.dtype)

    def _form(
        self, linear: Linear, packing: FormFactory, entries: Sequence[TensorEntry], factors: Tensor | None
    ) -> LinearForm:
        bias = self._bias(linear)
        empty = packing.empty_form(linear.out_features, linear.in_features, bias)
        if empty is not None:
            fill, first = self._fill_function(empty, linear, factors), 0
            for source, entry in zip(linear.sources, entries, strict=True):
                for row, rows in self._blocks((entry,)):
                    check_fp16(f"{source}.weight", rows, self.choice.dtype)
                    fill(first + row, rows if factors is None else rows * factors)
                first += entry.shape[0]
            return empty
        weight, mapped = self.streams.whole(entries, self.choice.dtype, packing.keeps_weight)
        form = packing.pack(weight if factors is None else weight * factors, bias)
        if not (mapped and packing.keeps_weight):
            self.streams.drop(entries)
        return form

    def _fill_function(self, empty: EmptyForm, linear: Linear, factors: Tensor | None) -> Callable[[int, Tensor], None]:
        """Return the function that fills a form with rows; int4 forms also use the input correlations."""
        correlation = self.correlations.get(linear.sources)
        if correlation is None or not isinstance(empty, IntPanelLinear | HybridLinear):
            return empty.fill
        return partial(empty.fill, gptq_factors=compute_gptq_factors(correlation, factors))

    def _advance(self, entries: Sequence[TensorEntry]) -> None:
        self.done = min(
            self.total, self.done + sum(entry.nbytes for entry in entries)
        )  # a tied embedding is counted twice
        self.progress(self.done, self.total)
