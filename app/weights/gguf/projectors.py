"""The types of projectors in llama.cpp's files `mmproj`, and what transformers calls their tensors and values.

A type is a row of `PROJECTORS`. The names are those of `tools/mtmd/clip.cpp` and of the converter. Torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader

Shapes = Mapping[str, tuple[int, ...]]
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PartValues:
    """What the table reads of a file: its values below `clip.vision`, and the shapes of its tensors."""

    read: ConfigReader
    shapes: Shapes

    def sizes(self, **more: Any) -> Values:
        """Return the sizes that all towers have, by their usual names."""
        read = self.read
        return {
            "hidden_size": read.integer("embedding_length"),
            "intermediate_size": self.shapes.get(self.inner_name, (0,))[0],  # files of Qwen2-VL have another number
            "num_hidden_layers": read.integer("block_count"),
            "num_attention_heads": read.integer("attention.head_count"),
            "image_size": read.integer("image_size"),
            "patch_size": read.integer("patch_size"),
            "layer_norm_eps": read.number("attention.layer_norm_epsilon"),
            **more,
        }

    @property
    def is_swapped(self) -> bool:
        """Whether both products of an MLP have each other's name, as in old files."""
        width = self.read.integer("embedding_length")
        return self.shapes.get("v.blk.0.ffn_up.weight", (0,))[0] == width != self.shapes["v.blk.0.ffn_up.weight"][-1]

    @property
    def inner_name(self) -> str:
        """The name of the first product of an MLP."""
        return "v.blk.0.ffn_down.weight" if self.is_swapped else "v.blk.0.ffn_up.weight"

    @property
    def activation(self) -> str:
        for name, activation in (("clip.use_silu", "silu"), ("clip.use_gelu", "gelu")):
            if self.read.boolean(name, False):
                return activation
        return "quick_gelu"

    @property
    def gelu(self) -> str:
        """The activation of a tower that has no other one, by transformers' name. Raises `CheckpointInvalid`."""
        if self.activation != "gelu":
            raise CheckpointInvalid(f"{self.read.where}: its towers have GELU, and clip.use_gelu is not true.")
        return "gelu_pytorch_tanh"

    def side(self, default_scale: int | None = None) -> int:
        """Return how many tokens a square picture has in a row."""
        patches = self.read.integer("image_size") // self.read.integer("patch_size")
        default = () if default_scale is None else (default_scale,)
        return max(1, patches // self.read.integer("projector.scale_factor", *default))

    def merges(self) -> Values:
        """Return what Qwen's towers have in common."""
        merge = self.read.integer("spatial_merge_size", 2)
        sizes = self.sizes(spatial_merge_size=merge, temporal_patch_size=2)
        return sizes | {"depth": sizes["num_hidden_layers"], "num_heads": sizes["num_attention_heads"]}

    def area(self, least: int, most: int) -> Values:
        """Return how many pixels a picture of Qwen has; by default as in the published files."""
        found = (
            self.read.integer(f"image_{name}_pixels", default) for name, default in (("min", least), ("max", most))
        )
        size = dict(zip(("shortest_edge", "longest_edge"), found, strict=True))
        return {"size": size, "patch_size": self.read.integer("patch_size")}


@dataclass(frozen=True, slots=True)
class Described:
    """What transformers is given: values of its configuration, of its image processor and of its processor."""

    vision: Values
    config: Values = field(default_factory=dict)
    pictures: Values = field(default_factory=dict)
    processor: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """A type of projector.

    `readers`: the row of `DECODER_FAMILIES` that reads such pictures, by the architecture of the text model: a class of
    transformers and, after a slash, the type of its text model. `processors`: its classes for pictures, and for both.
    `tokens`: which tokens are what in its configuration and tokenizer. `names`: tensors by their name in the file, without
    `.weight` or `.bias`; `layer` and `parts`: the same in a layer. Several tensors of one name follow each other.
    `added`: what was added to values in the file. `rotates`: queries and keys are ordered for neighbours. `unused`:
    starts of tensors of the class that no picture needs.
    """

    readers: Mapping[str, str]
    processors: tuple[str, str]
    tokens: Mapping[str, str]
    names: Mapping[str, str]
    layer: str
    parts: Mapping[str, str]
    describe: Callable[[PartValues], Described]
    added: Mapping[str, float] = field(default_factory=dict)
    rotates: bool = False
    unused: tuple[str, ...] = ()


def _idefics3(part: PartValues) -> Described:
    size, scale = part.read.integer("image_size"), part.read.integer("projector.scale_factor")
    return Described(
        part.sizes(hidden_act=part.gelu),
        {"scale_factor": scale, "pad_token_id": None},
        {
            "size": {"longest_edge": part.read.integer("preproc_image_size", size)},
            "max_image_size": {"longest_edge": size},
        },
        {"image_seq_len": part.side() ** 2},
    )


def _llava(part: PartValues) -> Described:
    """Describe LLaVA: a CLIP, whose first token is of no patch, or a SigLIP. Which layers give features is in the file."""
    has_class, size = "v.class_embd" in part.shapes, part.read.integer("image_size")
    layers, strategy = part.read.values.get("feature_layer"), "default" if has_class else "full"
    vision = part.sizes(model_type="clip_vision_model", hidden_act=part.activation)
    if not has_class:
        vision |= {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}
    grid = part.read.values.get("image_grid_pinpoints") or ()
    tiles = {"image_grid_pinpoints": [list(grid[at : at + 2]) for at in range(0, len(grid), 2)]} if grid else {}
    config = {"vision_feature_select_strategy": strategy, "vision_feature_layer": list(layers or ()) or -1}
    options = {"patch_size": part.read.integer("patch_size"), "num_additional_image_tokens": int(has_class)}
    return Described(
        vision,
        config | tiles,
        {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}, **tiles},
        {**options, "vision_feature_select_strategy": strategy},
    )


