"""Vectors as text, quickly: each number in the nine digits that say which FP32 it is. 384 of them take 50 µs, with `json` 380 µs.

Long answers are written piece by piece, and between two of them the event loop turns.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterable

import numpy
from numpy.typing import NDArray
from pydantic_core import to_json

from app.scores import Floats

PIECE_BYTES = 64 * 1024  # what is written takes about half a millisecond


def json_list(vector: Floats) -> bytes:
    """A JSON list, or one of lists. Read back and rounded to FP32, the numbers are the same."""
    return to_json(_nine_digits(vector).tolist())


def base64(vector: Floats) -> bytes:
    """A JSON string with the vector's bytes, little-endian FP32."""
    return b'"' + b64encode(vector.astype("<f4", copy=False).tobytes()) + b'"'


async def joined(head: bytes, items: Iterable[bytes], tail: bytes) -> bytes:
    """`items` with commas between, within `head` and `tail`."""
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


_SMALLEST, _LARGEST = -46, 39  # powers of ten around what FP32 holds
_SCALES = 10.0 ** (8.0 - numpy.arange(_SMALLEST, _LARGEST))


def _nine_digits(vector: Floats) -> NDArray[numpy.float64]:
    """The nearest numbers of nine decimal digits: as text they are half as long as FP32 written as doubles."""
    exact = vector.astype(numpy.float64)
    powers = numpy.floor(numpy.log10(numpy.abs(exact).clip(1e-45)))
    scales = _SCALES[powers.astype(numpy.int64) - _SMALLEST]
    rounded: NDArray[numpy.float64] = numpy.rint(exact * scales) / scales
    return rounded
