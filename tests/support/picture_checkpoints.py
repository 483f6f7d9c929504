"""Tiny random checkpoints of models that read pictures, with the library's processors, and what the library generates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from served_families import EXPERTS, SERVED, TINY
from tiny_checkpoints import write_tokenizer

_NO_HEAD_DIM = {name: value for name, value in TINY.items() if name != "head_dim"}
_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
    *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    *("<img>", "</img>", "<IMG_CONTEXT>"),
    *("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|image|>", "<|video|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *("<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<|img_row_2_col_1|>"),
)
FIRST_ID = 270  # of these tokens
IDS: Mapping[str, int] = {token: FIRST_ID + place for place, token in enumerate(_TOKENS)}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 16,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_PIXTRAL = {**_CLIP, "model_type": "pixtral", "patch_size": 7, "image_size": 56, "head_dim": 8}
_SIZE = {"height": 28, "width": 28}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
_UNTIED = {"tie_word_embeddings": False}  # else a token is followed by itself
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}


def template(image_token: str) -> str:
    """A chat template that writes the placeholder of each picture where it is."""
    return (
        "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + image_token
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    values = TINY if model_type in ("llama", "mistral", "qwen3") else _NO_HEAD_DIM
    return {**values, "model_type": model_type, **more}


def _idefics(name: str) -> tuple[dict[str, Any], Callable[[Any], Any], str]:
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "text_config": _text("llama", pad_token_id=1),
        "vision_config": {**vision, "image_size": 28, "patch_size": 7},
        "image_token_id": IDS["<image>"],
        "scale_factor": 2,
        "pad_token_id": 1,
    }

    def processor(tokenizer: Any) -> Any:
        made = getattr(transformers, f"{name}ImageProcessorPil")(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        )
        return transformers.Idefics3Processor(made, tokenizer, image_seq_len=4)

    return config, processor, "<image>"


def _llava(kind: str, text: dict[str, Any], vision: dict[str, Any], strategy: str, layers: int | list[int] = -1) -> Any:
    import transformers

    clip = vision is _CLIP
    config = {
        "text_config": text,
        "vision_config": vision,
        "image_token_index": IDS["<image>"],
        "image_token_id": IDS["<image>"],
        "vision_feature_select_strategy": strategy,
        "vision_feature_layer": layers,
    }
    if kind != "Llava":
        config["image_grid_pinpoints"] = _PINPOINTS
    if kind == "LlavaOnevision":
        config["video_token_index"] = config["video_token_id"] = IDS["<video>"]

    def processor(tokenizer: Any) -> Any:
        options = {"patch_size": 14, "vision_feature_select_strategy": strategy}
        if clip:
            options["num_additional_image_tokens"] = 1
        if kind == "Llava":
            pictures: Any = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=_SIZE)
            return transformers.LlavaProcessor(pictures, tokenizer, **options)
        if kind == "LlavaNext":
            pictures = transformers.LlavaNextImageProcessorPil(
                size={"shortest_edge": 28}, crop_size=_SIZE, image_grid_pinpoints=_PINPOINTS
            )
            return transformers.LlavaNextProcessor(pictures, tokenizer, **options)
        pictures = transformers.LlavaOnevisionImageProcessorPil(size=_SIZE, image_grid_pinpoints=_PINPOINTS)
        options = {"num_image_tokens": 4, "vision_feature_select_strategy": strategy}
        return _without_videos(transformers.LlavaOnevisionProcessor)(pictures, tokenizer, None, **options)

    return config, processor, "<image>"


def _internvl(text: str) -> Any:
    import transformers

    config = {
        "text_config": _text(text),
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [28, 28],
            "patch_size": [7, 7],
        },
        "image_token_id": IDS["<IMG_CONTEXT>"],
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }

    def processor(tokenizer: Any) -> Any:
        _name_tokens(
            tokenizer,
            start_image_token="<img>",
            end_image_token="</img>",
            context_image_token="<IMG_CONTEXT>",
            video_token="<video>",
        )
        pictures = transformers.GotOcr2ImageProcessorPil(size=_SIZE, crop_to_patches=True, min_patches=1, max_patches=4)
        made = _without_videos(transformers.InternVLProcessor)
        return made(pictures, tokenizer, None, image_seq_length=4)

    return config, processor, "<IMG_CONTEXT>"


def _ovis2() -> Any:
    import transformers

    config = {
        "text_config": _text("qwen2"),
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "hidden_stride": 2,
            "vocab_size": 40,
        },
        "image_token_id": IDS["<IMG_ATOM>"],
        "visual_indicator_token_ids": [IDS[f"<IMG_{name}>"] for name in ("START", "GRID", "COL", "ROW", "END")],
        "vocab_size": 320,
        "hidden_size": 32,
        "tie_word_embeddings": False,
    }

    def processor(tokenizer: Any) -> Any:
        pictures = transformers.Ovis2ImageProcessorPil(size=_SIZE, crop_to_patches=True, min_patches=1, max_patches=4)
        return transformers.Ovis2Processor(pictures, tokenizer, image_seq_length=4)

    return config, processor, "<image>"


def _qwen(kind: str, vision: dict[str, Any], **text: Any) -> Any:
    import transformers

    sizes = {"num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 3}
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
    config = {
        "text_config": {**_NO_HEAD_DIM, "rope_parameters": rope, **text},
        "vision_config": {**sizes, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, **vision},
        **{f"{name}_token_id": IDS[f"<|{name}_pad|>"] for name in ("image", "video")},
        **{f"vision_{name}_token_id": IDS[f"<|vision_{name}|>"] for name in ("start", "end")},
        "tie_word_embeddings": False,
    }

    def processor(tokenizer: Any) -> Any:
        pictures = transformers.Qwen2VLImageProcessorPil(
            patch_size=7, size={"shortest_edge": 14 * 28, "longest_edge": 42 * 56}
        )
        return _without_videos(getattr(transformers, f"{kind}Processor"))(pictures, tokenizer, None)

    return config, processor, "<|vision_start|><|image_pad|><|vision_end|>"


def _qwen3_5(**text: Any) -> Any:
    rope = {"rope_theta": 5000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5, "mrope_interleaved": True}
    return _qwen("Qwen3VL", {"num_position_embeddings": 16}, **{**text, "rope_parameters": rope})


def _glm4v(**text: Any) -> Any:
    import transformers

    rope = {"rope_theta": 5000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    sizes = {"head_dim": 16, "num_attention_heads": 2, "rope_parameters": rope}
    config, _, _ = _qwen("", {"image_size": 28}, **{**text, **sizes})
    config |= {f"{name}_token_id": IDS[f"<|{name}|>"] for name in ("image", "video")}

    def processor(tokenizer: Any) -> Any:
        pictures = transformers.Glm4vImageProcessorPil(
            patch_size=7, size={"shortest_edge": 2 * 14 * 28, "longest_edge": 2 * 42 * 56}
        )
        return _without_videos(transformers.Glm4vProcessor)(pictures, tokenizer, None)

    return config, processor, "<|image|>"


def _gemma3() -> Any:
    import transformers

    config = {
        "text_config": {**SERVED["Gemma3ForConditionalGeneration"]["text_config"], **_UNTIED, "sliding_window": 18},
        **_UNTIED,
        "vision_config": {**_SIGLIP, "patch_size": 7},
        "mm_tokens_per_image": 16,
        "image_token_index": IDS["<image_soft_token>"],
        "boi_token_index": IDS["<start_of_image>"],
        "eoi_token_index": IDS["<end_of_image>"],
    }

    def processor(tokenizer: Any) -> Any:
        _name_tokens(
            tokenizer, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
        )
        pictures = transformers.Gemma3ImageProcessorPil(size=_SIZE)
        return transformers.Gemma3Processor(pictures, tokenizer, image_seq_length=16)

    return config, processor, "<start_of_image>"


def _paligemma(text: str, **more: Any) -> Any:
    import transformers

    config = {
        "text_config": {**SERVED[f"{text.title()}ForCausalLM"], "model_type": text, **_UNTIED, **more},
        **_UNTIED,
        "vision_config": {**_SIGLIP, "patch_size": 7, "vision_use_head": False},
        "image_token_index": IDS["<image>"],
        "projection_dim": 32,
        "hidden_size": 32,
    }

    def processor(tokenizer: Any) -> Any:
        pictures = transformers.SiglipImageProcessorPil(size=_SIZE)
        pictures.image_seq_length = 16
        return transformers.PaliGemmaProcessor(pictures, tokenizer)

    return config, processor, ""


def _gemma4(text: dict[str, Any]) -> Any:
    import transformers

    config = {
        "text_config": {**text, **_UNTIED, "pad_token_id": 0},
        **_UNTIED,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 100,
        },
        "audio_config": None,
        "image_token_id": IDS["<|image|>"],
        "video_token_id": IDS["<|video|>"],
        "audio_token_id": IDS["<|audio|>"],
        "boi_token_id": IDS["<|image>"],
        "eoi_token_id": IDS["<image|>"],
    }

    def processor(tokenizer: Any) -> Any:
        names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        names |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
        _name_tokens(tokenizer, **names)
        pictures = transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
        return _without_videos(transformers.Gemma4Processor)(None, pictures, tokenizer, None)

    return config, processor, "<|image|>"


def _mistral3(kind: str) -> Any:
    text = SERVED[f"Mistral3ForConditionalGeneration{kind}"]["text_config"]
    config = {
        "text_config": text,
        "vision_config": _PIXTRAL,
        "image_token_index": IDS["[IMG]"],
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }

    return config, lambda tokenizer: _pixtral(tokenizer, 2), "[IMG]"


def _llava_of_pixtral() -> Any:
    config = {
        "text_config": _text("mistral", sliding_window=None),
        "vision_config": _PIXTRAL,
        "image_token_index": IDS["[IMG]"],
        "image_token_id": IDS["[IMG]"],
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    }
    return config, lambda tokenizer: _pixtral(tokenizer, 1), "[IMG]"


def _pixtral(tokenizer: Any, merged: int) -> Any:
    import transformers

    from app.engine.transformers.picture_processors import RowsProcessor

    made = RowsProcessor(tokenizer, {"patch_size": 7, "spatial_merge_size": merged})
    made.image_processor = transformers.PixtralImageProcessorPil(patch_size=7, size={"longest_edge": 42})
    return made


def _lfm2_vl() -> Any:
    config = {
        "text_config": {**SERVED["Lfm2ForCausalLM"], "model_type": "lfm2"},
        "vision_config": {**_CLIP, "model_type": "siglip2_vision_model", "patch_size": 7, "num_patches": 16},
        "image_token_id": IDS["<image>"],
        "projector_hidden_size": 24,
    }
    sizes = {"encoder_patch_size": 7, "tile_size": 28, "min_image_tokens": 3, "max_image_tokens": 6, "max_tiles": 2}

    def processor(tokenizer: Any) -> Any:
        from app.engine.transformers.picture_processors import TilesProcessor

        return TilesProcessor(tokenizer, sizes)

    return config, processor, "<image>"


def _name_tokens(tokenizer: Any, **names: str) -> None:
    tokenizer.init_kwargs["extra_special_tokens"] = names
    for name, token in names.items():
        setattr(tokenizer, name, token)
    tokenizer._set_model_specific_special_tokens(names)


def _without_videos(kind: Any) -> Any:
    """The class of a processor that needs no torchvision."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return (
            None
            if name in ("video_processor", "feature_extractor")
            else kind.check_argument_for_proper_class(self, name, argument)
        )

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "SmolVLMForConditionalGeneration/llama": lambda: _idefics("SmolVLM"),
    "Idefics3ForConditionalGeneration/llama": lambda: _idefics("Idefics3"),
    "LlavaForConditionalGeneration/llama": lambda: _llava("Llava", _text("llama"), _CLIP, "default"),
    "LlavaForConditionalGeneration/mistral": lambda: _llava(
        "Llava", _text("mistral", sliding_window=6), _CLIP, "default"
    ),
    "LlavaForConditionalGeneration/qwen2": lambda: _llava("Llava", _text("qwen2"), _SIGLIP, "full"),
    "LlavaNextForConditionalGeneration/llama": lambda: _llava("LlavaNext", _text("llama"), _CLIP, "default"),
    "LlavaNextForConditionalGeneration/mistral": lambda: _llava(
        "LlavaNext", _text("mistral", sliding_window=None), _CLIP, "default"
    ),
    "LlavaNextForConditionalGeneration/granite": lambda: _llava(
        "LlavaNext", _text("granite", **_MULTIPLIERS), _SIGLIP, "full", [-2, -1]
    ),
    "LlavaOnevisionForConditionalGeneration/qwen2": lambda: _llava("LlavaOnevision", _text("qwen2"), _SIGLIP, "full"),
    "InternVLForConditionalGeneration/qwen2": lambda: _internvl("qwen2"),
    "InternVLForConditionalGeneration/qwen3": lambda: _internvl("qwen3"),
    "InternVLForConditionalGeneration/llama": lambda: _internvl("llama"),
    "Ovis2ForConditionalGeneration/qwen2": _ovis2,
    "Qwen2VLForConditionalGeneration": lambda: _qwen("Qwen2VL", {"embed_dim": 16, "hidden_size": 32}),
    "Qwen2_5_VLForConditionalGeneration": lambda: _qwen(
        "Qwen2_5_VL", {"window_size": 28, "fullatt_block_indexes": [1]}
    ),
    "Qwen3VLForConditionalGeneration": lambda: _qwen("Qwen3VL", _DEEPSTACK, head_dim=8, intermediate_size=64),
    "Qwen3VLMoeForConditionalGeneration": lambda: _qwen("Qwen3VL", _DEEPSTACK, head_dim=8, **EXPERTS),
    "Qwen3_5ForConditionalGeneration": lambda: _qwen3_5(**SERVED["Qwen3_5ForCausalLM"]),
    "Qwen3_5MoeForConditionalGeneration": lambda: _qwen3_5(**SERVED["Qwen3_5MoeForCausalLM"]),
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": lambda: _gemma4(SERVED["Gemma4ForConditionalGeneration"]["text_config"]),
    "Mistral3ForConditionalGeneration": lambda: _mistral3(""),
    "Mistral3ForConditionalGeneration/ministral3": lambda: _mistral3("/ministral3"),
    "Mistral3ForConditionalGeneration/mistral4": lambda: _mistral3("/mistral4"),
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": lambda: _glm4v(**TINY, **EXPERTS, n_routed_experts=6, attention_bias=True),
    "PaliGemmaForConditionalGeneration/gemma": lambda: _paligemma("gemma"),
    "PaliGemmaForConditionalGeneration/gemma2": lambda: _paligemma("gemma2", sliding_window=64),
    "Lfm2VlForConditionalGeneration": _lfm2_vl,
}
# Further forms of these families.
FORMS: Mapping[str, Callable[[], Any]] = {
    **FAMILIES,
    "LlavaForConditionalGeneration/Pixtral": _llava_of_pixtral,
    # Blocks in layers with a window, as of 31B and 26B-A4B; a picture has up to 70 tokens.
    "Gemma4ForConditionalGeneration/blocks": lambda: _gemma4(
        {
            **SERVED["Gemma4ForConditionalGeneration"]["text_config"],
            "use_bidirectional_attention": "vision",
            "sliding_window": 72,
        }
    ),
}


