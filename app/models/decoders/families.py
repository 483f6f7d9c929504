"""The supported families of decoders, one row for each architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.models.decoders import expert_values
from app.models.decoders import family_values as values
from app.models.decoders.families_experts import EXPERT_FAMILIES, LLAMA4
from app.models.decoders.families_layer_norm import LAYER_NORM_FAMILIES
from app.models.decoders.families_recurrent import RECURRENT_FAMILIES
from app.models.decoders.family import DecoderFamily, layer_names
from app.models.decoders.layer_config import HeadNormConfig, NormConfig

_PER_HEAD = HeadNormConfig()
_RMS_PLUS_1 = NormConfig("rms", offset=1.0)
_GEMMA2 = DecoderFamily(
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
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    title="Gemma 3 (1B, 270M)",
    theta=1_000_000.0,
    sliding_ropes=True,
    local_theta=10_000.0,
    head_norm=HeadNormConfig(offset=1.0),
    slides=lambda config, layer: (layer + 1) % config.integer("sliding_window_pattern", 6) != 0,
    read=values.gemma3,
)
# Names of the text half of a model that also reads pictures or sounds, and of the other halves.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
_OTHER_HALVES = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in (
        "vision_tower",
        "audio_tower",
        "embed_vision",
        "embed_audio",
        "multi_modal_projector",
        "visual",
        "vision_embedder",
        "vision_model",
        "connector",
        "visual_embeddings_table",
    )
)
# Classes of models that read pictures, each with its title and the types of text models that it may have, the default
# first.
_TEXTS_OF_READERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "SmolVLMForConditionalGeneration": ("smolvlm", "SmolVLM", ("llama",)),
    "Idefics3ForConditionalGeneration": ("idefics3", "Idefics 3", ("llama",)),
    "LlavaForConditionalGeneration": ("llava", "LLaVA", ("llama", "mistral", "qwen2")),
    "LlavaNextForConditionalGeneration": ("llava_next", "LLaVA-NeXT", ("llama", "mistral", "granite")),
    "LlavaOnevisionForConditionalGeneration": ("llava_onevision", "LLaVA-OneVision", ("qwen2",)),
    "InternVLForConditionalGeneration": ("internvl", "InternVL 2.5 and later", ("qwen2", "qwen3", "llama")),
    "Ovis2ForConditionalGeneration": ("ovis2", "Ovis 2", ("qwen2",)),
    "PaliGemmaForConditionalGeneration": ("paligemma", "PaliGemma 1 and 2", ("gemma", "gemma2")),
}
DEFAULT_TEXTS: Mapping[str, str] = {name: texts[0] for name, (_, _, texts) in _TEXTS_OF_READERS.items()}
_TEXT_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "granite": "Granite",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
}
# What the first files of LLaVA leave out of the section of their text model.
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma": {"max_position_embeddings": 8192},
    "gemma2": {"max_position_embeddings": 8192},
}


def _text_half(
    family: DecoderFamily, model_type: str, title: str, reads_pictures: bool = False, **more: Any
) -> DecoderFamily:
    """Return the family of models whose text half is a decoder of this family."""
    return replace(
        family,
        model_type=model_type,
        title=title,
        text_config="text_config",
        prefixes=_TEXT_PREFIXES,
        ignored=(*_OTHER_HALVES, "image_newline", "model.image_newline", *family.ignored),
        embeds=False,
        reads_pictures=reads_pictures,
        **more,
    )


def _reader_with_axes(
    family: DecoderFamily,
    model_type: str,
    title: str,
    sections: tuple[int, ...],
    theta: float = 10_000.0,
    **more: Any,
) -> DecoderFamily:
    """Return the family of models whose pictures have positions in three axes."""
    return _text_half(family, model_type, title, reads_pictures=True, sections=sections, theta=theta, **more)


def _readers_of_pictures(families: Mapping[str, DecoderFamily]) -> dict[str, DecoderFamily]:
    """Return the rows of models that read pictures: one for each text model, the class and its type as the name."""
    rows: dict[str, DecoderFamily] = {}
    for name, (model_type, title, texts) in _TEXTS_OF_READERS.items():
        for text in texts:
            own = _text_half(families[f"{_TEXT_NAMES[text]}ForCausalLM"], model_type, title, reads_pictures=True)
            rows[f"{name}/{text}"] = replace(own, defaults=_LEFT_OUT.get(text, {}))
            if model_type == "paligemma":
                read = values.paligemma if text == "gemma" else values.paligemma2
                rows[f"{name}/{text}"] = replace(rows[f"{name}/{text}"], read=read, joins_prompt=True)
    return rows


_GEMMA3N = replace(
    _GEMMA3,
    model_type="gemma3n_text",
    title="Gemma 3n, its text model alone",
    window=512,
    attention_biases="none",
    norm=NormConfig(),
    head_norm=HeadNormConfig(values=True),
    slides=lambda config, layer: (layer + 1) % 5 != 0,
    read=values.gemma3n,
    embeds=False,
)

_GEMMA4 = replace(
    _GEMMA3N,
    model_type="gemma4_text",
    title="Gemma 4 (E2B, E4B, 31B, 26B-A4B), its text model alone",
    attention_biases="config",
    slides=expert_values.gemma4_slides,
    read=expert_values.gemma4,
    parts={
        ".router.proj.": ".mlp.gate.",
        ".router.per_expert_scale": ".mlp.gate.per_expert_scale",
        ".router.scale": ".mlp.router_norm.weight",
        ".experts.": ".mlp.experts.",
    },
)
_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    model_type="gemma4_unified_text",
    title="Gemma 4 12B, its text model alone",
    window=1024,
    read=expert_values.gemma4_unified,
)


def _assistant(family: DecoderFamily, model_type: str, model: str) -> DecoderFamily:
    """Return the family of the draft heads of a model. The clusters of tokens in their files are not read."""
    return replace(
        family,
        model_type=model_type,
        title=f"draft heads of {model}, with `--draft-model`",
        text_config="text_config",
        read=expert_values.gemma4_assistant,
        prefixes={f"{way}_projection.": f"model.{way}_projection." for way in ("pre", "post")},
        ignored=("masked_embedding.",),
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

_LFM3 = replace(
    _LFM2,
    model_type="lfm3",
    title="LFM3",
    aliases={},
    head_dim=128,
    sliding_ropes=True,
    fields={"placement": "sandwich"},
    read=values.lfm3,
    parts={**_LFM2.parts, ".self_attn.g_proj.": ".self_attn.gate_proj."},
    names={
        "model.embedding_norm": "model.norm",
        **layer_names(
            "model.layers",
            {
                "operator_norm": "input_layernorm",
                "post_operator_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffn_norm": "post_feedforward_layernorm",
            },
        ),
    },
)

_OLMO2 = DecoderFamily(
    model_type="olmo2",
    title="OLMo 2",
    eps=1e-5,
    head_norm=HeadNormConfig(scope="together"),
    fields={"placement": "post"},
)
_MISTRAL = DecoderFamily(
    model_type="mistral",
    title="Mistral",
    window=4096,
    attention_biases="none",
    slides=lambda config, layer: True,
    embeds=True,
)
_MINISTRAL3 = DecoderFamily(
    model_type="ministral3",
    title="Ministral 3, up to the context it was first trained with",
    eps=1e-5,
    head_dim=128,
    theta=1_000_000.0,
    attention_biases="none",
    slides=lambda config, layer: True,
    read=values.ministral3,
)
_QWEN2 = DecoderFamily(
    model_type="qwen2",
    title="Qwen 2 and 2.5",
    window=4096,
    attention_biases="qkv",
    slides=values.qwen_slides,
    embeds=True,
)
_QWEN3 = DecoderFamily(
    model_type="qwen3",
    title="Qwen 3",
    window=4096,
    head_dim=128,
    head_norm=_PER_HEAD,
    slides=values.qwen_slides,
    embeds=True,
)
_GLM4 = DecoderFamily(
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
)

# The defaults are those of transformers' configuration classes, which omit default values from a saved config.json.
_PLAIN_FAMILIES: Mapping[str, DecoderFamily] = {
    "LlamaForCausalLM": DecoderFamily(
        model_type="llama",
        title="Llama 1 to 3, SmolLM 1 and 2, and others with its layers",
        has_mlp_bias=True,
        embeds=True,
    ),
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
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
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _text_half(
        _GEMMA3, "gemma3", "Gemma 3 (4B and larger)", reads_pictures=True, fields={**_GEMMA3.fields, "blocks": "all"}
    ),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _text_half(_GEMMA3N, "gemma3n", "Gemma 3n, text only"),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _text_half(
        _GEMMA4, "gemma4", "Gemma 4 (E2B, E4B, 31B, 26B-A4B)", reads_pictures=True
    ),
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4AssistantForCausalLM": _assistant(_GEMMA4, "gemma4_assistant", "Gemma 4"),
    "Gemma4UnifiedAssistantForCausalLM": _assistant(_GEMMA4_UNIFIED, "gemma4_unified_assistant", "Gemma 4 12B"),
    "Gemma4UnifiedForConditionalGeneration": _text_half(_GEMMA4_UNIFIED, "gemma4_unified", "Gemma 4 12B, text only"),
    "Llama4ForConditionalGeneration": _text_half(LLAMA4, "llama4", "Llama 4, text only, up to 8,191 tokens of context"),
    "GemmaForCausalLM": DecoderFamily(
        model_type="gemma",
        title="Gemma 1",
        tie_embeddings=True,
        head_dim=256,
        norm=_RMS_PLUS_1,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        read=values.gemma,
    ),
    "VaultGemmaForCausalLM": replace(
        _GEMMA2,
        model_type="vaultgemma",
        title="VaultGemma",
        fields={},
        names=layer_names("model.layers", {"pre_feedforward_layernorm": "post_attention_layernorm"}),
        embeds=False,
    ),
    "GraniteForCausalLM": DecoderFamily(
        model_type="granite", title="Granite 3 (dense)", has_mlp_bias=True, read=values.granite
    ),
    "GraniteSWAForCausalLM": DecoderFamily(
        model_type="granite_swa",
        title="Granite with sinks and windows",
        window=128,
        tie_embeddings=True,
        eps=1e-5,
        has_mlp_bias=True,
        fields={"has_sinks": True},
        slides=lambda config, layer: layer % 4 != 0,
        read=values.granite_swa,
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
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        model_type="olmo3",
        title="OLMo 3",
        window=4096,
        theta=500_000.0,
        sliding_ropes=True,
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
    "MinistralForCausalLM": replace(_MISTRAL, model_type="ministral", title="Ministral (8B of 2024)", embeds=False),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": _text_half(_MISTRAL, "mistral3", "Mistral Small 3", reads_pictures=True),
    "Mistral3ForConditionalGeneration/ministral3": _text_half(
        _MINISTRAL3, "mistral3", "Ministral 3, up to the context it was first trained with", reads_pictures=True
    ),
    "Mistral3ForConditionalGeneration/mistral4": _text_half(
        EXPERT_FAMILIES["Mistral4ForCausalLM"],
        "mistral3",
        "Mistral Small 4, up to the context it was first trained with",
        reads_pictures=True,
    ),
    "Qwen2VLForConditionalGeneration": _reader_with_axes(_QWEN2, "qwen2_vl", "Qwen2-VL", (16, 24, 24), 1_000_000.0),
    "Qwen2_5_VLForConditionalGeneration": _reader_with_axes(
        _QWEN2, "qwen2_5_vl", "Qwen2.5-VL", (16, 24, 24), 1_000_000.0
    ),
    "Qwen3VLForConditionalGeneration": _reader_with_axes(
        _QWEN3, "qwen3_vl", "Qwen3-VL", (24, 20, 20), 500_000.0, interleaved_axes=True
    ),
    "Qwen3VLMoeForConditionalGeneration": _reader_with_axes(
        EXPERT_FAMILIES["Qwen3MoeForCausalLM"],
        "qwen3_vl_moe",
        "Qwen3-VL with experts",
        (24, 20, 20),
        500_000.0,
        interleaved_axes=True,
        expert_layout="either",
    ),
    "Glm4vForConditionalGeneration": _reader_with_axes(
        _GLM4, "glm4v", "GLM-4.1V", (8, 12, 12), head_dim=None, partial=1.0, attention_biases="qkv", eps=1e-5
    ),
    "Glm4vMoeForConditionalGeneration": _reader_with_axes(
        EXPERT_FAMILIES["Glm4MoeForCausalLM"], "glm4v_moe", "GLM-4.5V", (8, 12, 12), head_norm=None
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
    "NanoChatForCausalLM": DecoderFamily(
        model_type="nanochat",
        title="nanochat",
        norm=NormConfig(has_weight=False),
        head_norm=HeadNormConfig(after_rope=True, has_weight=False),
        activation=("hidden_act", "relu2"),
        fields={"is_gated": False, "embedding_norm": True},
        read=values.nanochat,
        names=layer_names("model.layers", {"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}),
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
    "GlmForCausalLM": replace(
        _GLM4, model_type="glm", title="GLM-4 (9B of 2024)", fields={"fused_gate_up": True}, names={}
    ),
    "Glm4ForCausalLM": _GLM4,
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
    "Lfm3ForCausalLM": _LFM3,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        title="LFM2 with experts",
        aliases={"num_experts": "num_local_experts"},
        read=expert_values.lfm2_moe,
        parts={"feed_forward.expert_bias": "feed_forward.gate.e_score_correction_bias", **_LFM2.parts},
    ),
    "Lfm2VlForConditionalGeneration": _text_half(_LFM2, "lfm2_vl", "LFM2-VL", reads_pictures=True),
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
DECODER_FAMILIES: Mapping[str, DecoderFamily] = {**_PLAIN_FAMILIES, **_readers_of_pictures(_PLAIN_FAMILIES)}


# What is not offered -> the starts of the class names that need it.
UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "state-space layers, whose state is not a KV cache": ("Mamba", "FalconMamba", "Jamba", "Zamba"),
    "recurrent layers with a state, such as linear attention": (
        *("Rwkv", "RecurrentGemma", "MiniMaxFor", "MiniMaxText", "MiniMaxM1", "KimiLinear", "xLSTM"),
    ),
    "an encoder that reads the text and a decoder that attends to it": (
        *("T5", "MT5", "UMT5", "Bart", "MBart", "Pegasus", "Marian", "BigBirdPegasus", "LED", "SwitchTransformers"),
        *("M2M100", "MvpFor", "PLBart", "ProphetNet", "LongT5", "FSMT", "Blenderbot", "NllbMoe", "EncoderDecoder"),
    ),
    "speech": ("Whisper", "Speech", "Wav2Vec", "Voxtral", "Moshi", "Qwen2Audio"),
    "pictures": (
        *("LlavaNextVideo", "VipLlava", "VideoLlava", "IdeficsFor", "Idefics2", "PaliGemma", "Mllama"),
        *("InternVLChat", "Phi4Multimodal", "DeepseekVL", "OvisFor", "Molmo", "Pixtral", "Qwen2_5Omni"),
        "Lfm3Vl",
    ),
    "sparse attention, for which an indexer selects tokens": ("DeepseekV32", "DeepseekV4", "GlmMoeDsa"),
    "weights of one and a half bits": ("BitNet",),
    "a mixture of experts of its own kind": ("JetMoe", "Dbrx", "LongcatFlash"),
}


def reads_pictures(architecture: str) -> bool:
    """Return True if pictures are read in front of the decoder of an architecture."""
    return architecture in DECODER_FAMILIES and DECODER_FAMILIES[architecture].reads_pictures


_SHORT_NAMES = [name.removesuffix("ForCausalLM") for name in DECODER_FAMILIES][:8]


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
        f"architecture {said} is not supported; supported are {', '.join(_SHORT_NAMES)} and"
        f" {len(DECODER_FAMILIES) - len(_SHORT_NAMES)} others (docs/families.md) and the encoders of"
        " docs/encoders.md."
    )
