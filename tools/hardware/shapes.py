"""Checkpoints of real shapes with synthetic weights: a device computes them at the cost of real ones."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHARD_BYTES = 4 * 2**30
_BLOCK = 2**26  # number of random values drawn; every tensor is cut out of them, since drawing billions takes minutes
_SPREAD = 0.02  # standard deviation, as models are initialized
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint to write. `values` are its config.json."""

    name: str
    values: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(2 * rows * columns for _, (rows, columns) in self.matrices())

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        return _llama(self.values) if self.values["model_type"] == "llama" else _bert(self.values)


LLAMA_1B = Made(
    "llama-1b",
    {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
LLAMA_8B = Made(
    "llama-8b",
    {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
)
BERT_LARGE = Made(
    "bert-large",
    {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "torch_dtype": "bfloat16",
    },
)
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
SMALL_LLAMA = Made(
    "small-llama",
    {**LLAMA_1B.values, **_SMALL, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
)
SMALL_BERT = Made("small-bert", {**BERT_LARGE.values, **_SMALL})


def write(made: Made, directory: Path) -> Path:
    """Write the whole directory in files of at most a few gigabytes. An existing directory is used as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return directory
    (directory / "config.json").write_text(json.dumps(dict(made.values), indent=1), encoding="utf-8")
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(made.values["vocab_size"])), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    noise = (
        torch.randn(min(_BLOCK, made.num_bytes), generator=torch.Generator().manual_seed(0))
        .mul_(_SPREAD)
        .to(torch.bfloat16)
    )
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(made)):
        file = f"model-{number:05d}.safetensors"
        save_file(
            {name: _tensor(name, shape, noise) for name, shape in shard.items()}, directory / file, {"format": "pt"}
        )
        weight_map |= dict.fromkeys(shard, file)
    index.write_text(
        json.dumps({"metadata": {"total_size": made.num_bytes}, "weight_map": weight_map}), encoding="utf-8"
    )
    return directory


def _shards(made: Made) -> Iterator[dict[str, tuple[int, ...]]]:
    held: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in [*made.matrices(), *_vectors(made.values)]:
        held[name] = shape
        size += 2 * torch.Size(shape).numel()
        if size >= SHARD_BYTES:
            yield held
            held, size = {}, 0
    if held:
        yield held


def _tensor(name: str, shape: tuple[int, ...], noise: torch.Tensor) -> torch.Tensor:
    """Return a tensor: ones for norms, zeros for biases, and noise with a different offset for each matrix."""
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    start = zlib.crc32(name.encode()) % len(noise)
    rolled = torch.cat((noise[start:], noise[:start]))
    return rolled.repeat(-(-count // len(noise)))[:count].view(shape).contiguous()


def _llama(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    queries, keys = (values[name] * values["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (values["vocab_size"], hidden)
    for layer in range(values["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, outputs, inputs in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{at}.{name}.weight", (outputs, inputs)
    if not values["tie_word_embeddings"]:
        yield "lm_head.weight", (values["vocab_size"], hidden)


def _bert(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    for name, rows in (
        ("word", "vocab_size"),
        ("position", "max_position_embeddings"),
        ("token_type", "type_vocab_size"),
    ):
        yield f"embeddings.{name}_embeddings.weight", (values[rows], hidden)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            yield f"{at}.{name}.weight", (hidden, hidden)
        yield f"{at}.intermediate.dense.weight", (inner, hidden)
        yield f"{at}.output.dense.weight", (hidden, inner)


def _vectors(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int]]]:
    """Return the names of norms and biases."""
    hidden, layers = values["hidden_size"], range(values["num_hidden_layers"])
    if values["model_type"] == "llama":
        yield "model.norm.weight", (hidden,)
        for layer in layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{name}.weight", (hidden,)
        return
    norms = ["embeddings.LayerNorm"]
    for layer in layers:
        at = f"encoder.layer.{layer}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        for name in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "output.dense",
        ):
            yield f"{at}.{name}.bias", (hidden,)
        yield f"{at}.intermediate.dense.bias", (values["intermediate_size"],)
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Write a tokenizer with as many words as the model has embedding rows, so that every id exists."""
    vocab = {f"w{index}": index for index in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w2"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model, **empty}
