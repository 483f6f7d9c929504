"""The tower of a GGUF model: transformers' Idefics 3 with the tensors of a file `mmproj` and the model's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer

from app.engine.transformers.tower import PictureTower
from app.models.decoders.config import ModelConfig
from app.text.tokenizer_files import read_tokenizer_files
from app.weights.gguf.mmproj import PicturePart
from app.weights.tensor_reader import MappedFiles

_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")


class GgufTower(PictureTower):
    """A tower whose parts are in a GGUF file. `model` has the tokens, `config` the width of its vectors."""

    def __init__(
        self,
        part: PicturePart,
        model: Path,
        config: ModelConfig,
        dtype: str = "float32",
        is_quantized: bool = False,
    ) -> None:
        self._part, self._width = part, config.hidden_size
        super().__init__(model, config, 1.0, dtype, is_quantized)

    def _parts(self, location: Path, name: str) -> tuple[Any, Any, int]:
        part = self._part
        files = read_tokenizer_files(location)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(files.tokenizer))
        missing = [token for token in _TOKENS if token not in tokenizer.get_vocab()]
        if missing:
            raise ValueError(f"{location.name} has no token {missing[0]}")
        config = transformers.Idefics3Config(
            vision_config=dict(part.vision),
            text_config={
                "model_type": "llama",
                "hidden_size": self._width,
                "num_hidden_layers": 0,
                "num_attention_heads": 1,
                "vocab_size": 1,
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
            },
            scale_factor=part.scale_factor,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=None,
        )
        mapped = MappedFiles()
        model = transformers.Idefics3ForConditionalGeneration.from_pretrained(
            None,
            config=config,
            state_dict={name: mapped.tensor(entry).to(self._dtype) for name, entry in part.tensors.items()},
            dtype=self._dtype,
        )
        size = part.vision["image_size"]
        pictures = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": part.longest_edge},
            max_image_size={"longest_edge": size},
            image_mean=list(part.mean),
            image_std=list(part.std),
        )
        rows = size // part.vision["patch_size"] // part.scale_factor
        processor = transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=rows * rows)
        return processor, model.eval(), self._width
