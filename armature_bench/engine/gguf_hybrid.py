"""Writes what a GGUF file says about families whose layers differ: those with a recurrent state, and Gemma 4.

Their tensors change as in llama.cpp's converter: the inverse of what `app/weights/gguf/tensors.py` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.models.decoders.config import ModelConfig
from app.weights.gguf import tensors
from app.weights.gguf.config import FAMILIES, WHOLE_NAMES, GgufFamily
from app.weights.gguf.hybrid import READERS
from app.weights.gguf.reader import GgufTensor
from app.weights.safetensors import EncodedEntry, RearrangedEntry, TensorEntry
from armature_bench.engine.gguf_experts import merged_name

# llama.cpp's name and the family of each architecture that is written here.
HYBRIDS: dict[str, tuple[str, GgufFamily]] = {
    family.architecture: (name, family) for name, family in FAMILIES.items() if family.model_type in READERS
}
_UNUSED_FREQUENCY = 1e30  # a divisor of pairs that do not rotate
Arrays = Iterator[tuple[str, NDArray[Any]]]


def architecture_name(config: ModelConfig) -> str:
    """Return llama.cpp's name of the architecture."""
    name = HYBRIDS[config.architecture][0]
    if name.startswith("nemotron_h"):
        return "nemotron_h" if config.experts is None else "nemotron_h_moe"
    return name


def write_hybrid_values(writer: Any, config: ModelConfig) -> None:
    """Write the metadata beside sizes and experts to a `gguf.GGUFWriter`."""
    layers, family = range(config.num_layers), HYBRIDS[config.architecture][1]
    if config.recurrent is not None:
        sizes = config.recurrent.sizes
        writer.add_ssm_conv_kernel(sizes.width)
        writer.add_ssm_state_size(sizes.key_size)
        writer.add_ssm_group_count(sizes.key_heads)
        writer.add_ssm_time_step_rank(sizes.heads)
        writer.add_ssm_inner_size(sizes.values)
    attends = [config.has_mixer(layer) and not config.has_state(layer) for layer in layers]
    if config.recurrent is not None and config.recurrent.sizes.has_delta:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", [config.has_state(layer) for layer in layers])
        pairs = next(rope for rope in config.ropes if rope is not None).dim // 2
        # Of pictures, pairs have the time, the row and the column of a part in turn; of texts, all have one position.
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    elif not config.attends_beside and config.recurrent is not None:
        writer.add_head_count_kv([config.num_kv_heads * one for one in attends])
    if family.model_type == "granitemoehybrid":
        assert config.recurrent is not None, "another architecture has no state"
        # `ModelConfig` has the factor of branches in other values; only the norms of states keep their epsilon.
        branches = (config.recurrent.norm_eps / config.norm_eps) ** 0.5
        writer.add_layer_norm_rms_eps(config.recurrent.norm_eps)
        writer.add_residual_scale(branches)
        writer.add_attention_scale(config.attention_scale)
        writer.add_embedding_scale(config.embedding_scale * branches)
        writer.add_logit_scale(1 / config.logit_scale)
        writer.add_rope_scaling_finetuned(any(config.ropes))
    if family.model_type == "nemotron_h":
        writer.add_layer_norm_eps(config.norm_eps)
        inner = config.intermediate_size if config.experts is None else config.experts.size
        if config.experts is not None:
            writer.add_expert_shared_feed_forward_length(config.experts.shared_size)
        writer.add_feed_forward_length([0 if config.has_mixer(layer) else inner for layer in layers])
    if config.convolution is not None:
        writer.add_shortconv_l_cache(config.convolution.width)
        writer.add_head_count_kv([0 if short else config.num_kv_heads for short in config.convolution.layers])
    if family.model_type == "gemma4_text":
        _write_gemma4(writer, config)


