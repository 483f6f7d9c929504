"""The table of recipes: forms that exist, a plain one last, and a refusal that lists the rows."""

from __future__ import annotations

import pytest

from app.errors import NoRecipe
from app.kernels.linear.layout import LAYOUTS
from app.kernels.linear.linear import DEVICE_FORMS, FORMS, QUANTISED_FORMS
from app.weights.forms import RECIPES, Recipe, find_recipe, for_encoder


@pytest.mark.parametrize("is_output", [False, True])
def test_every_recipe_names_forms_that_exist(is_output: bool) -> None:
    for (device, _, precision), recipe in RECIPES.items():
        forms = recipe.forms(is_output)
        if device != "cpu":
            assert set(forms) <= set(DEVICE_FORMS) and forms[-1] == "device"  # which suits always
            assert recipe.equalise == (precision == "int4") and recipe.int8_copy_from is None
        elif precision in ("fp32", "bf16"):
            assert set(forms) <= set(FORMS) and forms[-1] == "plain"  # which suits always
            assert not recipe.equalise and recipe.int8_copy_from is None
        else:
            assert (
                set(forms[:-1]) <= set(QUANTISED_FORMS)
                and forms[0] in LAYOUTS
                and forms[-1] == "plain"
                and recipe.equalise
            )


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_cpus_are_served(architecture: str, precision: str) -> None:
    assert find_recipe("cpu", architecture, precision).linear


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_both_architectures_hold_the_same_bytes(precision: str) -> None:
    """What a checkpoint needs is counted before the machine is known."""
    first, second = (find_recipe("cpu", architecture, precision) for architecture in ("x86_64", "arm64"))
    assert all(first.forms(is_output)[0] == second.forms(is_output)[0] for is_output in (False, True))


def test_an_output_layer_may_have_forms_of_its_own() -> None:
    recipe = Recipe(linear=("int4/64",), output=("int8",))
    assert (recipe.forms(False), recipe.forms(True)) == (("int4/64",), ("int8",))


def test_a_missing_row_lists_those_that_exist() -> None:
    with pytest.raises(NoRecipe) as caught:
        find_recipe("cpu", "riscv64", "bf16")
    assert "bf16 on cpu with riscv64" in caught.value.message and "cpu x86_64 fp32" in caught.value.message


@pytest.mark.parametrize(
    ("device", "architecture", "precisions"),
    [
        ("cuda", "x86_64", {"fp32", "bf16", "int4"}),
        ("cuda", "arm64", {"fp32", "bf16", "int4"}),
        ("mps", "arm64", {"fp32", "bf16", "fp16", "int4"}),
        ("mps", "x86_64", set()),
    ],
)
def test_devices_are_served_in_these_precisions_and_no_others(
    device: str, architecture: str, precisions: set[str]
) -> None:
    assert {name for kind, built, name in RECIPES if (kind, built) == (device, architecture)} == precisions
    with pytest.raises(NoRecipe, match=f"int8 on {device}"):
        find_recipe(device, architecture, "int8")


def test_four_bits_on_a_device_leave_the_output_layer_as_it_is() -> None:
    recipe = find_recipe("cuda", "x86_64", "int4")
    assert recipe.forms(is_output=True) == ("device",) and recipe.forms(is_output=False)[0] == "device int4/64"


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_eight_bits_of_texts_have_a_scale_for_each_group(architecture: str) -> None:
    recipe = find_recipe("cpu", architecture, "int8")
    assert (recipe.forms(False)[0], for_encoder(recipe).forms(False)[0]) == ("int8", "int8/128")
    assert for_encoder(recipe).equalise and for_encoder(find_recipe("cpu", architecture, "bf16")) == find_recipe(
        "cpu", architecture, "bf16"
    )
