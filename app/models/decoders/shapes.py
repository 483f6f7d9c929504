"""The tensors that serving a decoder needs, by Llama's names, and their shapes.

Derived from the config alone, without torch. `stored.py` says how checkpoints of other families name and order them.
"""

from __future__ import annotations

from collections.abc import Iterator

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import NormConfig

Shape = tuple[int, ...]


def tensors_of(config: ModelConfig) -> dict[str, Shape]:
    """Return name to shape of every tensor that serving needs; weights are [out, in] as in torch."""
    size = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, size)}
    if config.num_positions:
        shapes["model.embed_positions.weight"] = (config.first_position + config.num_positions, size)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes.update((f"{at}.{name}", shape) for name, shape in _attention(config))
        shapes.update((f"{at}.{name}", shape) for name, shape in _mlp(config))
        for name in norms_of(config):
            shapes.update((f"{at}.{tensor}", shape) for tensor, shape in _norm(name, config.norm, size))
    shapes.update(_norm("model.norm", config.norm, size))
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, size)
    if config.logits_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def tables_of(config: ModelConfig) -> list[str]:
    """Return the tensors whose rows are looked up as stored: embeddings without those tied to the output layer."""
    tables = [] if config.tie_embeddings else ["model.embed_tokens.weight"]
    return [*tables, "model.embed_positions.weight"] if config.num_positions else tables


def products_of(config: ModelConfig) -> Iterator[tuple[Shape, bool]]:
    """Yield the shape of every product of the layers, and True if it has a bias.

    Products are listed as computed: queries, keys and values are one product, gate and up too.
    """
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for _ in range(config.num_layers):
        yield (queries + 2 * keys, config.hidden_size), config.qkv_bias
        yield (config.hidden_size, queries), config.output_bias
        yield ((2 if config.is_gated else 1) * config.intermediate_size, config.hidden_size), config.mlp_bias
        yield (config.hidden_size, config.intermediate_size), config.mlp_bias


def qkv_sources(config: ModelConfig) -> tuple[str, ...]:
    """Return the names in a layer of the tensors of one product: queries, keys and values."""
    return ("self_attn.qkv_proj",) if config.fused_qkv else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def up_sources(config: ModelConfig) -> tuple[str, ...]:
    """Return the names in a layer of the tensors of the first product of its MLP."""
    if not config.is_gated:
        return ("mlp.up_proj",)
    return ("mlp.gate_up_proj",) if config.fused_gate_up else ("mlp.gate_proj", "mlp.up_proj")


def norms_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of one layer's norms of hidden states."""
    match config.placement:
        case "pre":
            return ("input_layernorm", "post_attention_layernorm")
        case "parallel":
            return ("input_layernorm",) if config.shares_norm else ("input_layernorm", "post_attention_layernorm")
        case "post":
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        case "sandwich":
            return (
                *("input_layernorm", "post_attention_layernorm"),
                *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            )


def norm_elements(config: ModelConfig) -> int:
    """Return the number of elements of all norms, which are FP32."""
    parts = config.norm.has_weight + config.norm.has_bias
    heads = 0
    if config.head_norm is not None:
        counts = (config.head_norm.num_weights(one, config.head_dim) for one in (config.num_heads, config.num_kv_heads))
        heads = sum(counts)
    return config.num_layers * (parts * len(norms_of(config)) * config.hidden_size + heads) + parts * config.hidden_size


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, norm: NormConfig, size: int) -> Iterator[tuple[str, Shape]]:
    if norm.has_weight:
        yield f"{name}.weight", (size,)
    if norm.has_bias:
        yield f"{name}.bias", (size,)


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (queries + 2 * keys,) if config.fused_qkv else (queries, keys, keys)
    for name, count in zip(qkv_sources(config), rows, strict=True):
        yield from _linear(name, count, config.hidden_size, config.qkv_bias)
    yield from _linear("self_attn.o_proj", config.hidden_size, queries, config.output_bias)
    if config.head_norm is not None:
        yield "self_attn.q_norm.weight", (config.head_norm.num_weights(config.num_heads, config.head_dim),)
        yield "self_attn.k_norm.weight", (config.head_norm.num_weights(config.num_kv_heads, config.head_dim),)


def _mlp(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    inner, outer = config.intermediate_size, config.hidden_size
    for name in up_sources(config):
        yield from _linear(name, 2 * inner if config.fused_gate_up else inner, outer, config.mlp_bias)
    yield from _linear("mlp.down_proj", outer, inner, config.mlp_bias)
