"""The tensors that a decoder's checkpoint must hold, and their shapes.

Derived from the config alone, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from app.models.decoders.config import ModelConfig

Shape = tuple[int, ...]


def tensors_of(config: ModelConfig) -> dict[str, Shape]:
    """Return name to shape of every tensor that serving needs; weights are [out, in] as in torch."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes.update((f"{at}.{name}", shape) for name, shape in _attention(config))
        shapes.update((f"{at}.{name}", shape) for name, shape in _mlp(config))
        shapes.update((f"{at}.{name}.weight", (config.hidden_size,)) for name in norms_of(config))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def products_of(config: ModelConfig) -> Iterator[tuple[Shape, bool]]:
    """Yield the shape of every product of the layers, and True if it has a bias.

    Products are listed as computed: queries, keys and values are one product, gate and up too.
    """
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for _ in range(config.num_layers):
        yield (queries + 2 * keys, config.hidden_size), config.qkv_bias
        yield (config.hidden_size, queries), config.output_bias
        yield (2 * config.intermediate_size, config.hidden_size), config.mlp_bias
        yield (config.hidden_size, config.intermediate_size), config.mlp_bias


def norms_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of one layer's norms.

    In Gemma `post_attention_layernorm` follows attention; elsewhere it precedes the MLP.
    """
    llama = ("input_layernorm", "post_attention_layernorm")
    return (*llama, "pre_feedforward_layernorm", "post_feedforward_layernorm") if config.gemma else llama


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.fused_weights:
        yield from _linear("self_attn.qkv_proj", queries + 2 * keys, config.hidden_size, config.qkv_bias)
    else:
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(f"self_attn.{name}", rows, config.hidden_size, config.qkv_bias)
    yield from _linear("self_attn.o_proj", config.hidden_size, queries, config.output_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def _mlp(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    inner, outer = config.intermediate_size, config.hidden_size
    if config.fused_weights:
        yield from _linear("mlp.gate_up_proj", 2 * inner, outer, config.mlp_bias)
    else:
        yield from _linear("mlp.gate_proj", inner, outer, config.mlp_bias)
        yield from _linear("mlp.up_proj", inner, outer, config.mlp_bias)
    yield from _linear("mlp.down_proj", outer, inner, config.mlp_bias)
