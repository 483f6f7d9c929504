"""Fast conversion of FP32 vectors to JSON, with the nine digits that identify an FP32 number.

384 numbers take 50 µs; the `json` module takes 380 µs. Long responses are written in parts, between which the
event loop runs other tasks.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterable

import numpy
from numpy.typing import NDArray
from pydantic_core import to_json

from app.scores import Floats

PIECE_BYTES = 64 * 1024  # written in about half a millisecond


def json_list(vector: Floats) -> bytes:
    """Return a JSON list, nested for a matrix. Parsing it and rounding to FP32 gives the same numbers."""
    return to_json(_nine_digits(vector).tolist())


def base64(vector: Floats) -> bytes:
    """Return a JSON string with the base64 of the vector's bytes, little-endian FP32."""
    return b'"' + b64encode(vector.astype("<f4", copy=False).tobytes()) + b'"'


async def joined(head: bytes, items: Iterable[bytes], tail: bytes) -> bytes:
    """Return `head`, the items separated by commas, and `tail`.

    The event loop runs other tasks after each `CHUNK_BYTES`.
    """
    parts, held = [head], 0
    for number, item in enumerate(items):
        if number:
            parts.append(b",")
        parts.append(item)
        held += len(item)
        if held > PIECE_BYTES:
            held = 0
            await asyncio.sleep(0)
    parts.append(tail)
    return b"".join(parts)


_SMALLEST, _LARGEST = -46, 39  # powers of ten just outside the range of FP32
_SCALES = 10.0 ** (8.0 - numpy.arange(_SMALLEST, _LARGEST))


def _nine_digits(vector: Floats) -> NDArray[numpy.float64]:
    """Return the nearest numbers with nine decimal digits.

    As text they are half as long as FP32 values written as doubles.
    """
    exact = vector.astype(numpy.float64)
    powers = numpy.floor(numpy.log10(numpy.abs(exact).clip(1e-45)))
    scales = _SCALES[powers.astype(numpy.int64) - _SMALLEST]
    rounded: NDArray[numpy.float64] = numpy.rint(exact * scales) / scales
    return rounded
