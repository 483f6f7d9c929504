"""Fills a model with a checkpoint's weights: mapped where they are used as stored, else packed one at a time from the mapped file.

At its peak it holds the finished weights and one tensor more; the largest go first, while little is there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from app.backends.base import Backend
from app.hardware.plan import ServingPlan
from app.kernels.equalise import column_maxima, gauge
from app.kernels.hybrid import HybridLinear
from app.kernels.int_panels import IntPanels
from app.kernels.linear import FORMS, Linear, LinearForm, Packing, host_architecture
from app.kernels.panels import PanelLinear
from app.models.layers import Embedding, RMSNorm
from app.models.registry import build_model
from app.weights.checkpoint import Checkpoint
from app.weights.choice import Choice
from app.weights.headers import TensorEntry
from app.weights.recipes import find_recipe
from app.weights.streams import WeightStreams

Progress = Callable[[int, int], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(checkpoint: Checkpoint, plan: ServingPlan, backend: Backend, progress: Progress | None = None) -> nn.Module:
    """The model, ready to run. `progress` hears (bytes done, bytes in all) after each tensor."""
    recipe = find_recipe(plan.device.value, host_architecture(), plan.precision.value)
    dtype = DTYPES[plan.dtype.value]
    model = build_model(checkpoint.model_config, dtype, plan.max_model_len.value, backend.device)
    choice = Choice(recipe, dtype, plan.int8_copy.value)
    _Loading(checkpoint, choice, progress or (lambda done, total: None)).fill(model)
    return model


class _Loading:
    """State of one load: which factors channels were multiplied by, and how far it is."""

    def __init__(self, checkpoint: Checkpoint, choice: Choice, progress: Progress) -> None:
        self.choice, self.progress = choice, progress
        self.streams = WeightStreams(checkpoint.tensors)
        self.factors: dict[tuple[str, ...], Tensor] = {}  # by a layer's sources: what its columns were multiplied by
        self.done, self.total = 0, sum(entry.nbytes for entry in checkpoint.tensors.values())

    @torch.inference_mode()
    def fill(self, model: nn.Module) -> None:
        modules = list(model.modules())
        linears = [module for module in modules if isinstance(module, Linear)]
        norms = [module for module in modules if isinstance(module, RMSNorm)]
        for norm in norms:
            self._adopt(norm)
        feeding = {norm.feeds: norm for norm in norms if norm.feeds is not None}
        for linear in sorted(linears, key=lambda linear: -linear.in_features * linear.out_features):
            self._pack(linear, feeding.get(linear))
        packed = {linear.sources: linear.form for linear in linears}
        for module in modules:
            if isinstance(module, Embedding):
                self._embed(module, packed.get((module.source,)))
        self.streams.close()
        self.progress(self.total, self.total)

    def _embed(self, embedding: Embedding, tied: LinearForm | None) -> None:
        if isinstance(tied, PanelLinear | IntPanels | HybridLinear):
            embedding.share(tied, self.factors.get((embedding.source,)))
            self._advance(self.streams.entries((embedding.source,)))
        else:
            self._adopt(embedding)

    def _adopt(self, module: Embedding | RMSNorm) -> None:
        (entry,) = self.streams.entries((module.source,))
        module.adopt(self.streams.stored(entry))
        self._advance((entry,))

    def _pack(self, linear: Linear, norm: RMSNorm | None) -> None:
        entries, packing = self.streams.entries(linear.sources), self.choice.packing(linear)
        factors = None
        if norm is not None and self.choice.recipe.equalise and packing not in FORMS.values():
            factors = gauge(norm.weight, column_maxima((rows for _, rows in self.streams.blocks(entries)), linear.in_features))
            norm.divide(factors)
            self.factors[linear.sources] = factors
        linear.form = self._form(linear, packing, entries, factors)
        self._advance(entries)

    def _form(self, linear: Linear, packing: Packing, entries: Sequence[TensorEntry], factors: Tensor | None) -> LinearForm:
        bias = self.streams.bias(linear.sources, self.choice.dtype) if linear.has_bias else None
        if bias is not None:
            self._advance(self.streams.entries(linear.sources, "bias"))
        empty = packing.room(linear.out_features, linear.in_features, bias)
        if empty is not None:
            for first, rows in self.streams.blocks(entries):
                empty.fill(first, rows if factors is None else rows * factors)
            return empty
        weight, mapped = self.streams.whole(entries, self.choice.dtype, packing.keeps_weight)
        form = packing.pack(weight if factors is None else weight * factors, bias)
        if not (mapped and packing.keeps_weight):
            self.streams.drop(entries)
        return form

    def _advance(self, entries: Sequence[TensorEntry]) -> None:
        self.done = min(self.total, self.done + sum(entry.nbytes for entry in entries))  # a tied table is used twice
        self.progress(self.done, self.total)
