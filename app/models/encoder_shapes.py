"""The tensors that an encoder must have, by our names, and their shapes.

Derived from the config alone, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from app.models.encoder_config import EncoderConfig
from app.models.shapes import Shape, norms_of, products_of, tensors_of


def encoder_tensors_of(config: EncoderConfig) -> dict[str, Shape]:
    """Return name to shape of every tensor that serving needs; weights are [out, in] as in torch.

    The layers of a decoder keep their own names.
    """
    body = _body(config) if config.decoder is None else tensors_of(config.decoder).items()
    return {**dict(body), **dict(_head(config)), **dict(_dense(config))}


def encoder_products_of(config: EncoderConfig) -> Iterator[tuple[Shape, bool]]:
    """Yield the shape of every product of the layers, and True if it has a bias.

    Products are listed as computed: queries, keys and values are one product, gate and up too.
    """
    if config.decoder is not None:
        yield from products_of(config.decoder)
        return
    size, inner = config.hidden_size, config.intermediate_size
    for _ in range(config.num_layers):
        yield (3 * size, size), config.qkv_bias
        yield (size, size), config.output_bias
        yield (inner * (2 if config.gated else 1), size), config.mlp_bias
        yield (size, inner), config.down_bias


def encoder_tables_of(config: EncoderConfig) -> Iterator[str]:
    """Yield the tensors that are looked up by rows and keep their stored dtype."""
    if config.decoder is not None:
        yield "model.embed_tokens.weight"
        return
    yield "embeddings.word.weight"
    if config.num_positions:
        yield "embeddings.position.weight"
    if config.num_types:
        yield "embeddings.type.weight"


def encoder_norm_elements(config: EncoderConfig) -> int:
    """Return the number of elements that are always FP32.

    These are norms, the distance bias, the head and the dense modules after pooling.
    """
    if config.decoder is not None:
        decoder = config.decoder
        heads = 2 * decoder.head_dim if decoder.qk_norm else 0
        norms = decoder.num_layers * (len(norms_of(decoder)) * decoder.hidden_size + heads) + decoder.hidden_size
    else:
        norms = sum(_elements(shape) for name, shape in _body(config) if "norm." in name or name.startswith("distance_bias"))
    return norms + sum(_elements(shape) for _, shape in (*_head(config), *_dense(config)))


def _elements(shape: Shape) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm_bias:
        yield f"{name}.bias", (config.hidden_size,)


def _body(config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    size = config.hidden_size
    yield "embeddings.word.weight", (config.vocab_size, size)
    if config.num_positions:
        yield "embeddings.position.weight", (config.num_positions, size)
    if config.num_types:
        yield "embeddings.type.weight", (config.num_types, size)
    yield from _norm("embeddings.norm", config)
    if config.distance_buckets:
        yield "distance_bias.weight", (config.distance_buckets, config.num_heads)
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    if config.pre_norm:
        yield from _norm("final_norm", config)


def _layer(config: EncoderConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    at, size, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
    for name in ("query", "key", "value"):
        yield from _linear(f"{at}.{name}", size, size, config.qkv_bias)
    yield from _linear(f"{at}.out", size, size, config.output_bias)
    for name in ("gate", "up") if config.gated else ("up",):
        yield from _linear(f"{at}.{name}", inner, size, config.mlp_bias)
    yield from _linear(f"{at}.down", size, inner, config.down_bias)
    if layer > 0 or not config.pre_norm:  # the embeddings' norm serves as the first layer's if pre_norm is set
        yield from _norm(f"{at}.attention_norm", config)
    yield from _norm(f"{at}.mlp_norm", config)


def _head(config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    head, size = config.head, config.hidden_size
    if head is None:
        return
    if head.dense:
        yield from _linear("head.dense", size, size, head.dense_bias)
    if head.norm:
        yield from _norm("head.norm", config)
    yield from _linear("head.out", len(config.labels), size, head.bias)


def _dense(config: EncoderConfig) -> Iterator[tuple[str, Shape]]:
    for place, dense in enumerate(config.pooling.dense):
        yield from _linear(f"dense.{place}", dense.out_features, dense.in_features, dense.bias)
