"""The part of a model that reads pictures: the library's processor and its vision tower, in front of a native decoder.

The library's class is built without layers of the language model. What its forward pass gives to the language model in
place of the embeddings of a picture's tokens are the vectors of that picture.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from app.engine.picture_files import picture_size, read_picture
from app.engine.transformers.build import import_library
from app.engine.transformers.loading import first_line
from app.engine.transformers.picture_processors import PROCESSORS
from app.engine.transformers.tower_kernels import use_kernels
from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import PromptVectors
from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES
from app.weights.files import read_optional

_LOG = logging.getLogger(__name__)
# Of pictures whose vectors are computed together: two of 448 x 448. On idle cores one by one takes as long; beside another
# process that computes, two take 0.7 of it; and four take up to 1.15 times as long on idle cores (two cores of a Zen 4).
_TOGETHER_PIXELS = 2**19
_NOT_A_VECTOR = 12288.0  # in place of the embeddings of tokens of the text; BF16 has it
_CUT_BY_NUMBER = ("LlavaOnevisionForConditionalGeneration",)
_NOT_LOADED = frozenset({"video_processor", "feature_extractor"})  # parts of processors, of videos and sounds
_NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError)


class PictureVectors:
    """What a picture is in a prompt: its tokens, runs of vectors, counted from the first token, and texts around it."""

    def __init__(self, token_ids: Sequence[int], runs: Iterable[PromptVectors], around: tuple[str, str]) -> None:
        self.token_ids, self.runs, self.around = tuple(token_ids), tuple(runs), around


@dataclass(frozen=True, slots=True)
class _TextInputs:
    """What a language model gets: vectors [tokens, hidden], more for the results of its first layers, positions.

    `added` [layers, tokens, hidden] is zero where there is no vector. `places` [3, tokens] int64, or None with one axis.
    """

    vectors: Tensor
    added: Tensor
    places: Tensor | None


class PictureTower:
    """One thread may call it. `scale` is multiplied with the vectors, as the decoder does with its embeddings.

    `cuts_by_number`, `joined_tokens`: as in `app.service.pictures.Tower`.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        scale: float = 1.0,
        dtype: str = "float32",
        is_quantized: bool = False,
    ) -> None:
        """Load the tower. Raises `UnsupportedParameter` if the library cannot.

        `is_quantized`: the weights of its large products may have eight bits, as those of the language model.
        """
        import_library()
        name = config.architecture.partition("/")[0]
        self._scale, self._joins, self._dtype = scale, config.blocks != "none", getattr(torch, dtype)
        self._window = min((window for window in config.windows if window is not None), default=config.max_model_len)
        self.cuts_by_number = name in _CUT_BY_NUMBER
        self.joined_tokens = self._window if DECODER_FAMILIES[config.architecture].joins_prompt else 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            self._processor, model, self._hidden_size = self._parts(directory, name)
        except _LIBRARY_ERRORS as error:
            raise UnsupportedParameter(
                f"Pictures cannot be read: transformers {transformers.__version__} cannot load this checkpoint's part"
                f" for them: {first_line(error)}",
                field="messages",
            ) from error
        self._model: Any = model.model
        self._text_model = self._model.get_decoder()
        if self._dtype == torch.bfloat16:
            use_kernels(self._model, is_quantized)
        self._model.set_input_embeddings(_NoEmbedding(self._hidden_size, self._dtype))
        self.token, self.token_id = str(self._processor.image_token), int(self._processor.image_token_id)
        known = () if self.joined_tokens else self._processor.tokenizer.added_tokens_decoder
        self._known_tokens = {self.token_id, *known}
        _LOG.info("pictures are read by %s", type(self._model).__name__)

    def _parts(self, directory: Path, name: str) -> tuple[Any, Any, int]:
        """Return the processor, the model, and the size of its vectors."""
        processor: Any = _processor_class(directory).from_pretrained(directory, local_files_only=True)
        return processor, *_load(directory, getattr(transformers, name), self._dtype)

    def read_all(
        self, files: Sequence[tuple[bytes, str]], is_alone: bool, others: Sequence[tuple[bytes, str]] = ()
    ) -> tuple[list[PictureVectors], list[PictureVectors | None]]:
        """Return the vectors of pictures in their order, and of those of the `others` that were computed with them.

        Raises `InvalidRequest` if one of `files` cannot be read.
        """
        given = [*files, *others]
        sizes = [picture_size(data) for data, _ in given]
        wanted = [place for place, size in enumerate(sizes) if place < len(files) or size in sizes[: len(files)]]
        made: dict[int, PictureVectors] = {}
        pictures: dict[int, Any] = {}
        for place in sorted(wanted, key=lambda place: (sizes[place], place)):
            try:
                picture = read_picture(*given[place])
            except InvalidRequest:
                if place < len(files):
                    raise
                continue
            first = next(iter(pictures.values()), picture)
            if picture.size != first.size or (len(pictures) + 1) * math.prod(picture.size) > _TOGETHER_PIXELS:
                made |= self._together(pictures, given, len(files), is_alone)
                pictures = {}
            pictures[place] = picture
        made |= self._together(pictures, given, len(files), is_alone)
        return [made[place] for place in range(len(files))], [
            made.get(place) for place in range(len(files), len(given))
        ]

    def _together(
        self, pictures: Mapping[int, Any], given: Sequence[tuple[bytes, str]], count: int, is_alone: bool
    ) -> dict[int, PictureVectors]:
        """Return the vectors of pictures of one size, by their places; of none if no place is below `count`."""
        first = next(iter(pictures), count)
        if first >= count:
            return {}
        return dict(zip(pictures, self.read_alike(list(pictures.values()), given[first][1], is_alone), strict=True))

    def read_alike(self, pictures: Sequence[Any], field: str, is_alone: bool) -> list[PictureVectors]:
        """Return the vectors of pictures of one size, which are computed together. Raises `InvalidRequest`."""
        count = 1 if is_alone or not self.cuts_by_number else 2
        try:
            inputs = self._processor(
                text=[self._processor.image_token * count] * len(pictures),
                images=[[picture] * count for picture in pictures],
                return_tensors="pt",
                add_special_tokens=False,
            )
        except _LIBRARY_ERRORS as error:
            size = f"{pictures[0].width} x {pictures[0].height}"
            raise InvalidRequest(
                f"{field}, of {size} pixels, is none for this model: {first_line(error)}", field
            ) from error
        with torch.inference_mode():
            found = self._inputs_of_texts(inputs)
        ids = inputs["input_ids"][0].tolist()
        ids = ids[: len(ids) // count]
        # Words around the tokens of a picture are tokenized with the text beside them.
        places = [place for place, token in enumerate(ids) if token in self._known_tokens]
        first, end = places[0], places[-1] + 1
        decode = self._processor.tokenizer.decode
        around = ("", "") if self.joined_tokens else (decode(ids[:first]), decode(ids[end:]))
        made = [PictureVectors(ids[first:end], self._runs(one, first, end), around) for one in found]
        longest = max(run.num_rows for run in made[0].runs)
        if self._joins and longest > self._window:
            raise InvalidRequest(
                f"{field} has {longest} tokens that see each other, and a layer's window {self._window}.", field
            )
        return made

    def _inputs_of_texts(self, inputs: Any) -> list[_TextInputs]:
        given: list[dict[str, Any]] = []

        def note(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
            given.append(named)

        hook = self._text_model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            given_to_all = {name: self._cast(value) for name, value in inputs.items() if name != "labels"}
            self._model(**given_to_all, use_cache=False)
        finally:
            hook.remove()
        named = given[0]
        vectors = named["inputs_embeds"].float()
        features = named.get("deepstack_visual_embeds") or []
        added = torch.zeros(len(features), *vectors.shape)
        for layer, feature in zip(added, features, strict=True):
            layer[named["visual_pos_masks"]] = feature.float()
        places = named.get("position_ids")
        axes = places[-3:] if places is not None and places.dim() == 3 else None
        return [
            _TextInputs(vectors[row], added[:, row], None if axes is None else axes[:, row])
            for row in range(len(vectors))
        ]

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _runs(self, found: _TextInputs, first: int, end: int) -> Iterator[PromptVectors]:
        """Yield the runs of vectors among the tokens from `first` to `end`."""
        is_vector = (found.vectors[first:end] != _NOT_A_VECTOR).any(1).tolist()
        for is_run, group in groupby(range(first, end), key=lambda token: is_vector[token - first]):
            tokens = list(group)
            if not is_run:
                continue
            own = slice(tokens[0], tokens[-1] + 1)
            data = torch.cat((found.vectors[own] * self._scale, *found.added[:, own]), 1).contiguous().numpy().tobytes()
            places, num_places = b"", 0
            if found.places is not None:
                relative = found.places[:, own] - found.places[0, tokens[0]]
                places, num_places = relative.contiguous().numpy().tobytes(), int(relative.max()) + 1
            start = tokens[0] - first
            block = (start, start + len(tokens)) if self._joins else None
            yield PromptVectors(start, len(tokens), data, places, num_places, block)


class _NoEmbedding(nn.Module):
    """Stands for the embedding of the text, which the native decoder has."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.full((*ids.shape, self.weight.shape[1]), _NOT_A_VECTOR, dtype=self.weight.dtype)


def _processor_class(directory: Path) -> Any:
    """Return the class of the checkpoint's processor."""
    named = (read_optional(directory / name).get("processor_class") for name in _NAMING_FILES)
    model_type = str(read_optional(directory / "config.json").get("model_type"))
    name = next(filter(None, named), None) or PROCESSOR_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ValueError("no file names its processor")
    if name in PROCESSORS:
        return PROCESSORS[name]
    return without_videos(getattr(transformers, str(name)))


def without_videos(kind: Any) -> Any:
    """Return a processor's class, or one derived from it that needs nothing that only videos need."""
    if not _NOT_LOADED.intersection(kind.get_attributes()):
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
        return None if name in _NOT_LOADED else kind.check_argument_for_proper_class(self, name, argument)

    own = {"_get_arguments_from_pretrained": classmethod(arguments), "check_argument_for_proper_class": check}
    return type(kind.__name__, (kind,), own)


def _load(directory: Path, kind: Any, dtype: torch.dtype) -> tuple[Any, int]:
    """Return the model without layers of its language model, and the size of its vectors."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the language model; a quantized weight of the tower would be missing
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, 0
    if getattr(text, "hidden_size_per_layer_input", 0):
        text.hidden_size_per_layer_input = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    model, info = kind.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_missing(info)
    return model.eval(), int(text.hidden_size)


def check_missing(info: Mapping[str, Any], unused: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` if weights are missing, but for those of the text model and those that begin with `unused`."""
    texts = ("lm_head", "embed_tokens", "language_model.", "text_model.")
    found = (name for name in info["missing_keys"] if not any(text in name for text in texts))
    if missing := sorted(name for name in found if not name.startswith(unused)):
        raise ValueError(f"the weights {', '.join(missing[:5])} are missing")
