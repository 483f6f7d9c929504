"""The supported families of decoders, one row for each architecture, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

from app.models.decoders import expert_values as experts
from app.models.decoders import family_values as values
from app.models.decoders.family import DecoderFamily
from app.models.decoders.layer_config import HeadNormConfig, NormConfig


def _layers(stored: str, parts: Mapping[str, str], **others: str) -> dict[str, str]:
    """Return names of tensors: `parts` are those in a layer, whose name in the file is `stored`."""
    return {
        **{others_name.replace("__", "."): ours for others_name, ours in others.items()},
        **{f"{stored}.{{}}.{part}": f"model.layers.{{}}.{ours}" for part, ours in parts.items()},
    }


_LAYER = "model.layers"
_QKV = {f"{part}_proj": f"self_attn.{part}_proj" for part in "qkv"}
_RMS_PLUS_1 = NormConfig("rms", offset=1.0)
_LAYER_NORM = NormConfig("layer", has_bias=True)
_WITHOUT_BIAS = NormConfig("layer")
_PER_HEAD = HeadNormConfig()
_PLAIN_MLP = {"is_gated": False}
_GPT = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2 = {**_GPT, "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
_GEMMA3 = DecoderFamily(
    model_type="gemma3_text",
    title="Gemma 3 (1B, 270M)",
    window=4096,
    tie_embeddings=True,
    head_dim=256,
    theta=1_000_000.0,
    sliding_ropes=True,
    local_theta=10_000.0,
    norm=_RMS_PLUS_1,
    head_norm=HeadNormConfig(offset=1.0),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    fields={"placement": "sandwich"},
    slides=lambda config, layer: (layer + 1) % config.integer("sliding_window_pattern", 6) != 0,
    read=values.gemma3,
    embeds=True,
)

# The defaults are those of transformers' configuration classes, which omit default values from a saved config.json.
DECODER_FAMILIES: Mapping[str, DecoderFamily] = {
    "LlamaForCausalLM": DecoderFamily(
        model_type="llama",
        title="Llama 1 to 3, SmolLM 1 and 2, and others with its layers",
        has_mlp_bias=True,
        embeds=True,
    ),
    "MistralForCausalLM": DecoderFamily(
        model_type="mistral",
        title="Mistral",
        window=4096,
        attention_biases="none",
        slides=lambda config, layer: True,
        embeds=True,
    ),
    "Qwen2ForCausalLM": DecoderFamily(
        model_type="qwen2",
        title="Qwen 2 and 2.5",
        window=4096,
        attention_biases="qkv",
        slides=values.qwen_slides,
        embeds=True,
    ),
    "Qwen3ForCausalLM": DecoderFamily(
        model_type="qwen3",
        title="Qwen 3",
        window=4096,
        head_dim=128,
        head_norm=_PER_HEAD,
        slides=values.qwen_slides,
        embeds=True,
    ),
    "Phi3ForCausalLM": DecoderFamily(
        model_type="phi3",
        title="Phi-3, Phi-4",
        attention_biases="none",
        eps=1e-5,
        fields={"fused_qkv": True, "fused_gate_up": True},
        slides=lambda config, layer: True,
        embeds=True,
    ),
    "SmolLM3ForCausalLM": DecoderFamily(
        model_type="smollm3",
        title="SmolLM3",
        tie_embeddings=True,
        theta=2_000_000.0,
        has_mlp_bias=True,
        slides=values.smollm3_slides,
        read=values.smollm3,
        embeds=True,
    ),
    "Gemma2ForCausalLM": DecoderFamily(
        model_type="gemma2",
        title="Gemma 2",
        window=4096,
        tie_embeddings=True,
        head_dim=256,
        norm=_RMS_PLUS_1,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        fields={"placement": "sandwich"},
        slides=lambda config, layer: layer % 2 == 0,
        read=values.gemma2,
        embeds=True,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "MixtralForCausalLM": DecoderFamily(
        model_type="mixtral",
        title="Mixtral",
        attention_biases="none",
        eps=1e-5,
        theta=1_000_000.0,
        slides=lambda config, layer: True,
        read=experts.mixtral,
        parts={"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
    ),
    "Qwen2MoeForCausalLM": DecoderFamily(
        model_type="qwen2_moe",
        aliases={"num_experts": "num_local_experts"},
        title="Qwen 1.5 and 2 with experts",
        window=4096,
        attention_biases="qkv",
        slides=values.qwen_slides,
        read=experts.qwen2_moe,
    ),
    "Qwen3MoeForCausalLM": DecoderFamily(
        model_type="qwen3_moe",
        aliases={"num_experts": "num_local_experts"},
        title="Qwen 3 with experts",
        window=4096,
        head_norm=_PER_HEAD,
        slides=lambda config, layer: True,
        read=experts.qwen3_moe,
    ),
    "OlmoeForCausalLM": DecoderFamily(
        model_type="olmoe",
        aliases={"num_experts": "num_local_experts"},
        title="OLMoE",
        eps=1e-5,
        head_norm=HeadNormConfig(scope="together"),
        read=experts.olmoe,
    ),
    "GraniteMoeForCausalLM": DecoderFamily(
        model_type="granitemoe",
        title="Granite 3 with experts",
        read=experts.granite_moe,
        parts={
            "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
            "block_sparse_moe.router.layer.": "mlp.gate.",
        },
    ),
    "Glm4MoeForCausalLM": DecoderFamily(
        model_type="glm4_moe",
        aliases={"n_routed_experts": "num_local_experts"},
        title="GLM 4.5 and newer with experts",
        partial=0.5,
        attention_biases="config_qkv",
        eps=1e-5,
        head_norm=_PER_HEAD,
        read=experts.glm4_moe,
        parts={".mlp.shared_experts.": ".mlp.shared_expert."},
        has_more_layers=True,
    ),
}
