"""The families of decoders with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.models.decoders import expert_values as values
from app.models.decoders.family import DecoderFamily
from app.models.decoders.family_values import qwen_slides
from app.models.decoders.layer_config import HeadNormConfig, NormConfig

_PER_HEAD = HeadNormConfig()
# Until `read`, `head_dim` is the part of a head with rotary embeddings, which is what saved files call it too.
_LATENT: Mapping[str, Any] = {
    "aliases": {"head_dim": "qk_rope_head_dim", "n_routed_experts": "num_local_experts"},
    "head_dim": 64,
    "parts": {".mlp.shared_experts.": ".mlp.shared_expert."},
    "has_more_layers": True,
}
_MIXTRAL = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}

EXPERT_FAMILIES: Mapping[str, DecoderFamily] = {
    "MixtralForCausalLM": DecoderFamily(
        model_type="mixtral",
        title="Mixtral",
        attention_biases="none",
        eps=1e-5,
        theta=1_000_000.0,
        slides=lambda config, layer: True,
        read=values.mixtral,
        parts=_MIXTRAL,
    ),
    "PhimoeForCausalLM": DecoderFamily(
        model_type="phimoe",
        title="Phi-3.5-MoE",
        norm=NormConfig(kind="layer", has_bias=True),
        eps=1e-5,
        theta=1_000_000.0,
        slides=lambda config, layer: True,
        read=values.phimoe,
        parts=_MIXTRAL,
    ),
    "Ernie4_5_MoeForCausalLM": DecoderFamily(
        model_type="ernie4_5_moe",
        title="Ernie 4.5 with experts",
        tie_embeddings=True,
        attention_biases="none",
        theta=500_000.0,
        eps=1e-5,
        interleaved=True,
        read=values.ernie_moe,
        parts={".mlp.shared_experts.": ".mlp.shared_expert.", ".mlp.moe_statics.": ".mlp.gate."},
        ignored=("model.mtp_",),
    ),
    "Qwen2MoeForCausalLM": DecoderFamily(
        model_type="qwen2_moe",
        aliases={"num_experts": "num_local_experts"},
        title="Qwen 1.5 and 2 with experts",
        window=4096,
        attention_biases="qkv",
        slides=qwen_slides,
        read=values.qwen2_moe,
    ),
    "Qwen3MoeForCausalLM": DecoderFamily(
        model_type="qwen3_moe",
        aliases={"num_experts": "num_local_experts"},
        title="Qwen 3 with experts",
        window=4096,
        head_norm=_PER_HEAD,
        slides=lambda config, layer: True,
        read=values.qwen3_moe,
    ),
    "OlmoeForCausalLM": DecoderFamily(
        model_type="olmoe",
        aliases={"num_experts": "num_local_experts"},
        title="OLMoE",
        eps=1e-5,
        head_norm=HeadNormConfig(scope="together"),
        read=values.olmoe,
    ),
    "GraniteMoeForCausalLM": DecoderFamily(
        model_type="granitemoe",
        title="Granite 3 with experts",
        read=values.granite_moe,
        parts={
            "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
            "block_sparse_moe.router.layer.": "mlp.gate.",
        },
    ),
    "GptOssForCausalLM": DecoderFamily(
        model_type="gpt_oss",
        title="gpt-oss (20B, 120B)",
        head_dim=64,
        theta=150_000.0,
        eps=1e-5,
        window=128,
        fields={"activation": "swiglu_oai", "mlp_bias": True, "has_sinks": True},
        slides=lambda config, layer: layer % 2 == 0,
        read=values.gpt_oss,
        parts={".mlp.router.": ".mlp.gate."},
        expert_layout="interleaved",
    ),
    "Glm4MoeForCausalLM": DecoderFamily(
        model_type="glm4_moe",
        aliases={"n_routed_experts": "num_local_experts"},
        title="GLM 4.5 and newer with experts",
        partial=0.5,
        attention_biases="config_qkv",
        eps=1e-5,
        head_norm=_PER_HEAD,
        read=values.glm4_moe,
        parts={".mlp.shared_experts.": ".mlp.shared_expert."},
        has_more_layers=True,
    ),
    "DeepseekV2ForCausalLM": DecoderFamily(
        model_type="deepseek_v2",
        title="DeepSeek-V2, its Lite and Coder models",
        has_mlp_bias=True,
        read=values.deepseek_v2,
        **_LATENT,
    ),
    "DeepseekV3ForCausalLM": DecoderFamily(
        model_type="deepseek_v3",
        title="DeepSeek-V3, V3.1 and R1; Moonlight and Kimi K2 with a tokenizer.json",
        read=values.deepseek_v3,
        **_LATENT,
    ),
    "Glm4MoeLiteForCausalLM": DecoderFamily(
        model_type="glm4_moe_lite",
        title="GLM 4.7 Flash",
        eps=1e-5,
        read=values.glm4_moe_lite,
        **_LATENT,
    ),
}
