"""Processors of this package make the tokens and pixels of the library's own, which need torchvision."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
from PIL import Image

from app.engine.transformers.picture_processors import PictureProcessor, RowsProcessor, TilesProcessor
from picture_checkpoints import IDS
from tiny_checkpoints import write_tokenizer

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError) as error:  # a build for another torch raises the second
    pytest.skip(f"needs torchvision: {error}", allow_module_level=True)

SIZES = ((30, 20), (448, 448), (640, 480), (300, 1200), (511, 513), (801, 799))
LEVELS = 2  # of 255, by which rounding may differ
TILES = (
    {},
    {"tile_size": 256, "max_tiles": 4, "min_image_tokens": 16, "max_image_tokens": 64},
    {"use_thumbnail": False},
)
ROWS = ({"patch_size": 16, "spatial_merge_size": 1}, {"patch_size": 14, "spatial_merge_size": 2})


def picture(width: int, height: int, seed: int) -> Any:
    values = numpy.random.default_rng(seed).integers(0, 255, (height // 16 + 2, width // 16 + 2, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokens = json.loads((directory / "tokenizer.json").read_text())
    names = dict.fromkeys(
        (*IDS, *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)))
    )
    plain = {"special": True, "normalized": False} | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokens["added_tokens"] += [{"id": 270 + at, "content": name, **plain} for at, name in enumerate(names)]
    (directory / "tokenizer.json").write_text(json.dumps(tokens))
    return transformers.AutoTokenizer.from_pretrained(directory)


def check(own: PictureProcessor, library: Any, token: str, std: float) -> None:
    for width, height in SIZES:
        for pictures in ([picture(width, height, 1)], [picture(width, height, 1), picture(height, width, 2)]):
            asked = {"text": [token * len(pictures)], "images": [pictures], "return_tensors": "pt"}
            found, wanted = (one(**asked, add_special_tokens=False) for one in (own, library))
            assert set(wanted) <= {*found, "token_type_ids", "mm_token_type_ids"}
            for name in set(wanted) & set(found):
                assert found[name].shape == wanted[name].shape, (name, width, height)
                difference = (found[name].double() - wanted[name].double()).abs().max().item()
                most = LEVELS / 255 / std if name == "pixel_values" else 0.0
                assert difference <= most * 1.01, (name, width, height, difference)


@pytest.mark.full
@pytest.mark.parametrize("values", ROWS)
def test_rows_of_patches_are_those_of_pixtral(values: dict[str, int], tokenizer: Any) -> None:
    import transformers

    size, patch = {"longest_edge": 1024}, values["patch_size"]
    own = RowsProcessor(tokenizer, values)
    own.image_processor = transformers.PixtralImageProcessorPil(patch_size=patch, size=size)
    pictures = transformers.PixtralImageProcessor(patch_size={"height": patch, "width": patch}, size=size)
    check(own, transformers.PixtralProcessor(pictures, tokenizer, **values), "[IMG]", 0.26)


@pytest.mark.full
@pytest.mark.parametrize("values", TILES)
def test_tiles_are_those_of_lfm2_vl(values: dict[str, Any], tokenizer: Any) -> None:
    import transformers

    pictures = transformers.Lfm2VlImageProcessor(**values)
    check(TilesProcessor(tokenizer, values), transformers.Lfm2VlProcessor(pictures, tokenizer), "<image>", 0.5)
