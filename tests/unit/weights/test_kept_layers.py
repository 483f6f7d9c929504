"""Layers that the operator keeps in another precision: the form of each, and the bytes that the plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.errors import SettingsInvalid
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import KeptLayers, kept_layer_bytes, kept_precision
from app.weights.load import form_choice
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import Linear
from armature_kernels.linear.row_split import RowSplitLinear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load, plan_of
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}


def bits_of(model: torch.nn.Module, sources: str) -> list[int]:
    found = []
    for linear in model.modules():
        if isinstance(linear, Linear) and any(source.endswith(sources) for source in linear.sources):
            form = linear.form
            if isinstance(form, RowSplitLinear):
                found += [part.packing.bits for part in form.forms]
            else:
                found.append(form.packing.bits if isinstance(form, IntPanelLinear) else 16)
    return found


@pytest.mark.parametrize("precision", ("int8", "int4", "int4-small"))
def test_each_pattern_decides_the_form_of_its_layers(tmp_path: Path, precision: str) -> None:
    directory = write_checkpoint(tmp_path / "tiny", **SHAPE)
    kept = (("*.0.*.down_proj", "bf16"), ("*.k_proj", "int8"), ("*.[qv]_proj", "int4"), ("*.up_proj", "bf16"))
    model = load(directory, precision, keep_layers=kept)
    assert set(bits_of(model, "layers.0.mlp.down_proj")) == {16}
    assert bits_of(model, "layers.0.self_attn.k_proj") == [4, 8, 4]
    assert set(bits_of(model, ".gate_proj")) == {16}, "a product is exact if one of its sources is"
    assert set(bits_of(model, "layers.0.self_attn.o_proj")) <= ({8} if precision == "int8" else {4, 8})


def test_int4_small_has_fewer_upgraded_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", **SHAPE))
    small, usual = (form_choice(plan_of(name, 64), checkpoint.model_config) for name in ("int4-small", "int4"))
    assert small.upgraded < usual.upgraded
    sizes = checkpoint.needs().bytes_by_precision
    assert sizes["int4-small"] < sizes["int4"] < sizes["int8"]


@pytest.mark.parametrize("kept", ((("lm_head", "bf16"),), (("*.down_proj", "int8"), ("*.o_proj", "bf16"))))
def test_the_bytes_are_those_of_the_forms(tmp_path: Path, kept: KeptLayers) -> None:
    directory = write_checkpoint(tmp_path / "tiny", **SHAPE)
    config = open_checkpoint(directory).decoder
    plain, changed = load(directory, "int4-small"), load(directory, "int4-small", keep_layers=kept)

    def nbytes(model: torch.nn.Module) -> int:
        return sum(linear.form.nbytes for linear in model.modules() if isinstance(linear, Linear))

    assert kept_layer_bytes(config, "int4-small", kept) == nbytes(changed) - nbytes(plain) > 0


def test_a_pattern_must_match(tmp_path: Path) -> None:
    config = open_checkpoint(write_checkpoint(tmp_path / "tiny", **SHAPE)).decoder
    with pytest.raises(SettingsInvalid, match=r"no layer of this model matches \*\.experts.*\*\.down_proj"):
        kept_layer_bytes(config, "int4", (("*.experts", "int8"),))


def test_the_first_pattern_decides() -> None:
    kept = (("*.0.mlp.*", "bf16"), ("*.mlp.*", "int8"), ("lm_head", "int8"))
    assert kept_precision(kept, "model.layers.0.mlp.up_proj") == "bf16"
    assert kept_precision(kept, "model.layers.1.mlp.up_proj") == "int8"
    assert kept_precision(kept, "model.layers.1.self_attn.o_proj") is None
    assert kept_precision(kept, "model.embed_tokens") == "int8"
