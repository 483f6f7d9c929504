"""The table of recipes: which forms hold the linear layers, by device, architecture and precision.

A combination without a row is refused. Torch is not needed: the names are those of the tables of forms in
`kernels/linear.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.errors import NoRecipe
from app.hardware.decision import RecipeKey


@dataclass(frozen=True, slots=True)
class Recipe:
    """Forms in order of preference: the first that suits the weight and the machine holds it.

    `linear` is for the linear layers, `output` for the output layer and an embedding tied to it (None: as
    `linear`). The forms "plain" and "device" suit any weight. `equalise`: channels are equalized before
    quantization (kernels/equalise.py). `int8_copy_from`: if an int8 copy is held in addition to int4 weights, the
    copy multiplies from this number of rows on.
    """

    linear: tuple[str, ...]
    output: tuple[str, ...] | None = None
    equalise: bool = False
    int8_copy_from: int | None = None

    def forms(self, is_output: bool) -> tuple[str, ...]:
        """Return the forms for the output layer or for the other linear layers."""
        return self.linear if self.output is None or not is_output else self.output


EXACT = Recipe(linear=("panels", "onednn", "plain"))
INT8 = Recipe(linear=("int8", "torch int8", "plain"), equalise=True)


def _int4(*others: str, int8_copy_from: int) -> Recipe:
    """Return a recipe with groups of 64, 0.53 bytes per weight. `others` serve if the native library was not built."""
    return Recipe(linear=("int4/64", *others, "plain"), equalise=True, int8_copy_from=int8_copy_from)


# Recipes for devices with separate memory. With int4, the output layer is not quantized: each of its rows is one
# token's score, and a tied embedding needs its exact rows.
DEVICE_EXACT = Recipe(linear=("device",))
DEVICE_INT4 = Recipe(linear=("device int4/64", "device"), output=("device",), equalise=True)


def _device(kind: str, architecture: str, *exact: str) -> dict[RecipeKey, Recipe]:
    return {**{(kind, architecture, name): DEVICE_EXACT for name in exact}, (kind, architecture, "int4"): DEVICE_INT4}


# Device kind, CPU architecture, precision. kernels/linear.py lists the gains of packing on x86; torch has the same
# operators on Arm.
RECIPES: Mapping[RecipeKey, Recipe] = {
    ("cpu", "x86_64", "fp32"): EXACT,
    ("cpu", "x86_64", "bf16"): EXACT,
    ("cpu", "x86_64", "int8"): INT8,
    ("cpu", "x86_64", "int4"): _int4("torch int4/64", int8_copy_from=64),
    ("cpu", "arm64", "fp32"): EXACT,
    ("cpu", "arm64", "bf16"): EXACT,
    ("cpu", "arm64", "int8"): INT8,
    ("cpu", "arm64", "int4"): _int4("kleidi int4/64", "torch int4/64", int8_copy_from=32),
    **_device("cuda", "x86_64", "fp32", "bf16"),
    **_device("cuda", "arm64", "fp32", "bf16"),
    **_device("mps", "arm64", "fp32", "bf16", "fp16"),
}


# Replacements for encoders, whose vectors are compared with others. The error of a text of one word is not averaged
# over words: with one scale per row, all-MiniLM-L6-v2's vector of "ok" has a cosine of 0.982 with the exact one; with
# one per 128 inputs, 0.995.
TEXT_FORMS: Mapping[str, str] = {"int8": "int8/128"}


def for_texts(recipe: Recipe) -> Recipe:
    """Return the recipe for an encoder, or for a decoder that is served for its hidden states."""
    return replace(recipe, linear=tuple(TEXT_FORMS.get(name, name) for name in recipe.linear))


# Recipes of deterministic=on, under which other rows must not affect a result: forms that sum each row in a fixed
# order on any processor.
FIXED: Mapping[str, Recipe] = {
    "bf16": Recipe(linear=("panels/fixed",)),
    "int8": Recipe(linear=("int8",), equalise=True),
    "int4": Recipe(linear=("int4/64",), equalise=True),
}


def find_recipe(device: str, architecture: str, precision: str) -> Recipe:
    """Return the recipe for this machine.

    Raises:
        NoRecipe: There is none; the message lists the existing ones.
    """
    recipe = RECIPES.get((device, architecture, precision))
    if recipe is None:
        rows = "; ".join(" ".join(key) for key in RECIPES)
        raise NoRecipe(f"No recipe serves {precision} on {device} with {architecture}. Recipes exist for: {rows}.")
    return recipe
