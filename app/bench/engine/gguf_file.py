"""Writes a Llama checkpoint as a GGUF file, which llama.cpp reads and quantizes.

The package `gguf` writes the file. llama.cpp's conversion script is not part of it, so this module maps the names of
tensors and the metadata. Weights are copied bit for bit. Torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
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
from app.weights.safetensors import EncodedEntry, TensorEntry

# Our tensor names and llama.cpp's. The rows of queries and keys are reordered, see `interleaved`.
LAYER_NAMES = {ours: theirs for theirs, ours in tensors.LAYER_NAMES.items()}
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

    Args:
        checkpoint: A checkpoint that passes `require_convertible`.
        file: The file to write.
        describe_tokenizer: Adds the tokenizer to the `gguf.GGUFWriter`.

    Raises:
        CheckpointInvalid: The file cannot describe this model.
    """
    gguf = import_module("gguf")
    config = checkpoint.decoder
    require_convertible(config)
    require_plain(checkpoint)
    writer = gguf.GGUFWriter(file, "llama")
    rope = config.ropes[0]
    assert rope is not None, "checked: one rope for all layers, of a known kind"
    write_shape(writer, config, rope)
    describe_tokenizer(writer)
    for name, entry in checkpoint.tensors.items():
        if name == "lm_head.weight" and config.tie_embeddings:
            continue
        values, is_bf16 = tensor(entry), entry.dtype == "BF16"
        if len(entry.shape) == 1:
            values, is_bf16 = single_precision(values, is_bf16), False
        elif "q_proj" in name or "k_proj" in name:
            values = interleaved(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        writer.add_tensor(
            gguf_name(name),
            values.view(np.uint8) if is_bf16 else values,
            raw_dtype=gguf.GGMLQuantizationType.BF16 if is_bf16 else None,
        )
    rope = config.ropes[0]
    if rope is not None and rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def require_convertible(config: ModelConfig) -> None:
    """Refuse a model with properties that this conversion does not write.

    Raises:
        CheckpointInvalid: The model has such a property.
    """
    kinds = {rope and rope.kind for rope in config.ropes}
    if config.architecture != "LlamaForCausalLM" or config.qkv_bias or config.output_bias or config.mlp_bias:
        raise CheckpointInvalid(f"{config.architecture} cannot be converted to GGUF: only a Llama without biases can.")
    if len(set(config.ropes)) != 1 or not kinds <= {"default", "llama3"}:
        raise CheckpointInvalid(
            f"Rotary embeddings of kind {', '.join(map(str, kinds))} cannot be converted to GGUF: only default and llama3 can."
        )


def require_plain(checkpoint: Checkpoint) -> None:
    """Refuse weights that are quantized, or in another order than a checkpoint's: they are copied bit for bit.

    Raises:
        CheckpointInvalid: The checkpoint has such weights.
    """
    if any(isinstance(entry, EncodedEntry) for entry in checkpoint.tensors.values()):
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


def gguf_name(name: str) -> str:
    """Return the GGUF name: `model.layers.3.mlp.up_proj.weight` becomes `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def tensor(entry: TensorEntry) -> NDArray[Any]:
    """Map a tensor, so that a checkpoint may be larger than memory."""
    return np.memmap(entry.file, DTYPES[entry.dtype], mode="r", offset=entry.start, shape=entry.shape)


def single_precision(values: NDArray[Any], is_bf16: bool) -> NDArray[Any]:
    """Return the values in FP32. BF16 is the upper half of FP32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if is_bf16 else values.astype(np.float32)


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder rows [heads x head_dim, in] for llama.cpp's rotary embedding.

    llama.cpp rotates neighbours, elements 2i and 2i + 1 of a head; Hugging Face rotates i and i + head_dim/2.
    Attention scores do not depend on the order.
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
