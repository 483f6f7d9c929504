"""Tiny random checkpoints of models that read pictures, with the library's processors, and what the library generates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from served_families import TINY
from tiny_checkpoints import write_tokenizer

_NO_HEAD_DIM = {name: value for name, value in TINY.items() if name != "head_dim"}
_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
    *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    *("<img>", "</img>", "<IMG_CONTEXT>"),
    *("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
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
_SIZE = {"height": 28, "width": 28}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
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


def _llava(kind: str, text: dict[str, Any], vision: dict[str, Any], strategy: str) -> Any:
    import transformers

    clip = vision is _CLIP
    config = {
        "text_config": text,
        "vision_config": vision,
        "image_token_index": IDS["<image>"],
        "image_token_id": IDS["<image>"],
        "vision_feature_select_strategy": strategy,
        "vision_feature_layer": -1,
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
        tokenizer.init_kwargs["extra_special_tokens"] = extra = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
        for name, token in extra.items():
            setattr(tokenizer, name, token)
        tokenizer._set_model_specific_special_tokens(extra)
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


def _without_videos(kind: Any) -> Any:
    """The class of a processor that needs no torchvision."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, argument)

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
        "LlavaNext", _text("granite", **_MULTIPLIERS), _SIGLIP, "full"
    ),
    "LlavaOnevisionForConditionalGeneration/qwen2": lambda: _llava("LlavaOnevision", _text("qwen2"), _SIGLIP, "full"),
    "InternVLForConditionalGeneration/qwen2": lambda: _internvl("qwen2"),
    "InternVLForConditionalGeneration/qwen3": lambda: _internvl("qwen3"),
    "InternVLForConditionalGeneration/llama": lambda: _internvl("llama"),
    "Ovis2ForConditionalGeneration/qwen2": _ovis2,
}


class Reference:
    """The library's model and processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    def generated(self, text: str, pictures: Sequence[Any], max_tokens: int) -> list[int]:
        """The greedy completion of a rendered conversation."""
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


def write_reader(directory: Path, name: str, seed: int = 0) -> Reference:
    """Write the tiny checkpoint of a family, and return the library's model and processor."""
    import transformers

    values, make_processor, image_token = FAMILIES[name]()
    kind = getattr(transformers, name.partition("/")[0])
    torch.manual_seed(seed)
    model = kind(kind.config_class(**values)).eval()
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
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template(image_token), "pad_token": "</s>"})
    )
    processor = make_processor(transformers.AutoTokenizer.from_pretrained(directory))
    options = (
        {"image_seq_length": 4} if "InternVL" in name else {"num_image_tokens": 4} if "Onevision" in name else None
    )
    if options is None:
        processor.save_pretrained(directory)
    else:  # the library would save the processor of videos too
        processor.image_processor.save_pretrained(directory)
        processor.tokenizer.save_pretrained(directory)
        values = {"processor_class": type(processor).__name__, **options}
        (directory / "processor_config.json").write_text(
            json.dumps(values | {"vision_feature_select_strategy": "full"} if "Onevision" in name else values)
        )
    return Reference(model, processor)
