"""Opening encoders' directories: any layout under one set of names, counts, and every error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.errors import CheckpointInvalid
from app.models.encoders.config import encoder_tensors_of
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import encoder_bytes
from app.weights.tensor_reader import MappedFiles
from encoder_families import FAMILIES
from tiny_checkpoints import write_checkpoint, write_weights
from tiny_encoders import SUFFIX, write_encoder

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("use", ["Model", SUFFIX])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens(tmp_path: Path, family: str, use: str) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "tiny", family + use))
    config = checkpoint.encoder
    assert (
        checkpoint.kind == "encoder" and config.architecture == family + use and bool(config.labels) == (use == SUFFIX)
    )
    assert {name: entry.shape for name, entry in checkpoint.tensors.items()} == encoder_tensors_of(config)
    needs = checkpoint.needs()
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "tiny" / "model.safetensors").values())
    assert (needs.kind, needs.kv_elements_per_token, needs.num_parameters) == ("encoder", 0, stored)
    assert needs.bytes_by_precision["fp32"] == 4 * stored > needs.bytes_by_precision["bf16"]


def test_eight_bits_are_counted_with_a_scale_for_each_group(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "tiny"))
    config = replace(checkpoint.encoder, num_layers=1, hidden_size=256, intermediate_size=512)
    held = encoder_bytes(config, checkpoint.tensors)
    assert held["fp32"] > held["bf16"] > held["int8"]
    weights = 4 * 256 * 256 + 2 * 256 * 512  # a byte each, and two for the scale of 32
    biases = 4 * 256 + 512 + 256  # 4 bytes instead of 2
    assert held["bf16"] - held["int8"] == weights - 2 * weights // 32 - 2 * biases


def values_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return MappedFiles().tensor(checkpoint.tensors[name]).clone()


def test_one_stored_tensor_holds_several(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path, "GteModel"))
    stored = load_file(tmp_path / "model.safetensors")
    query, key, value = stored["encoder.layer.1.attention.qkv_proj.weight"].chunk(3)
    up, gate = stored["encoder.layer.1.mlp.up_gate_proj.weight"].chunk(2)
    for name, wanted in {"query": query, "key": key, "value": value, "up": up, "gate": gate}.items():
        assert torch.equal(values_of(checkpoint, f"layers.1.{name}.weight"), wanted), name
    assert torch.equal(
        values_of(checkpoint, "layers.0.key.bias"), stored["encoder.layer.0.attention.qkv_proj.bias"].chunk(3)[1]
    )


# Renames what was published into what transformers 5 calls it.
NOMIC = {
    "emb_ln": "embeddings.LayerNorm",
    "encoder.layers": "layers",
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
    "fc11": "up_proj",
    "fc12": "gate_proj",
    "fc2": "down_proj",
}


def test_both_of_nomics_layouts_are_the_same_model(tmp_path: Path) -> None:
    first = open_checkpoint(write_encoder(tmp_path / "first", "NomicBertModel"))
    second = write_encoder(tmp_path / "second", "NomicBertModel")
    tensors: Tensors = {}
    for name, tensor in load_file(second / "model.safetensors").items():
        for old, new in NOMIC.items():
            name = name.replace(old, new)
        if "Wqkv" in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            tensors |= {
                name.replace("attn.Wqkv", f"self_attn.{letter}_proj"): part.contiguous() for letter, part in parts
            }
        else:
            tensors[name] = tensor
    write_weights(second, tensors)
    opened = open_checkpoint(second)
    assert all(torch.equal(values_of(first, name), values_of(opened, name)) for name in first.tensors)


def edited(directory: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    write_weights(directory, tensors)
    return directory


def renamed(tensors: Tensors, new_name: Callable[[str], str]) -> None:
    items = list(tensors.items())
    tensors.clear()
    tensors.update((new_name(name), tensor) for name, tensor in items)


EXTRAS = (
    "cls.predictions.bias",
    "pooler.dense.weight",
    "bert.pooler.dense.bias",
    "embeddings.position_ids",
    "lm_head.bias",
)


@pytest.mark.parametrize("name", EXTRAS)
def test_harmless_extras_are_left_alone(tmp_path: Path, name: str) -> None:
    directory = write_encoder(tmp_path, "BertForMaskedLM")
    open_checkpoint(edited(directory, lambda tensors: tensors.update({name: torch.ones(3)})))


def test_prefixes_and_old_names_of_norms(tmp_path: Path) -> None:
    plain = open_checkpoint(write_encoder(tmp_path / "plain"))

    def old(name: str) -> str:
        return "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")

    opened = open_checkpoint(edited(write_encoder(tmp_path / "old"), lambda tensors: renamed(tensors, old)))
    assert all(torch.equal(values_of(plain, name), values_of(opened, name)) for name in plain.tensors)


REFUSED: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "missing": (
        "BertModel",
        lambda t: t.pop("encoder.layer.1.output.dense.bias"),
        "lack 1 .* encoder.layer.1.output.dense.bias",
    ),
    "shape": (
        "BertModel",
        lambda t: t.update({"embeddings.LayerNorm.bias": torch.ones(3)}),
        "embeddings.LayerNorm.bias has shape",
    ),
    "left over": (
        "BertModel",
        lambda t: t.update({"encoder.layer.2.x": torch.ones(3)}),
        "does not use: encoder.layer.2.x",
    ),
    "no head": (f"Bert{SUFFIX}", lambda t: t.pop("classifier.weight"), "lack 1 .* classifier.weight"),
    "adapters": ("JinaEmbeddingsV3Model", lambda t: t.update({"x.lora_A": torch.ones(3)}), "adapters"),
    "uneven": (
        "GteModel",
        lambda t: t.update({"encoder.layer.0.attention.qkv_proj.bias": torch.ones(97)}),
        "3 equal parts",
    ),
    "a decoder's extra": (
        "Qwen3Model",
        lambda t: t.update({"layers.0.experts": torch.ones(3)}),
        "does not use: model.layers.0.exp",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_tensors_are_named(tmp_path: Path, case: str) -> None:
    architecture, change, sentence = REFUSED[case]
    directory = edited(write_encoder(tmp_path, architecture), change)
    with pytest.raises(CheckpointInvalid, match=sentence):
        open_checkpoint(directory)


def test_a_decoder_saved_alone_and_beside_a_head(tmp_path: Path) -> None:
    alone = open_checkpoint(write_encoder(tmp_path / "alone", "Qwen3Model"))
    beside = write_encoder(tmp_path / "beside", "Qwen3Model")
    edited(beside, lambda tensors: renamed(tensors, lambda name: f"model.{name}"))
    assert set(open_checkpoint(beside).tensors) == set(alone.tensors) and "model.norm.weight" in alone.tensors
    assert not alone.encoder.bidirectional and alone.encoder.pooling.modes == ("last",)


def test_each_kind_says_what_it_is(tmp_path: Path) -> None:
    encoder = open_checkpoint(write_encoder(tmp_path / "encoder"))
    decoder = open_checkpoint(write_checkpoint(tmp_path / "decoder"))
    assert encoder.encoder.hidden_size == decoder.decoder.hidden_size == 32
    with pytest.raises(CheckpointInvalid, match=r"is an encoder \(BertModel\); a decoder is needed here"):
        _ = encoder.decoder
    with pytest.raises(CheckpointInvalid, match=r"is a decoder \(LlamaForCausalLM\); an encoder is needed here"):
        _ = decoder.encoder


def test_a_quantized_one_is_refused(tmp_path: Path) -> None:
    file = write_encoder(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"bits": 4}}))
    with pytest.raises(CheckpointInvalid, match="already quantized"):
        open_checkpoint(tmp_path)
