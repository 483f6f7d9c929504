"""Convert a Llama checkpoint to GGUF: `python -m tools.gguf_checkpoint DIR FILE.gguf [--type q4_0] [--pure]`.

Run it with the interpreter of an environment that has `gguf` and `llama-cpp-python`; torch is not needed. `gguf`
writes the file. The conversion script of llama.cpp is not part of that package, so this module maps the tensor names
and metadata. Weights are copied bit for bit, and llama.cpp itself quantizes them. A byte-level BPE tokenizer is
included. Without one the file accepts token ids only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from app.models.decoders.config import ModelConfig, RopeConfig
from app.weights.checkpoint import open_checkpoint
from app.weights.safetensors import TensorEntry

# Our tensor names and llama.cpp's. `{}` is the layer. The rows of queries and keys are reordered, see `interleaved`.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}  # numpy has no BF16, so its bits are read as uint16
NORMAL_TOKEN, CONTROL_TOKEN, USER_TOKEN, UNUSED_TOKEN = 1, 3, 4, 5  # `enum llama_token_type`
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # `enum llama_ftype`


def main() -> int:
    """Write the file: as stored, or quantized by llama.cpp."""
    arguments = _arguments()
    if arguments.type is None:
        write_gguf(arguments.checkpoint, arguments.file)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.file.parent) as folder:
        whole = Path(folder) / "whole.gguf"
        write_gguf(arguments.checkpoint, whole)
        quantise(whole, arguments.file, arguments.type, pure=arguments.pure, threads=arguments.threads)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory of a Llama checkpoint")
    parser.add_argument("file", type=Path, help="GGUF file to write")
    parser.add_argument(
        "--type", choices=list(TYPES), help="quantize to this type; without it the weights stay as stored"
    )
    parser.add_argument(
        "--pure", action="store_true", help="use this type for every matrix, including the output layer"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the quantizer")
    return parser.parse_args()


def write_gguf(directory: Path, file: Path) -> None:
    """Write all tensors in the dtype of the checkpoint, and norms in FP32 as llama.cpp requires."""
    import gguf

    checkpoint = open_checkpoint(directory)
    config = checkpoint.decoder
    check(config)
    writer = gguf.GGUFWriter(file, "llama")
    _write_shape(writer, config)
    _write_tokenizer(writer, config.vocab_size, directory)
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
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


def check(config: ModelConfig) -> None:
    """Refuse a model with properties that this conversion does not write."""
    kinds = {rope and rope.kind for rope in config.ropes}
    if config.architecture != "LlamaForCausalLM" or config.qkv_bias or config.output_bias or config.mlp_bias:
        raise SystemExit(f"{config.architecture} cannot be converted: only a Llama without biases can")
    if len(set(config.ropes)) != 1 or not kinds <= {"default", "llama3"}:
        raise SystemExit(
            f"rotary embeddings of kind {', '.join(map(str, kinds))} cannot be converted: only default and llama3 can"
        )


def _write_shape(writer: Any, config: ModelConfig) -> None:
    rope = config.ropes[0]
    assert rope is not None, "checked: one rope for all layers, of a known kind"
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


def _write_tokenizer(writer: Any, vocab_size: int, directory: Path) -> None:
    file = directory / "tokenizer.json"
    read = byte_level(json.loads(file.read_text()), vocab_size) if file.exists() else None
    if read is None:
        writer.add_tokenizer_model("no_vocab")
        return
    tokens, kinds, merges = read
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    ends = json.loads((directory / "config.json").read_text()).get("eos_token_id")
    if ends is not None:
        writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def byte_level(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int], list[str]] | None:
    """Read a tokenizer that splits text as GPT-2's does.

    Returns:
        Tokens by id, their `enum llama_token_type`, and the merges; None for any other tokenizer.
    """
    model, split = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    if (
        model["type"] != "BPE"
        or split.get("type") != "ByteLevel"
        or split.get("add_prefix_space")
        or not split.get("use_regex", True)
    ):
        return None
    tokens, kinds = [f"[unused{token_id}]" for token_id in range(vocab_size)], [UNUSED_TOKEN] * vocab_size
    for token, token_id in model["vocab"].items():
        tokens[token_id], kinds[token_id] = token, NORMAL_TOKEN
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL_TOKEN if added["special"] else USER_TOKEN
    return tokens, kinds, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def gguf_name(name: str) -> str:
    """Return the GGUF name: `model.layers.3.mlp.up_proj.weight` becomes `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def tensor(entry: TensorEntry) -> np.ndarray:
    """Map a tensor, so that a checkpoint may be larger than memory."""
    return np.memmap(entry.file, DTYPES[entry.dtype], mode="r", offset=entry.start, shape=entry.shape)


def single_precision(values: np.ndarray, is_bf16: bool) -> np.ndarray:
    """Return the values in FP32. BF16 is the upper half of FP32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if is_bf16 else values.astype(np.float32)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows [heads x head_dim, in] for llama.cpp's rotary embedding.

    llama.cpp rotates neighbours, elements 2i and 2i + 1 of a head; Hugging Face rotates i and i + head_dim/2.
    Attention scores do not depend on the order.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def llama3_divisors(rope: RopeConfig) -> np.ndarray:
    """Return the divisors of each pair's frequency in Llama 3.1 and later.

    High frequencies are divided by 1, low ones by `factor`, and those between them by a blend.
    """
    frequencies = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    turns = rope.original_max_position_embeddings * frequencies / (2 * np.pi)
    quick = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 / ((1 - quick) / rope.factor + quick)).astype(np.float32)


def quantise(whole: Path, file: Path, kind: str, *, pure: bool, threads: int) -> None:
    """Quantize with llama.cpp.

    Without `pure` it uses more precise types for some matrices, as its own command does.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = TYPES[kind], pure, threads
    code = llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), params)
    if code != 0:
        raise SystemExit(f"llama.cpp could not quantize {whole}: code {code}; see its output above")


if __name__ == "__main__":
    sys.exit(main())
