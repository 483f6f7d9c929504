"""The tensors that serving a decoder needs, by Llama's names, and their shapes, from the config alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import AltUpConfig, LatentConfig, NormConfig, RecurrentConfig
from armature_kernels.linear.layout import PANEL_OUTPUTS

Shape = tuple[int, ...]
# Norms around experts that are `apart`: of the router's input and theirs, and of the results of the MLP and theirs.
APART_NORMS = (
    *("mlp.router_norm", "pre_feedforward_layernorm_2"),
    *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
)
_STREAM_MATRICES = (".altup.prediction_coefs", ".altup.correction_coefs")
_STATE_SCALES = tuple(f".linear_attn.in_proj_{part}" for part in ("ba", "b", "a"))


def tensors_of(config: ModelConfig) -> dict[str, Shape]:
    """Return name to shape of every tensor that serving needs; weights are [out, in] as in torch."""
    size = config.hidden_size
    shapes = dict(_before_layers(config))
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes.update((f"{at}.{name}", shape) for name, shape in _layer(config, layer))
        if config.layer_factors:
            shapes[f"{at}.layer_scalar"] = (1,)
        if config.altup is not None:
            shapes.update((f"{at}.{name}", shape) for name, shape in _altup_layer(config, config.altup))
    if config.altup is not None:
        shapes.update(_altup_around(config, config.altup))
    shapes.update(_norm("model.norm", config.norm, size))
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, size)
    if config.logits_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def _before_layers(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    size = config.hidden_size
    if config.served_size:
        yield "model.pre_projection.weight", (size, 2 * config.served_size)
        yield "model.post_projection.weight", (config.served_size, size)
    elif config.is_draft_head:
        yield "model.fc.weight", (size, 2 * size)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "served_norm"):
            yield from _norm(f"model.{name}", config.norm, size)
        return
    yield "model.embed_tokens.weight", (config.vocab_size, size)
    if config.num_positions and not config.sinusoids:
        yield "model.embed_positions.weight", (config.first_position + config.num_positions, size)
    if config.embedding_norm:
        yield from _norm("model.embed_norm", config.norm, size)


def tables_of(config: ModelConfig) -> list[str]:
    """Return the tensors whose rows are looked up as stored: embeddings without those tied to the output layer."""
    tables = [] if config.tie_embeddings else ["model.embed_tokens.weight"]
    if config.altup is not None:
        tables.append("model.embed_tokens_per_layer.weight")
    return [*tables, "model.embed_positions.weight"] if config.num_positions and not config.sinusoids else tables


def products_of(config: ModelConfig) -> Iterator[tuple[Shape, bool]]:
    """Yield the shape of every product of the layers except routers, and True if it has a bias.

    Products are listed as computed: queries, keys and values are one product, gate and up too.
    """
    yield from dense_products_of(config)
    yield from ((shape, False) for shape in narrow_products(config).values())
    for shape in expert_products_of(config):
        assert config.experts is not None, "there are products of experts"
        yield from [(shape, config.mlp_bias)] * config.experts.routing.num_experts


def dense_products_of(config: ModelConfig) -> Iterator[tuple[Shape, bool]]:
    """Yield the shapes of `products_of` that every token passes, without `narrow_products`."""
    if config.served_size:
        yield from (
            ((config.hidden_size, 2 * config.served_size), False),
            ((config.served_size, config.hidden_size), False),
        )
    elif config.is_draft_head:
        yield (config.hidden_size, 2 * config.hidden_size), False
    for layer in range(config.num_layers):
        for product in mixer_products(config, layer):
            if not is_router(product.sources[0]):
                yield (sum(product.rows), product.inputs), product.bias
        inner = config.inner_size(layer)
        if config.experts is not None and config.has_experts(layer):
            inner = config.experts.shared_size
        if inner:
            yield ((2 if config.is_gated else 1) * inner, config.hidden_size), config.mlp_bias
            yield (config.hidden_size, inner), config.mlp_bias


def expert_products_of(config: ModelConfig) -> Iterator[Shape]:
    """Yield the shapes of the products of one expert, for each layer that has experts."""
    if config.experts is not None:
        for _ in filter(None, config.experts.layers):
            yield (1 + config.is_gated) * config.experts.size, config.hidden_size
            yield config.hidden_size, config.experts.size


def router_weights(config: ModelConfig) -> int:
    """Return the number of weights of all routers."""
    experts, count = config.experts, 0
    if experts is not None:
        count = sum(experts.layers) * (experts.routing.num_experts + experts.shared_gate)
    if config.altup is not None and config.altup.num_streams > 1:
        count += config.num_layers * PANEL_OUTPUTS  # packed, the outputs fill a panel
    if config.recurrent is not None and config.recurrent.sizes.has_delta:
        outputs = -(-2 * config.recurrent.sizes.heads // PANEL_OUTPUTS) * PANEL_OUTPUTS
        count += sum(config.recurrent.layers) * outputs
    return count * config.hidden_size


def active_weights(config: ModelConfig) -> int:
    """Return the number of weights of products and routers that one token is multiplied with."""
    top_k = 0 if config.experts is None else config.experts.routing.top_k
    dense = sum(rows * columns for (rows, columns), _ in dense_products_of(config))
    dense += sum(rows * columns for rows, columns in narrow_products(config).values())
    return dense + top_k * expert_weights(config) + router_weights(config)


def expert_weights(config: ModelConfig) -> int:
    """Return the number of weights of one expert of each layer that has experts."""
    return sum(rows * columns for rows, columns in expert_products_of(config))


def is_expert(source: str) -> bool:
    return ".mlp.experts." in source


def is_router(source: str) -> bool:
    """Return True for the weights of a router, of experts or of streams, and of what a state decays and takes in.

    They are not quantized.
    """
    names = (".mlp.gate", ".mlp.shared_expert_gate", ".altup.modality_router", *_STREAM_MATRICES, *_STATE_SCALES)
    return f".{source}".endswith(names)


def narrow_products(config: ModelConfig) -> dict[str, Shape]:
    """Return the products of AltUp and of inputs of layers by source: they are few, and have at least eight bits."""
    altup, size = config.altup, config.hidden_size
    if altup is None:
        return {}
    shapes: dict[str, Shape] = {"model.per_layer_model_projection": (config.num_layers * altup.input_size, size)}
    for number in range(altup.num_streams - 1):
        shapes[f"model.altup_projections.{number}"] = shapes[f"model.altup_unembed_projections.{number}"] = (size, size)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        if altup.laurel_rank:
            shapes[f"{at}.laurel.linear_left"] = (altup.laurel_rank, size)
            shapes[f"{at}.laurel.linear_right"] = (size, altup.laurel_rank)
        shapes[f"{at}.per_layer_input_gate"] = (altup.input_size, size)
        shapes[f"{at}.per_layer_projection"] = (size, altup.input_size)
    return shapes


def qkv_sources(config: ModelConfig) -> tuple[str, ...]:
    """Return the names in a layer of the tensors of one product: queries, keys and values."""
    return ("self_attn.qkv_proj",) if config.fused_qkv else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class Product(NamedTuple):
    """A product of a layer: the names in the layer of its tensors, and the rows of each."""

    sources: tuple[str, ...]
    rows: tuple[int, ...]
    inputs: int
    bias: bool


def mixer_products(config: ModelConfig, layer: int) -> tuple[Product, ...]:
    """Return the products of a layer's attention, convolution or state, as computed; of each, the last is the output's."""
    if not config.has_mixer(layer):
        return ()
    states = state_products(config) if config.has_state(layer) else ()
    return states if states and not config.attends_beside else (*attention_products(config, layer), *states)


def attention_products(config: ModelConfig, layer: int) -> tuple[Product, ...]:
    """Return the products of a layer's attention or convolution; the last one is the output's."""
    hidden, heads = config.hidden_size, config.heads(layer)
    if config.has_convolution(layer):
        return (
            Product(("conv.in_proj",), (3 * hidden,), hidden, bias=False),
            Product(("conv.out_proj",), (hidden,), hidden, bias=False),
        )
    if config.latent is not None:
        return _latent_products(config, config.latent)
    gates, keys = config.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    apart = config.has_output_gate and config.gates_apart
    queries = gates * (1 + (config.has_output_gate and not apart))
    rows = (queries + 2 * keys,) if config.fused_qkv else (queries, keys, keys)
    out = Product(("self_attn.o_proj",), (hidden,), gates, config.output_bias)
    if not config.writes_cache(layer):
        return Product(("self_attn.q_proj",), (queries,), hidden, config.qkv_bias), out
    sources = qkv_sources(config)
    if heads.keys_are_values:
        sources = (*sources[:2], sources[1])
    if apart:
        sources, rows = ("self_attn.gate_proj", *sources), (gates, *rows)
    return Product(sources, rows, hidden, config.qkv_bias), out


def state_products(config: ModelConfig) -> tuple[Product, ...]:
    """Return the products of a layer with a state; the last one is the output's."""
    recurrent = config.recurrent
    assert recurrent is not None, "the model has such layers"
    sizes, hidden, bias, at = recurrent.sizes, config.hidden_size, recurrent.product_bias, recurrent.name
    out = Product((f"{at}.out_proj",), (hidden,), sizes.values, bias)
    if not sizes.has_delta:
        return Product((f"{at}.in_proj",), (sizes.values + sizes.channels + sizes.heads,), hidden, bias), out
    scales, inputs = {"b": sizes.heads, "a": sizes.heads}, {"qkv": sizes.channels, "z": sizes.values}
    if recurrent.is_apart:
        inputs = {"q": sizes.keys, "k": sizes.keys, "v": sizes.values, "z": sizes.values}
    if recurrent.is_fused:
        scales, inputs = {"ba": 2 * sizes.heads}, {"qkvz": sizes.channels + sizes.values}
    first, second = (
        Product(tuple(f"{at}.in_proj_{part}" for part in parts), tuple(parts.values()), hidden, bias)
        for parts in (scales, inputs)
    )
    return first, second, out


