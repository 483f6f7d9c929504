"""One table: on which device and architecture, at which precision, which forms hold the linear layers. A missing row is a refusal.

Torch is not needed: the names are those of the tables of forms in `kernels/linear.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.errors import NoRecipe
from app.hardware.decision import RecipeKey


@dataclass(frozen=True, slots=True)
class Recipe:
    """Forms in the order of preference: the first that suits the weight and the machine holds it; "plain" and "device" suit always.

    `linear` is for the layers' products, `output` for the output layer and the embedding tied to it (None: as `linear`).
    `equalise`: channels are made alike before they are rounded (kernels/equalise.py).
    `int8_copy_from`: where an int8 copy is held beside four-bit weights, it multiplies from so many rows on.
    """

    linear: tuple[str, ...]
    output: tuple[str, ...] | None = None
    equalise: bool = False
    int8_copy_from: int | None = None

    def forms(self, is_output: bool) -> tuple[str, ...]:
        return self.linear if self.output is None or not is_output else self.output


EXACT = Recipe(linear=("panels", "onednn", "plain"))
INT8 = Recipe(linear=("int8", "torch int8", "plain"), equalise=True)


def _int4(*others: str, int8_copy_from: int) -> Recipe:
    """Groups of 64: 0.53 bytes a weight. `others` serve where our library was not built."""
    return Recipe(linear=("int4/64", *others, "plain"), equalise=True, int8_copy_from=int8_copy_from)


# On devices with memory of their own. With four bits the output layer stays as it is: each of its rows is one token's score, and an
# embedding tied to it wants its rows back.
DEVICE_EXACT = Recipe(linear=("device",))
DEVICE_INT4 = Recipe(linear=("device int4/64", "device"), output=("device",), equalise=True)


def _device(kind: str, architecture: str, *exact: str) -> dict[RecipeKey, Recipe]:
    return {**{(kind, architecture, name): DEVICE_EXACT for name in exact}, (kind, architecture, "int4"): DEVICE_INT4}


# device kind, CPU architecture, precision. What packing gains on x86 stands in kernels/linear.py; torch for Arm has the same operators.
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


# What holds an encoder's products instead. Vectors are compared with others, and a text of one word has no others to average with: with one
# scale a row, all-MiniLM-L6-v2's "ok" comes out at a cosine of 0.982 with the exact one; with one for each 128 inputs at 0.995.
TEXT_FORMS: Mapping[str, str] = {"int8": "int8/128"}


def for_texts(recipe: Recipe) -> Recipe:
    """The same recipe for an encoder, or for a decoder that is served for its hidden states."""
    return replace(recipe, linear=tuple(TEXT_FORMS.get(name, name) for name in recipe.linear))


# Where neighbours may not matter (deterministic=on): forms whose rows add in one order, on any processor that they suit.
FIXED: Mapping[str, Recipe] = {
    "bf16": Recipe(linear=("panels/fixed",)),
    "int8": Recipe(linear=("int8",), equalise=True),
    "int4": Recipe(linear=("int4/64",), equalise=True),
}


def find_recipe(device: str, architecture: str, precision: str) -> Recipe:
    """The recipe for this machine. Raises `NoRecipe` with the rows that exist."""
    recipe = RECIPES.get((device, architecture, precision))
    if recipe is None:
        rows = "; ".join(" ".join(key) for key in RECIPES)
        raise NoRecipe(f"No recipe serves {precision} on {device} with {architecture}. Recipes exist for: {rows}.")
    return recipe
