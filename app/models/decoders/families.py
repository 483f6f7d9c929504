"""The supported families of decoders, one row for each architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.models.decoders import family_values as values
from app.models.decoders.families_layer_norm import LAYER_NORM_FAMILIES
from app.models.decoders.families_recurrent import RECURRENT_FAMILIES
from app.models.decoders.family import DecoderFamily, layer_names
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
        slides=values.qwen_slides,
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


_RMS_PLUS_1 = NormConfig("rms", offset=1.0)
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
# Names of the text half of a model that also reads pictures or sounds.
_GEMMA_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_GEMMA3N = DecoderFamily(
    model_type="gemma3n_text",
    title="Gemma 3n, its text model alone",
    window=512,
    tie_embeddings=True,
    head_dim=256,
    theta=1_000_000.0,
    sliding_ropes=True,
    local_theta=10_000.0,
    attention_biases="none",
    head_norm=HeadNormConfig(values=True),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    fields={"placement": "sandwich"},
    slides=lambda config, layer: (layer + 1) % 5 != 0,
    read=values.gemma3n,
)

_LFM2 = DecoderFamily(
    model_type="lfm2",
    title="LFM2",
    aliases={"intermediate_size": "block_ff_dim"},
    tie_embeddings=True,
    theta=1_000_000.0,
    norm_eps="norm_eps",
    eps=1e-5,
    attention_biases="none",
    head_norm=_PER_HEAD,
    read=values.lfm2,
    parts={".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.", ".feed_forward.": ".mlp."},
    names={
        "model.embedding_norm": "model.norm",
        **layer_names(
            "model.layers",
            {
                "operator_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "self_attn.out_proj": "self_attn.o_proj",
                "self_attn.q_layernorm": "self_attn.q_norm",
                "self_attn.k_layernorm": "self_attn.k_norm",
            },
        ),
    },
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
    # The text half of a model that also reads pictures, which it does not here.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        model_type="gemma3",
        title="Gemma 3 (4B and larger), text only",
        text_config="text_config",
        prefixes=_GEMMA_TEXT,
        ignored=(
            *("vision_tower.", "multi_modal_projector."),
            *("model.vision_tower.", "model.multi_modal_projector."),
        ),
        embeds=False,
    ),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(
        _GEMMA3N,
        model_type="gemma3n",
        title="Gemma 3n, text only",
        text_config="text_config",
        prefixes=_GEMMA_TEXT,
        ignored=tuple(
            f"{prefix}{part}."
            for prefix in ("", "model.")
            for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
        ),
    ),
    "GemmaForCausalLM": DecoderFamily(
        model_type="gemma",
        title="Gemma 1",
        tie_embeddings=True,
        head_dim=256,
        norm=_RMS_PLUS_1,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        read=values.gemma,
    ),
    "VaultGemmaForCausalLM": DecoderFamily(
        model_type="vaultgemma",
        title="VaultGemma",
        window=4096,
        tie_embeddings=True,
        head_dim=256,
        norm=_RMS_PLUS_1,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        slides=lambda config, layer: layer % 2 == 0,
        read=values.gemma2,
        names=layer_names("model.layers", {"pre_feedforward_layernorm": "post_attention_layernorm"}),
    ),
    "GraniteForCausalLM": DecoderFamily(
        model_type="granite", title="Granite 3 (dense)", has_mlp_bias=True, read=values.granite
    ),
    "HyperCLOVAXForCausalLM": DecoderFamily(
        model_type="hyperclovax",
        title="HyperCLOVA X",
        has_mlp_bias=True,
        fields={"placement": "sandwich"},
        read=values.hyperclovax,
        names=layer_names(
            "model.layers",
            {
                "post_norm1": "post_attention_layernorm",
                "post_attention_layernorm": "pre_feedforward_layernorm",
                "post_norm2": "post_feedforward_layernorm",
            },
        ),
    ),
    "OlmoForCausalLM": DecoderFamily(
        model_type="olmo",
        title="OLMo 1",
        norm=NormConfig("layer", has_weight=False),
        norm_eps="layer_norm_eps",
        eps=1e-5,
        read=values.olmo,
    ),
    "Olmo2ForCausalLM": DecoderFamily(
        model_type="olmo2",
        title="OLMo 2",
        eps=1e-5,
        head_norm=HeadNormConfig(scope="together"),
        fields={"placement": "post"},
    ),
    "Olmo3ForCausalLM": DecoderFamily(
        model_type="olmo3",
        title="OLMo 3",
        eps=1e-5,
        window=4096,
        theta=500_000.0,
        sliding_ropes=True,
        head_norm=HeadNormConfig(scope="together"),
        fields={"placement": "post"},
        slides=lambda config, layer: (layer + 1) % 4 != 0,
    ),
    "Exaone4ForCausalLM": DecoderFamily(
        model_type="exaone4",
        title="EXAONE 4",
        eps=1e-5,
        window=4096,
        attention_biases="none",
        head_norm=_PER_HEAD,
        fields={"placement": "post"},
        slides=values.exaone4_slides,
        read=values.exaone4,
    ),
    "MinistralForCausalLM": DecoderFamily(
        model_type="ministral",
        title="Ministral (8B of 2024)",
        window=4096,
        attention_biases="none",
        slides=lambda config, layer: True,
    ),
    "Ministral3ForCausalLM": DecoderFamily(
        model_type="ministral3",
        title="Ministral 3, up to the context it was first trained with",
        eps=1e-5,
        head_dim=128,
        theta=1_000_000.0,
        attention_biases="none",
        slides=lambda config, layer: True,
        read=values.ministral3,
    ),
    "SeedOssForCausalLM": DecoderFamily(
        model_type="seed_oss", title="Seed-OSS", head_dim=128, has_mlp_bias=True, read=values.seed_oss
    ),
    "Ernie4_5ForCausalLM": DecoderFamily(
        model_type="ernie4_5",
        title="Ernie 4.5 (dense)",
        tie_embeddings=True,
        head_dim=128,
        theta=500_000.0,
        eps=1e-5,
        interleaved=True,
        read=values.ernie,
    ),
    "HunYuanDenseV1ForCausalLM": DecoderFamily(
        model_type="hunyuan_v1_dense",
        title="Hunyuan (dense)",
        eps=1e-5,
        head_norm=HeadNormConfig(after_rope=True),
        read=values.hunyuan,
        names=layer_names(
            "model.layers",
            {"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"},
        ),
    ),
    "ArceeForCausalLM": DecoderFamily(
        model_type="arcee",
        title="Arcee (AFM)",
        eps=1e-5,
        has_mlp_bias=True,
        activation=("hidden_act", "relu2"),
        fields={"is_gated": False},
    ),
    "ApertusForCausalLM": DecoderFamily(
        model_type="apertus",
        title="Apertus",
        eps=1e-5,
        theta=12_000_000.0,
        head_norm=_PER_HEAD,
        activation=("hidden_act", "xielu"),
        fields={"is_gated": False},
        names=layer_names(
            "model.layers",
            {"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
        ),
        computed=(".rotary_emb.inv_freq", ".act_fn.beta", ".act_fn.eps"),
    ),
    "GlmForCausalLM": DecoderFamily(
        model_type="glm",
        title="GLM-4 (9B of 2024)",
        head_dim=128,
        partial=0.5,
        interleaved=True,
        eps=1.5625e-07,
        attention_biases="config_qkv",
        fields={"fused_gate_up": True},
        read=values.glm,
    ),
    "Glm4ForCausalLM": DecoderFamily(
        model_type="glm4",
        title="GLM-4-0414",
        head_dim=128,
        partial=0.5,
        interleaved=True,
        eps=1.5625e-07,
        attention_biases="config_qkv",
        fields={"fused_gate_up": True, "placement": "sandwich"},
        read=values.glm,
        names=layer_names(
            "model.layers",
            {
                "post_self_attn_layernorm": "post_attention_layernorm",
                "post_attention_layernorm": "pre_feedforward_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            },
        ),
    ),
    "HeliumForCausalLM": DecoderFamily(
        model_type="helium",
        title="Helium",
        head_dim=128,
        theta=100_000.0,
        interleaved=True,
        eps=1e-8,
        attention_biases="config_qkv",
        has_mlp_bias=True,
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        title="LFM2 with experts",
        aliases={"num_experts": "num_local_experts"},
        read=values.lfm2_moe,
        parts={"feed_forward.expert_bias": "feed_forward.gate.e_score_correction_bias", **_LFM2.parts},
    ),
    "CwmForCausalLM": DecoderFamily(
        model_type="cwm",
        title="CWM",
        head_dim=128,
        theta=1_000_000.0,
        eps=1e-5,
        window=8192,
        attention_biases="none",
        slides=lambda config, layer: layer % 4 != 0,
    ),
    "YoutuForCausalLM": DecoderFamily(
        model_type="youtu",
        title="Youtu-LLM",
        aliases={"head_dim": "qk_rope_head_dim"},
        head_dim=64,
        tie_embeddings=True,
        has_mlp_bias=True,
        read=values.youtu,
    ),
    "MiniCPM3ForCausalLM": DecoderFamily(
        model_type="minicpm3",
        title="MiniCPM3",
        aliases={"head_dim": "qk_rope_head_dim"},
        head_dim=32,
        tie_embeddings=True,
        eps=1e-5,
        has_mlp_bias=True,
        read=values.minicpm3,
    ),
    **LAYER_NORM_FAMILIES,
    **EXPERT_FAMILIES,
    **RECURRENT_FAMILIES,
}


# What is not offered -> the starts of the class names that need it.
UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "state-space layers, whose state is not a KV cache": (
        *("Mamba", "FalconMamba", "FalconH1", "Jamba", "Zamba", "NemotronH"),
    ),
    "recurrent layers with a state, such as linear attention": (
        *("Rwkv", "RecurrentGemma", "MiniMax", "KimiLinear", "OlmoHybrid", "xLSTM"),
    ),
    "an encoder that reads the text and a decoder that attends to it": (
        *("T5", "MT5", "UMT5", "Bart", "MBart", "Pegasus", "Marian", "BigBirdPegasus", "LED", "SwitchTransformers"),
        *("M2M100", "MvpFor", "PLBart", "ProphetNet"),
    ),
    "speech": ("Whisper", "Speech", "Wav2Vec", "Voxtral", "Moshi", "Qwen2Audio"),
    "pictures": (
        *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Llava", "Idefics", "PaliGemma", "Mllama", "InternVL", "Mistral3"),
        *("SmolVLM", "Gemma4", "Phi4Multimodal", "DeepseekVL", "Ovis", "Molmo", "Glm4v", "Pixtral", "Qwen2_5Omni"),
        *("Lfm2Vl", "Lfm3Vl"),
    ),
    "chunked attention and experts that alternate with dense layers": ("Llama4",),
    "sparse attention, for which an indexer selects tokens": ("DeepseekV32", "DeepseekV4", "GlmMoeDsa"),
    "weights of one and a half bits": ("BitNet",),
    "a mixture of experts of its own kind": (
        *("GraniteMoeShared", "Dots1", "HunYuanMoE", "Cohere2Moe"),
        *("FlexOlmo", "Jetmoe", "Dbrx", "ExaoneMoe"),
    ),
}


_SHORT_NAMES = [name.removesuffix("ForCausalLM") for name in DECODER_FAMILIES]


def reason_of(architecture: str) -> str | None:
    """Return what an architecture needs that is not offered; None if it is not in the table."""
    fitting = [
        (len(prefix), reason)
        for reason, prefixes in UNSUPPORTED.items()
        for prefix in prefixes
        if architecture.startswith(prefix)
    ]
    return max(fitting)[1] if fitting else None


def refusal(names: Sequence[str], model_type: str) -> str:
    """Return the sentence that refuses a config.json with these architectures, or with this model type."""
    said = ", ".join(names) or model_type
    known = next(filter(None, map(reason_of, names)), None)
    if known is not None:
        return f"architecture {said} is not supported: it needs {known}, which is not offered (docs/families.md)."
    return (
        f"architecture {said} is not supported; supported are {', '.join(_SHORT_NAMES)} (docs/families.md) and the encoders of"
        " docs/encoders.md."
    )