def _latent_products(config: ModelConfig, latent: LatentConfig) -> tuple[Product, ...]:
    hidden, heads, bias = config.hidden_size, latent.heads, config.qkv_bias
    queries, shared = heads.heads * heads.size, latent.rank + heads.rotated
    others = Product(("self_attn.kv_b_proj",), (heads.heads * (heads.plain + heads.value),), latent.rank, False)
    out = Product(("self_attn.o_proj",), (hidden,), heads.heads * heads.value, config.output_bias)
    if latent.query_rank is None:
        first = Product(("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"), (queries, shared), hidden, bias)
        return first, others, out
    names = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    first = Product(names, (latent.query_rank, shared), hidden, bias)
    return first, Product(("self_attn.q_b_proj",), (queries,), latent.query_rank, False), others, out


def mlp_name(config: ModelConfig, layer: int) -> str | None:
    """Return the name in a layer of the MLP that every token passes; None if there are only experts."""
    if config.experts is None or not config.has_experts(layer) or config.experts.apart:
        return "mlp" if config.inner_size(layer) else None
    return "mlp.shared_expert" if config.experts.shared_size else None


def up_sources(config: ModelConfig, mlp: str = "mlp") -> tuple[str, ...]:
    """Return the names in a layer of the tensors of the first product of an MLP; experts are fused in stacks only."""
    if not config.is_gated:
        return (f"{mlp}.up_proj",)
    is_fused = config.fused_gate_up and ".experts." not in mlp
    return (f"{mlp}.gate_up_proj",) if is_fused else (f"{mlp}.gate_proj", f"{mlp}.up_proj")


