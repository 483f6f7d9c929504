"""Checkpoints that transformers and torchao quantized: our logits are those of transformers, and damage is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from app.errors import CheckpointInvalid
from app.weights.checkpoint import open_checkpoint
from app.weights.safetensors import QuantizedEntry
from armature_kernels.linear.torchao_linear import build_config, torchao_module
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from reference_attention import PlainAttend, context_of
from reference_models import reference_logits, transformers
from tiny_checkpoints import write_checkpoint, write_tokenizer

PROMPT = list(range(5, 29))
# The config, the class of its weights, and what may differ: activations that transformers rounds to eight bits.
CONFIGS: dict[str, tuple[str, float]] = {
    "torchao:Int8WeightOnlyConfig": ("Int8Tensor", 1e-4),
    "torchao:Int8WeightOnlyConfig(granularity=PerGroup(32))": ("Int8Tensor", 1e-4),
    "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32))": ("IntxUnpackedToInt8Tensor", 1e-4),
    "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(16), mapping_type=asymmetric)": (
        "IntxUnpackedToInt8Tensor",
        1e-4,
    ),
    "torchao:Int8DynamicActivationInt8WeightConfig": ("Int8Tensor", 0.05),
    "torchao:Int8DynamicActivationIntxWeightConfig(weight_dtype=int4)": ("IntxUnpackedToInt8Tensor", 0.05),
    "torchao:Float8WeightOnlyConfig": ("Float8Tensor", 1e-4),
}


def quantized(folder: Path, config: str, shard_size: str = "1GB", **overrides: Any) -> Path:
    """A checkpoint as transformers saves it, with the tokenizer that it was read with."""
    exact = write_checkpoint(folder / "exact", hidden_size=64, intermediate_size=96, head_dim=16, **overrides)
    scheme = transformers.TorchAoConfig(build_config(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        exact, dtype=torch.float32, quantization_config=scheme, attn_implementation="eager", local_files_only=True
    )
    model.save_pretrained(folder / "quantized", max_shard_size=shard_size)
    write_tokenizer(folder / "quantized")
    return folder / "quantized"


@torch.inference_mode()
def logits(directory: Path, dtype: str = "float32") -> torch.Tensor:
    found: torch.Tensor = load(directory, dtype)(context_of(PROMPT, PlainAttend())).float()
    return found


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_are_those_of_transformers(tmp_path: Path, config: str) -> None:
    directory = quantized(tmp_path, config)
    kind, apart = CONFIGS[config]
    entries = open_checkpoint(directory).tensors
    assert {entry.kind for entry in entries.values() if isinstance(entry, QuantizedEntry)} == {kind}
    assert sum(isinstance(entry, QuantizedEntry) for entry in entries.values()) == 2 * 7  # of two layers
    expected, found = reference_logits(directory, PROMPT), logits(directory)
    assert (found - expected).norm() <= apart * expected.norm()
    exact = logits(tmp_path / "exact")
    assert (found - exact).norm() > 2e-3 * exact.norm()  # it is the quantized weights that were read


def test_a_tied_embedding_biases_and_shards(tmp_path: Path) -> None:
    directory = quantized(
        tmp_path, "torchao:Int8WeightOnlyConfig", "40KB", architecture="Qwen2ForCausalLM", tie_word_embeddings=True
    )
    assert len(list(directory.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(directory), reference_logits(directory, PROMPT), atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="the native library has no kernels here")
@pytest.mark.parametrize(("precision", "apart"), [("bfloat16", 0.03), ("int8", 0.03), ("int4", 0.2)])
def test_weights_are_packed_into_our_formats(tmp_path: Path, precision: str, apart: float) -> None:
    directory = quantized(tmp_path, "torchao:IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32))")
    expected = reference_logits(directory, PROMPT)
    assert (logits(directory, precision) - expected).norm() <= apart * expected.norm()


def _change(directory: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> None:
    file = directory / "model.safetensors"
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no dictionary)
        metadata = dict(stored.metadata())
    change(tensors, metadata)
    save_file(tensors, file, metadata)


NAME = "model.layers.1.mlp.up_proj"


def _other_kind(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata[f"{NAME}.weight"] = metadata[f"{NAME}.weight"].replace('"Int8Tensor"', '"Int4TilePackedTo4dTensor"')


def _no_scale(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    del tensors[f"{NAME}._weight_scale"]


def _no_dtype(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata[f"{NAME}.weight"] = metadata[f"{NAME}.weight"].replace("float32", "float31")


def _scaled_inputs(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors[f"{NAME}._weight_act_pre_scale"] = torch.ones(64)
    metadata[f"{NAME}.weight"] = metadata[f"{NAME}.weight"].replace('["zero', '["act_pre_scale", "zero')


def _wrong_scale(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors[f"{NAME}._weight_scale"] = torch.ones(7, 1)


def _other_class(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    values = json.loads(metadata[f"{NAME}.weight"])
    values["_data"]["act_quant_kwargs"] = {"_type": "os.system", "_data": "true"}
    metadata[f"{NAME}.weight"] = json.dumps(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_kind, "torchao's Int4TilePackedTo4dTensor"),
        (_no_scale, "not all of its parts"),
        (_no_dtype, "metadata of this weight is damaged"),
        (_scaled_inputs, "scales of activations are not supported"),
        (_wrong_scale, "torchao cannot read a quantized weight"),
        (_other_class, "Failed to find class os.system"),
    ],
)
def test_damage_is_refused_by_name(
    tmp_path: Path, int8_checkpoint: Path, change: Callable[[Any, Any], None], words: str
) -> None:
    directory = tmp_path / "changed"
    shutil.copytree(int8_checkpoint, directory)
    _change(directory, change)
    with pytest.raises(CheckpointInvalid) as caught:
        logits(directory)
    assert words in caught.value.message


@pytest.fixture(scope="module")
def int8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torchao_module("torchao.quantization")
    return quantized(tmp_path_factory.mktemp("int8"), "torchao:Int8WeightOnlyConfig")


def test_the_weights_of_other_libraries_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(CheckpointInvalid, match="already quantized by hqq"):
        open_checkpoint(directory)
