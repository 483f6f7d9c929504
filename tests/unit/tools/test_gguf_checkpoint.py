"""The GGUF file for llama.cpp is the same model: names, row order of rotary embeddings, Llama 3's scaled frequencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import RotaryEmbedding
from app.models.decoders.rope import RopeConfig
from app.models.decoders.shapes import tensors_of
from app.weights.checkpoint import open_checkpoint
from armature_bench.engine import gguf_file
from tools.gguf_checkpoint import byte_level

DEMO = Path(__file__).resolve().parents[3] / "app" / "demo" / "llama"


def turned(pairs: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """[heads, pairs, 2] turned by an angle a pair."""
    x, y = pairs[..., 0], pairs[..., 1]
    return np.stack([x * np.cos(angles) - y * np.sin(angles), x * np.sin(angles) + y * np.cos(angles)], axis=-1)


def test_scores_are_the_same_where_neighbours_are_rotated() -> None:
    heads, head_dim, hidden = 3, 8, 5
    generator = np.random.default_rng(1)
    weights = generator.normal(size=(2, heads * head_dim, hidden))
    x = generator.normal(size=hidden)
    angles = generator.uniform(0, 6, size=(2, head_dim // 2))
    halves = [turned(np.moveaxis((w @ x).reshape(heads, 2, -1), 1, 2), a) for w, a in zip(weights, angles, strict=True)]
    neighbours = [
        turned((gguf_file.interleaved(w, heads) @ x).reshape(heads, -1, 2), a)
        for w, a in zip(weights, angles, strict=True)
    ]
    assert np.allclose((halves[0] * halves[1]).sum((1, 2)), (neighbours[0] * neighbours[1]).sum((1, 2)))
    assert not np.array_equal(gguf_file.interleaved(weights[0], heads), weights[0])


def test_every_tensor_of_a_llama_has_a_name_of_its_own_there() -> None:
    config = open_checkpoint(DEMO).model_config
    names = [gguf_file.gguf_name(config, name) for name in tensors_of(config)]
    assert len(set(names)) == len(names) == 2 + 9 * config.num_layers
    assert {"token_embd.weight", "output_norm.weight", "blk.4.attn_q.weight", "blk.0.ffn_down.weight"} <= set(names)


def test_norms_become_single_precision_from_the_stored_bits() -> None:
    checkpoint = open_checkpoint(DEMO)
    entry = checkpoint.tensors["model.norm.weight"]
    assert entry.dtype == "BF16"
    stored = gguf_file.tensor(entry)
    expected = torch.frombuffer(bytearray(stored.tobytes()), dtype=torch.bfloat16).float().numpy()
    assert np.array_equal(gguf_file.single_precision(stored, is_bf16=True), expected)


def test_scaled_frequencies_are_ours() -> None:
    scaled = RopeConfig(500_000.0, 64, "llama3", 32.0, 8192, 1.0, 4.0)
    ours, plain = (
        RotaryEmbedding(rope, 131_072, torch.device("cpu")).frequencies for rope in (scaled, RopeConfig(500_000.0, 64))
    )
    divisors = gguf_file.llama3_divisors(scaled)
    assert divisors.min() == 1.0
    assert divisors.max() == 32.0
    assert np.allclose(plain.numpy() / divisors, ours.numpy(), rtol=1e-5)


def test_what_the_file_cannot_say_is_refused() -> None:
    values = dict(open_checkpoint(DEMO).config)
    refusals = [
        {**values, "attention_bias": True},
        {**values, "architectures": ["MistralForCausalLM"]},
        {**values, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ]
    for refused in refusals:
        try:
            gguf_file.require_convertible(ModelConfig.from_hf(refused))
        except CheckpointInvalid as refusal:
            assert "cannot be converted" in refusal.message
        else:
            raise AssertionError(f"{refused} was converted")
    gguf_file.require_convertible(ModelConfig.from_hf(values))


def test_a_byte_level_tokenizer_goes_along() -> None:
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "added_tokens": [{"id": 0, "content": "<s>", "special": True}],
    }
    assert byte_level(tokenizer, 5) == (["<s>", "a", "b", "ab", "[unused4]"], [3, 1, 1, 1, 5], ["a b"])
    assert byte_level(tokenizer | {"pre_tokenizer": {"type": "Metaspace"}}, 5) is None