def norms_of(config: ModelConfig, layer: int) -> tuple[str, ...]:
    match config.placement_of(layer):
        case "pre":
            return ("input_layernorm", "post_attention_layernorm")
        case "single":
            return ("input_layernorm",)
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
    """Return the number of elements of all norms, sinks, biases of routers and filters, which are FP32."""
    parts = config.norm.has_weight + config.norm.has_bias
    convolved = 0 if config.convolution is None else sum(config.convolution.layers)
    filters = 0 if config.convolution is None else convolved * config.convolution.width * config.hidden_size
    norms = sum(len(norms_of(config, layer)) for layer in range(config.num_layers)) + 1 + config.embedding_norm
    own = sum(_head_elements(config, layer) for layer in range(config.num_layers) if not config.has_convolution(layer))
    own += config.num_layers * config.layer_factors
    biases = 0
    if config.experts is not None and config.experts.selection_bias:
        biases = sum(config.experts.layers) * config.experts.routing.num_experts
    if config.experts is not None and config.experts.apart:
        biases = sum(config.experts.layers) * (config.experts.routing.num_experts + 4 * config.hidden_size)
    return norms * parts * config.hidden_size + own + filters + biases + _altup_elements(config)


def _head_elements(config: ModelConfig, layer: int) -> int:
    """Return the number of elements of the norms of a layer's heads, or of its short rows, and of its sinks."""
    if not config.has_mixer(layer):
        return 0
    count = 0
    if config.recurrent is not None and config.has_state(layer):
        count = sum(math.prod(shape) for _, shape in _recurrent_vectors(config.recurrent))
        if not config.attends_beside:
            return count
    heads, norm = config.heads(layer), config.head_norm
    count += config.num_heads * config.has_sinks
    if config.latent is not None:
        count += config.latent.rank + (config.latent.query_rank or 0)
    if norm is None:
        return count
    count += norm.num_weights(config.num_heads, heads.head_dim)
    if config.writes_cache(layer):  # keys that are read from other layers have no norm
        count += norm.num_weights(heads.num_kv_heads, heads.head_dim) + norm.values * heads.head_dim
    return count


