"""Reads the values of config.json that describe a mixture of experts. Each public function is `DecoderFamily.read` of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.family import Fields
from app.models.decoders.family_values import (
    LATENT,
    LatentDefaults,
    convolutions,
    exaone4,
    gemma,
    granite,
    granite_swa,
    hunyuan,
    known_texts,
    latent,
    ministral3,
    refuse,
    shared_kv_layers,
    smollm3,
    without_rope,
)
from app.models.decoders.layer_config import AltUpConfig, ExpertsConfig, HeadSizes, NormConfig
from app.models.decoders.rope import RopeConfig, parse_rope
from armature_kernels.elementwise.routing_rule import MAX_EXPERTS, Routing
from armature_kernels.native.arguments import SWIGLU_ALPHA, SWIGLU_LIMIT


def checked_experts(config: ConfigReader, experts: ExpertsConfig) -> Fields:
    """Return the field of the experts. Raises `CheckpointInvalid` for numbers that are contradictory or too large."""
    routing = experts.routing
    if routing.num_experts > MAX_EXPERTS:
        raise CheckpointInvalid(f"{config.where}: {routing.num_experts} experts are more than {MAX_EXPERTS}.")
    groups, kept = routing.num_groups, routing.top_groups
    if routing.num_experts % groups or kept > groups:
        raise CheckpointInvalid(
            f"{config.where}: {kept} of {groups} groups cannot be selected from {routing.num_experts} experts."
        )
    if groups > 1 and routing.group_rating == "two best" and routing.num_experts // groups < 2:
        raise CheckpointInvalid(f"{config.where}: groups of experts must have two at least.")
    if routing.top_k > routing.num_experts // groups * kept:
        raise CheckpointInvalid(
            f"{config.where}: {routing.top_k} experts of each token cannot be selected from"
            f" {routing.num_experts // groups * kept}."
        )
    return {"experts": experts}


def _everywhere(fields: Fields) -> tuple[bool, ...]:
    return (True,) * int(fields["num_layers"])


def sparse_layers(config: ConfigReader, fields: Fields) -> tuple[bool, ...]:
    step, dense = config.integer("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, Sequence):
        raise CheckpointInvalid(f"{config.where}: mlp_only_layers must be a list of layers.")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(fields["num_layers"]))


def _routing(config: ConfigReader, count: int, top_k: int, renormalize: bool = False) -> Routing:
    return Routing(
        config.integer("num_experts", count),
        config.integer("num_experts_per_tok", top_k),
        renormalize=config.boolean("norm_topk_prob", renormalize),
    )


def mixtral(config: ConfigReader, fields: Fields) -> Fields:
    routing = Routing(config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2))
    return _of_inner_size(config, fields, routing)


def phimoe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Phi-3.5-MoE, of which its router always selects two, and the bias of the logits."""
    refuse(config, "num_experts_per_tok", 2, "another number of experts of each token than two")
    jitter = config.number("router_jitter_noise", 0.01)
    routing = Routing(config.integer("num_local_experts", 16), 2, "sparsemixer", renormalize=False, jitter=jitter)
    return {**_of_inner_size(config, fields, routing), "logits_bias": config.boolean("lm_head_bias", False)}


