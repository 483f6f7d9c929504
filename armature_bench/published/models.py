"""Models of the published shapes with random weights, written as Hugging Face checkpoints.

Speed does not depend on the values of weights, as long as they are ordinary numbers: they are BF16 values from 0.0078
to 0.031 of either sign. Norms are 1 and biases are 0.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
VALUE_BYTES = 2  # BF16
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_BLOCK_VALUES = 4_000_037  # random values that are repeated; a prime number, so that rows of weights differ
_ONE = b"\x80\x3f"  # 1.0 in BF16, little endian
_HIGH_BYTES = bytes((0x3C, 0xBC))  # sign and exponent of values from 0.0078 to 0.031


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a tokenizer in which each token has a text, as each chunk of a measured stream needs one."""
    vocab = {"[UNK]": 0, **{f"w{number}": number for number in range(1, vocab_size)}}
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model by its `config.json`; `name` is also the name of its folder."""

    name: str
    title: str
    config: Mapping[str, Any] = field(hash=False)

    @property
    def tensors(self) -> dict[str, Shape]:
        """Shape of every tensor by Hugging Face's names."""
        is_bert = self.config["model_type"] == "bert"
        return dict(_bert_tensors(self.config) if is_bert else _decoder_tensors(self.config))

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


_DECODER = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def _llama(name: str, title: str, *, tied: bool = True, **sizes: int) -> PublishedModel:
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    return PublishedModel(name, title, _DECODER | {"tie_word_embeddings": tied} | fixed | sizes)


def _gemma(name: str, title: str, **sizes: int) -> PublishedModel:
    fixed = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
    }
    return PublishedModel(name, title, _DECODER | fixed | sizes)


BERT_LARGE = PublishedModel(
    "bert-large",
    "BERT-Large",
    {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    },
)
LLAMA_110M = _llama(
    "llama-110m",
    "Llama 110M",
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    vocab_size=32000,
)
LLAMA_1B = _llama(
    "llama-1b",
    "Llama 1B",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
)
LLAMA_3B = _llama(
    "llama-3b",
    "Llama 3B",
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
LLAMA_8B = _llama(
    "llama-8b",
    "Llama 8B",
    tied=False,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
GEMMA_1B = _gemma("gemma-3-1b", "Gemma 3 1B", hidden_size=1152, intermediate_size=6912, num_hidden_layers=26)
GEMMA_270M = _gemma("gemma-3-270m", "Gemma 3 270M", hidden_size=640, intermediate_size=2048, num_hidden_layers=18)
LARGE_LLAMAS = (LLAMA_8B, LLAMA_3B, LLAMA_1B)  # the largest first
# The largest first. Gemma 2B's eager steps take longer than `DEFAULT_SECONDS` on two cores.
GEMMAS = (GEMMA_1B, GEMMA_270M)


def model_folder(model: PublishedModel, folder: Path) -> tuple[Path, bool]:
    """Return the checkpoint of a model below `folder`, and True if it was there before; else it is written now."""
    place = folder / model.name
    if (place / CONFIG).is_file():
        return place, True
    write_model(place, model.config, model.tensors, _tokenizer(model.config["vocab_size"]))
    return place, False


def write_model(
    place: Path, config: Mapping[str, Any], tensors: Mapping[str, Shape], tokenizer: Mapping[str, Any]
) -> None:
    """Write a checkpoint with random weights. An interrupted folder has no `config.json`, which comes last."""
    place.mkdir(parents=True, exist_ok=True)
    _write_weights(tensors, place / WEIGHTS)
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    (place / CONFIG).write_text(json.dumps(dict(config)))


def _write_weights(tensors: Mapping[str, Shape], file: Path) -> None:
    block, header, end = _random_block(), dict[str, Any](), 0
    for name, shape in tensors.items():
        begin, end = end, end + VALUE_BYTES * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            left = VALUE_BYTES * math.prod(shape)
            if len(shape) == 1:
                out.write(bytes(left) if name.endswith("bias") else _ONE * shape[0])
                continue
            while left > 0:
                left -= out.write(block[:left])


def _random_block() -> memoryview:
    """Return random BF16 values in little endian."""
    drawn = random.Random(0)
    values = bytearray(VALUE_BYTES * _BLOCK_VALUES)
    values[0::2] = drawn.randbytes(_BLOCK_VALUES)
    signs = bytes(_HIGH_BYTES[byte & 1] for byte in range(256))
    values[1::2] = drawn.randbytes(_BLOCK_VALUES).translate(signs)
    return memoryview(values)


def _decoder_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    queries, keys = heads * size, config["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        if config["model_type"] == "gemma3_text":
            yield f"{at}.self_attn.q_norm.weight", (size,)
            yield f"{at}.self_attn.k_norm.weight", (size,)
            yield f"{at}.pre_feedforward_layernorm.weight", (hidden,)
            yield f"{at}.post_feedforward_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _bert_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (config["vocab_size"], hidden)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], hidden)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], hidden)
    yield from _layer_norm("embeddings.LayerNorm", hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        for product in ("query", "key", "value"):
            yield from _dense(f"{at}.attention.self.{product}", hidden, hidden)
        yield from _dense(f"{at}.attention.output.dense", hidden, hidden)
        yield from _layer_norm(f"{at}.attention.output.LayerNorm", hidden)
        yield from _dense(f"{at}.intermediate.dense", inner, hidden)
        yield from _dense(f"{at}.output.dense", hidden, inner)
        yield from _layer_norm(f"{at}.output.LayerNorm", hidden)


def _dense(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _layer_norm(name: str, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)
