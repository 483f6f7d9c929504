"""Reads the picture part of a GGUF model, llama.cpp's file `mmproj`: its sizes, and its tensors by transformers' names.

Torch is not needed. The file is untrusted: a size is used only if the tensors have it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.families import DECODER_FAMILIES
from app.weights.files import files_in
from app.weights.gguf.projectors import TYPES, Described, PartValues, Projector, projector_of
from app.weights.gguf.reader import SUFFIX, GgufModel, GgufTensor, read_gguf
from app.weights.gguf.tensors import Changes, gguf_entry, interleaved
from app.weights.safetensors import TensorEntry

_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PicturePart:
    """The part of a model that reads pictures: what transformers is given, and its tensors by transformers' names.

    `reader`: the class and, after a slash, the type of its text model. Several tensors of one name follow each other.
    """

    file: Path
    reader: str
    projector: Projector
    described: Described
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tensors: Mapping[str, tuple[TensorEntry, ...]]


def whole_config(config: Mapping[str, Any], reader: str) -> Mapping[str, Any]:
    """Return the values of config.json of a model, given those of its text model and its row in `DECODER_FAMILIES`."""
    name, _, text_type = reader.partition("/")
    section = DECODER_FAMILIES[reader].text_config
    if section is None:
        return config
    text = {**config, "model_type": text_type} if text_type else dict(config)
    return {"architectures": [name], "model_type": config["model_type"], section: text}


def is_picture_part(file: Path) -> bool:
    """Return True for the name that llama.cpp gives such a file: `mmproj-MODEL.gguf`, `MODEL.mmproj-f16.gguf`."""
    return file.suffix == SUFFIX and "mmproj" in file.name.lower()


def find_picture_part(model: Path, architecture: str, hidden_size: int, given: Path | None) -> PicturePart | None:
    """Return the part in the file that is given, or else in the only one beside the model, if it fits.

    Raises `CheckpointInvalid` if the given one cannot be used; one that was only found is then left out, with a warning.
    """
    if given is not None:
        return read_picture_part(given, architecture, hidden_size)
    found = [file for file in files_in(model.parent, f"*{SUFFIX}") if is_picture_part(file)]
    if not found:
        return None
    if len(found) > 1:
        log.warning("pictures are not read: %s and others lie beside the model; name one with --mmproj", found[0].name)
        return None
    try:
        return read_picture_part(found[0], architecture, hidden_size)
    except CheckpointInvalid as error:
        log.warning("pictures are not read: %s", error.message)
        return None


def read_picture_part(file: Path, architecture: str, hidden_size: int) -> PicturePart:
    """Read a file for a text model of an architecture and width. Raises `CheckpointInvalid` or `OSError`."""
    model = read_gguf(file)
    read = ConfigReader({**model.metadata, **_values_below(model, "clip.vision.")}, file.name)
    kind = read.text("projector_type", read.text("clip.projector_type", ""))
    if kind not in TYPES:
        said = f"a projector of type {kind[:40]!r}" if kind else "no projector of pictures"
        raise CheckpointInvalid(f"{file.name} has {said}; supported are {', '.join(TYPES)}.")
    part = PartValues(read, {name: tensor.shape for name, tensor in model.tensors.items()})
    projector = projector_of(kind, part)
    reader = projector.readers.get(architecture)
    if reader is None:
        raise CheckpointInvalid(
            f"{file.name} has a projector of type {kind!r}, which is not for a {architecture}: it is for"
            f" {', '.join(projector.readers)}."
        )
    _check_sizes(part, file.name, hidden_size)
    described = projector.describe(part)
    rows, side = (
        part.shapes.get("v.position_embd.weight", (0,))[0],
        read.integer("image_size") // read.integer("patch_size"),
    )
    if rows and "image_size" in described.vision and rows not in (side * side, side * side + 1):
        raise CheckpointInvalid(f"{file.name}: v.position_embd.weight has {rows} rows for {side} x {side} patches.")
    tensors: dict[str, tuple[TensorEntry, ...]] = {}
    for name, entry in _named(model, projector, part):
        tensors[name] = (*tensors.get(name, ()), entry)
    mean, std = (read.numbers(name, 3) for name in ("image_mean", "image_std"))
    return PicturePart(file, reader, projector, described, mean, std, tensors)


def _values_below(model: GgufModel, prefix: str) -> dict[str, Any]:
    below = {name.removeprefix(prefix): value for name, value in model.metadata.items() if name.startswith(prefix)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in below.items()}


def _check_sizes(part: PartValues, file: str, hidden_size: int) -> None:
    """Compare the sizes with the tensors: a model of these sizes is built before the tensors are read."""
    sizes, shapes = part.sizes(), part.shapes
    width, inner, layers = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    if width % sizes["num_attention_heads"]:
        raise CheckpointInvalid(f"{file}: {sizes['num_attention_heads']} heads do not divide a width of {width}.")
    expected = {
        "v.patch_embd.weight": (width, 3, sizes["patch_size"], sizes["patch_size"]),
        "v.blk.0.attn_out.weight": (width, width),
        part.inner_name: (inner, width),
    }
    first = [name.removeprefix("v.blk.0.") for name in shapes if name.startswith("v.blk.0.")]
    # Not more layers than there are tensors, since each is looked for.
    for layer in range(1, min(layers, len(shapes) + 1)):
        expected |= {f"v.blk.{layer}.{name}": shapes[f"v.blk.0.{name}"] for name in first}
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            found = f"has the shape {shapes[name]}" if name in shapes else "is missing"
            raise CheckpointInvalid(f"{file}: tensor {name} {found}, and {shape} is needed.")
    num_layer_tensors = sum(name.startswith("v.blk.") for name in shapes)
    if num_layer_tensors != layers * len(first):
        raise CheckpointInvalid(
            f"{file} has {num_layer_tensors} tensors in layers, and {layers} layers have {layers * len(first)}."
        )
    products = [shape for name, shape in shapes.items() if name.startswith("mm.") and len(shape) == 2]
    if not any(hidden_size in shape for shape in products):
        raise CheckpointInvalid(
            f"{file} is not for this model: its projector gives no vectors of {hidden_size} values."
        )


def _named(model: GgufModel, projector: Projector, part: PartValues) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the tensors with transformers' names: `v.blk.3.ffn_up.bias` becomes `….encoder.layers.3.mlp.fc1.bias`."""
    deep = sorted({name.split(".")[2] for name in part.shapes if name.startswith("v.deepstack.")}, key=_number)
    # Queries come before keys, and these before values; the second half of a patch comes after the first.
    for name, tensor in sorted(
        model.tensors.items(), key=lambda row: (".attn_v." in row[0], ".attn_k." in row[0], row[0])
    ):
        stem, _, kind = name.removesuffix(".1").rpartition(".")
        if kind not in ("weight", "bias"):
            stem, kind = name, "weight"
        words = stem.split(".")
        ours: str | None
        if stem.startswith("v.blk."):
            word = _SWAPPED.get(words[-1], words[-1]) if part.is_swapped else words[-1]
            ours = projector.parts.get(word)
            ours = ours and f"{projector.layer}.{words[2]}.{ours}"
        elif stem.startswith("v.deepstack."):
            ours = projector.names.get(f"v.deepstack.{words[-1]}", "").format(deep.index(words[2])) or None
        else:
            ours = projector.names.get(stem)
        if ours is None:
            raise CheckpointInvalid(f"{model.file.name}: tensor {name[:80]} is not known in files of its type.")
        if ours:
            yield f"{ours}.{kind}", _entry(stem, tensor, projector, part)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _entry(stem: str, tensor: GgufTensor, projector: Projector, part: PartValues) -> TensorEntry:
    rotated = projector.rotates and stem.endswith((".attn_q", ".attn_k"))
    rows = interleaved(tensor, part.read.integer("attention.head_count")) if rotated else None
    return gguf_entry(tensor, Changes(tensor.shape, rows, added=projector.added.get(stem, 0.0)))
