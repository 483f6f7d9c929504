"""Writes tiny checkpoints as GGUF files with the package `gguf`, in llama.cpp's conventions, as its own converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from app.weights.checkpoint import open_checkpoint
from armature_bench.engine import gguf_file
from armature_bench.engine.gguf_file import write_shape
from tiny_checkpoints import CHAT_TEMPLATE, write_checkpoint

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
# Names in a layer, in the order of the checks: the first that occurs in a tensor's name is used.
NAMES = {
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GROUPED = {"hidden_size": 64, "intermediate_size": 96}  # sizes that have whole groups of 32


def write_gguf(folder: Path, architecture: str = "LlamaForCausalLM", kind: str = "F32", **overrides: Any) -> Path:
    """Write a tiny checkpoint to `folder`/exact and the same model to `folder`/tiny.gguf; matrices have the type `kind`."""
    source = write_checkpoint(folder / "exact", architecture, **overrides)
    file = folder / "tiny.gguf"
    convert(source, file, kind)
    return file


def convert(
    source: Path, file: Path, kind: str = "F32", added: Mapping[str, np.ndarray[Any, Any]] | None = None, **options: Any
) -> None:
    """Write a checkpoint as a GGUF file, with the tensors `added` as they are."""
    config = open_checkpoint(source).decoder
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.architecture], **options)
    write_values(writer, config, json.loads((source / "config.json").read_text()))
    write_tokenizer(writer, source)
    for name, tensor in load_file(source / "model.safetensors").items():
        write_tensor(writer, config, name, tensor, kind)
    for name, values in (added or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def requantize(file: Path, kind: str) -> Path:
    """Write a file of FP32 weights again with matrices of another type, as llama.cpp does: routers stay as they are."""
    reader, target = gguf.GGUFReader(file), file.with_name(f"{kind}.gguf")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        stays = tensor.data.ndim == 1 or "ffn_gate_inp" in tensor.name or "ssm_conv1d" in tensor.name
        chosen = gguf.GGMLQuantizationType["F32" if stays else kind]
        writer.add_tensor(tensor.name, gguf.quants.quantize(np.array(tensor.data), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_mixture(folder: Path, architecture: str, **overrides: Any) -> Path:
    """Write a tiny mixture of experts to `folder`/exact, and the same to `folder`/tiny.gguf with the benchmark's writer."""
    checkpoint = open_checkpoint(write_checkpoint(folder / "exact", architecture, **overrides))
    file = folder / "tiny.gguf"
    gguf_file.write_gguf(checkpoint, file, lambda writer: write_tokenizer(writer, checkpoint.directory))
    return file


def write_values(writer: gguf.GGUFWriter, config: Any, values: dict[str, Any]) -> None:
    write_shape(writer, config, config.ropes[-1] or config.ropes[0])
    if config.norm.offset:
        writer.add_sliding_window(values["sliding_window"])
        if config.attention_softcap:
            writer.add_attn_logit_softcapping(config.attention_softcap)
            writer.add_final_logit_softcapping(config.logit_softcap)
        if config.architecture == "Gemma3ForCausalLM":
            writer.add_sliding_window_pattern([window is not None for window in config.windows])


def write_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if place in special else 1 for place in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_tensor(writer: gguf.GGUFWriter, config: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    values = tensor.float().numpy()
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads and ARCHITECTURES[config.architecture] in ("llama", "smollm3"):
        # The two elements that a rotary embedding rotates together are neighbours in llama.cpp.
        values = values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if name.endswith("norm.weight"):
        values = values + np.float32(config.norm.offset)
    quantized = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
    packed = gguf.quants.quantize(np.ascontiguousarray(values), quantized)
    writer.add_tensor(gguf_name(config, name), packed, raw_dtype=quantized)


def gguf_name(config: Any, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in others:
        return f"{others[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if part == "post_attention_layernorm" and config.norm.offset:
        return f"blk.{layer}.post_attention_norm.{kind}"
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write_reader_gguf(source: Path, folder: Path, kind: str = "F32") -> tuple[Path, Path]:
    """Write a checkpoint of SmolVLM or Idefics 3 as llama.cpp has it: the text model, and the file `mmproj` beside it."""
    values = json.loads((source / "config.json").read_text())
    weights, text = load_file(source / "model.safetensors"), folder / "text"
    text.mkdir(parents=True)
    (text / "config.json").write_text(json.dumps({**values["text_config"], "architectures": ["LlamaForCausalLM"]}))
    own = {name.replace("text_model.", ""): one for name, one in weights.items() if "text_model." in name}
    save_file({**own, "lm_head.weight": weights["lm_head.weight"]}, text / "model.safetensors")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    (text / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = folder / "reader.gguf"
    convert(text, model)
    return model, write_mmproj(source, folder / "mmproj-reader.gguf", kind)


def write_mmproj(source: Path, file: Path, kind: str = "F32", **changed: Any) -> Path:
    """Write the picture part as llama.cpp's converter does, with the names of its own table."""
    values = json.loads((source / "config.json").read_text())
    processor = json.loads((source / "processor_config.json").read_text())["image_processor"]
    vision = values["vision_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(changed.get("projector", gguf.VisionProjectorType.IDEFICS3))
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(changed.get("layers", vision["num_hidden_layers"]))
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    writer.add_vision_projector_scale_factor(values["scale_factor"])
    writer.add_vision_use_gelu(True)
    for name, tensor in load_file(source / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is not None and theirs.startswith(("v.", "mm.")) and name != changed.get("without"):
            packed_kind = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), packed_kind)
            writer.add_tensor(theirs, packed, raw_dtype=packed_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
