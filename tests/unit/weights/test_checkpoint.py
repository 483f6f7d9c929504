"""Opening a checkpoint directory: its description, and every error in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.weights import tensor_names
from app.weights.checkpoint import INDEX, open_checkpoint
from quantized_files import quantized, round_to_gptq
from tiny_checkpoints import ARCHITECTURES, config_values, random_tensors, write_checkpoint, write_weights


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_opens(tmp_path: Path, architecture: str, shards: int) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", architecture, shards=shards))
    assert checkpoint.name == "tiny" and checkpoint.model_config.architecture == architecture
    assert checkpoint.generation_config["eos_token_id"] == 1
    assert len({entry.file for entry in checkpoint.tensors.values()}) == shards


@pytest.mark.parametrize("tied", [False, True])
def test_needs(tmp_path: Path, tied: bool) -> None:
    directory = write_checkpoint(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=tied)
    needs = open_checkpoint(directory).needs()
    tensors = random_tensors(ModelConfig.from_hf(config_values(tie_word_embeddings=tied)))
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert needs.num_parameters == elements and needs.weight_bytes == 2 * elements
    table = 0 if tied else 320 * 32  # looked up as stored, at two bytes
    assert (
        needs.bytes_by_precision.items() >= {"fp32": 4 * (elements - table) + 2 * table, "bf16": 2 * elements}.items()
    )
    assert needs.kv_elements_per_token == 2 * 2 * 2 * 8
    assert (needs.max_model_len, needs.num_layers, needs.hidden_size, needs.vocab_size) == (256, 2, 32, 320)
    assert (needs.kind, needs.stored_dtype, needs.architecture) == ("decoder", "bfloat16", "LlamaForCausalLM")


def test_keys_that_no_layer_reads_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published files of Gemma 3n hold them; those of a layer that needs them are not left alone."""
    directory = write_checkpoint(tmp_path, "Gemma3nForCausalLM")
    tensors = random_tensors(ModelConfig.from_hf(config_values("Gemma3nForCausalLM")))
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{part}.weight"] = tensors[f"model.layers.1.self_attn.{part}.weight"].clone()
    write_weights(directory, tensors)
    with caplog.at_level("INFO"):
        assert "model.layers.3.self_attn.k_proj.weight" not in open_checkpoint(directory).tensors
    assert "not read" not in caplog.text
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    write_weights(directory, tensors)
    with pytest.raises(CheckpointInvalid, match="k_norm"):
        open_checkpoint(directory)


def test_the_same_weights_in_another_form_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mistral's directories hold both, without an index."""
    write_checkpoint(tmp_path)
    for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes(b"not even a header")
    with caplog.at_level("INFO"):
        assert {entry.file.name for entry in open_checkpoint(tmp_path).tensors.values()} == {"model.safetensors"}
    assert "not read: consolidated-00001-of-00002.safetensors, consolidated.safetensors" in caplog.text


def test_harmless_extras_are_left_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(ModelConfig.from_hf(config_values(tie_word_embeddings=True)))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_weights(directory, tensors)
    assert "lm_head.weight" not in open_checkpoint(directory).tensors


@pytest.mark.parametrize("change", ["none", "last value", "type"])
def test_an_output_layer_of_its_own_is_used(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_names, "_COMPARED_BYTES", 1000)  # so that the last value is not in the first part
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(ModelConfig.from_hf(config_values(tie_word_embeddings=True)))
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "last value":
        head[-1, -1] += 1
    tensors["lm_head.weight"] = head.to(torch.bfloat16) if change == "type" else head
    write_weights(directory, tensors)
    with caplog.at_level("WARNING"):
        opened = open_checkpoint(directory)
    assert ("lm_head.weight" in opened.tensors) == (change != "none")
    assert opened.model_config.tie_embeddings == (change == "none")  # type: ignore[union-attr]
    assert ("differs from the embedding" in caplog.text) == (change != "none")


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_of_two_tied_tensors_may_be_left_out(tmp_path: Path, kept: str) -> None:
    """`save_model` of safetensors keeps the output layer."""
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(ModelConfig.from_hf(config_values(tie_word_embeddings=True)))
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    write_weights(directory, tensors)
    opened = open_checkpoint(directory)
    assert opened.tensors["model.embed_tokens.weight"].nbytes == tensors[kept].nbytes
    assert "lm_head.weight" not in opened.tensors and opened.decoder.tie_embeddings