def granite_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Granite: a softmax over the logits of the selected ones gives their weights."""
    experts = replace(
        mixtral(config, fields)["experts"], shared_size=config.integer("shared_intermediate_size", 0, at_least=0)
    )
    return {**granite(config, fields), "experts": experts}


def granite_moe_swa(config: ConfigReader, fields: Fields) -> Fields:
    return {**granite_moe(config, fields), **granite_swa(config, fields)}


def olmoe(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "clip_qkv", None, "clipping queries, keys and values")
    return _of_inner_size(config, fields, _routing(config, 64, 8))


def _of_inner_size(config: ConfigReader, fields: Fields, routing: Routing) -> Fields:
    """Return experts of the size of an MLP in every layer."""
    return checked_experts(config, ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields)))


def qwen2_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Qwen 1.5 and 2, with a gated shared expert, and the biases of attention."""
    experts = ExpertsConfig(
        _routing(config, 60, 4),
        config.integer("moe_intermediate_size", 1408),
        sparse_layers(config, fields),
        shared_size=config.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return {**checked_experts(config, experts), "qkv_bias": config.boolean("qkv_bias", True)}


def qwen3_moe(config: ConfigReader, fields: Fields) -> Fields:
    size = config.integer("moe_intermediate_size", 768)
    routing = _routing(config, 128, 8)
    return checked_experts(config, ExpertsConfig(routing, size, sparse_layers(config, fields)))


def gpt_oss(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of gpt-oss, whose gates are clamped, and the biases of attention.

    transformers writes YaRN even if config.json has no rotary embeddings.
    """
    refuse(config, "swiglu_alpha", SWIGLU_ALPHA, "another factor in the experts' gates than 1.702")
    refuse(config, "swiglu_limit", SWIGLU_LIMIT, "another limit of the experts' gates than 7")
    routing = Routing(config.integer("num_local_experts", 128), config.integer("num_experts_per_tok", 4))
    experts = ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields), router_bias=True)
    bias = config.boolean("attention_bias", True)
    found = {**checked_experts(config, experts), "qkv_bias": bias, "output_bias": bias}
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return found
    rope = RopeConfig(150_000.0, fields["head_dim"], "yarn", 32.0, 4096, truncate=False)
    return {**found, "ropes": (rope,) * fields["num_layers"]}


def minimax_m2(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of MiniMax-M2, and how many elements of a head are rotated."""
    refuse(config, "scoring_func", "sigmoid", "another score of experts than sigmoid")
    refuse(config, "use_qk_norm", True, "leaving out the norms of queries and keys")
    routing = Routing(config.integer("num_local_experts", 256), config.integer("num_experts_per_tok", 8), "sigmoid")
    experts = ExpertsConfig(routing, fields["intermediate_size"], _everywhere(fields), selection_bias=True)
    found = checked_experts(config, experts)
    if config.has("rotary_dim"):
        share = config.integer("rotary_dim") / fields["head_dim"]
        rope = parse_rope(config, fields["head_dim"], 5_000_000.0, partial=share)
        found["ropes"] = (rope,) * fields["num_layers"]
    return found


def hunyuan_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Hunyuan, whose numbers may be lists with one value for each layer."""
    count, top_k = _same_everywhere(config, "num_experts"), _same_everywhere(config, "moe_topk")
    experts = ExpertsConfig(
        Routing(count, top_k), fields["intermediate_size"], _everywhere(fields), shared_size=fields["intermediate_size"]
    )
    return {**checked_experts(config, experts), **hunyuan(config, fields)}


def _same_everywhere(config: ConfigReader, name: str) -> int:
    if not isinstance(config.values.get(name), list):
        return config.integer(name, 1)
    numbers = set(config.integers(name))
    if len(numbers) != 1:
        raise CheckpointInvalid(f"{config.where}: {name} differs between layers, which is not offered.")
    return numbers.pop()


def _sigmoid_routing(
    config: ConfigReader,
    count: int,
    top_k: int,
    scale: float,
    groups: tuple[int, int] = (1, 1),
    renormalize: bool = True,
) -> Routing:
    return Routing(
        config.integer("n_routed_experts", count),
        config.integer("num_experts_per_tok", top_k),
        "sigmoid",
        config.boolean("norm_topk_prob", renormalize),
        config.number("routed_scaling_factor", scale),
        1e-20,
        config.integer("n_group", groups[0]),
        config.integer("topk_group", groups[1]),
        "two best",
    )


def _experts_after(config: ConfigReader, fields: Fields, dense: int) -> tuple[bool, ...]:
    """Return which layers have experts: those that mlp_layer_types says, or all after some dense ones."""
    if config.has("mlp_layer_types"):
        types = known_texts(config, "mlp_layer_types", fields["num_layers"], "dense sparse")
        return tuple(name == "sparse" for name in types)
    first = config.integer("first_k_dense_replace", dense, at_least=0)
    return tuple(layer >= first for layer in range(fields["num_layers"]))


def _beside_shared(
    config: ConfigReader,
    routing: Routing,
    layers: tuple[bool, ...],
    size: int,
    shared: tuple[str, int] = ("n_shared_experts", 1),
    selection_bias: bool = True,
) -> Fields:
    """Read experts of one size beside shared ones; `size` and the number in `shared` are defaults."""
    size = config.integer("moe_intermediate_size", size)
    shared_size = size * config.integer(*shared, at_least=0)
    experts = ExpertsConfig(routing, size, layers, shared_size=shared_size, selection_bias=selection_bias)
    return checked_experts(config, experts)


def ernie_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Ernie 4.5, which are in every so many layers of a range of them."""
    refuse(config, "use_bias", False, "a bias in products around experts that have none")
    count, top_k = config.integer("moe_num_experts", 64), config.integer("moe_k", 6)
    routing = Routing(count, top_k, epsilon=config.number("moe_norm_min", 1e-12))
    count, step = fields["num_layers"], config.integer("moe_layer_interval", 1)
    first, last = config.integer("moe_layer_start_index", 1, at_least=0), config.values.get("moe_layer_end_index", -1)
    last = count - 1 if last in (-1, None) else config.integer("moe_layer_end_index", at_least=0)
    layers = tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(count))
    return _beside_shared(config, routing, layers, 1536, ("moe_num_shared_experts", 2))


def glm4_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of GLM 4.5, which begin after some dense layers, and the norms of queries and keys."""
    routing, layers = _sigmoid_routing(config, 128, 8, 1.0), _experts_after(config, fields, 1)
    norms = {} if config.boolean("use_qk_norm", False) else {"head_norm": None}
    return {**_beside_shared(config, routing, layers, 1408), **norms}


def lfm2_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the short convolutions of LFM2, and the experts, which begin after some dense layers."""
    routing = Routing(
        config.integer("num_experts", 32),
        config.integer("num_experts_per_tok", 4),
        "sigmoid",
        config.boolean("norm_topk_prob", True),
        config.number("routed_scaling_factor", 1.0),
        1e-6,
    )
    dense = config.integer("num_dense_layers", 2, at_least=0)
    experts = ExpertsConfig(
        routing,
        config.integer("moe_intermediate_size", 1792),
        tuple(layer >= dense for layer in range(fields["num_layers"])),
        selection_bias=config.boolean("use_expert_bias", True),
    )
    return {**checked_experts(config, experts), **convolutions(config, fields)}


def deepseek_v2(config: ConfigReader, fields: Fields) -> Fields:
    """Read latent attention and the experts of DeepSeek-V2, whose weights are not divided by their sum."""
    reason = "dividing the weights of experts by their sum, which implementations do differently,"
    refuse(config, "norm_topk_prob", False, reason)
    refuse(config, "scoring_func", "softmax", "another score of experts than softmax")
    refuse(config, "moe_layer_freq", 1, "a dense layer between layers with experts")
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointInvalid(
            f"{config.where}: topk_method {method!r} is not known; known are greedy and group_limited_greedy."
        )
    has_groups = method == "group_limited_greedy"
    routing = Routing(
        config.integer("n_routed_experts", 64),
        config.integer("num_experts_per_tok"),
        renormalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group") if has_groups else 1,
        top_groups=config.integer("topk_group") if has_groups else 1,
    )
    layers = _experts_after(config, fields, 0)
    experts = _beside_shared(config, routing, layers, 1407, ("n_shared_experts", 2), selection_bias=False)
    return {**experts, **latent(config, fields, LATENT)}


def deepseek_v3(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "scoring_func", "sigmoid", "another score of experts than sigmoid")
    refuse(config, "topk_method", "noaux_tc", "another selection of experts than noaux_tc")
    refuse(config, "moe_layer_freq", 1, "a dense layer between layers with experts")
    routing = _sigmoid_routing(config, 256, 8, 2.5, groups=(8, 4))
    experts = _beside_shared(config, routing, _experts_after(config, fields, 3), 2048)
    return {**experts, **latent(config, fields, LATENT)}


def mistral4(config: ConfigReader, fields: Fields) -> Fields:
    """Read latent attention and the experts of Mistral 4, whose `head_dim` is the size of a whole head."""
    rotated = config.integer("qk_rope_head_dim", 64)
    routing = replace(_sigmoid_routing(config, 128, 4, 1.0), scoring="softmax")
    ropes = tuple(replace(rope, dim=rotated) for rope in fields["ropes"])
    sizes = LatentDefaults(plain=64, rank=256, query_rank=1024)
    return {
        **_beside_shared(config, routing, _experts_after(config, fields, 0), 2048, selection_bias=False),
        **ministral3(config, fields),
        "ropes": ropes,
        **latent(config, {**fields, "head_dim": rotated, "ropes": ropes}, sizes),
    }


def glm4_moe_lite(config: ConfigReader, fields: Fields) -> Fields:
    experts = _beside_shared(config, _sigmoid_routing(config, 64, 4, 1.8), _experts_after(config, fields, 1), 1536)
    return {**experts, **latent(config, fields, LatentDefaults(plain=192, value=256, query_rank=768))}


def dots1(config: ConfigReader, fields: Fields) -> Fields:
    routing = _sigmoid_routing(config, 128, 6, 1.0, renormalize=False)
    return _beside_shared(config, routing, _experts_after(config, fields, 0), 1408, ("n_shared_experts", 2))


def solar_open(config: ConfigReader, fields: Fields) -> Fields:
    return _beside_shared(config, _sigmoid_routing(config, 128, 8, 1.0), _everywhere(fields), 1280)


def exaone_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the layers without rotary embeddings, as EXAONE 4 has them, and the experts."""
    routing, layers = _sigmoid_routing(config, 64, 8, 2.5), _experts_after(config, fields, 1)
    return {**_beside_shared(config, routing, layers, 1024, ("num_shared_experts", 1)), **exaone4(config, fields)}


def hy_v3(config: ConfigReader, fields: Fields) -> Fields:
    refuse(config, "mlp_bias", False, "a bias in products around experts that have none")
    routing = _scaled_routing(config, 192, 8, "router_scaling_factor", 2.826)
    return _beside_shared(config, routing, _experts_after(config, fields, 1), 1536, ("num_shared_experts", 1))


def _scaled_routing(config: ConfigReader, count: int, top_k: int, name: str, scale: float) -> Routing:
    """Read experts that a sigmoid selects, whose weights are multiplied by the value `name`."""
    numbers = config.integer("num_experts", count), config.integer("num_experts_per_tok", top_k)
    return Routing(*numbers, "sigmoid", scale=config.number(name, scale), epsilon=1e-20)


def afmoe_slides(config: ConfigReader, layer: int) -> bool:
    return (layer + 1) % config.integer("global_attn_every_n_layers", 4) != 0


def afmoe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of AFMoE, and which layers have rotary embeddings: those with a window."""
    refuse(config, "attention_bias", False, "biases of queries beside gates that have none")
    dense = config.integer("num_dense_layers", 1, at_least=0)
    routing = _scaled_routing(config, 64, 6, "route_scale", 1.0)
    layers = tuple(layer >= dense for layer in range(fields["num_layers"]))
    return {
        **_beside_shared(config, routing, layers, 1408, ("num_shared_experts", 2)),
        "has_output_gate": True,
        "gates_apart": True,
        "embedding_scale": fields["hidden_size"] ** 0.5 if config.boolean("mup_enabled", False) else 1.0,
        "ropes": without_rope(fields["ropes"], [window is not None for window in fields["windows"]]),
    }


def nemotron_h(config: ConfigReader, fields: Fields, layers: tuple[bool, ...]) -> Fields:
    """Read the experts without gates of Nemotron 3, which are in these layers."""
    refuse(config, "moe_latent_size", None, "experts that read a shorter row")
    size = config.integer("moe_intermediate_size", 7688)
    experts = ExpertsConfig(
        _sigmoid_routing(config, 8, 2, 1.0),
        size,
        layers,
        shared_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        selection_bias=True,
    )
    return checked_experts(config, experts)


def flex_olmo(config: ConfigReader, fields: Fields) -> Fields:
    return _of_inner_size(config, fields, _routing(config, 7, 5))


def mellum(config: ConfigReader, fields: Fields) -> Fields:
    routing = _routing(config, 64, 8, renormalize=True)
    size = config.integer("moe_intermediate_size", 896)
    return checked_experts(config, ExpertsConfig(routing, size, _experts_after(config, fields, 0)))


def cohere2_moe_slides(config: ConfigReader, layer: int) -> bool:
    """Return True unless it is the last layer of a pattern; the first layers, without experts, have one of their own."""
    dense = config.integer("first_k_dense_replace", 0, at_least=0)
    if layer < dense:
        return (layer + 1) % config.integer("prefix_dense_sliding_window_pattern", 1) != 0
    return (layer - dense + 1) % config.integer("sliding_window_pattern", 4) != 0


def cohere2_moe(config: ConfigReader, fields: Fields) -> Fields:
    """Read the experts of Command A+, beside which shared ones are added or averaged.

    Layers with a window have rotary embeddings, and the dense ones too if a pattern of one makes them full attention.
    """
    strategy = config.text("shared_expert_combination_strategy", "average")
    scoring = config.text("expert_selection_fn", "softmax")
    if strategy not in ("average", "sum") or scoring not in ("softmax", "sigmoid"):
        raise CheckpointInvalid(
            f"{config.where}: shared_expert_combination_strategy {strategy!r} or expert_selection_fn {scoring!r} is not known."
        )
    sparse, shared = _experts_after(config, fields, 0), config.integer("num_shared_experts", 0, at_least=0)
    share = 0.5 if shared and strategy == "average" else 1.0
    routing = Routing(
        config.integer("num_experts", 8),
        config.integer("num_experts_per_tok", 2),
        "sigmoid" if scoring == "sigmoid" else "softmax",
        config.boolean("norm_topk_prob", True) or scoring == "softmax",
        scale=share,
    )
    size = fields["intermediate_size"]
    dense_size = config.optional_integer("prefix_dense_intermediate_size") or size
    experts = ExpertsConfig(routing, size, sparse, shared_size=size * shared, shared_scale=share)
    always = config.integer("prefix_dense_sliding_window_pattern", 1) == 1
    rotated = [
        window is not None or (always and not one) for window, one in zip(fields["windows"], sparse, strict=True)
    ]
    norm = fields["norm"]
    if config.has("rms_norm_eps"):
        norm = NormConfig(eps=config.number("rms_norm_eps"))
    return {
        **checked_experts(config, experts),
        "norm": norm,
        "intermediate_size": dense_size,
        "logit_scale": config.number("logit_scale", 0.0625),
        "ropes": without_rope(fields["ropes"], rotated),
    }


def llama4(config: ConfigReader, fields: Fields) -> Fields:
    """Read Llama 4 up to the context in which chunks of attention and the scales of queries by position change nothing."""
    count, size = fields["num_layers"], config.integer("intermediate_size", 8192)
    config.values.get("layer_types")  # full attention, or in chunks, which are longer than the context
    lengths = [config.integer("max_position_embeddings"), config.integer("attention_chunk_size", 8192)]
    floor_scale = config.integer("floor_scale", 8192)
    config.number("attn_scale", 0.1)
    if config.boolean("attn_temperature_tuning", True):
        lengths.append(floor_scale - 1)
    step, listed = config.integer("interleave_moe_layer_step", 1), config.values.get("moe_layers")
    sparse = set(config.integers("moe_layers")) if listed is not None else set(range(step - 1, count, step))
    routing = Routing(
        config.integer("num_local_experts", 16), config.integer("num_experts_per_tok", 1), "sigmoid", False
    )
    if routing.top_k != 1:
        raise CheckpointInvalid(f"{config.where}: {routing.top_k} experts of each token; supported: 1.")
    experts = ExpertsConfig(
        routing, size, tuple(layer in sparse for layer in range(count)), shared_size=size, scales_inputs=True
    )
    has_norm = config.boolean("use_qk_norm", True)
    return {
        **smollm3(config, fields),
        **checked_experts(config, experts),
        "head_norm": fields.get("head_norm") if has_norm else None,
        "intermediate_size": config.integer("intermediate_size_mlp", 16384),
        "max_model_len": min(lengths),
    }


def gemma4_slides(config: ConfigReader, layer: int) -> bool:
    return (layer + 1) % 6 != 0 and layer + 1 != config.integer("num_hidden_layers")


def gemma4(config: ConfigReader, fields: Fields) -> Fields:
    """Read Gemma 4: the inputs of layers, if there are any, and the experts beside each MLP, if there are any."""
    found, size = gemma4_unified(config, fields), config.integer("hidden_size_per_layer_input", 256, at_least=0)
    table = config.integer("vocab_size_per_layer_input", 262_144)
    if size:
        found["altup"] = AltUpConfig(1, 0, size, table)
    if config.boolean("enable_moe_block", False):
        routing = Routing(config.integer("num_experts"), config.integer("top_k_experts"))
        experts = ExpertsConfig(
            routing,
            config.integer("moe_intermediate_size"),
            _everywhere(fields),
            shared_size=fields["intermediate_size"],
            apart=True,
        )
        found |= checked_experts(config, experts)
    return found


def gemma4_assistant(config: ConfigReader, fields: Fields) -> Fields:
    """Read a draft head. All of its layers read keys and values of the model that it drafts for."""
    for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        refuse(config, name, 0, "inputs of layers in a draft head")
    for name in ("enable_moe_block", "use_double_wide_mlp"):
        refuse(config, name, False, "experts or wider layers in a draft head")
    found = gemma4_unified(config, fields, reads_model=True)
    found |= {"logit_softcap": None, "served_size": config.integer("backbone_hidden_size", 1536)}
    # The window ends before the token of the query, and includes the last key at its distance.
    windows = tuple(window and window + 1 for window in fields["windows"])
    return {**found, "is_draft_head": True, "windows": windows}


def gemma4_unified(config: ConfigReader, fields: Fields, reads_model: bool = False) -> Fields:
    """Read the heads and the rotary embeddings of layers with full attention, and which layers share keys and values."""
    refuse(config, "use_bidirectional_attention", "vision", "attention in both directions")
    windows, layers, inner = fields["windows"], fields["num_layers"], fields["intermediate_size"]
    if windows[-1] is not None:
        raise CheckpointInvalid(f"{config.where}: the last of layer_types must be full_attention.")
    heads, shared = _full_heads(config, fields), 0 if reads_model else shared_kv_layers(config, windows)
    rope = RopeConfig(1_000_000.0, heads.head_dim, "proportional", num_rotated=heads.head_dim // 8)
    if config.has("rope_parameters"):
        rope = parse_rope(config, heads.head_dim, 1_000_000.0, "full_attention")
    wide = config.boolean("use_double_wide_mlp", False) and shared > 0
    return {
        **gemma(config, fields),
        "blocks": "sliding" if config.has("use_bidirectional_attention") else "none",
        "attention_scale": 1.0,
        "logit_softcap": config.optional_number("final_logit_softcapping"),
        "full_heads": heads,
        "ropes": tuple(rope if window is None else own for window, own in zip(windows, fields["ropes"], strict=True)),
        "shared_kv_layers": shared,
        "inner_sizes": (inner,) * (layers - shared) + (2 * inner,) * shared if wide else (),
        "layer_factors": True,
    }


def _full_heads(config: ConfigReader, fields: Fields) -> HeadSizes:
    """Read the heads of layers with full attention, by their own names or from what layers have instead of others."""
    alike, own = config.boolean("attention_k_eq_v", False), config.section("per_layer_config")
    kv_heads, size = fields["num_kv_heads"], config.integer("global_head_dim", 512)
    if config.has("num_global_key_value_heads") and alike:
        kv_heads = config.integer("num_global_key_value_heads")
    if own.values:
        full = {str(layer) for layer, window in enumerate(fields["windows"]) if window is None}
        sections = [own.section(layer) for layer in own.values]
        first = sections[0]
        known = {"head_dim", "num_key_value_heads"}
        if set(own.values) != full or any(one.values != first.values for one in sections) or set(first.values) - known:
            raise CheckpointInvalid(
                f"{own.where} must give all layers with full_attention the same heads, and no other."
            )
        kv_heads, size = first.integer("num_key_value_heads", fields["num_kv_heads"]), first.integer("head_dim", 512)
    if fields["num_heads"] % kv_heads:
        raise CheckpointInvalid(
            f"{config.where}: {fields['num_heads']} attention heads cannot share {kv_heads} key/value heads evenly."
        )
    return HeadSizes(kv_heads, size, alike)
