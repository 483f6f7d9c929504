"""Fills a model with a checkpoint's weights: mapped where they are used as stored, else packed one at a time from the mapped file.

At its peak it holds the finished weights and one tensor more; the largest go first, while little is there yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from app.backends.base import Backend
from app.hardware.plan import ServingPlan
from app.kernels.hybrid import HybridLinear, HybridPacking
from app.kernels.int_panels import IntPanels
from app.kernels.linear import FORMS, ROUNDED_FORMS, EmptyForm, Linear, Packing, host_architecture
from app.kernels.panels import PanelLinear
from app.models.layers import Embedding, RMSNorm
from app.models.registry import build_model
from app.weights.checkpoint import Checkpoint
from app.weights.headers import TensorEntry
from app.weights.mapped import TORCH_DTYPES, MappedFiles
from app.weights.recipes import Recipe, find_recipe

Progress = Callable[[int, int], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OUTPUT_SOURCES = (("lm_head",), ("model.embed_tokens",))
_COPY_BYTES = 8 * 2**20  # source pages held while a tensor is converted
_STREAM_BYTES = 8 * 2**20  # of a weight on its way into panels: less than the last cache of any server


def load_model(checkpoint: Checkpoint, plan: ServingPlan, backend: Backend, progress: Progress | None = None) -> nn.Module:
    """The model, ready to run. `progress` hears (bytes done, bytes in all) after each tensor."""
    recipe = find_recipe(plan.device.value, host_architecture(), plan.precision.value)
    dtype = DTYPES[plan.dtype.value]
    model = build_model(checkpoint.model_config, dtype, plan.max_model_len.value, backend.device)
    choice = _Choice(recipe, dtype, plan.int8_copy.value)
    _Loading(checkpoint, choice, dtype, progress or (lambda done, total: None)).fill(model)
    return model


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which form a weight is held in: the first of the recipe's that suits it."""

    recipe: Recipe
    dtype: torch.dtype
    int8_copy: bool

    def packing(self, linear: Linear) -> Packing:
        is_output = linear.sources in OUTPUT_SOURCES
        packings = [self._packing(name, is_output) for name in self.recipe.forms(is_output)]
        found = (packing for packing in packings if packing.suits(linear.out_features, linear.in_features, self.dtype))
        return next(found)

    def _packing(self, name: str, is_output: bool) -> Packing:
        """With an int8 copy beside it where one is wanted: the output layer sees few rows, and needs none."""
        rounded = ROUNDED_FORMS.get(name)
        if rounded is None:
            return FORMS[name]
        if not self.int8_copy or is_output or self.recipe.int8_copy_from is None or rounded.bits == 8:
            return rounded
        return HybridPacking(rounded, ROUNDED_FORMS["int8"], self.recipe.int8_copy_from - 1)


class _Loading:
    """State of one load: the mapped files, a buffer that all fused and converted tensors pass through, and how far it is."""

    def __init__(self, checkpoint: Checkpoint, choice: _Choice, dtype: torch.dtype, progress: Progress) -> None:
        self.tensors, self.choice, self.dtype, self.progress = checkpoint.tensors, choice, dtype, progress
        self.files = MappedFiles()
        self.staging = torch.empty(0, dtype=torch.uint8)
        self.done, self.total = 0, sum(entry.nbytes for entry in checkpoint.tensors.values())

    @torch.inference_mode()
    def fill(self, model: nn.Module) -> None:
        modules = list(model.modules())
        linears = [module for module in modules if isinstance(module, Linear)]
        for linear in sorted(linears, key=lambda linear: -linear.in_features * linear.out_features):
            self._pack(linear)
        packed = {linear.sources: linear.form for linear in linears}
        for module in modules:
            if isinstance(module, Embedding | RMSNorm):
                entry = self.tensors[f"{module.source}.weight"]
                tied = packed.get((module.source,))
                if isinstance(module, Embedding) and isinstance(tied, PanelLinear | IntPanels | HybridLinear):
                    module.share(tied)
                else:
                    module.adopt(self.files.tensor(entry))
                self._advance((entry,))
        self.files.close()
        self.progress(self.total, self.total)

    def _pack(self, linear: Linear) -> None:
        entries = [self.tensors[f"{source}.weight"] for source in linear.sources]
        packing, bias = self.choice.packing(linear), self._bias(linear.sources) if linear.has_bias else None
        empty = packing.room(linear.out_features, linear.in_features, bias)
        if empty is not None:
            self._stream(empty, entries)
            linear.form = empty
        else:
            weight, mapped = self._weight(entries, (linear.out_features, linear.in_features), packing.keeps_weight)
            linear.form = packing.pack(weight, bias)
            if not (mapped and packing.keeps_weight):
                for entry in entries:
                    self.files.drop(entry.file, entry.start, entry.end)
        self._advance(entries)

    def _stream(self, form: EmptyForm, entries: Sequence[TensorEntry]) -> None:
        """A few rows at a time, through a buffer that stays in the processor's cache: neither whole tensors nor mapped pages are held."""
        first = 0
        for entry in entries:
            rows, columns = entry.shape
            dtype = TORCH_DTYPES[entry.dtype]  # as stored: a form that rounds rounds once
            step = max(1, _STREAM_BYTES // (columns * dtype.itemsize))
            for row in range(0, rows, step):
                some = self._staging((min(step, rows - row), columns), dtype)
                self.files.read(entry, row, some)
                form.fill(first + row, some)
            first += rows

    def _weight(self, entries: Sequence[TensorEntry], shape: tuple[int, int], keeps: bool) -> tuple[Tensor, bool]:
        """The weight in the model's dtype, and whether it is the mapped file itself: so where its parts lie end to end as stored."""
        if TORCH_DTYPES[entries[0].dtype] == self.dtype and _lie_end_to_end(entries):
            self.files.fetch(entries[0].file, entries[0].start, entries[-1].end)
            return self.files.span(entries[0], shape), True
        weight = torch.empty(shape, dtype=self.dtype) if keeps else self._staging(shape, self.dtype)
        row = 0
        for entry in entries:
            self._copy(entry, weight[row : row + entry.shape[0]])
            row += entry.shape[0]
        return weight, False

    def _staging(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if self.staging.numel() < nbytes:
            self.staging = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self.staging = torch.empty(nbytes, dtype=torch.uint8)
        return self.staging[:nbytes].view(dtype).view(shape)

    def _copy(self, entry: TensorEntry, target: Tensor) -> None:
        source, row_bytes = self.files.tensor(entry), entry.nbytes // max(1, entry.shape[0])
        step = max(1, _COPY_BYTES // max(1, row_bytes))
        for row in range(0, entry.shape[0], step):
            target[row : row + step].copy_(source[row : row + step])
            self.files.drop(entry.file, entry.start + row * row_bytes, entry.start + min(row + step, entry.shape[0]) * row_bytes)

    def _bias(self, sources: Sequence[str]) -> Tensor:
        entries = [self.tensors[f"{source}.bias"] for source in sources]
        self._advance(entries)
        return torch.cat([self.files.tensor(entry).to(self.dtype) for entry in entries])

    def _advance(self, entries: Sequence[TensorEntry]) -> None:
        self.done = min(self.total, self.done + sum(entry.nbytes for entry in entries))  # a tied table is used twice
        self.progress(self.done, self.total)


def _lie_end_to_end(entries: Sequence[TensorEntry]) -> bool:
    return all((left.file, left.dtype, left.end) == (right.file, right.dtype, right.start) for left, right in pairwise(entries))