@pytest.mark.parametrize("change", ["none", "values", "quantized"])
def test_a_quantized_model_has_its_own_output_layer_too(tmp_path: Path, change: str) -> None:
    directory, _ = quantized(tmp_path, "gptq", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    if change == "quantized":
        tensors |= {f"lm_head.{part}": one.contiguous() for part, one in round_to_gptq(table.float(), 32).items()}
    else:
        tensors["lm_head.weight"] = table * (2 if change == "values" else 1)
    write_weights(directory, tensors)
    opened = open_checkpoint(directory)
    assert ("lm_head.weight" in opened.tensors) == (not opened.decoder.tie_embeddings) == (change != "none")


def edit_json(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        file = directory / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = random_tensors(ModelConfig.from_hf(config_values()))
        change(tensors)
        write_weights(directory, tensors)

    return edit


def replace_weights(*names: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        for name in names:
            (directory / name).write_bytes(b"x")

    return replace


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def rename_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")


NORM, HEAD = "model.norm.weight", "lm_head.weight"
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config not json": (lambda d: (d / "config.json").write_text("{,"), "config.json in"),
    "config not utf-8": (lambda d: (d / "config.json").write_bytes(b"\xff\xff"), "config.json cannot be read"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "is not a JSON object"),
    "generation config": (lambda d: (d / "generation_config.json").write_text("x"), "generation_config.json in"),
    "unknown architecture": (
        edit_json("config.json", architectures=["Foo"]),
        "Foo is not supported; supported are Llama",
    ),
    "quantized": (edit_json("config.json", quantization_config={"quant_method": "hqq"}), "already quantized"),
    "no weights": (replace_weights(), "has no weights"),
    "pickle": (replace_weights("pytorch_model.bin"), "(pytorch_model.bin), which can run code"),
    "two files, no index": (replace_weights("a.safetensors", "b.safetensors"), f"2 *.safetensors files and no {INDEX}"),
    "truncated": (truncate, "model.safetensors has been cut short"),
    "not safetensors": (replace_weights("model.safetensors"), "model.safetensors is not a whole safetensors file"),
    "missing tensor": (
        edit_tensors(lambda t: t.pop(NORM)),
        f"lack 1 of the 21 tensors of this LlamaForCausalLM: {NORM}.",
    ),
    "no head": (
        edit_tensors(lambda t: t.pop(HEAD)),
        "no lm_head.weight; if it shares the embedding's, config.json must say",
    ),
    "shape": (
        edit_tensors(lambda t: t.update({NORM: torch.ones(5)})),
        f"{NORM} has shape [5], and config.json asks for [32]",
    ),
    "dtype": (
        edit_tensors(lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
        f"{NORM} is stored as I8; supported: F32",
    ),
    "extra": (
        edit_tensors(lambda t: t.update({"model.x": torch.ones(5)})),
        "LlamaForCausalLM of config.json does not use: model.x.",
    ),
    "fewer layers": (edit_json("config.json", num_hidden_layers=1), "9 tensors that"),
    "more layers": (edit_json("config.json", num_hidden_layers=9), "and 59 more"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json."),
    "old tokenizer": (rename_tokenizer, "tokenizer.model alone is not enough"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_what_is_wrong(tmp_path: Path, name: str) -> None:
    damage, sentence = REFUSALS[name]
    directory = write_checkpoint(tmp_path)
    damage(directory)
    with pytest.raises(CheckpointInvalid) as caught:
        open_checkpoint(directory)
    assert sentence in caught.value.message
    assert len(caught.value.message) < 1000


SHARD = "model-00002-of-00003.safetensors"
SHARDED_REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda d: (d / SHARD).unlink(), f"lacks 1 of 3 shards: {SHARD}"),
    "missing tensor": (edit_json(INDEX, weight_map={NORM: SHARD}), f"{NORM} (in {SHARD})"),
    "elsewhere": (edit_json(INDEX, weight_map={NORM: "../model.safetensors"}), "names of files in the same directory"),
    "no map": (edit_json(INDEX, weight_map=None), "weight_map must map"),
    "not json": (lambda d: (d / INDEX).write_text("]"), f"{INDEX} in"),
}


@pytest.mark.parametrize("name", SHARDED_REFUSALS)
def test_refusals_of_sharded_checkpoints(tmp_path: Path, name: str) -> None:
    damage, sentence = SHARDED_REFUSALS[name]
    directory = write_checkpoint(tmp_path, shards=3)
    damage(directory)
    with pytest.raises(CheckpointInvalid) as caught:
        open_checkpoint(directory)
    assert sentence in caught.value.message


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    for path, sentence in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "model.safetensors", "is a file; give the directory"),
    ):
        with pytest.raises(CheckpointInvalid, match=sentence):
            open_checkpoint(path)
