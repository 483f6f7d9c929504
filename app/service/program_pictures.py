"""Pictures as rows of a program's input: scaled, cut and normalized as by torchvision's presets."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy

from app.engine.picture_files import read_picture
from app.errors import InvalidRequest
from app.messages import Array
from app.text.child_process import stop_if_cancelled
from app.weights.program_description import PictureSpec

_NUMPY = {"FP32": "<f4", "FP16": "<f2", "FP64": "<f8", "UINT8": "u1"}
MAX_ROW_BYTES = 64 * 2**20  # of the rows of one input: 111 pictures of 224 × 224 in FP32


def picture_rows(spec: PictureSpec, files: Sequence[bytes]) -> Array:
    """Return the rows of an input, one for each file. Raises `InvalidRequest`, with the input and the row."""
    dtype = numpy.dtype(_NUMPY[spec.datatype])
    rows = numpy.empty((len(files), *spec.shape), dtype)
    if rows.nbytes > MAX_ROW_BYTES:
        raise InvalidRequest(
            f"Input {spec.name!r}: {len(files)} pictures take {rows.nbytes >> 20} MiB, and may take {MAX_ROW_BYTES >> 20}.",
            field=spec.name,
        )
    for at, data in enumerate(files):
        stop_if_cancelled()
        rows[at] = _row(spec, read_picture(data, f"{spec.name}[{at}]"))
    return Array(spec.datatype, rows.shape, rows.tobytes())


def _row(spec: PictureSpec, picture: Any) -> Any:
    from PIL import Image

    short, (width, height) = spec.resize, picture.size
    # The other side is rounded down, as in torchvision.
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    resampling = getattr(Image.Resampling, spec.interpolation.upper())
    scaled = picture.resize(size, resampling)
    rows, columns = spec.crop
    top, left = round((size[1] - rows) / 2), round((size[0] - columns) / 2)
    cut = scaled.crop((left, top, left + columns, top + rows))
    pixels = numpy.asarray(cut.convert("L") if spec.channels == 1 else cut).reshape(rows, columns, spec.channels)
    if spec.datatype != "UINT8":
        pixels = pixels.astype(numpy.float32) / numpy.float32(255)
        if spec.mean:
            pixels = pixels - numpy.asarray(spec.mean, numpy.float32)
        if spec.std:
            pixels = pixels / numpy.asarray(spec.std, numpy.float32)
    return pixels.transpose(2, 0, 1) if spec.channels_first else pixels


def picture_file(element: bytes, field: str) -> bytes:
    """Return the file of an element of a BYTES tensor: itself, or what it has as base64, also as a data URL."""
    if not element.isascii() or b"\0" in element:
        return element
    text = element.partition(b",")[2] if element.startswith(b"data:") else element
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{field} is neither a picture nor base64: {error}.", field=field) from error
