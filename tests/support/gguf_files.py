"""Writes tiny checkpoints as GGUF files with the package `gguf`, in llama.cpp's conventions, as its own converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from app.weights.checkpoint import open_checkpoint
from app.weights.gguf.projectors import PROJECTORS
from armature_bench.engine import gguf_file
from armature_bench.engine.gguf_file import write_shape
from picture_checkpoints import Reference
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
# Further text models of `READERS`.
TEXT_ARCHITECTURES = {
    **ARCHITECTURES,
    "MistralForCausalLM": "mistral3",
    "GraniteForCausalLM": "granite",
    "Lfm2ForCausalLM": "lfm2",
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
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
GROUPED = {"hidden_size": 64, "intermediate_size": 96}  # sizes that have whole groups of 32


def write_gguf(folder: Path, architecture: str = "LlamaForCausalLM", kind: str = "F32", **overrides: Any) -> Path:
    """Write a tiny checkpoint to `folder`/exact and the same model to `folder`/tiny.gguf; matrices have the type `kind`."""
    source = write_checkpoint(folder / "exact", architecture, **overrides)
    file = folder / "tiny.gguf"
    convert(source, file, kind)
    return file


def convert(
    source: Path,
    file: Path,
    kind: str = "F32",
    added: Mapping[str, np.ndarray[Any, Any]] | None = None,
    theirs: str = "",
    describe: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    **options: Any,
) -> None:
    """Write a checkpoint as a GGUF file, with the tensors `added` as they are.

    `theirs`: llama.cpp's name for an architecture whose layers are those of the checkpoint. `describe` adds values.
    """
    config = open_checkpoint(source).decoder
    writer = gguf.GGUFWriter(file, theirs or TEXT_ARCHITECTURES[config.architecture], **options)
    write_values(writer, config, json.loads((source / "config.json").read_text()))
    describe(writer)
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
    full = [rope for rope, window in zip(config.ropes, config.windows, strict=True) if rope and window is None]
    write_shape(writer, config, next(rope for rope in (*full, *reversed(config.ropes)) if rope))
    if config.convolution is not None:
        heads = [0 if convolves else config.num_kv_heads for convolves in config.convolution.layers]
        writer.add_head_count_kv(heads)
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
    if heads and TEXT_ARCHITECTURES[config.architecture] in ("llama", "smollm3", "mistral3", "granite"):
        values = swap_halves(values, heads)
    if name.endswith("norm.weight"):
        values = values + np.float32(config.norm.offset)
    values = values.squeeze(1) if values.ndim == 3 else values  # filters
    quantized = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
    packed = gguf.quants.quantize(np.ascontiguousarray(values), quantized)
    writer.add_tensor(gguf_name(config, name), packed, raw_dtype=quantized)


def gguf_name(config: Any, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    others |= {"model.embedding_norm": "token_embd_norm"}  # of LFM2
    if stem in others:
        return f"{others[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if part == "post_attention_layernorm" and config.norm.offset:
        return f"blk.{layer}.post_attention_norm.{kind}"
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _of_granite(writer: gguf.GGUFWriter, text: Mapping[str, Any]) -> None:
    writer.add_attention_scale(text["attention_multiplier"])
    writer.add_embedding_scale(text["embedding_multiplier"])
    writer.add_residual_scale(text["residual_multiplier"])
    writer.add_logit_scale(text["logits_scaling"])


def _of_lfm2(writer: gguf.GGUFWriter, text: Mapping[str, Any]) -> None:
    writer.add_shortconv_l_cache(text["conv_L_cache"])


def _of_qwen(writer: gguf.GGUFWriter, text: Mapping[str, Any]) -> None:
    writer.add_rope_dimension_sections([*text["rope_parameters"]["mrope_section"], 0])


# The text model of a class that reads pictures, llama.cpp's name for it, and further values; its projector's type and the
# values of the file `mmproj` that not all types have.
_AREA = {"image_min_pixels": 14 * 28, "image_max_pixels": 42 * 56}
READERS: Mapping[str, tuple[str, str, Any, str, Mapping[str, Any]]] = {
    "SmolVLMForConditionalGeneration/llama": (
        *("LlamaForCausalLM", "llama", None, "idefics3"),
        {"projector.scale_factor": 2, "preproc_image_size": 56, "clip.use_gelu": True},
    ),
    "LlavaForConditionalGeneration/qwen2": ("Qwen2ForCausalLM", "qwen2", None, "mlp", {}),
    "LlavaNextForConditionalGeneration/llama": (
        *("LlamaForCausalLM", "llama", None, "mlp"),
        {"image_grid_pinpoints": [28, 56, 56, 28, 56, 56]},
    ),
    "LlavaNextForConditionalGeneration/granite": (
        *("GraniteForCausalLM", "granite", _of_granite, "mlp"),
        {"image_grid_pinpoints": [28, 56, 56, 28, 56, 56], "feature_layer": [1, 2]},
    ),
    "InternVLForConditionalGeneration/qwen2": (
        *("Qwen2ForCausalLM", "qwen2", None, "internvl"),
        {"projector.scale_factor": 2, "preproc_max_tiles": 4, "clip.use_gelu": True},
    ),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", "qwen2vl", _of_qwen, "qwen2vl_merger", _AREA),
    "Qwen2_5_VLForConditionalGeneration": (
        *("Qwen2ForCausalLM", "qwen2vl", _of_qwen, "qwen2.5vl_merger"),
        {**_AREA, "n_wa_pattern": 2, "window_size": 28, "clip.use_silu": True},
    ),
    "Qwen3VLForConditionalGeneration": (
        *("Qwen3ForCausalLM", "qwen3vl", _of_qwen, "qwen3vl_merger"),
        {**_AREA, "is_deepstack_layers": [True, False, True], "clip.use_gelu": True},
    ),
    "Gemma3ForConditionalGeneration": (
        *("Gemma3ForCausalLM", "gemma3", None, "gemma3"),
        {"projector.scale_factor": 1, "clip.use_gelu": True},
    ),
    "LlavaForConditionalGeneration/Pixtral": (
        *("LlamaForCausalLM", "llama", None, "pixtral"),
        {"image_size": 42, "clip.use_gelu": True},
    ),
    "Mistral3ForConditionalGeneration": (
        *("MistralForCausalLM", "mistral3", None, "pixtral"),
        {"image_size": 42, "spatial_merge_size": 2, "clip.use_gelu": True},
    ),
    "Lfm2VlForConditionalGeneration": (
        *("Lfm2ForCausalLM", "lfm2", _of_lfm2, "lfm2"),
        {
            "projector.scale_factor": 2,
            "image_size": 28,
            "preproc_image_size": 28,
            "preproc_max_tiles": 2,
            "image_min_pixels": 3 * 14**2,
            "image_max_pixels": 6 * 14**2,
            "clip.use_gelu": True,
        },
    ),
}


def write_reader_gguf(
    name: str, source: Path, reference: Reference, folder: Path, kind: str = "F32"
) -> tuple[Path, Path]:
    """Write a model of `READERS` as llama.cpp has it: the text model, and the file `mmproj` beside it."""
    reader, (architecture, theirs, describe, _, _) = reference.model, READERS[name]
    values = reader.config.to_dict()
    text = folder / "text"
    text.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())["text_config"]
    (text / "config.json").write_text(json.dumps({**config, "architectures": [architecture], "model_type": None}))
    inner = ("language_model.", "text_model.")
    state = {one: tensor.contiguous() for one, tensor in reader.state_dict().items() if one != "lm_head.weight"}
    own = {one.replace(half, ""): tensor for one, tensor in state.items() for half in inner if half in one}
    save_file({**own, "lm_head.weight": reader.state_dict()["lm_head.weight"].clone()}, text / "model.safetensors")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    (text / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = folder / "reader.gguf"
    convert(text, model, theirs=theirs, describe=lambda writer: describe and describe(writer, values["text_config"]))
    return model, write_mmproj(name, reference, folder / "mmproj-reader.gguf", kind)


def write_mmproj(name: str, reference: Reference, file: Path, kind: str = "F32", **changed: Any) -> Path:
    """Write the picture part in the conventions of llama.cpp's converter."""
    *_, projector, further = READERS[name]
    reader, pictures = reference.model, getattr(reference.processor, "image_processor", None)
    vision = reader.config.vision_config.to_dict()
    parts = dict(_stored_parts(name, reader))
    size, patch = (
        one[0] if isinstance(one, (list, tuple)) else one
        for one in (vision.get("image_size", 28), vision["patch_size"])
    )
    values: dict[str, Any] = {
        "image_size": size,
        "patch_size": patch,
        "embedding_length": len(parts["v.blk.0.attn_out.weight"]),
        "block_count": vision.get("depth") or vision["num_hidden_layers"],
        "feed_forward_length": 1,
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "image_mean": list(getattr(pictures, "image_mean", (0.5,) * 3)),
        "image_std": list(getattr(pictures, "image_std", (0.5,) * 3)),
        "clip.projector_type": projector,
        **further,
        **changed.get("values", {}),
    }
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_type("mmproj")
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        add[type(value)](key if key.startswith("clip.") else f"clip.vision.{key}", value)
    for theirs, tensor in parts.items():
        if theirs != changed.get("without"):
            packed_kind = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
            writer.add_tensor(theirs, gguf.quants.quantize(tensor, packed_kind), raw_dtype=packed_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _stored_parts(name: str, reader: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the tensors of the tower as they are in a file, by the table of names that the server reads them with."""
    *_, projector, further = READERS[name]
    forms = {"mlp": "image_grid_pinpoints", "pixtral": "spatial_merge_size"}
    is_form = forms.get(projector) in further
    row = PROJECTORS[[key for key in PROJECTORS if key.partition(" ")[0] == projector][is_form]]
    names = {ours: theirs for theirs, ours in row.names.items() if ours and theirs != "model.image_newline"}
    for whole, tensor in reader.state_dict().items():
        stem, _, kind = whole.rpartition(".")
        if whole in names or kind not in ("weight", "bias"):
            stem, kind = whole, "weight"
        values = np.ascontiguousarray(tensor.float().numpy())
        if stem.startswith(f"{row.layer}."):
            layer, _, part = stem.removeprefix(f"{row.layer}.").partition(".")
            split = [theirs for theirs, ours in row.parts.items() if ours == part]
            for theirs, own in zip(split, np.split(values, len(split)), strict=True):
                rotated = row.rotates and theirs in ("attn_q", "attn_k")
                heads = reader.config.vision_config.num_attention_heads
                yield (
                    f"v.blk.{layer}.{theirs}.{kind}",
                    swap_halves(own, heads) if rotated else np.ascontiguousarray(own),
                )
        elif "deepstack_merger_list." in stem:
            deep = reader.config.vision_config.deepstack_visual_indexes[int(stem.split(".")[-2])]
            theirs = names[".".join((*stem.split(".")[:-2], "{}", stem.split(".")[-1]))]
            yield f"v.deepstack.{deep}.{theirs.rpartition('.')[2]}.{kind}", values
        elif stem in names and not stem.endswith(".post_layernorm" if row.unused else " "):
            theirs = names[stem]
            if values.ndim == 5:
                yield f"{theirs}.weight.1", np.ascontiguousarray(values[:, :, 1])
                values = np.ascontiguousarray(values[:, :, 0])
            if theirs == "v.patch_embd" and projector == "lfm2" and kind == "weight":
                values = np.ascontiguousarray(values.reshape(len(values), 7, 7, 3).transpose(0, 3, 1, 2))
            bare = theirs in ("v.class_embd", "v.image_newline")
            yield theirs if bare else f"{theirs}.{kind}", values.squeeze() + np.float32(row.added.get(theirs, 0))


def swap_halves(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows of heads in llama.cpp's order: the two that a rotary embedding rotates together are neighbours."""
    return np.ascontiguousarray(
        values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    )
