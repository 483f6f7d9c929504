"""Decodes the files of pictures, within limits that are checked before a pixel is read. Imports Pillow at the first one."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy

from app.errors import InvalidRequest

MAX_PIXELS = 64_000_000  # 256 MB when decoded
MAX_RATIO = 200  # of the sides: where the shorter one is scaled to a size, the other would make a larger picture
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Raised by Pillow for files that are damaged or cut off.
_DAMAGED = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, struct.error, MemoryError,
)  # fmt: skip


def picture_size(data: bytes) -> tuple[int, int]:
    """Return the width and height in a file's header; 0 if it cannot be read."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # it would warn; `read_picture` checks the size
    try:
        width, height = Image.open(io.BytesIO(data), formats=_FORMATS).size
    except _DAMAGED:
        return 0, 0
    return int(width), int(height)


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
