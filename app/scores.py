"""What the numbers of an encoder's answer mean to a person: vectors and logits as scores. FP32 throughout."""

from __future__ import annotations

from typing import Literal

import numpy
from numpy.typing import NDArray

from app.messages import Array

Floats = NDArray[numpy.float32]
Meaning = Literal["softmax", "sigmoid", "identity"]


def floats(array: Array) -> Floats:
    """An FP32 array in its shape; nothing is copied."""
    return numpy.frombuffer(array.data, dtype="<f4").reshape(array.shape)


def scores(logits: Array, meaning: Meaning) -> Array:
    """Logits [texts, labels] as scores of the same shape: a row's sum is 1 (softmax), or each label's own is in [0, 1] (sigmoid)."""
    return Array("FP32", logits.shape, of_logits(floats(logits), meaning).astype("<f4").tobytes())


def of_logits(logits: Floats, meaning: Meaning) -> Floats:
    """The same on numbers."""
    if meaning == "identity":
        return logits
    if meaning == "sigmoid":
        shares: Floats = 1 / (1 + numpy.exp(-logits.clip(-80, 80)))
        return shares
    powers: Floats = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    of_one: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return of_one


def cosines(queries: Floats, documents: Floats) -> Floats:
    """[queries, documents] of vectors [.., size] that need not have unit length; a vector of length 0 is like none."""
    alike: Floats = unit(queries) @ unit(documents).T
    return alike


def unit(vectors: Floats) -> Floats:
    """Vectors of length 1."""
    lengths = numpy.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    turned: Floats = vectors / lengths.clip(1e-12)
    return turned
