"""Choice of the form that holds a layer's weight, and of the parts of it that a pack file can keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from app.hardware.plan.plan import ServingPlan
from app.models.decoders.config import ModelConfig
from app.models.decoders.layers import Norm
from app.models.decoders.shapes import is_expert, is_router
from app.weights.forms import (
    DETERMINISTIC_RECIPES,
    DEVICE_EXACT,
    EXACT,
    KEPT_FORMS,
    OUTPUT_SOURCES,
    KeptLayers,
    Recipe,
    choose_upgrades,
    find_recipe,
    fp8_blocks,
    kept_precision,
    stored_forms,
)
from app.weights.safetensors import TensorEntry
from armature_kernels.linear.bf16_panels import HybridFactory, HybridLinear
from armature_kernels.linear.bf16_product import WideRows
from armature_kernels.linear.device import DeviceFactory
from armature_kernels.linear.device_fp8 import DeviceFp8Factory
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.layout import LAYOUTS
from armature_kernels.linear.linear import DEVICE_FORMS, FORMS, QUANTIZED_FORMS, FormFactory, Linear, host_architecture
from armature_kernels.linear.row_split import RowSplitFactory, RowSplitLinear
from armature_kernels.linear.torchao_config import is_torchao
from armature_kernels.linear.torchao_linear import TorchaoFactory, check_runs
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel

# Routers are not quantized: a small error can select other experts. One summation order for any number of rows.
ROUTER_FORMS = ("panels/widened", "panels/fp32", "plain")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Their results can be kept in a file for the next start.
CacheablePacking = IntPanelFactory | HybridFactory | RowSplitFactory
CacheableForm = IntPanelLinear | HybridLinear | RowSplitLinear


@dataclass(frozen=True, slots=True)
class FormChoice:
    """A recipe with decisions of the plan.

    `keep` names layers in another precision. `dtype` is that of activations. `int8_copy`: an int8 copy is held in
    addition to int4 weights. `most_few` is the measured number of rows up to which int4 multiplies if both are held;
    None: the recipe's. `device` holds the model; None: the processor.
    """

    recipe: Recipe
    dtype: torch.dtype
    int8_copy: bool
    keep: KeptLayers = ()
    most_few: int | None = field(default=None, repr=False)  # not part of a pack's key
    device: torch.device | None = field(
        default=None, repr=False
    )  # not part of the key either: weights in device memory are not kept
    # Not part of it either: how packed integers are multiplied.
    wide: WideRows = field(default=WideRows.MANY, repr=False)
    # Sources in the recipe's form for upgraded layers. A pack stores them, so they are not part of its key.
    upgraded: frozenset[str] = field(default=frozenset(), repr=False)
    # Forms of sources whose codes are kept. They follow from the checkpoint and the precision.
    stored: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Blocks of the sources whose codes in FP8 are kept on a device.
    fp8: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def packing(self, linear: Linear) -> FormFactory:
        """Return the first packing that suits a layer, split by rows if its sources differ and all are integers."""
        is_output = linear.sources in OUTPUT_SOURCES
        by_source = [self._form_names(source) for source in linear.sources]
        exact = EXACT.linear if self.device is None else DEVICE_EXACT.linear
        names = exact if exact in by_source else by_source[0]
        if names != exact and len(set(by_source)) > 1:
            split = self._row_split(linear, [self._quantized(each[0]) for each in by_source])
            if split.supports(linear.out_features, linear.in_features, self.dtype):
                return self._with_copy(split, split.ranges[0][1].group)
            names = self.recipe.linear
        packings = [self._packing(name, is_output, has_copy=not is_expert(linear.sources[0])) for name in names]
        found = next(one for one in packings if one.supports(linear.out_features, linear.in_features, self.dtype))
        if isinstance(found, DeviceFp8Factory) and self.fp8:
            return replace(found, block=self._common_block(linear))
        return found

    def _common_block(self, linear: Linear) -> tuple[int, int]:
        """Return the largest block within which all sources of a layer have one scale: their widths are equal."""
        heights = (self.fp8[source][0] for source in linear.sources)
        return math.gcd(*heights, *linear.source_rows[:-1]), self.fp8[linear.sources[0]][1]

    def _form_names(self, source: str) -> tuple[str, ...]:
        if is_router(source):
            return ROUTER_FORMS if self.device is None else DEVICE_EXACT.linear
        kept = kept_precision(self.keep, source)
        if kept is not None:
            return KEPT_FORMS[kept]
        if self.fp8 and source not in self.fp8:
            return DEVICE_EXACT.linear
        if source in self.stored:
            return (self.stored[source], *self.recipe.linear)
        return self.recipe.source_forms(source, source in self.upgraded)

    def _row_split(self, linear: Linear, packings: Sequence[FormFactory]) -> RowSplitFactory:
        """Return the packing of a product whose sources have these packings; equal neighbours share a form."""
        ranges: list[tuple[int, IntPanelFactory]] = []
        for rows, packing in zip(linear.source_rows, packings, strict=True):
            assert isinstance(packing, IntPanelFactory), "only integer panels are split by rows"
            count = rows + (ranges.pop()[0] if ranges and ranges[-1][1] == packing else 0)
            ranges.append((count, packing))
        return RowSplitFactory(tuple(ranges))

    def code_bits(self, source: str) -> int | None:
        """Return the bits of the form that may hold a source's codes of the checkpoint; None: it is rounded here."""
        if source not in self.stored or kept_precision(self.keep, source) is not None:
            return None
        return LAYOUTS[self.stored[source]].bits

    def equalizes(self, linear: Linear, packing: FormFactory) -> bool:
        """Return True if channels are equalized before a weight is packed so, which is done if it is rounded here."""
        if any(source in self.stored for source in linear.sources):
            return False
        return self.recipe.equalise and packing not in FORMS.values() and not isinstance(packing, DeviceFactory)

    def _packing(self, name: str, is_output: bool, has_copy: bool) -> FormFactory:
        """Return the packing of a form's name; the output layer and experts see few rows and need no int8 copy."""
        if name in FORMS:
            return FORMS[name]
        if name in DEVICE_FORMS:
            assert self.device is not None, "a plan for a device needs the backend's device"
            return DEVICE_FORMS[name](self.device, self.dtype)
        if is_torchao(name):
            return TorchaoFactory(name, self.device, self.dtype)
        packing = self._quantized(name)
        if is_output and isinstance(packing, IntPanelFactory):
            return replace(packing, wide=WideRows.NEVER)  # whole logits must have the bits of the top ones
        if not isinstance(packing, IntPanelFactory) or packing.bits == 8 or not has_copy:
            return packing
        return self._with_copy(packing, packing.group)

    def _quantized(self, name: str) -> FormFactory:
        packing = QUANTIZED_FORMS[name]
        return replace(packing, wide=self.wide) if isinstance(packing, IntPanelFactory) else packing

    def _with_copy(self, packing: IntPanelFactory | RowSplitFactory, group: int | None) -> FormFactory:
        threshold = self.recipe.int8_copy_from
        if not self.int8_copy or threshold is None:
            return packing
        return HybridFactory(
            packing, IntPanelFactory(8, group), threshold - 1 if self.most_few is None else self.most_few
        )


