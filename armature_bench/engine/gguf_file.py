"""Writes a checkpoint of a Llama, a mixture of experts or a hybrid as a GGUF file, which llama.cpp reads and quantizes.

llama.cpp's conversion script is not part of the package `gguf`, so this module maps the names of tensors and the
metadata. Weights are copied bit for bit. Torch is needed for hybrids only (`gguf_hybrid.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.rope import RopeConfig
from app.weights.checkpoint import Checkpoint
from app.weights.gguf import tensors
from app.weights.gguf.config import FAMILIES, MIXTRAL, GgufFamily
from app.weights.safetensors import EncodedEntry, RearrangedEntry, TensorEntry
from armature_bench.engine.gguf_experts import merged_name, require_experts, stacked_names, write_expert_values
from armature_bench.engine.gguf_hybrid import (
    HYBRIDS,
    architecture_name,
    as_plain,
    folded_scales,
    gguf_arrays,
    rope_divisors,
    stored_entry,
    write_hybrid_values,
)

# llama.cpp's name and the family of each architecture that is written.
ARCHITECTURES: dict[str, tuple[str, GgufFamily]] = {
    family.architecture: (name, family)
    for name, family in (*FAMILIES.items(), ("llama", MIXTRAL))
    if name == "llama" or (family.has_experts and family.architecture not in HYBRIDS)
}
OTHER_NAMES = {ours: theirs for theirs, ours in tensors.OTHER_NAMES.items()}
DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}  # numpy has no BF16, so its bits are read as uint16


def without_vocabulary(writer: Any) -> None:
    """Describe no tokenizer: the file accepts token ids only."""
    writer.add_tokenizer_model("no_vocab")


def write_gguf(
    checkpoint: Checkpoint, file: Path, describe_tokenizer: Callable[[Any], None] = without_vocabulary
) -> None:
    """Write all tensors in the dtype of the checkpoint, and norms in FP32 as llama.cpp requires.

    The checkpoint passes `require_convertible`. `describe_tokenizer` adds the tokenizer to the `gguf.GGUFWriter`.
    Raises `CheckpointInvalid` if the file cannot describe this model.
    """
    gguf = import_module("gguf")
    config = checkpoint.decoder
    if config.architecture in HYBRIDS:
        _write_hybrid(checkpoint, file, describe_tokenizer)
        return
    require_convertible(config)
    require_plain(checkpoint)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.architecture][0])
    rope = config.ropes[0]
    assert rope is not None, "checked: one rope for all layers, of a known kind"
    write_shape(writer, config, rope)
    write_expert_values(writer, config)
    describe_tokenizer(writer)
    names = {name: gguf_name(config, name) for name in checkpoint.tensors if not _is_tied(config, name)}
    stacks = stacked_names(names)
    for name, sources in stacks.items():
        _describe(gguf, writer, name, [checkpoint.tensors[source] for source in sources])
    divisors = llama3_divisors(rope) if rope.kind == "llama3" else None
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # One after the other: the experts of a layer are copied to be one tensor, and those of all layers may not fit memory.
    for sources in stacks.values():
        values = [_values(config, source, checkpoint.tensors[source]) for source in sources]
        writer.write_tensor_data(values[0] if len(values) == 1 else np.stack(values))
    if divisors is not None:
        writer.write_tensor_data(divisors)
    writer.close()


def _write_hybrid(checkpoint: Checkpoint, file: Path, describe_tokenizer: Callable[[Any], None]) -> None:
    """Write a model whose tensors are in another order in files. Matrices keep their dtype; what is computed is FP32."""
    gguf, reader = import_module("gguf"), import_module("app.weights.tensor_reader")
    config, files = checkpoint.decoder, reader.MappedFiles()
    require_plain(checkpoint, {name: as_plain(entry) for name, entry in checkpoint.tensors.items()})
    # Tensors wait in a temporary file until the header is written.
    writer = gguf.GGUFWriter(file, architecture_name(config), use_temp_file=True)
    rope = next((rope for rope in config.ropes if rope is not None), RopeConfig(10_000.0, config.head_dim))
    write_shape(writer, config, rope)
    write_expert_values(writer, config)
    write_hybrid_values(writer, config)
    describe_tokenizer(writer)
    stacks: dict[str, list[NDArray[Any]]] = {}
    scales, found = folded_scales(config), dict(checkpoint.tensors)
    if scales:  # a tied output layer has a factor of its own
        found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    for name, entry in found.items():
        if _is_tied(config, name) and not scales:
            continue
        stored = stored_entry(config, entry, name)
        wide = files.tensor(stored).float().numpy() * np.float32(scales.get(name, 1.0))
        for theirs, values in gguf_arrays(config, name, wide):
            parts = stacks.setdefault(theirs, [])
            parts.append(values)
            if config.experts is None or "_exps." not in theirs or theirs.endswith(".scale"):
                _add(gguf, writer, theirs, values, stored, is_exact=scales.get(name, 1.0) == 1.0)
            elif len(parts) == config.experts.routing.num_experts:
                _add(gguf, writer, theirs, np.stack(parts), stored)
            else:
                continue
            parts.clear()
    divisors = rope_divisors(config)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(gguf: Any, writer: Any, name: str, values: NDArray[Any], entry: TensorEntry, is_exact: bool = True) -> None:
    is_wide = (
        not is_exact or entry.dtype != "BF16" or values.ndim == 1 or "ffn_gate_inp" in name or ".ssm_conv1d" in name
    )
    values = values[0] if name.endswith(".ffn_gate_inp_shexp.weight") else values
    if is_wide or (isinstance(entry, RearrangedEntry) and entry.factors):
        writer.add_tensor(name, values)
        return
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor(name, halves, raw_shape=values.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _is_tied(config: ModelConfig, name: str) -> bool:
    return name == "lm_head.weight" and config.tie_embeddings


def _is_wide(name: str, entry: TensorEntry) -> bool:
    """Return True for tensors that llama.cpp wants in FP32: vectors, and routers."""
    return len(entry.shape) == 1 or name.endswith((".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight"))


def _describe(gguf: Any, writer: Any, name: str, entries: list[TensorEntry]) -> None:
    first, count = entries[0], len(entries)
    shape = first.shape if count == 1 else (count, *first.shape)
    shape = shape[1:] if name.endswith(".ffn_gate_inp_shexp.weight") else shape
    kind = "F32" if _is_wide(name, first) else first.dtype
    size = 4 if kind == "F32" else 2
    writer.add_tensor_info(
        name, shape, np.dtype(np.float32), count * first.num_elements * size, gguf.GGMLQuantizationType[kind]
    )


def _values(config: ModelConfig, name: str, entry: TensorEntry) -> NDArray[Any]:
    """Return the values of one of our tensors as the file has them."""
    values = tensor(entry)
    if _is_wide(gguf_name(config, name), entry):
        return single_precision(values, entry.dtype == "BF16")
    if ARCHITECTURES[config.architecture][1].interleaves_heads and ("q_proj" in name or "k_proj" in name):
        return interleaved(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
    return values


def require_convertible(config: ModelConfig) -> None:
    """Raise `CheckpointInvalid` for a model with properties that this conversion does not write."""
    kinds = {rope and rope.kind for rope in config.ropes}
    _, family = ARCHITECTURES.get(config.architecture, ("", None))
    has_bias = config.qkv_bias and family is not None and family.interleaves_heads
    if family is None or has_bias or config.output_bias or config.mlp_bias:
        raise CheckpointInvalid(
            f"{config.architecture} cannot be converted to GGUF: only a Llama without biases and the mixtures of experts"
            " of docs/gguf.md can."
        )
    require_experts(config, family.model_type)
    if any(config.windows):
        raise CheckpointInvalid(f"A {config.architecture} with a sliding window cannot be converted to GGUF.")
    if len(set(config.ropes)) != 1 or not kinds <= {"default", "llama3"}:
        raise CheckpointInvalid(
            f"Rotary embeddings of kind {', '.join(map(str, kinds))} cannot be converted to GGUF: only default and llama3 can."
        )


def require_plain(checkpoint: Checkpoint, entries: Mapping[str, TensorEntry] | None = None) -> None:
    """Raise `CheckpointInvalid` for weights that are quantized, or in another order: they are copied bit for bit."""
    if any(isinstance(entry, EncodedEntry) for entry in (entries or checkpoint.tensors).values()):
        raise CheckpointInvalid(
            f"{checkpoint.location} is quantized or a GGUF file already: give the original weights."
        )


def write_shape(writer: Any, config: ModelConfig, rope: RopeConfig) -> None:
    """Write the sizes of a model, and the rotary embedding that most of its layers have."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)


