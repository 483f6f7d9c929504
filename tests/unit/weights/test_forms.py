"""The table of recipes: forms that exist, a plain one last, and a refusal that lists the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import NoRecipe
from app.hardware.plan.memory_budget import kv_bytes_per_token
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import norm_elements
from app.weights import forms
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import RECIPES, Recipe, choose_upgrades, find_recipe
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.layout import LAYOUTS
from armature_kernels.linear.linear import DEVICE_FORMS, FORMS, QUANTIZED_FORMS, Linear
from armature_kernels.linear.torchao_config import EXAMPLE, is_torchao
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from tiny_checkpoints import write_checkpoint


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
                all(name in QUANTIZED_FORMS or is_torchao(name) for name in forms[:-1])
                and forms[0] in LAYOUTS
                and forms[-1] == "plain"
                and recipe.equalise
            )


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_cpus_are_served(architecture: str, precision: str) -> None:
    assert find_recipe("cpu", architecture, precision).linear


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_config_of_torchao_is_a_recipe_that_leaves_the_output_layer_exact(device: str) -> None:
    recipe, exact = find_recipe(device, "x86_64", EXAMPLE), find_recipe(device, "x86_64", "bf16")
    assert recipe == Recipe(linear=(EXAMPLE, exact.linear[-1]), output=exact.linear)


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
        ("cuda", "x86_64", {"fp32", "bf16", "fp8", "int8", "int4"}),
        ("cuda", "arm64", {"fp32", "bf16", "fp8", "int8", "int4"}),
        ("mps", "arm64", {"fp32", "bf16", "fp16", "int4"}),
        ("mps", "x86_64", set()),
    ],
)
def test_devices_are_served_in_these_precisions_and_no_others(
    device: str, architecture: str, precisions: set[str]
) -> None:
    assert {name for kind, built, name in RECIPES if (kind, built) == (device, architecture)} == precisions
    with pytest.raises(NoRecipe, match=f"int4-small on {device}"):
        find_recipe(device, architecture, "int4-small")


def test_four_bits_on_a_device_leave_the_output_layer_as_it_is() -> None:
    recipe = find_recipe("cuda", "x86_64", "int4")
    assert recipe.forms(is_output=True) == ("device",) and recipe.forms(is_output=False)[0] == "device int4/64"


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_activations_and_weights_have_a_scale_for_32_inputs(architecture: str) -> None:
    four, eight = (find_recipe("cpu", architecture, precision) for precision in ("int4", "int8"))
    assert eight.forms(True)[0] == eight.forms(False)[0] == four.forms(True)[0] == four.upgrade == "int8/32"
    assert four.forms(False)[0] == "int4/32 double quantized"


def config_of(directory: Path, **changed: Any) -> ModelConfig:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    return open_checkpoint(write_checkpoint(directory, **{**shape, **changed})).decoder


def test_upgrades_are_the_values_and_what_loses_most_within_the_budget(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    values = {f"model.layers.{layer}.self_attn.v_proj" for layer in range(4)}
    recipe = find_recipe("cpu", "x86_64", "int4")
    assumed = choose_upgrades(config, recipe)
    assert "lm_head" in assumed, "the output layer of a small model"
    assumed -= {"lm_head"}
    assert values < assumed and {name.rsplit(".", 1)[1] for name in assumed - values} == {"down_proj"}
    o_proj = ("model.layers.2.self_attn.o_proj",)
    measured = choose_upgrades(config, recipe, {o_proj: 1.0, ("model.layers.0.mlp.down_proj",): 0.1})
    assert values < measured and o_proj[0] in measured
    spent = sum(cost for sources, cost in forms._upgrade_costs(config).items() if set(sources) <= measured)
    assert 0 < spent <= forms.upgrade_budget(config, recipe)


def test_a_model_whose_values_exceed_the_budget_has_no_upgrades(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, hidden_size=32, intermediate_size=32, head_dim=8, num_attention_heads=16, num_key_value_heads=16
    )
    assert choose_upgrades(config, find_recipe("cpu", "x86_64", "int4-small")) == {"lm_head"}


def test_the_output_layer_of_a_large_model_has_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, recipe = config_of(tmp_path, tie_word_embeddings=True), find_recipe("cpu", "x86_64", "int4")
    small = forms.quantized_bytes(config, "int4")
    assert "model.embed_tokens" in choose_upgrades(config, recipe)
    layers = sum(rows * columns for (rows, columns), _ in forms.products_of(config))
    budget = forms.upgrade_budget(config, recipe)
    monkeypatch.setattr(forms, "SMALL_MODEL", layers + config.vocab_size * config.hidden_size // 2)
    assert "model.embed_tokens" not in choose_upgrades(config, recipe), "a vocabulary that is large for the layers"
    assert forms.upgrade_budget(config, recipe) == budget and forms.quantized_bytes(config, "int4") < small
    monkeypatch.setattr(forms, "SMALL_MODEL", 0)
    assert "model.embed_tokens" not in choose_upgrades(config, recipe)
    assert forms.quantized_bytes(config, "int4") < small


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_bytes_of_a_model_with_several_hidden_states_are_those_that_it_holds(tmp_path: Path, precision: str) -> None:
    """Its table of inputs of all layers stays as stored, and keys that layers share are counted once."""
    sizes = {"intermediate_size": 96, "laurel_rank": 32, "hidden_size_per_layer_input": 32, "vocab_size": 320}
    directory = write_checkpoint(tmp_path, "Gemma3nForCausalLM", dtype=torch.bfloat16, **sizes)
    checkpoint = open_checkpoint(directory)
    needs, model = checkpoint.needs(), load(directory, {"bf16": "bfloat16"}.get(precision, precision))
    table = checkpoint.tensors["model.embed_tokens_per_layer.weight"]
    assert needs.table_bytes == table.nbytes == 300 * 4 * 32 * 2
    assert model.entry.table.weight.dtype == torch.bfloat16
    held = table.nbytes + sum(linear.form.nbytes for linear in model.modules() if isinstance(linear, Linear))
    held += 4 * norm_elements(checkpoint.decoder) if precision != "bf16" else 2 * norm_elements(checkpoint.decoder)
    assert needs.bytes_by_precision[precision] == pytest.approx(held, rel=0.06)
    assert needs.kv_elements_per_token == 2 * 2 * 2 * 8 and (needs.num_layers, needs.num_kv_layers) == (4, 2)
    assert kv_bytes_per_token(needs, "int8") == 2 * 64
    narrow = [linear for linear in model.modules() if isinstance(linear, Linear) and "laurel" in linear.sources[0]]
    if precision == "int4":
        assert all(isinstance(linear.form, IntPanelLinear) and linear.form.packing.bits == 8 for linear in narrow)
