"""Processors of pictures that replace those of the library that need torchvision.

They make the same tokens, and the same pixels but for rounding, since Pillow scales the pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer

from app.weights.files import read_optional


class PictureProcessor:
    """What a tower calls: it returns the inputs of the model for texts with a placeholder for each picture."""

    def __init__(self, tokenizer: Any, values: Mapping[str, Any]) -> None:
        self.tokenizer, self.values = tokenizer, values
        self.image_token = str(
            values.get("image_token") or getattr(tokenizer, "image_token", None) or self.default_token
        )
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    default_token = "<image>"

    @classmethod
    def from_pretrained(cls, directory: Path, **options: Any) -> Any:
        values = [read_optional(directory / f"{name}_config.json") for name in ("preprocessor", "processor")]
        pictures = values[1].get("image_processor", {})  # newer files have all in one
        return cls(AutoTokenizer.from_pretrained(directory, **options), {**values[0], **pictures, **values[1]})

    def __call__(self, text: Sequence[str], images: Any = None, **options: Any) -> dict[str, Any]:
        inputs, shown = self.pictures([one for group in images for one in group]) if images else ({}, [])
        left, texts = iter(shown), []
        for whole in text:
            first, *others = whole.split(self.image_token)
            texts.append(first + "".join(next(left, "") + other for other in others))
        return {**inputs, **self.tokenizer(texts, **options)}

    def pictures(self, images: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the inputs of the model for RGB pictures, and the text that stands for each."""
        raise NotImplementedError


