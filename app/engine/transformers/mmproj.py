"""The tower of a GGUF model: a class of transformers with the tensors of a file `mmproj` and the model's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from app.engine.transformers.picture_processors import PROCESSORS
from app.engine.transformers.tower import PictureTower, check_missing, without_videos
from app.models.decoders.config import ModelConfig
from app.text.tokenizer_files import read_tokenizer_files
from app.weights.gguf.mmproj import PicturePart
from app.weights.tensor_reader import MappedFiles


class GgufTower(PictureTower):
    """A tower whose parts are in a GGUF file. `model` has the tokens, `config` the sizes of the text model."""

    def __init__(
        self,
        part: PicturePart,
        model: Path,
        config: ModelConfig,
        scale: float = 1.0,
        dtype: str = "float32",
        is_quantized: bool = False,
    ) -> None:
        self._part, self._config = part, config
        super().__init__(model, config, scale, dtype, is_quantized)

    def _parts(self, location: Path, name: str) -> tuple[Any, Any, int]:
        tokenizer = self._tokenizer(location)
        return self._processor_of(tokenizer), self._load(name, tokenizer), self._config.hidden_size

    def _tokenizer(self, location: Path) -> Any:
        found, tokens = read_tokenizer_files(location).tokenizer, self._part.projector.tokens
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(found))
        missing = [token for token in tokens.values() if token not in made.get_vocab()]
        if missing:
            raise ValueError(f"{location.name} has no token {missing[0]}")
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(found), extra_special_tokens=dict(tokens)
        )

    def _processor_of(self, tokenizer: Any) -> Any:
        of_pictures, of_both = self._part.projector.processors
        shown, colors = self._part.described, {"image_mean": list(self._part.mean), "image_std": list(self._part.std)}
        pictures = getattr(transformers, of_pictures)(**shown.pictures, **colors) if of_pictures else None
        if of_both not in PROCESSORS:
            kind = without_videos(getattr(transformers, of_both))
            return kind(image_processor=pictures, tokenizer=tokenizer, **shown.processor)
        made = PROCESSORS[of_both](tokenizer, {**shown.processor, **colors})
        made.image_processor = pictures  # type: ignore[attr-defined]
        return made

    def _load(self, name: str, tokenizer: Any) -> Any:
        kind, part, text = getattr(transformers, name), self._part, self._config
        ids = {token: tokenizer.convert_tokens_to_ids(word) for token, word in part.projector.tokens.items()}
        rope = next((rope for rope in text.ropes if rope is not None and rope.axes), None)
        sections = {} if rope is None else {"mrope_section": [rope.axes.count(axis) for axis in range(3)]}
        inner: dict[str, Any] = {
            "hidden_size": text.hidden_size,
            "num_hidden_layers": 0,
            "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads,
            "head_dim": text.head_dim,
            "rms_norm_eps": text.norm_eps,
            "layer_types": [],
            "vocab_size": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **sections},
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        }
        if "/" in part.reader:
            inner["model_type"] = part.reader.partition("/")[2]
        config = kind.config_class(
            vision_config=dict(part.described.vision),
            text_config=inner,
            **part.described.config,
            **{f"{token}_{end}": number for token, number in ids.items() for end in ("id", "index")},
        )
        with torch.device("meta"):
            shapes = {key: value.shape for key, value in kind(config).state_dict().items()}
        mapped = MappedFiles()
        tensors = {
            _stored_name(key, shapes): [mapped.tensor(entry).to(self._dtype) for entry in entries]
            for key, entries in part.tensors.items()
        }
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={key: _joined(values, shapes[key]) for key, values in tensors.items()},
            dtype=self._dtype,
            output_loading_info=True,
        )
        check_missing(info, part.projector.unused)
        return model.eval()


def _stored_name(key: str, shapes: dict[str, torch.Size]) -> str:
    """Return the name of a parameter, which may be that of a tensor without its `.weight`."""
    found = key if key in shapes else key.removesuffix(".weight")
    if found not in shapes:
        raise ValueError(f"it has no {found}")
    return found


def _joined(values: list[Tensor], shape: torch.Size) -> Tensor:
    """Return one tensor of a shape: filters of two pictures, rows one below the other, or filters as rows of pixels."""
    filters = values[0].dim() == 4
    joined = values[0] if len(values) == 1 else torch.stack(values, 2) if filters else torch.cat(values)
    if filters and len(shape) == 2:
        joined = joined.permute(0, 2, 3, 1)
    return joined.reshape(shape)
