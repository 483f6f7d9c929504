"""Write a checkpoint with random weights of a shape, to measure speed and memory: neither depends on the values.

    python -m tools.random_checkpoint moe-3b DIR

`moe-3b` has 3.2B weights in the layers of Qwen 3 with experts, of which a token uses 0.6B. `qwen3.5-0.8b` has three layers
with a recurrent state for each one of attention. `llama-1.7b` and
`llama-135m` have the shapes of SmolLM2 and one vocabulary, so that the second can draft for the first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of
from armature_bench.published.models import write_model

_SMOLLM2: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 130_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "moe-3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "llama-1.7b": {
        **_SMOLLM2,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        **{f"linear_num_{kind}_heads": 16 for kind in ("key", "value")},
        **{f"linear_{kind}_head_dim": 128 for kind in ("key", "value")},
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "llama-135m": {
        **_SMOLLM2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


def _tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of bytes, in which every id has a text."""
    vocab = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    vocab["\u0120w"] = len(vocab)
    vocab |= {f"\u0120w{number}": number for number in range(len(vocab), size)}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u0120", "w")]))  # llama.cpp requires a merge
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    config = {**SHAPES[given.shape], "torch_dtype": "bfloat16"}
    tensors = tensors_of(ModelConfig.from_hf(config))
    write_model(given.directory, config, tensors, json.loads(_tokenizer(config["vocab_size"]).to_str()))
    print(f"{sum(map(math.prod, tensors.values())):,} weights in {given.directory}")


if __name__ == "__main__":
    main()
