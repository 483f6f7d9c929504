"""Conversion of an encoder's vectors and logits to scores, in FP32."""

from __future__ import annotations

from typing import Literal

import numpy
from numpy.typing import NDArray

from app.messages import Array

Floats = NDArray[numpy.float32]
Meaning = Literal["softmax", "sigmoid", "identity"]


def floats(array: Array) -> Floats:
    """Return an FP32 array as a numpy array of its shape, without a copy."""
    return numpy.frombuffer(array.data, dtype="<f4").reshape(array.shape)


def scores(logits: Array, meaning: Meaning) -> Array:
    """Return scores for logits [texts, labels], in the same shape.

    With `softmax` each row sums to 1. With `sigmoid` each label's score is in [0, 1]. With `identity` the logits
    are returned.
    """
    return Array("FP32", logits.shape, of_logits(floats(logits), meaning).astype("<f4").tobytes())


def of_logits(logits: Floats, meaning: Meaning) -> Floats:
    """Return scores for logits [texts, labels] given as a numpy array; see `scores`."""
    if meaning == "identity":
        return logits
    if meaning == "sigmoid":
        shares: Floats = 1 / (1 + numpy.exp(-logits.clip(-80, 80)))
        return shares
    powers: Floats = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    of_one: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return of_one


def cosines(queries: Floats, documents: Floats) -> Floats:
    """Return the cosine similarities [queries, documents] of vectors [.., size], which need not have unit length.

    A zero vector has similarity 0 to every other.
    """
    alike: Floats = unit(queries) @ unit(documents).T
    return alike


def unit(vectors: Floats) -> Floats:
    """Return the vectors [.., size] scaled to length 1."""
    lengths = numpy.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    turned: Floats = vectors / lengths.clip(1e-12)
    return turned