def _write_gemma4(writer: Any, config: ModelConfig) -> None:
    layers, heads = range(config.num_layers), config.full_heads
    assert heads is not None and config.ropes[-1] is not None, "the last layer has full attention"
    sliding = next(layer for layer in layers if config.windows[layer] is not None)
    rope = config.ropes[sliding]
    assert rope is not None, "all layers have rotary embeddings"
    writer.add_key_length(heads.head_dim)
    writer.add_value_length(heads.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_head_count_kv([config.heads(layer).num_kv_heads for layer in layers])
    writer.add_feed_forward_length([config.inner_size(layer) for layer in layers])
    writer.add_sliding_window(config.windows[sliding])
    writer.add_sliding_window_pattern([window is not None for window in config.windows])
    writer.add_shared_kv_layers(config.shared_kv_layers)
    writer.add_embedding_length_per_layer_input(0 if config.altup is None else config.altup.input_size)
    writer.add_rope_dimension_count(heads.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base(config.ropes[-1].theta)
    writer.add_rope_freq_base_swa(rope.theta)
    if config.logit_softcap is not None:
        writer.add_final_logit_softcapping(config.logit_softcap)


def rope_divisors(config: ModelConfig) -> NDArray[Any] | None:
    """Return the divisors of the frequencies of Gemma 4's layers with full attention; None for other models."""
    if config.full_heads is None or config.ropes[-1] is None:
        return None
    divisors = np.ones(config.full_heads.head_dim // 2, np.float32)
    divisors[config.ropes[-1].num_rotated :] = _UNUSED_FREQUENCY
    return divisors


def stored_entry(config: ModelConfig, entry: TensorEntry, name: str) -> TensorEntry:
    """Return the entry with the rows that a file has: queries beside their gates stay as a checkpoint has them."""
    is_query = config.has_output_gate and ".self_attn.q_proj." in name
    return entry.source if is_query and isinstance(entry, RearrangedEntry) else entry


def folded_scales(config: ModelConfig) -> dict[str, float]:
    """Return the factors that are part of the embeddings and of the output layer in files of Falcon-H1."""
    if HYBRIDS[config.architecture][1].model_type != "falcon_h1":
        return {}
    return {"model.embed_tokens.weight": config.embedding_scale, "lm_head.weight": config.logit_scale}


def as_plain(entry: TensorEntry) -> TensorEntry:
    """Return the stored tensor of one whose rows are in another order."""
    source = entry.source if isinstance(entry, RearrangedEntry) else entry
    return source if not isinstance(source, EncodedEntry) else entry


def gguf_arrays(config: ModelConfig, name: str, values: NDArray[Any]) -> Arrays:
    """Yield the tensors of a file for one of ours in FP32: a fused one is several, and rows have llama.cpp's order."""
    family = HYBRIDS[config.architecture][1]
    for ours, part in _separate(config, name, values):
        theirs = _name_there(config, ours, family)
        own = theirs.split(".", 2)[-1]
        piece = own.rpartition(".")[0] or own
        piece = "ssm_dt" if own == "ssm_dt.bias" else piece
        if own == "ssm_a":
            part = -np.exp(part)
        if family.adds_one and name.endswith("norm.weight") and piece != "ssm_norm":
            part = part + np.float32(1)
        part = part.reshape(part.shape[0], part.shape[2]) if part.ndim == 3 and part.shape[1] == 1 else part
        part = _reordered(config, family, piece, part)
        if config.recurrent is not None and not config.recurrent.sizes.has_delta:
            part = part.reshape(-1, 1) if own in ("ssm_a", "ssm_d") else part
            part = part.reshape(config.recurrent.sizes.key_heads, -1) if piece == "ssm_norm" else part
        yield theirs, np.ascontiguousarray(part, dtype=np.float32)


def _separate(config: ModelConfig, name: str, values: NDArray[Any]) -> Arrays:
    """Yield the parts of a fused tensor, by our names."""
    fused: Mapping[str, tuple[tuple[str, int], ...]] = {}
    if config.recurrent is not None:
        sizes = config.recurrent.sizes
        fused = {".in_proj_qkvz.": ((".in_proj_qkv.", sizes.channels), (".in_proj_z.", sizes.values))}
    half = values.shape[0] // 2
    fused = {**fused, ".gate_up_proj.": ((".gate_proj.", half), (".up_proj.", half))}
    parts = next((parts for part, parts in fused.items() if part in name), None)
    if parts is None:
        yield name, values
        return
    whole, start = next(part for part in fused if part in name), 0
    for part, rows in parts:
        yield name.replace(whole, part), values[start : start + rows]
        start += rows


def _reordered(config: ModelConfig, family: GgufFamily, piece: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return the values with rows and columns as in a file: the inverse of what the reader does."""
    if family.interleaves_heads and piece in ("attn_q", "attn_k"):
        heads = config.num_heads if piece == "attn_q" else config.num_kv_heads
        halves = values.reshape(heads, 2, -1, values.shape[1])
        return halves.swapaxes(1, 2).reshape(values.shape)
    recurrent = config.recurrent
    if recurrent is None or not recurrent.sizes.has_delta:
        return values
    sizes = recurrent.sizes
    if recurrent.is_fused and piece == "ssm_ba":  # ours: all betas, then all steps
        parts = values.reshape(2, sizes.key_heads, -1, values.shape[1])
        return parts.swapaxes(0, 1).reshape(values.shape)
    described = GgufTensor(Path(), "F32", values.shape, 0, 0)
    numbers = {
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.heads,
        "linear_key_head_dim": sizes.key_size,
        "linear_value_head_dim": sizes.value_size,
    }
    changes = tensors.state_changes(piece, described, numbers, family)
    if changes is None:
        return values
    if changes.columns is not None:
        groups = values.reshape(values.shape[0], len(changes.columns), -1)
        return groups[:, np.argsort(changes.columns)].reshape(values.shape)
    return values if changes.rows is None else values[np.argsort(changes.rows)]


def _name_there(config: ModelConfig, name: str, family: GgufFamily) -> str:
    """Return the name in a file of one of our tensors."""
    merged = merged_name(name)
    if merged is not None:
        return merged
    stem, _, kind = name.rpartition(".")
    own_names = tensors.NAMES.get(family.model_type, {})
    others = {ours: theirs for theirs, ours in {**tensors.OTHER_NAMES, **own_names}.items()}
    if stem in others:
        return f"{others[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if not part:  # `layer_scalar`
        layer, part = stem.removeprefix("model.layers."), ""
    own = f"{part}.{kind}".strip(".")
    whole = {ours: theirs for theirs, ours in WHOLE_NAMES.items()}
    if own in whole:
        return f"blk.{layer}.{whole[own]}"
    vectors = {ours: theirs for theirs, ours in tensors.STATE_VECTORS.items()}
    if kind in vectors:
        return f"blk.{layer}.{vectors[kind]}"
    if part.endswith(".in_proj_ba"):
        return f"blk.{layer}.ssm_ba.{kind}"
    theirs = {ours: one for one, ours in {**tensors.LAYER_NAMES, **own_names}.items()}
    if family.model_type == "falcon_h1" and part == "post_attention_layernorm":
        return f"blk.{layer}.ffn_norm"
    return f"blk.{layer}.{theirs[part]}.{kind}"
