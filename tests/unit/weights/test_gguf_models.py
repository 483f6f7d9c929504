"""GGUF files: the tensors, the configuration and the tokenizer are those of the checkpoint that a file was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gguf_files
from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.text.chat import open_chat_template
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.gguf.blocks import dequantize_blocks
from app.weights.gguf.config import REFUSED, WITHOUT_EFFECT, config_values
from app.weights.gguf.reader import TYPES, read_gguf
from app.weights.tensor_reader import MappedFiles, TensorReader
from armature_bench.engine.gguf_file import write_gguf as write_copy
from gguf_files import ARCHITECTURES, GROUPED, convert, write_gguf
from loaded_models import load
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import write_checkpoint

PROMPT = list(range(5, 29))


def same_tensors(ours: Checkpoint, exact: Checkpoint) -> bool:
    """True if both have the same tensors, bit for bit in FP32."""
    first, second = MappedFiles(), MappedFiles()
    return list(ours.tensors) == list(exact.tensors) and all(
        torch.equal(first.tensor(entry).float(), second.tensor(exact.tensors[name]).float())
        for name, entry in ours.tensors.items()
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_has_the_tensors_and_values_of_its_checkpoint(tmp_path: Path, architecture: str) -> None:
    heads = {"query_pre_attn_scalar": 8} if "Gemma" in architecture else {}  # llama.cpp derives it from the head
    file = write_gguf(tmp_path, architecture, **heads)
    ours, exact = open_checkpoint(file), open_checkpoint(tmp_path / "exact")
    # (w + 1) - 1 of Gemma's norms rounds to FP32.
    close = {name for name in exact.tensors if name.endswith("norm.weight") and exact.decoder.norm.offset}
    first, second = MappedFiles(), MappedFiles()
    assert list(ours.tensors) == list(exact.tensors)
    for name, entry in ours.tensors.items():
        tolerance = 1.2e-7 if name in close else 0.0
        torch.testing.assert_close(
            first.tensor(entry), second.tensor(exact.tensors[name]), rtol=0, atol=tolerance, msg=name
        )
    assert ours.decoder == ModelConfig.from_hf({**exact.config, "rms_norm_eps": ours.decoder.norm_eps})


@pytest.mark.parametrize("kind", [name for name in TYPES if name not in ("F32", "F16")])
def test_blocks_have_the_values_of_the_gguf_package(kind: str) -> None:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (300, TYPES[kind].nbytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    ours = dequantize_blocks(kind, torch.from_numpy(blocks)).float().numpy()
    assert np.array_equal(ours, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_files_give_the_values_that_they_hold(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path, kind=kind, **GROUPED))
    # What the package reads from what it wrote is a checkpoint of its own.
    values, reader = {}, gguf.GGUFReader(tmp_path / "tiny.gguf")
    for tensor in reader.tensors:
        values[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    files = MappedFiles()
    ours = files.tensor(checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]).float().numpy()
    assert np.array_equal(ours, values["blk.1.ffn_down.weight"])
    rows = values["blk.0.attn_q.weight"].reshape(4, 4, 2, 64).swapaxes(1, 2).reshape(32, 64)
    entry = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(files.tensor(entry).float().numpy(), rows)
    streams = TensorReader(checkpoint.tensors)
    assert np.array_equal(streams.block(entry, range(5, 21)).float().numpy(), rows[5:21])
    assert checkpoint.needs().stored_quantization == ("" if "F16" in kind else kind)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int4-small"])
def test_a_model_is_that_of_a_checkpoint_with_the_same_values(tmp_path: Path, precision: str) -> None:
    file = write_gguf(tmp_path, kind="Q8_0", **GROUPED)
    values = {name: MappedFiles().tensor(entry).clone() for name, entry in open_checkpoint(file).tensors.items()}
    save_file(values, tmp_path / "exact" / "model.safetensors")
    with torch.inference_mode():
        ours = load(file, precision)(context_of(PROMPT, PlainAttend()))
        assert torch.equal(ours, load(tmp_path / "exact", precision)(context_of(PROMPT, PlainAttend())))


def test_the_tokenizer_and_the_template_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    file = write_gguf(tmp_path)
    ours, exact = Tokenizer(file), Tokenizer(tmp_path / "exact")
    text = "the weather in the <|user|>Ärger, 中文, 1234</s> \n\n  then"
    assert ours.encode(text) == exact.encode(text)
    assert ours.decode(ours.encode(text)) == exact.decode(exact.encode(text))
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (0, {1}, exact.vocab_size)
    assert ours.special_tokens == exact.special_tokens
    template = open_chat_template(file, ours.config, ours.named_tokens)
    assert template is not None and "add_generation_prompt" in template.source


def test_named_templates_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ messages | tojson }}{{ tools | tojson }}"
    named = [{"name": "default", "template": gguf_files.CHAT_TEMPLATE}, {"name": "tool_use", "template": source}]
    monkeypatch.setattr(gguf_files, "CHAT_TEMPLATE", named)
    file = write_gguf(tmp_path)
    template = open_chat_template(file, Tokenizer(file).config, {})
    assert template is not None and template.with_tools is not None
    assert template.with_tools.source == source and "add_generation_prompt" in template.source
    template.close()


def test_a_gguf_file_is_not_copied_to_another(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path, kind="Q8_0", **GROUPED))
    with pytest.raises(CheckpointInvalid, match="is quantized or a GGUF file already"):
        write_copy(checkpoint, tmp_path / "copy.gguf")


def test_parts_are_one_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "exact")
    folder = tmp_path / "parts"
    folder.mkdir()
    convert(source, folder / "tiny.gguf", split_max_tensors=8)
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) == 3
    for path in (*parts, folder):
        checkpoint = open_checkpoint(path)
        assert same_tensors(checkpoint, open_checkpoint(source))
        assert checkpoint.content_files == parts and Tokenizer(checkpoint.location).vocab_size == 270
    parts[1].unlink()
    with pytest.raises(CheckpointInvalid, match=r"lacks 1 of 3 parts of this model: tiny-00002-of-00003.gguf"):
        open_checkpoint(folder)


def test_a_directory_with_two_models_asks_for_one(tmp_path: Path) -> None:
    file = write_gguf(tmp_path)
    assert open_checkpoint(tmp_path).gguf == file and open_checkpoint(tmp_path).name == "tiny"
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointInvalid, match=r"has 2 GGUF models: give one of them, such as .*other\.gguf"):
        open_checkpoint(tmp_path)


def test_divisors_of_rotary_frequencies_are_kept(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "exact")
    convert(source, tmp_path / "tiny.gguf", added={"rope_freqs.weight": np.array([1, 2, 4, 8], dtype=np.float32)})
    rope = open_checkpoint(tmp_path / "tiny.gguf").decoder.ropes[0]
    assert rope is not None and rope.short_factor == rope.long_factor == (1, 2, 4, 8) and rope.attention_factor == 1


def test_every_name_of_llama_cpp_is_known() -> None:
    """Those that the reader of an architecture asks for need not be listed."""
    from gguf.constants import Keys

    parts = (Keys.LLM, Keys.Attention, Keys.Attention.Indexer, Keys.Rope, Keys.SSM, Keys.WKV)
    names = {value for part in parts for value in vars(part).values() if isinstance(value, str) and "{arch}." in value}
    asked = {"context_length", "embedding_length", "block_count", "feed_forward_length", "nextn_predict_layers"}
    asked |= {f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")}
    asked |= {"attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"}
    left = {name.removeprefix("{arch}.") for name in names} - asked - REFUSED.keys() - WITHOUT_EFFECT
    assert left == set()


NUMBERS: dict[str, tuple[str, Any]] = {
    "attn_logit_softcapping": ("llama", 50.0),
    "final_logit_softcapping": ("qwen2", 30.0),
    "attention.scale": ("llama", 0.5),
    "logit_scale": ("qwen3", 2.0),
    "attention.causal": ("qwen3", False),
    "rope.scaling.yarn_log_multiplier": ("llama", 0.1),
    "expert_group_count": ("llama", 4),
    "attention.shared_kv_layers": ("llama", 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_values_that_an_architecture_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    architecture, value = NUMBERS[name]
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    model = read_gguf(write_gguf(tmp_path, classes[architecture]))
    changed = replace(model, metadata={**model.metadata, f"{architecture}.{name}": value})
    with pytest.raises(CheckpointInvalid, match=f"{name} is {value}, which this architecture does not have here"):
        config_values(changed)
    for neutral in REFUSED[name]:
        config_values(replace(model, metadata={**model.metadata, f"{architecture}.{name}": neutral}))


def test_linear_scaling_of_old_files_is_followed(tmp_path: Path) -> None:
    model = read_gguf(write_gguf(tmp_path))
    values = config_values(replace(model, metadata={**model.metadata, "llama.rope.scale_linear": 4.0}))
    assert values["rope_scaling"] == {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}