def _altup_elements(config: ModelConfig) -> int:
    altup, size = config.altup, config.hidden_size
    if altup is None:
        return 0
    if altup.num_streams == 1:
        return config.num_layers * size + altup.input_size
    matrices = altup.num_streams**3 + altup.num_streams**2
    # Of each layer: the input norm twice more, the router's norm twice, two norms of branches, and factors.
    return config.num_layers * (7 * size + matrices) + altup.input_size


def linear_tensors(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, norm: NormConfig, size: int) -> Iterator[tuple[str, Shape]]:
    if norm.has_weight:
        yield f"{name}.weight", (size,)
    if norm.has_bias:
        yield f"{name}.bias", (size,)


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    if config.has_mixer(layer):
        yield from _mixer(config, layer)
    yield from _mlp(config, layer)
    for name in norms_of(config, layer):
        yield from _norm(name, config.norm, config.hidden_size)


def _mixer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    for product in mixer_products(config, layer):
        for name, count in zip(product.sources, product.rows, strict=True):
            yield from linear_tensors(name, count, product.inputs, product.bias)
    if config.convolution is not None and config.has_convolution(layer):
        yield "conv.conv.weight", (config.hidden_size, 1, config.convolution.width)
        return
    if config.recurrent is not None and config.has_state(layer):
        yield from _recurrent_vectors(config.recurrent)
        if not config.attends_beside:
            return
    yield from _attention_vectors(config, layer)


def _attention_vectors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    if config.latent is not None:
        yield "self_attn.kv_a_layernorm.weight", (config.latent.rank,)
        if config.latent.query_rank is not None:
            yield "self_attn.q_a_layernorm.weight", (config.latent.query_rank,)
    if config.has_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    if config.head_norm is not None and config.head_norm.has_weight:
        heads = config.heads(layer)
        for name in ("q_norm", "k_norm") if config.head_norm.has_bias else ():
            yield f"self_attn.{name}.bias", (heads.head_dim,)
        yield "self_attn.q_norm.weight", (config.head_norm.num_weights(config.num_heads, heads.head_dim),)
        if config.writes_cache(layer):
            yield "self_attn.k_norm.weight", (config.head_norm.num_weights(heads.num_kv_heads, heads.head_dim),)


