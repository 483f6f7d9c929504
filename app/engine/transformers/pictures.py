"""Tasks of pictures: labels, labels that a request names, and vectors of texts and pictures in one space."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel, pipeline

from app.engine.picture_files import read_picture
from app.engine.transformers.tasks import Item, Parameters, Task
from app.engine.transformers.texts import TextReader

_PATCH_VALUES = 3 * 16 * 16  # of a picture, which cost about as much as a token
_TEMPLATE = "This is a photo of {}."


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
