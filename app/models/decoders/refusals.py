"""Why architectures of language models are not served, as sentences for error messages and the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.models.decoders.families import DECODER_FAMILIES

# What is not offered -> the starts of the class names that need it.
UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "state-space layers, whose state is not a KV cache": (
        *("Mamba", "FalconMamba", "FalconH1", "Jamba", "Zamba", "Bamba", "NemotronH", "GraniteMoeHybrid"),
    ),
    "recurrent layers with a state, such as linear attention": (
        *("Rwkv", "RecurrentGemma", "Qwen3Next", "Qwen3_5", "MiniMax", "KimiLinear", "OlmoHybrid", "xLSTM"),
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