def filter_kinds(recurrent: RecurrentConfig) -> tuple[str, tuple[str, ...]]:
    """Return what follows a layer's name in the names of its filters, and the kinds of the stored tensors."""
    if recurrent.is_apart:
        return "", tuple(f"{part}_conv1d.weight" for part in "qkv")
    return ".conv1d", ("weight",)


def _recurrent_vectors(recurrent: RecurrentConfig) -> Iterator[tuple[str, Shape]]:
    at, sizes = recurrent.name, recurrent.sizes
    source, kinds = filter_kinds(recurrent)
    channels = (sizes.keys, sizes.keys, sizes.values) if recurrent.is_apart else (sizes.channels,)
    for kind, count in zip(kinds, channels, strict=True):
        yield f"{at}{source}.{kind}", (count, 1, sizes.width)
    if recurrent.conv_bias:
        yield f"{at}.conv1d.bias", (sizes.channels,)
    yield f"{at}.dt_bias", (sizes.heads,)
    yield f"{at}.A_log", (sizes.heads,)
    if not sizes.has_delta:
        yield f"{at}.D", (sizes.heads,)
    if recurrent.norm_size:
        yield f"{at}.norm.weight", (recurrent.norm_weights,)


def _altup_layer(config: ModelConfig, altup: AltUpConfig) -> Iterator[tuple[str, Shape]]:
    """Yield what a layer with streams has beside attention and MLP, except its `narrow_products`."""
    size, streams = config.hidden_size, altup.num_streams
    if streams == 1:
        yield from _norm("post_per_layer_input_norm", config.norm, size)
        return
    for name in ("altup.router_norm", "laurel.post_laurel_norm", "post_per_layer_input_norm"):
        yield from _norm(name, config.norm, size)
    yield "altup.modality_router.weight", (streams, size)
    yield "altup.prediction_coefs.weight", (streams**2, streams)
    yield "altup.correction_coefs.weight", (streams, streams)
    yield "altup.correct_output_scale", (size,)


def _altup_around(config: ModelConfig, altup: AltUpConfig) -> Iterator[tuple[str, Shape]]:
    """Yield what a model with streams has outside of its layers, and all `narrow_products`."""
    table = (altup.input_vocab_size, config.num_layers * altup.input_size)
    yield "model.embed_tokens_per_layer.weight", table
    yield from _norm("model.per_layer_projection_norm", config.norm, altup.input_size)
    for source, shape in narrow_products(config).items():
        yield f"{source}.weight", shape


def _mlp(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    experts = config.experts
    if mlp_name(config, layer) is None and not config.has_experts(layer):
        return
    if experts is None or not config.has_experts(layer):
        yield from _one_mlp(config, "mlp", config.inner_size(layer))
        return
    count = experts.routing.num_experts
    yield from linear_tensors("mlp.gate", count, config.hidden_size, experts.router_bias)
    if experts.selection_bias:
        yield "mlp.gate.e_score_correction_bias", (count,)
    for number in range(count):
        yield from _one_mlp(config, f"mlp.experts.{number}", experts.size)
    if experts.shared_size:
        yield from _one_mlp(config, "mlp" if experts.apart else "mlp.shared_expert", experts.shared_size)
    if experts.apart:
        yield "mlp.gate.per_expert_scale", (count,)
        for name in APART_NORMS:
            yield from _norm(name, config.norm, config.hidden_size)
    if experts.shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, config.hidden_size)


def _one_mlp(config: ModelConfig, name: str, inner: int) -> Iterator[tuple[str, Shape]]:
    outer = config.hidden_size
    for source in up_sources(config, name):
        yield from linear_tensors(
            source, 2 * inner if source.endswith(".gate_up_proj") else inner, outer, config.mlp_bias
        )
    if config.activation == "xielu":
        yield f"{name}.act_fn.alpha_p", (1,)
        yield f"{name}.act_fn.alpha_n", (1,)
    yield from linear_tensors(f"{name}.down_proj", outer, inner, config.mlp_bias)
