"""GGUF files of mixtures of experts: tensors and configuration are those of the checkpoint that a file was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.gguf.reader import GgufModel, read_gguf
from app.weights.tensor_reader import MappedFiles
from armature_bench.engine.gguf_file import ARCHITECTURES, gguf_name, require_convertible
from gguf_files import requantize, write_mixture
from loaded_models import load
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import MIXTURES, config_values

PROMPT = list(range(5, 29))
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
INNER = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def with_close_numbers(config: ModelConfig) -> ModelConfig:
    """The config with the floats of a file, which are FP32."""
    eps, head_norm = float(np.float32(config.norm.eps)), config.head_norm
    return replace(
        config,
        norm=replace(config.norm, eps=eps),
        head_norm=None if head_norm is None else replace(head_norm, eps=float(np.float32(head_norm.eps))),
        attention_scale=float(np.float32(config.attention_scale)),
        embedding_scale=float(np.float32(config.embedding_scale)),
        logit_scale=1 / float(np.float32(1 / config.logit_scale)),
    )


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_has_the_tensors_and_values_of_its_checkpoint(tmp_path: Path, architecture: str) -> None:
    file = write_mixture(tmp_path, architecture)
    ours, exact = open_checkpoint(file), open_checkpoint(tmp_path / "exact")
    first, second = MappedFiles(), MappedFiles()
    assert list(ours.tensors) == list(exact.tensors)
    for name, entry in ours.tensors.items():
        assert torch.equal(first.tensor(entry), second.tensor(exact.tensors[name])), name
    assert with_close_numbers(ours.decoder) == with_close_numbers(exact.decoder)
    assert ours.needs().expert_use == exact.needs().expert_use


@pytest.mark.parametrize("architecture", MIXTURES)
def test_tensors_have_the_names_that_llama_cpp_reads(architecture: str) -> None:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[architecture][0])
    known = {gguf.TENSOR_NAMES[tensor].format(bid=1) for tensor in gguf.MODEL_TENSORS[kind]}
    config = ModelConfig.from_hf(config_values(architecture))
    names = {gguf_name(config, name).rpartition(".")[0] for name in tensors_of(config)}
    assert {name for name in names if not name.startswith("blk.0.")} <= known


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_a_quantized_mixture_gives_the_values_that_it_holds(tmp_path: Path, kind: str) -> None:
    file = requantize(write_mixture(tmp_path, "Qwen2MoeForCausalLM", **SIZES, **INNER), kind)
    checkpoint, files = open_checkpoint(file), MappedFiles()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for part in ("gate", "up", "down"):
        stored = tensors[f"blk.1.ffn_{part}_exps.weight"]
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        for expert in range(6):
            entry = checkpoint.tensors[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]
            assert np.array_equal(files.tensor(entry).float().numpy(), expected[expert])
    assert checkpoint.needs().stored_quantization == kind


@pytest.mark.parametrize(("kind", "precision"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8")])
def test_codes_of_experts_are_kept(tmp_path: Path, kind: str, precision: str) -> None:
    """The packed model computes with the values of the file, but for scales in BF16 and activations in 8 bits."""
    file = requantize(write_mixture(tmp_path, "Qwen3MoeForCausalLM", **SIZES, **INNER), kind)
    with torch.inference_mode():
        exact = load(file)(context_of(PROMPT, PlainAttend()))
        kept = load(file, precision)(context_of(PROMPT, PlainAttend()))
    assert open_checkpoint(file).needs().codes_precision == precision
    assert float((kept - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("precision", ["float32", "int4-small"])
def test_a_mixture_is_that_of_a_checkpoint_with_the_same_values(tmp_path: Path, precision: str) -> None:
    file = requantize(write_mixture(tmp_path, "Qwen3MoeForCausalLM", **SIZES, **INNER), "Q8_0")
    values = {name: MappedFiles().tensor(entry).clone() for name, entry in open_checkpoint(file).tensors.items()}
    save_file(values, tmp_path / "exact" / "model.safetensors")
    with torch.inference_mode():
        ours = load(file, precision)(context_of(PROMPT, PlainAttend()))
        assert torch.equal(ours, load(tmp_path / "exact", precision)(context_of(PROMPT, PlainAttend())))


@pytest.fixture(name="mixtral")
def _mixtral(tmp_path: Path) -> GgufModel:
    return read_gguf(write_mixture(tmp_path, "MixtralForCausalLM"))


def opened(monkeypatch: pytest.MonkeyPatch, model: GgufModel) -> Checkpoint:
    monkeypatch.setattr("app.weights.checkpoint.read_gguf", lambda file: model)
    return open_checkpoint(model.file)


def single_experts(model: GgufModel) -> Iterator[tuple[str, Any]]:
    """The tensors of a model as old converters wrote them: one for each expert."""
    for name, tensor in model.tensors.items():
        stem = name.removesuffix("_exps.weight")
        if stem == name:
            yield name, tensor
            continue
        size = (tensor.end - tensor.start) // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            start = tensor.start + expert * size
            yield f"{stem}.{expert}.weight", replace(tensor, shape=tensor.shape[1:], start=start, end=start + size)


def test_a_tensor_for_each_expert_is_read(mixtral: GgufModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = opened(monkeypatch, mixtral).tensors
    assert opened(monkeypatch, replace(mixtral, tensors=dict(single_experts(mixtral)))).tensors == expected


def test_gates_and_ups_in_one_tensor_are_read(mixtral: GgufModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = dict(mixtral.tensors)
    gates = tensors.pop("blk.0.ffn_gate_exps.weight")
    tensors.pop("blk.0.ffn_up_exps.weight")
    # Where the tensor would be: of each expert 48 rows of the gate, then 48 of the up, of 32 values in FP32.
    shape, size = (5, 96, 32), 48 * 32 * 4
    tensors["blk.0.ffn_gate_up_exps.weight"] = replace(gates, shape=shape, end=gates.start + 10 * size)
    found = opened(monkeypatch, replace(mixtral, tensors=tensors)).tensors
    for expert in range(5):
        for place, part in enumerate(("gate_proj", "up_proj")):
            entry = found[f"model.layers.0.mlp.experts.{expert}.{part}.weight"]
            start = gates.start + (2 * expert + place) * size
            assert (entry.shape, entry.start, entry.end) == ((48, 32), start, start + size)


def test_layers_that_predict_further_tokens_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_gguf(write_mixture(tmp_path, "Glm4MoeForCausalLM"))
    more = {name.replace("blk.1.", "blk.2."): tensor for name, tensor in model.tensors.items()}
    more["blk.2.nextn.eh_proj.weight"] = model.tensors["blk.1.attn_q.weight"]
    metadata = {**model.metadata, "glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    expected = opened(monkeypatch, model)
    found = opened(monkeypatch, GgufModel(model.file, metadata, {**model.tensors, **more}))
    assert found.tensors == expected.tensors and found.decoder == expected.decoder


REFUSALS: dict[str, tuple[Mapping[str, Any], str]] = {
    "gating": ({"llama.expert_gating_func": 2}, "llama.expert_gating_func is not the one of this architecture"),
    "scale": ({"llama.expert_weights_scale": 2.5}, "llama.expert_weights_scale is 2.5"),
    "none used": ({"llama.expert_used_count": None}, "expert_used_count is missing"),
    "too many used": ({"llama.expert_used_count": 6}, "6 experts of each token cannot be selected from 5"),
    "too many": ({"llama.expert_count": 2000}, "2000 experts are more than 1024"),
    "another number": ({"llama.expert_count": 4}, "The weights lack 24 of the "),
    "no number": ({"llama.expert_count": 0}, "The weights lack"),
    "a dense family": (
        {"general.architecture": "qwen3", "qwen3.expert_count": 5},
        "is a mixture of experts, which is not supported for architecture 'qwen3'",
    ),
    "no experts": (
        {"general.architecture": "qwen3moe"},
        "is no mixture of experts, which is not supported for architecture 'qwen3moe'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(mixtral: GgufModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, sentence = REFUSALS[name]
    metadata = {key: value for key, value in {**mixtral.metadata, **values}.items() if value is not None}
    with pytest.raises(CheckpointInvalid) as caught:
        opened(monkeypatch, replace(mixtral, metadata=metadata))
    assert sentence in caught.value.message


UNWRITTEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "sum": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob: false cannot be converted"),
    "dense": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "with dense layers among its experts"),
    "window": ("MixtralForCausalLM", {"sliding_window": 6}, "with a sliding window"),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_llama_cpp_computes_in_another_way_is_not_written(name: str) -> None:
    architecture, values, sentence = UNWRITTEN[name]
    with pytest.raises(CheckpointInvalid, match=sentence):
        require_convertible(ModelConfig.from_hf(config_values(architecture, **values)))
