"""The table of recipes: forms that exist, a plain one last, and a refusal that lists the rows."""

from __future__ import annotations

import pytest

from app.errors import NoRecipe
from app.kernels.linear import FORMS
from app.weights.recipes import RECIPES, find_recipe


def test_every_recipe_names_forms_that_exist_and_ends_with_one_that_always_suits() -> None:
    for recipe in RECIPES.values():
        assert set(recipe.linear) <= set(FORMS) and recipe.linear[-1] == "plain"


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cpus_are_served(architecture: str, precision: str) -> None:
    assert find_recipe("cpu", architecture, precision).linear


def test_a_missing_row_lists_those_that_exist() -> None:
    with pytest.raises(NoRecipe) as caught:
        find_recipe("cpu", "riscv64", "bf16")
    assert "bf16 on cpu with riscv64" in caught.value.message and "cpu x86_64 fp32" in caught.value.message
