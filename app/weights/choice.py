"""Which form a layer's weight is held in, the first of the recipe's that suits it on this machine; and what of it can be kept in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.kernels.device_linear import DevicePacking
from app.kernels.hybrid import HybridLinear, HybridPacking
from app.kernels.int_panels import IntPacking, IntPanels
from app.kernels.linear import DEVICE_FORMS, FORMS, ROUNDED_FORMS, Linear, Packing
from app.models.layers import RMSNorm
from app.weights.recipes import Recipe

OUTPUT_SOURCES = (("lm_head",), ("model.embed_tokens",))
KeptPacking = IntPacking | HybridPacking  # what they make is our own: it may be kept in a file for the next start
KeptForm = IntPanels | HybridLinear


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe with what the plan decided: the dtype of activations, and whether eight-bit copies are held beside four bits.

    `most_few`: up to so many rows four bits multiply where both are held, as measured; None: as the recipe says. What is kept in a file is
    the same for any. `device`: which memory of its own the model lies in; None: a processor's.
    """

    recipe: Recipe
    dtype: torch.dtype
    int8_copy: bool
    most_few: int | None = field(default=None, repr=False)  # not in a pack's key
    device: torch.device | None = field(default=None, repr=False)  # likewise: nothing is kept of what lies there

    def packing(self, linear: Linear) -> Packing:
        is_output = linear.sources in OUTPUT_SOURCES
        packings = [self._packing(name, is_output) for name in self.recipe.forms(is_output)]
        return next(one for one in packings if one.suits(linear.out_features, linear.in_features, self.dtype))

    def evens(self, packing: Packing) -> bool:
        """Whether channels are made alike before a weight is packed so: where it is rounded."""
        return self.recipe.equalise and packing not in FORMS.values() and not isinstance(packing, DevicePacking)

    def _packing(self, name: str, is_output: bool) -> Packing:
        """The output layer sees few rows: it needs no copy."""
        if name in FORMS:
            return FORMS[name]
        if name in DEVICE_FORMS:
            assert self.device is not None, "a plan for a device comes with its backend's"
            return DEVICE_FORMS[name](self.device, self.dtype)
        packing, threshold = ROUNDED_FORMS[name], self.recipe.int8_copy_from
        if not self.int8_copy or is_output or threshold is None or not isinstance(packing, IntPacking) or packing.bits == 8:
            return packing
        return HybridPacking(packing, IntPacking(8, None), threshold - 1 if self.most_few is None else self.most_few)


@dataclass(frozen=True, slots=True)
class Layer:
    """One product: how its weight is packed, and the norm whose channels are made even with its columns (None: as they are)."""

    linear: Linear
    packing: Packing
    norm: RMSNorm | None

    @property
    def name(self) -> str:
        return "+".join(self.linear.sources)

    def kept_bytes(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of all that is kept of it."""
        if not isinstance(self.packing, KeptPacking):
            return
        for index, nbytes in enumerate(self.packing.part_bytes(self.linear.out_features, self.linear.in_features)):
            yield f"{self.name}.{index}", nbytes
        if self.norm is not None:
            yield f"{self.name}.factors", 4 * self.linear.in_features

    def parts(self, factors: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """The same, of its form as it is packed."""
        if not isinstance(self.linear.form, KeptForm):
            return
        for index, part in enumerate(self.linear.form.parts):
            yield f"{self.name}.{index}", part
        if factors is not None:
            yield f"{self.name}.factors", factors

    def of(self, blobs: Mapping[str, Tensor]) -> list[Tensor]:
        """Its own parts among what was kept."""
        return [blobs[name] for name, _ in self.kept_bytes() if not name.endswith(".factors")]

    def factors(self, blobs: Mapping[str, Tensor]) -> Tensor:
        """What its columns were multiplied by, FP32 [in]."""
        return blobs[f"{self.name}.factors"].view(torch.float32)
