"""One table: on which device and architecture, at which precision, which forms hold the linear layers. A missing row is a refusal.

Torch is not needed: the names are those of `kernels.linear.FORMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import NoRecipe
from app.hardware.plan import RecipeKey


@dataclass(frozen=True, slots=True)
class Recipe:
    """`linear`: forms in the order of preference; the first that suits the weight and the machine holds it, "plain" suits always."""

    linear: tuple[str, ...]


PACKED = Recipe(linear=("panels", "onednn", "plain"))

# device kind, CPU architecture, precision. What packing gains on x86 stands in kernels/linear.py; torch for Arm has the same operators.
RECIPES: Mapping[RecipeKey, Recipe] = {
    ("cpu", "x86_64", "fp32"): PACKED,
    ("cpu", "x86_64", "bf16"): PACKED,
    ("cpu", "arm64", "fp32"): PACKED,
    ("cpu", "arm64", "bf16"): PACKED,
}


def find_recipe(device: str, architecture: str, precision: str) -> Recipe:
    """The recipe for this machine. Raises `NoRecipe` with the rows that exist."""
    recipe = RECIPES.get((device, architecture, precision))
    if recipe is None:
        rows = "; ".join(" ".join(key) for key in RECIPES)
        raise NoRecipe(f"No recipe serves {precision} on {device} with {architecture}. Recipes exist for: {rows}.")
    return recipe
