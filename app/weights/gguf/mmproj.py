"""Reads the picture part of a GGUF model, llama.cpp's file `mmproj`: its sizes, and its tensors by transformers' names.

Torch is not needed. The file is untrusted: a size is used only if the tensors have it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.files import files_in
from app.weights.gguf.reader import SUFFIX, GgufModel, read_gguf
from app.weights.gguf.tensors import gguf_entry
from app.weights.safetensors import TensorEntry

PROJECTOR = "idefics3"  # of Idefics 3, SmolVLM and SmolVLM2
_VISION = "model.vision_model"
_OTHER_NAMES: Mapping[str, str] = {
    "v.patch_embd": f"{_VISION}.embeddings.patch_embedding",
    "v.position_embd": f"{_VISION}.embeddings.position_embedding",
    "v.post_ln": f"{_VISION}.post_layernorm",
    "mm.model.fc": "model.connector.modality_projection.proj",
}
# Names in a layer `v.blk.N`.
_LAYER_NAMES: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_LAYER_TENSORS = 2 * len(_LAYER_NAMES)  # each has a weight and a bias
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PicturePart:
    """The part of a model that reads pictures: values of transformers' `Idefics3VisionConfig`, and its tensors.

    `scale_factor`: the projector joins as many patches in each direction. `longest_edge`: to which pictures are scaled
    before they are cut into squares of `vision["image_size"]`.
    """

    file: Path
    vision: Mapping[str, Any]
    scale_factor: int
    longest_edge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tensors: Mapping[str, TensorEntry]


def is_picture_part(file: Path) -> bool:
    """Return True for the name that llama.cpp gives such a file: `mmproj-MODEL.gguf`, `MODEL.mmproj-f16.gguf`."""
    return file.suffix == SUFFIX and "mmproj" in file.name.lower()


def find_picture_part(model: Path, hidden_size: int, given: Path | None) -> PicturePart | None:
    """Return the part in the file that is given, or else in the only one beside the model, if it fits.

    Raises `CheckpointInvalid` if the given one cannot be used; one that was only found is then left out, with a warning.
    """
    if given is not None:
        return read_picture_part(given, hidden_size)
    found = [file for file in files_in(model.parent, f"*{SUFFIX}") if is_picture_part(file)]
    if not found:
        return None
    if len(found) > 1:
        log.warning("pictures are not read: %s and others lie beside the model; name one with --mmproj", found[0].name)
        return None
    try:
        return read_picture_part(found[0], hidden_size)
    except CheckpointInvalid as error:
        log.warning("pictures are not read: %s", error.message)
        return None


def read_picture_part(file: Path, hidden_size: int) -> PicturePart:
    """Read a file for a model with this width. Raises `CheckpointInvalid` or `OSError`."""
    model = read_gguf(file)
    read = ConfigReader({**model.metadata, **_values_below(model, "clip.vision.")}, file.name)
    kind = read.text("projector_type", read.text("clip.projector_type", ""))
    if kind != PROJECTOR:
        said = f"a projector of type {kind[:40]!r}" if kind else "no projector of pictures"
        raise CheckpointInvalid(f"{file.name} has {said}; supported is {PROJECTOR!r} (Idefics 3, SmolVLM).")
    if not read.boolean("clip.use_gelu", True):
        raise CheckpointInvalid(f"{file.name}: clip.use_gelu is false, which this architecture does not have.")
    vision = {
        "hidden_size": read.integer("embedding_length"),
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": read.integer("attention.head_count"),
        "image_size": read.integer("image_size"),
        "patch_size": read.integer("patch_size"),
        "layer_norm_eps": read.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
    }
    scale = read.integer("projector.scale_factor")
    _check_sizes(model, vision, scale, hidden_size)
    tensors = {_name_here(name): gguf_entry(tensor) for name, tensor in model.tensors.items()}
    longest = read.integer("preproc_image_size", vision["image_size"])
    mean, std = (read.numbers(name, 3) for name in ("image_mean", "image_std"))
    return PicturePart(file, vision, scale, longest, mean, std, tensors)


def _values_below(model: GgufModel, prefix: str) -> dict[str, Any]:
    below = {name.removeprefix(prefix): value for name, value in model.metadata.items() if name.startswith(prefix)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in below.items()}


def _check_sizes(model: GgufModel, vision: Mapping[str, Any], scale: int, hidden_size: int) -> None:
    """Compare the sizes with the tensors: a model of these sizes is built before the tensors are read."""
    width, inner, layers = vision["hidden_size"], vision["intermediate_size"], vision["num_hidden_layers"]
    side, rest = divmod(vision["image_size"], vision["patch_size"])
    if rest or side % scale or width % vision["num_attention_heads"]:
        raise CheckpointInvalid(f"{model.file.name}: the sizes of its picture, patches and heads do not fit together.")
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    expected: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (width, 3, vision["patch_size"], vision["patch_size"]),
        "v.position_embd.weight": (side * side, width),
        "v.blk.0.attn_q.weight": (width, width),
        "v.blk.0.ffn_up.weight": (inner, width),
        f"v.blk.{layers - 1}.ffn_down.weight": (width, inner),
        "mm.model.fc.weight": (hidden_size, width * scale * scale),
    }
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            found = "is missing" if name not in shapes else f"has the shape {shapes[name]}"
            raise CheckpointInvalid(f"{model.file.name}: tensor {name} {found}, and {shape} is needed.")
    num_layer_tensors = sum(name.startswith("v.blk.") for name in shapes)
    if num_layer_tensors != layers * _LAYER_TENSORS:
        raise CheckpointInvalid(
            f"{model.file.name} has {num_layer_tensors} tensors in layers, and {layers} layers have"
            f" {layers * _LAYER_TENSORS}."
        )


def _name_here(name: str) -> str:
    """Return transformers' name: `v.blk.3.ffn_up.bias` becomes `….encoder.layers.3.mlp.fc1.bias`."""
    stem, _, kind = name.rpartition(".")
    if stem in _OTHER_NAMES:
        return f"{_OTHER_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("v.blk.").partition(".")
    known = _LAYER_NAMES.get(part)
    return name if known is None else f"{_VISION}.encoder.layers.{layer}.{known}.{kind}"
