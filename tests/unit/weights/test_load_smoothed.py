"""Loading in integers makes channels even first: what a checkpoint multiplied them by leaves no trace in what is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from tiled_codes import tiled
from tiny_checkpoints import write_checkpoint, write_weights

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
__all__ = ["tiled"]  # a fixture
FED = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant(directory: Path) -> Tensor:
    """Every third channel of each layer's norms 64 times as large, and the weights behind it as much smaller: the same function."""
    tensors = load_file(directory / "model.safetensors")
    factor = torch.where(torch.arange(tensors["model.norm.weight"].numel()) % 3 == 0, 64.0, 1.0)
    for name in list(tensors):
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        for linear in FED.get(part, ()):
            tensors[f"{layer}.{linear}.weight"] = tensors[f"{layer}.{linear}.weight"] / factor
        if part in FED:
            tensors[name] = tensors[name] * factor
    write_weights(directory, tensors)
    return factor


@pytest.mark.parametrize("precision", ("int8", "int4"))
def test_planted_channels_leave_no_trace(tmp_path, precision):
    plain, planted = write_checkpoint(tmp_path / "plain"), write_checkpoint(tmp_path / "planted")
    factor = plant(planted)
    before, after = load(plain, precision), load(planted, precision)
    for name in ("attention", "mlp"):
        norms = [getattr(model.layers[1], f"{name}_norm").weight for model in (before, after)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
    for form in ("attention.qkv", "mlp.gate_up"):
        parts = [model.get_submodule(f"layers.1.{form}").form.parts for model in (before, after)]
        assert all(torch.equal(*pair) for pair in zip(*parts, strict=True))
    exact = load(planted, "float32").layers[1].attention_norm.weight
    assert exact.abs()[factor > 1].mean() > 20 * exact.abs()[factor == 1].mean()  # the planting did plant


@pytest.mark.parametrize("precision", ("int8", "int4"))
def test_a_tied_embedding_gives_its_rows_as_they_were(tmp_path, precision):
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.arange(len(table))
    rows = load(directory, precision).embedding(ids)
    assert (rows - table).norm() < (0.02 if precision == "int8" else 0.15) * table.norm()


def test_planted_channels_leave_no_trace_on_a_device(tmp_path, tiled):
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    plain, planted = write_checkpoint(tmp_path / "plain", **wide), write_checkpoint(tmp_path / "planted", **wide)
    plant(planted)
    before, after = load(plain, "int4", device="cuda"), load(planted, "int4", device="cuda")
    for form in ("attention.qkv", "mlp.gate_up"):
        forms = [model.get_submodule(f"layers.1.{form}").form for model in (before, after)]
        assert torch.equal(forms[0].packed, forms[1].packed) and torch.equal(forms[0].scales, forms[1].scales)
    for name in ("attention_norm", "mlp_norm"):
        norms = [model.get_submodule(f"layers.1.{name}").weight for model in (before, after)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
