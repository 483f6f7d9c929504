"""The part of a model that reads pictures: the library's processor and its vision tower, in front of a native decoder.

The library's class is built without layers of the language model. What its forward pass gives to the language model in
place of the embeddings of a picture's tokens are the vectors of that picture.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from app.engine.picture_files import read_picture
from app.engine.transformers.build import import_library
from app.errors import InvalidRequest, UnsupportedParameter
from app.weights.files import read_optional

_LOG = logging.getLogger(__name__)
_NOT_A_VECTOR = 12345.0  # in place of the embeddings of tokens of the text
# One of several pictures is cut differently than a single one.
_CUT_BY_NUMBER = ("LlavaOnevisionForConditionalGeneration",)
_NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError)


class PictureVectors:
    """What a picture is in a prompt: its tokens, and runs of vectors FP32, each with its first token among them."""

    def __init__(self, token_ids: tuple[int, ...], inputs: Tensor) -> None:
        self.token_ids = token_ids
        self.runs = tuple(_runs(inputs))


class PictureTower:
    """One thread may call it. `scale` is multiplied with the vectors, as the decoder does with its embeddings."""

    def __init__(self, directory: Path, architecture: str, scale: float = 1.0) -> None:
        """Load the tower. Raises `UnsupportedParameter` if the library cannot."""
        import_library()
        name = architecture.partition("/")[0]
        self._scale, self._cuts_by_number = scale, name in _CUT_BY_NUMBER
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            self._processor: Any = _processor_class(directory).from_pretrained(directory, local_files_only=True)
            model, self._hidden_size = _load(directory, getattr(transformers, name))
        except _LIBRARY_ERRORS as error:
            raise UnsupportedParameter(
                f"Pictures cannot be read: transformers {transformers.__version__} cannot load this checkpoint's part"
                f" for them: {_first_line(error)}",
                field="messages",
            ) from error
        self._model: Any = model.model
        self._text_model = self._model.get_decoder()
        self._model.set_input_embeddings(_NoEmbedding(self._hidden_size))
        self.token_id = int(self._processor.image_token_id)
        _LOG.info("pictures are read by %s", type(self._model).__name__)

    def read(self, data: bytes, field: str, is_alone: bool) -> PictureVectors:
        """Return the vectors of a picture. Raises `InvalidRequest` if it cannot be read."""
        picture = read_picture(data, field)
        count = 1 if is_alone or not self._cuts_by_number else 2
        try:
            inputs = self._processor(
                text=[self._processor.image_token * count],
                images=[[picture] * count],
                return_tensors="pt",
                add_special_tokens=False,
            )
        except _LIBRARY_ERRORS as error:
            size = f"{picture.width} x {picture.height}"
            raise InvalidRequest(
                f"{field}, of {size} pixels, is none for this model: {_first_line(error)}", field
            ) from error
        with torch.inference_mode():
            vectors = self._inputs_of_text(inputs)
        ids = inputs["input_ids"][0].tolist()
        length = len(ids) // count
        return PictureVectors(tuple(ids[:length]), vectors[:length] * self._scale)

    def _inputs_of_text(self, inputs: Any) -> Tensor:
        """Return what the language model gets for these tokens [tokens, hidden]; where it is a vector."""
        given: list[Tensor] = []

        def note(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
            given.append(named["inputs_embeds"])

        hook = self._text_model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            self._model(**inputs, use_cache=False)
        finally:
            hook.remove()
        return given[0][0].float()


class _NoEmbedding(nn.Module):
    """Stands for the embedding of the text, which the native decoder has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.full((*ids.shape, self.weight.shape[1]), _NOT_A_VECTOR)


def _processor_class(directory: Path) -> Any:
    """Return the class of the checkpoint's processor, which needs nothing that only videos need."""
    named = (read_optional(directory / name).get("processor_class") for name in _NAMING_FILES)
    model_type = str(read_optional(directory / "config.json").get("model_type"))
    name = next(filter(None, named), None) or PROCESSOR_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ValueError("no file names its processor")
    kind: Any = getattr(transformers, str(name))
    if "video_processor" not in kind.get_attributes():
        return kind
    module = sys.modules[kind.__module__]
    if getattr(module, "num2words", str) is None:
        module.num2words = str  # type: ignore[attr-defined]  # it writes the length of a video

    def arguments(cls: Any, path: Path, /, processor_dict: Any = None, **options: Any) -> list[Any]:
        found = {
            "image_processor": transformers.AutoImageProcessor.from_pretrained(path, **options),
            "tokenizer": transformers.AutoTokenizer.from_pretrained(path, **options),
        }
        return [found.get(name) for name in kind.get_attributes()]

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, argument)

    own = {"_get_arguments_from_pretrained": classmethod(arguments), "check_argument_for_proper_class": check}
    return type(kind.__name__, (kind,), own)


def _load(directory: Path, kind: Any) -> tuple[Any, int]:
    """Return the model without layers of its language model, and the size of its vectors."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    model, info = kind.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    missing = [name for name in info["missing_keys"] if "lm_head" not in name and "embed_tokens" not in name]
    if missing:
        raise ValueError(f"the weights {', '.join(sorted(missing)[:5])} are missing")
    return model.eval(), int(text.hidden_size)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _runs(inputs: Tensor) -> Iterator[tuple[int, int, bytes]]:
    """Yield the first token, the number of rows, and the rows of each run of vectors."""
    is_vector = (inputs != _NOT_A_VECTOR).any(1).tolist()
    for found, places in groupby(range(len(is_vector)), key=is_vector.__getitem__):
        rows = list(places)
        if found:
            yield rows[0], len(rows), inputs[rows[0] : rows[-1] + 1].contiguous().numpy().tobytes()
