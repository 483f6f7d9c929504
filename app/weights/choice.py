"""Which form a layer's weight is held in: the first of the recipe's that suits it on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.hybrid import HybridPacking
from app.kernels.int_panels import IntPacking
from app.kernels.linear import FORMS, ROUNDED_FORMS, Linear, Packing
from app.weights.recipes import Recipe

OUTPUT_SOURCES = (("lm_head",), ("model.embed_tokens",))
KeptPacking = IntPacking | HybridPacking  # what it makes may be kept in a file, and mapped at the next start


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe with what the plan decided: the dtype of activations, and whether eight-bit copies are held beside four bits."""

    recipe: Recipe
    dtype: torch.dtype
    int8_copy: bool

    def packing(self, linear: Linear) -> Packing:
        is_output = linear.sources in OUTPUT_SOURCES
        packings = [self._packing(name, is_output) for name in self.recipe.forms(is_output)]
        return next(one for one in packings if one.suits(linear.out_features, linear.in_features, self.dtype))

    def _packing(self, name: str, is_output: bool) -> Packing:
        """The output layer sees few rows: it needs no copy."""
        if name in FORMS:
            return FORMS[name]
        packing, threshold = ROUNDED_FORMS[name], self.recipe.int8_copy_from
        if not self.int8_copy or is_output or threshold is None or not isinstance(packing, IntPacking) or packing.bits == 8:
            return packing
        return HybridPacking(packing, IntPacking(8, None), threshold - 1)