class RowsProcessor(PictureProcessor):
    """Pictures of Pixtral and Mistral 3: a token ends each row of patches."""

    default_token = "[IMG]"

    @classmethod
    def from_pretrained(cls, directory: Path, **options: Any) -> Any:
        made = super().from_pretrained(directory, **options)
        made.image_processor = AutoImageProcessor.from_pretrained(directory, **options)
        return made

    def pictures(self, images: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
        values = self.values
        patch = values.get("patch_size", 16)
        patch = patch["height"] if isinstance(patch, Mapping) else patch
        size = patch * values.get("spatial_merge_size", 1)
        inputs = self.image_processor(list(images), patch_size=size, return_tensors="pt")
        row_end, end = values.get("image_break_token", "[IMG_BREAK]"), values.get("image_end_token", "[IMG_END]")
        rows = [
            (self.image_token * (width // size) + row_end) * (height // size)
            for height, width in inputs["image_sizes"].tolist()
        ]
        return dict(inputs), [shown.removesuffix(row_end) + end for shown in rows]

    image_processor: Any


class TilesProcessor(PictureProcessor):
    """Pictures of LFM2-VL: a large one is cut into a grid of square tiles, followed by all of it in small."""

    def pictures(self, images: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
        cut = [self._cut(image) for image in images]
        pixels, masks, shapes = zip(*(self._patches(tile) for _, tiles in cut for tile in tiles), strict=True)
        inputs = {"pixel_values": torch.stack(pixels), "pixel_attention_mask": torch.stack(masks)}
        texts = [self._text(grid, tiles[-1].shape[:2]) for grid, tiles in cut]
        return {**inputs, "spatial_shapes": torch.tensor(shapes)}, texts

    def _value(self, name: str) -> Any:
        found = self.values.get(name)
        return _TILES[name] if found is None else found

    @property
    def _unit(self) -> int:
        """The side in pixels of what a token stands for."""
        return int(self._value("encoder_patch_size") * self._value("downsample_factor"))

    def _cut(self, image: Any) -> tuple[tuple[int, int], list[NDArray[numpy.uint8]]]:
        """Return the rows and columns of the grid, and the tiles [height, width, 3], with the small picture last."""
        unit, most, splits = self._unit, self._value("max_image_tokens"), self._value("do_image_splitting")
        fewest, largest = (self._value("min_tiles"), self._value("max_tiles")) if splits else (1, 1)
        height, width = (max(round(side / unit) * unit, 1) for side in (image.height, image.width))
        least = self._value("encoder_patch_size")
        is_large = max(height, least) * max(width, least) > most * unit**2 * self._value("max_pixels_tolerance")
        small = self._scaled(image, *self._small_size(image.height, image.width))
        if not is_large or fewest == largest == 1:
            return (1, 1), [small]
        side = self._value("tile_size")
        columns, rows = _grid(image.width, image.height, fewest, largest, side)
        whole = self._scaled(image, rows * side, columns * side)
        tiles = [
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        has_small = self._value("use_thumbnail") and rows * columns > 1
        return (rows, columns), [*tiles, small] if has_small else tiles

    def _scaled(self, image: Any, height: int, width: int) -> NDArray[numpy.uint8]:
        return numpy.asarray(image.resize((width, height), Image.Resampling(self._value("resample"))))

    def _small_size(self, height: int, width: int) -> tuple[int, int]:
        unit = self._unit
        fewest, most = (self._value(name) * unit**2 for name in ("min_image_tokens", "max_image_tokens"))
        sides = [max(unit, round(side / unit) * unit) for side in (height, width)]
        if sides[0] * sides[1] > most:
            scale = math.sqrt(height * width / most)
            sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
        elif sides[0] * sides[1] < fewest:
            scale = math.sqrt(fewest / (height * width))
            sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
        return sides[0], sides[1]

    def _patches(self, tile: NDArray[numpy.uint8]) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return the patches of a tile and their mask, both padded, and the rows and columns of patches."""
        size, mean, std = self._value("encoder_patch_size"), self._value("image_mean"), self._value("image_std")
        rows, columns = tile.shape[0] // size, tile.shape[1] // size
        pixels = (torch.tensor(tile).float() / 255 - torch.tensor(mean)) / torch.tensor(std)
        patches = pixels.view(rows, size, columns, size, 3).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        tile_patches = (self._value("tile_size") // size) ** 2 if self._value("do_image_splitting") else 0
        most = max(self._value("max_image_tokens") * self._value("downsample_factor") ** 2, tile_patches)
        padded = torch.zeros(most, patches.shape[1])
        padded[: len(patches)] = patches
        return padded, (torch.arange(most) < len(patches)).to(torch.int32), (rows, columns)

    def _text(self, grid: tuple[int, int], last_size: tuple[int, ...]) -> str:
        named = [(name, getattr(self.tokenizer, f"image_{name}_token", None)) for name in ("start", "end", "thumbnail")]
        start, end, small = (found or _TILE_TOKENS[name] for name, found in named)
        of_last = self.image_token * math.prod(-(-side // self._unit) for side in last_size)
        if grid == (1, 1):
            return start + of_last + end
        of_tile = self.image_token * (-(-self._value("tile_size") // self._unit)) ** 2
        tiles = [
            f"<|img_row_{row + 1}_col_{column + 1}|>{of_tile}" for row in range(grid[0]) for column in range(grid[1])
        ]
        return start + "".join(tiles) + (small + of_last if self._value("use_thumbnail") else "") + end


def _grid(width: int, height: int, fewest: int, most: int, side: int) -> tuple[int, int]:
    """Return the columns and rows of tiles whose shape is nearest to a picture's; of equal ones the larger if it fits."""
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    fitting = sorted((one for one in grids if fewest <= one[0] * one[1] <= most), key=math.prod)
    best, nearest = (1, 1), math.inf
    for columns, rows in fitting:
        difference = abs(width / height - columns / rows)
        if difference < nearest or (difference == nearest and width * height > 0.5 * side**2 * columns * rows):
            best, nearest = (columns, rows), difference
    return best


_TILE_TOKENS = {"start": "<|image_start|>", "end": "<|image_end|>", "thumbnail": "<|img_thumbnail|>"}
# The defaults of the library's class.
_TILES: Mapping[str, Any] = {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
    "resample": 2,  # bilinear
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
PROCESSORS: Mapping[str, type[PictureProcessor]] = {
    "PixtralProcessor": RowsProcessor,
    "Lfm2VlProcessor": TilesProcessor,
}