def _qwen2(part: PartValues) -> Described:
    vision = part.merges()
    width, inner = vision.pop("hidden_size"), vision.pop("intermediate_size")
    hidden = part.shapes.get("mm.2.weight", (0,))[0]
    vision |= {"embed_dim": width, "mlp_ratio": inner // width, "hidden_size": hidden, "hidden_act": part.activation}
    return Described(vision, pictures=part.area(56 * 56, 28 * 28 * 16384))


def _qwen2_5(part: PartValues) -> Described:
    """Describe Qwen2.5-VL, of which one layer of `n_wa_pattern` sees the whole picture."""
    vision, interval = part.merges(), part.read.integer("n_wa_pattern")
    whole = list(range(interval - 1, vision["num_hidden_layers"], interval))
    window = part.read.integer("window_size", 8 * vision["patch_size"])
    more = {"out_hidden_size": part.shapes.get("mm.2.weight", (0,))[0], "hidden_act": part.activation}
    vision |= {"fullatt_block_indexes": whole, "window_size": window, **more}
    return Described(vision, pictures=part.area(56 * 56, 28 * 28 * 16384))


def _qwen3(part: PartValues) -> Described:
    vision, deep = part.merges(), part.read.values.get("is_deepstack_layers") or ()
    vision |= {
        "out_hidden_size": part.shapes.get("mm.2.weight", (0,))[0],
        "num_position_embeddings": part.shapes.get("v.position_embd.weight", (0,))[0],
        "deepstack_visual_indexes": [layer for layer, is_deep in enumerate(deep) if is_deep],
        "hidden_act": part.gelu,
    }
    return Described(vision, pictures=part.area(2**16, 2**24))


def _gemma3(part: PartValues) -> Described:
    size, tokens = part.read.integer("image_size"), part.side(4) ** 2
    return Described(
        part.sizes(hidden_act=part.gelu, vision_use_head=False),
        {"mm_tokens_per_image": tokens},
        {"size": {"height": size, "width": size}},
        {"image_seq_length": tokens},
    )


def _internvl(part: PartValues) -> Described:
    size, tokens = part.read.integer("image_size"), part.side() ** 2
    vision = part.sizes(
        hidden_act=part.activation,
        attention_bias="v.blk.0.attn_q.bias" in part.shapes,
        use_qk_norm="v.blk.0.attn_q_norm.weight" in part.shapes,
        norm_type="layer_norm" if "v.blk.0.ln1.bias" in part.shapes else "rms_norm",
    )
    vision |= {"image_size": [size, size], "patch_size": [vision["patch_size"]] * 2}
    return Described(
        vision,
        {"downsample_ratio": 1 / part.read.integer("projector.scale_factor"), "image_seq_length": tokens},
        {
            "size": {"height": size, "width": size},
            "crop_to_patches": True,
            "min_patches": part.read.integer("preproc_min_tiles", 1),
            "max_patches": part.read.integer("preproc_max_tiles", 12),
        },
        {"image_seq_length": tokens},
    )


def _pixtral(part: PartValues) -> Described:
    vision = part.sizes(model_type="pixtral", hidden_act=part.activation)
    vision["head_dim"] = vision["hidden_size"] // max(1, vision["num_attention_heads"])
    merge, patch = part.read.integer("spatial_merge_size", 1), vision["patch_size"]
    config = {
        "spatial_merge_size": merge,
        "multimodal_projector_bias": "mm.1.bias" in part.shapes,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    pictures = {"patch_size": patch, "size": {"longest_edge": vision["image_size"]}}
    return Described(vision, config, pictures, {"patch_size": patch, "spatial_merge_size": merge})


def _lfm2(part: PartValues) -> Described:
    """Describe LFM2-VL. What llama.cpp does not write about its tiles is as in the published models."""
    scale, patch = part.read.integer("projector.scale_factor"), part.read.integer("patch_size")
    vision = part.sizes(model_type="siglip2_vision_model", hidden_act=part.gelu, vision_use_head=False)
    del vision["image_size"]  # pictures have any size
    vision["num_patches"] = part.shapes.get("v.position_embd.weight", (0,))[0]
    config = {
        "downsample_factor": scale,
        "projector_hidden_size": part.shapes.get("mm.1.weight", (0,))[0],
        "projector_bias": "mm.1.bias" in part.shapes,
        "projector_use_layernorm": "mm.input_norm.weight" in part.shapes,
    }
    unit, tile = (scale * patch) ** 2, part.read.integer("preproc_image_size", 512)
    tiles = {
        "encoder_patch_size": patch,
        "downsample_factor": scale,
        "tile_size": tile,
        "min_image_tokens": part.read.integer("image_min_pixels", 64 * unit) // unit,
        "max_image_tokens": part.read.integer("image_max_pixels", 256 * unit) // unit,
        "max_tiles": part.read.integer("preproc_max_tiles", 10),
    }
    return Described(vision, config, {}, tiles)


_SIGLIP_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _siglip_names(tower: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
    }


_TOWER, _JOINED = "model.vision_tower", "model.multi_modal_projector"
_IMAGE = {"image_token": "<image>"}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_QWEN_PARTS = {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_SPLIT_PARTS = _QWEN_PARTS | dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv")
_QWEN_NAMES = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.post_ln": "model.visual.merger.ln_q",
    "mm.0": "model.visual.merger.mlp.0",
    "mm.2": "model.visual.merger.mlp.2",
}
_LLAVA = Projector(
    readers={
        "LlamaForCausalLM": "LlavaForConditionalGeneration/llama",
        "MistralForCausalLM": "LlavaForConditionalGeneration/mistral",
        "Qwen2ForCausalLM": "LlavaForConditionalGeneration/qwen2",
    },
    processors=("CLIPImageProcessorPil", "LlavaProcessor"),
    tokens=_IMAGE,
    names={
        **_siglip_names(_TOWER),
        "v.class_embd": f"{_TOWER}.embeddings.class_embedding",
        "v.pre_ln": f"{_TOWER}.pre_layrnorm",
        "mm.0": f"{_JOINED}.linear_1",
        "mm.2": f"{_JOINED}.linear_2",
        "model.image_newline": "model.image_newline",
        "v.image_newline": "model.image_newline",
    },
    layer=f"{_TOWER}.encoder.layers",
    parts=_SIGLIP_PARTS,
    describe=_llava,
    unused=(f"{_TOWER}.post_layernorm.",),  # features are taken before it
)
_PIXTRAL = Projector(
    readers={
        "LlamaForCausalLM": "LlavaForConditionalGeneration/llama",
        "MistralForCausalLM": "LlavaForConditionalGeneration/mistral",
    },
    processors=("PixtralImageProcessorPil", "PixtralProcessor"),
    tokens={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    names={
        "v.patch_embd": f"{_TOWER}.patch_conv",
        "v.pre_ln": f"{_TOWER}.ln_pre",
        "mm.1": f"{_JOINED}.linear_1",
        "mm.2": f"{_JOINED}.linear_2",
        "mm.input_norm": f"{_JOINED}.norm",
        "mm.patch_merger": f"{_JOINED}.patch_merger.merging_layer",
        "v.token_embd.img_break": "",  # the text model has it
    },
    layer=f"{_TOWER}.transformer.layers",
    parts={
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    describe=_pixtral,
    rotates=True,
)
_QWEN2_VL = Projector(
    readers={"Qwen2VLForConditionalGeneration": "Qwen2VLForConditionalGeneration"},
    processors=("Qwen2VLImageProcessorPil", "Qwen2VLProcessor"),
    tokens=_QWEN_TOKENS,
    names=_QWEN_NAMES,
    layer="model.visual.blocks",
    parts={**_SPLIT_PARTS, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    describe=_qwen2,
)
PROJECTORS: Mapping[str, Projector] = {
    "idefics3": Projector(
        readers={"LlamaForCausalLM": "Idefics3ForConditionalGeneration/llama"},
        processors=("Idefics3ImageProcessorPil", "Idefics3Processor"),
        tokens={**_IMAGE, "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
        names={**_siglip_names("model.vision_model"), "mm.model.fc": "model.connector.modality_projection.proj"},
        layer="model.vision_model.encoder.layers",
        parts=_SIGLIP_PARTS,
        describe=_idefics3,
    ),
    "mlp": _LLAVA,
    "mlp with tiles": replace(
        _LLAVA,
        readers={
            "LlamaForCausalLM": "LlavaNextForConditionalGeneration/llama",
            "MistralForCausalLM": "LlavaNextForConditionalGeneration/mistral",
            "GraniteForCausalLM": "LlavaNextForConditionalGeneration/granite",
        },
        processors=("LlavaNextImageProcessorPil", "LlavaNextProcessor"),
    ),
    "qwen2vl_merger": _QWEN2_VL,
    "qwen2.5vl_merger": replace(
        _QWEN2_VL,
        readers={"Qwen2VLForConditionalGeneration": "Qwen2_5_VLForConditionalGeneration"},
        processors=("Qwen2VLImageProcessorPil", "Qwen2_5_VLProcessor"),
        parts={**_SPLIT_PARTS, **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}},
        describe=_qwen2_5,
    ),
    "qwen3vl_merger": replace(
        _QWEN2_VL,
        readers={
            "Qwen3VLForConditionalGeneration": "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
        },
        processors=("Qwen2VLImageProcessorPil", "Qwen3VLProcessor"),
        names={
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
            # In the file with the number of their layer, here counted.
            "v.deepstack.norm": "model.visual.deepstack_merger_list.{}.norm",
            "v.deepstack.fc1": "model.visual.deepstack_merger_list.{}.linear_fc1",
            "v.deepstack.fc2": "model.visual.deepstack_merger_list.{}.linear_fc2",
        },
        parts={**_QWEN_PARTS, "attn_qkv": "attn.qkv", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        describe=_qwen3,
    ),
    "gemma3": Projector(
        readers={"Gemma3ForCausalLM": "Gemma3ForConditionalGeneration"},
        processors=("Gemma3ImageProcessorPil", "Gemma3Processor"),
        tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        names={
            **_siglip_names(_TOWER),
            "mm.input_projection": f"{_JOINED}.mm_input_projection_weight",
            "mm.soft_emb_norm": f"{_JOINED}.mm_soft_emb_norm",
        },
        layer=f"{_TOWER}.encoder.layers",
        parts=_SIGLIP_PARTS,
        describe=_gemma3,
        added={"mm.soft_emb_norm": 1.0},
    ),
    "internvl": Projector(
        readers={
            f"{text}ForCausalLM": f"InternVLForConditionalGeneration/{text.lower()}"
            for text in ("Qwen2", "Qwen3", "Llama")
        },
        processors=("GotOcr2ImageProcessorPil", "InternVLProcessor"),
        tokens={
            **dict.fromkeys(("image_token", "context_image_token"), "<IMG_CONTEXT>"),
            "start_image_token": "<img>",
            # Files may have no token of videos, which the processor looks for before it writes those around a picture.
            **dict.fromkeys(("end_image_token", "video_token"), "</img>"),
        },
        names={
            "v.class_embd": f"{_TOWER}.embeddings.cls_token",
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
            "v.position_embd": f"{_TOWER}.embeddings.position_embeddings",
            "mm.model.mlp.0": f"{_JOINED}.layer_norm",
            "mm.model.mlp.1": f"{_JOINED}.linear_1",
            "mm.model.mlp.3": f"{_JOINED}.linear_2",
        },
        layer=f"{_TOWER}.encoder.layer",
        parts={
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1": "lambda_1",
            "ls2": "lambda_2",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        describe=_internvl,
    ),
    "pixtral": _PIXTRAL,
    "pixtral with a merger": replace(
        _PIXTRAL,
        readers=dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM"), "Mistral3ForConditionalGeneration"),
    ),
    "lfm2": Projector(
        readers={"Lfm2ForCausalLM": "Lfm2VlForConditionalGeneration"},
        processors=("", "Lfm2VlProcessor"),
        tokens={
            **_IMAGE,
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        names={
            **_siglip_names(_TOWER),
            "mm.input_norm": f"{_JOINED}.layer_norm",
            "mm.1": f"{_JOINED}.linear_1",
            "mm.2": f"{_JOINED}.linear_2",
        },
        layer=f"{_TOWER}.encoder.layers",
        parts=_SIGLIP_PARTS,
        describe=_lfm2,
    ),
}
TYPES = tuple(name for name in PROJECTORS if " " not in name)


def projector_of(kind: str, part: PartValues) -> Projector:
    """Return the row of a type in `TYPES`, or that of its form in this file."""
    if kind == "mlp" and part.read.has("image_grid_pinpoints"):
        kind = "mlp with tiles"
    if kind == "pixtral" and "mm.patch_merger.weight" in part.shapes:
        kind = "pixtral with a merger"
    return PROJECTORS[kind]