@dataclass(frozen=True, slots=True)
class LayerPacking:
    """A linear layer with its packing, and the norm that is equalized with its columns (None: not equalized)."""

    linear: Linear
    packing: FormFactory
    norm: Norm | None

    @property
    def name(self) -> str:
        return "+".join(self.linear.sources)

    def blob_bytes(self) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of each blob that is kept of the layer."""
        if not isinstance(self.packing, CacheablePacking):
            return
        for index, nbytes in enumerate(self.packing.part_bytes(self.linear.out_features, self.linear.in_features)):
            yield f"{self.name}.{index}", nbytes
        if self.norm is not None:
            yield f"{self.name}.factors", 4 * self.linear.in_features

    def blobs(self, factors: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        if not isinstance(self.linear.form, CacheableForm):
            return
        for index, part in enumerate(self.linear.form.parts):
            yield f"{self.name}.{index}", part
        if factors is not None:
            yield f"{self.name}.factors", factors

    def form_parts(self, blobs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the layer's parts from the kept blobs, without its smooth scales."""
        return [blobs[name] for name, _ in self.blob_bytes() if not name.endswith(".factors")]

    def smooth_scales(self, blobs: Mapping[str, Tensor]) -> Tensor:
        """Return the scales that the columns were multiplied by, FP32 [in_features]."""
        return blobs[f"{self.name}.factors"].view(torch.float32)


def _wide_rows(plan: ServingPlan, config: object) -> WideRows:
    """Return when rows are multiplied in bf16: vectors must not depend on other texts, and texts have many rows."""
    if getattr(config, "kind", "encoder") == "encoder":
        return WideRows.ALWAYS
    return WideRows.NEVER if plan.steps.deterministic else WideRows.MANY


def form_choice(
    plan: ServingPlan,
    config: object,
    device: torch.device | None = None,
    tensors: Mapping[str, TensorEntry] | None = None,
) -> FormChoice:
    """Return how the plan's weights are held, with the upgraded layers of a model that was not calibrated.

    `tensors` are the checkpoint's, whose codes may be kept; None: weights without codes. Raises `PlanImpossible` if the
    precision is a config of torchao that cannot run here.
    """
    precision, kind = plan.weights.precision, plan.placement.device
    recipe = (
        DETERMINISTIC_RECIPES[precision]
        if plan.steps.deterministic
        else find_recipe(kind, host_architecture(), precision)
    )
    own = None if kind == "cpu" else device
    if is_torchao(precision):
        check_runs(precision, own, DTYPES[plan.weights.dtype])
    upgraded: frozenset[str] = frozenset()
    if recipe.upgrade is not None and isinstance(config, ModelConfig):
        upgraded = choose_upgrades(config, recipe)
    return FormChoice(
        recipe,
        DTYPES[plan.weights.dtype],
        plan.weights.int8_copy,
        plan.weights.keep_layers,
        plan.weights.most_few_rows,
        own,
        _wide_rows(plan, config),
        upgraded,
        stored_forms(precision, tensors or {}) if own is None and has_kernel(OpCode.LINEAR_INT) else {},
        fp8_blocks(tensors or {}) if precision == "fp8" else {},
    )