def gguf_name(config: ModelConfig, name: str) -> str:
    """Return the GGUF name: `model.layers.3.mlp.up_proj.weight` becomes `blk.3.ffn_up.weight`."""
    merged = merged_name(name)
    if merged is not None:
        return merged
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{kind}"
    _, family = ARCHITECTURES[config.architecture]
    theirs = {ours: part for part, ours in {**tensors.LAYER_NAMES, **tensors.NAMES.get(family.model_type, {})}.items()}
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{theirs[part]}.{kind}"


def tensor(entry: TensorEntry) -> NDArray[Any]:
    """Map a tensor, so that a checkpoint may be larger than memory."""
    return np.memmap(entry.file, DTYPES[entry.dtype], mode="r", offset=entry.start, shape=entry.shape)


def single_precision(values: NDArray[Any], is_bf16: bool) -> NDArray[Any]:
    """Return the values in FP32. BF16 is the upper half of FP32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if is_bf16 else values.astype(np.float32)


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder rows [heads x head_dim, in] for llama.cpp's rotary embedding.

    llama.cpp rotates neighbours, elements 2i and 2i + 1 of a head; Hugging Face rotates i and i + head_dim/2. Attention
    scores do not depend on the order.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def llama3_divisors(rope: RopeConfig) -> NDArray[Any]:
    """Return the divisors of each pair's frequency in Llama 3.1 and later.

    High frequencies are divided by 1, low ones by `factor`, and those between them by a blend.
    """
    frequencies = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    turns = rope.original_max_position_embeddings * frequencies / (2 * np.pi)
    quick = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 / ((1 - quick) / rope.factor + quick)).astype(np.float32)