class Reference:
    """The library's model and processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    def generated(self, text: str, pictures: Sequence[Any], max_tokens: int) -> list[int]:
        """The greedy completion of a rendered conversation."""
        if "PaliGemma" in type(self.processor).__name__:  # which writes these itself
            text = text.replace(self.processor.tokenizer.bos_token, "").removesuffix("\n")
        inputs = self.processor(
            text=[text],
            images=[list(pictures)] if pictures else None,
            return_tensors="pt",
            add_special_tokens=False,
        )
        length = inputs["input_ids"].shape[1]
        options = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        with torch.inference_mode():
            ids: list[int] = self.model.generate(**inputs, **options)[0, length:].tolist()
        return ids


def write_reader(directory: Path, name: str, seed: int = 0, **text: Any) -> Reference:
    """Write the tiny checkpoint of a family, and return the library's model and processor. `text`: of its text model."""
    import transformers

    values, make_processor, image_token = FORMS[name]()
    values = {**values, "text_config": {**values["text_config"], **text}}
    kind = getattr(transformers, name.partition("/")[0])
    torch.manual_seed(seed)
    model = kind(kind.config_class(**values)).eval()
    model.set_attn_implementation("eager")  # torch's own has no soft caps
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "emb" not in parameter_name:
                parameter.copy_(torch.randn_like(parameter) / min(parameter.shape) ** 0.5)
            elif parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    tokens = json.loads((directory / "tokenizer.json").read_text())
    tokens["added_tokens"] += [
        {"id": token_id, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token, token_id in IDS.items()
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokens))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    chat = {"chat_template": template(image_token)} if image_token else {}
    config = {name: value for name, value in config.items() if name != "chat_template"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, **chat, "pad_token": "</s>"}))
    processor = make_processor(transformers.AutoTokenizer.from_pretrained(directory))
    options = {
        "InternVL": {"image_seq_length": 4},
        "LlavaOnevision": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    }
    own = getattr(processor, "values", None)  # of our processors
    if own is None and "video_processor" not in processor.get_attributes():
        processor.save_pretrained(directory)
        return Reference(model, processor)
    # The library would save the processor of videos too.
    if hasattr(processor, "image_processor"):
        processor.image_processor.save_pretrained(directory)
    processor.tokenizer.save_pretrained(directory)
    values = {"processor_class": type(processor).__name__, **options.get(name.partition("For")[0], {})}
    if own is not None:
        values = {**own, "processor_class": "Lfm2VlProcessor" if "Lfm2" in name else "PixtralProcessor"}
    (directory / "processor_config.json").write_text(json.dumps(values))
    return Reference(model, processor)
