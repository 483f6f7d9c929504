"""Tasks of pictures: labels, labels that a request names, and vectors of texts and pictures in one space."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel, pipeline

from app.engine.transformers.tasks import Item, Parameters, Task
from app.engine.transformers.texts import TextReader
from app.errors import InvalidRequest

MAX_PIXELS = 64_000_000  # 256 MB when decoded
MAX_RATIO = (
    200  # of the sides: processors that scale the shorter side to a size would make a larger picture of the rest
)
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_PATCH_VALUES = 3 * 16 * 16  # of a picture, which cost about as much as a token
_TEMPLATE = "This is a photo of {}."
# Raised by Pillow for files that are damaged or cut off.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    MemoryError,
)


def read_picture(data: bytes, field: str = "inputs") -> Any:
    """Return a picture as 8-bit RGB, upright, on white where it is transparent. Raises `InvalidRequest`."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # it would warn; the size is checked here
    try:
        picture: Any = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (UnidentifiedImageError, *_DAMAGED) as error:
        raise InvalidRequest(
            f"{field} is not a picture that is known here: send {', '.join(_FORMATS)}.", field
        ) from error
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise InvalidRequest(f"{field} has {width} x {height} pixels, and may have {MAX_PIXELS:,}.", field)
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidRequest(
            f"{field} has {width} x {height} pixels: a side may be at most {MAX_RATIO} times the other.", field
        )
    try:
        # A camera's JPEG may have further pictures, of its depth and brightness; the first one is the photo.
        if picture.format != "MPO" and getattr(picture, "is_animated", False):
            raise InvalidRequest(f"{field} has several frames: send one picture.", field)
        picture = ImageOps.exif_transpose(picture)
        return _to_rgb(picture, field)
    except _DAMAGED as error:
        raise InvalidRequest(f"{field} is a damaged picture: {str(error)[:100]}.", field) from error


def _to_rgb(picture: Any, field: str) -> Any:
    from PIL import Image

    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((numpy.asarray(picture) >> 8).astype(numpy.uint8))
    if picture.mode in ("I", "F"):
        raise InvalidRequest(f"{field} has 32 bits in a channel: send 8 or 16.", field)
    if picture.has_transparency_data:
        above = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return picture.convert("RGB")


class PictureReader:
    """The library's processor, which cuts and scales pictures as the model was trained."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.processor: Any = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        self.dtype = model.dtype

    def item(self, data: bytes) -> dict[str, Any]:
        made = self.processor(images=[read_picture(data)], return_tensors="pt")
        item = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in made.items()}
        return {**item, "size": 1 + item["pixel_values"].numel() // _PATCH_VALUES}


def check_picture() -> bytes:
    """Return the file of a small picture."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(file, "PNG")
    return file.getvalue()


def image_classification(model: PreTrainedModel, directory: Path) -> Task:
    reader = PictureReader(model, directory)
    pipe = pipeline("image-classification", model=model, image_processor=reader.processor, device=model.device)

    def split(data: bytes, parameters: Parameters) -> Sequence[Item]:
        return [reader.item(data)]

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        return pipe.postprocess(outputs[0], **pipe._sanitize_parameters(**parameters)[2])

    return Task(split, finish, check_picture())


class TextPictureModel:
    """A model that has texts and pictures in one space, and its two tasks."""

    def __init__(self, model: PreTrainedModel, directory: Path, texts: TextReader) -> None:
        self.model: Any = model
        self.texts, self.pictures = texts, PictureReader(model, directory)
        self.is_siglip = "siglip" in model.config.model_type
        # As the library's pipeline pads: SigLIP was trained with texts of one length.
        padded: dict[str, Any] = {"padding": "max_length", "max_length": 64}
        self.padding = padded if self.is_siglip else {"padding": True}

    def tasks(self) -> dict[str, Task]:
        check, labels = check_picture(), {"candidate_labels": ["one"]}
        named = Task(self._split_named, self._finish_named, check, call=self._compare, check_parameters=labels)
        vectors = Task(self._split, self._finish, "A text.", call=self._vectors)
        return {"zero-shot-image-classification": named, "feature-extraction": vectors}

    def _read_texts(self, given: Sequence[str], field: str) -> dict[str, Tensor]:
        for text in given:
            self.texts.prepare(text, field)
        made = dict(self.texts.tokenizer(list(given), return_tensors="pt", **self.padding))
        self.texts.check_length(made, field)
        return made

    def _tensors(self, items: Sequence[Item]) -> dict[str, Tensor]:
        names = [name for name, value in items[0].items() if isinstance(value, Tensor)]
        return {name: torch.cat([item[name] for item in items]).to(self.model.device) for name in names}

    def _split(self, given: str | bytes, parameters: Parameters) -> Sequence[Item]:
        return [self.pictures.item(given) if isinstance(given, bytes) else self._read_texts([given], "inputs")]

    def _vectors(self, items: Sequence[Item], parameters: Parameters) -> Sequence[Item]:
        inputs = self._tensors(items)
        call = self.model.get_image_features if "pixel_values" in inputs else self.model.get_text_features
        found = call(**inputs)
        return [{"vector": row.float().cpu()} for row in getattr(found, "pooler_output", found)]

    def _finish(self, outputs: list[Item], parameters: Parameters) -> Any:
        vector = outputs[0]["vector"]
        return (vector / vector.norm().clamp_min(1e-12) if parameters.get("normalize", True) else vector).tolist()

    def _split_named(self, data: bytes, parameters: Parameters) -> Sequence[Item]:
        labels, template = parameters["candidate_labels"], parameters.get("hypothesis_template", _TEMPLATE)
        labels = [label.strip() for label in labels.split(",")] if isinstance(labels, str) else labels
        sentences = self._read_texts([template.format(label) for label in labels], "parameters.candidate_labels")
        return [{**self.pictures.item(data), **sentences, "labels": labels}]

    def _compare(self, items: Sequence[Item], parameters: Parameters) -> Sequence[Item]:
        logits = [self.model(**self._tensors([item])).logits_per_image[0].float().cpu() for item in items]
        return [{"labels": item["labels"], "logits": row} for item, row in zip(items, logits, strict=True)]

    def _finish_named(self, outputs: list[Item], parameters: Parameters) -> Any:
        logits = outputs[0]["logits"]
        scores = (logits.sigmoid() if self.is_siglip else logits.softmax(-1)).tolist()
        ranked = sorted(zip(outputs[0]["labels"], scores, strict=True), key=lambda pair: -pair[1])
        return [{"score": score, "label": label} for label, score in ranked]
