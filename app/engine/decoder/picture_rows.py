"""What a step computes of the pictures in its prompts: their vectors, the positions of tokens, and blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.scheduler.batch import ScheduledSpan
from app.messages import PromptVectors
from armature_kernels.attention.attention import KvSegment
from armature_kernels.attention.context import TokenVectors
from armature_kernels.attention.flash import BlockRow


@dataclass(frozen=True, slots=True)
class StepPictures:
    """The pictures of a step: vectors on the host, and the tokens that see each other."""

    vectors: TokenVectors | None = None
    blocks: tuple[BlockRow, ...] = ()


NO_PICTURES = StepPictures()


def pictures_of(
    spans: Sequence[ScheduledSpan], segments_of: Callable[[ScheduledSpan], tuple[KvSegment, ...]]
) -> StepPictures:
    """Return the pictures of a step. `segments_of` gives the context of a span, which has its rows in the KV cache."""
    found = StepPictures(vectors_of(spans), tuple(block_rows(spans, segments_of)))
    return NO_PICTURES if found.vectors is None and not found.blocks else found


def vectors_of(spans: Sequence[ScheduledSpan]) -> TokenVectors | None:
    """Return the vectors at positions that the spans compute; None if there are none."""
    found = [(span, part, first) for span, first in _with_first_rows(spans) for part in _computed_parts(span)]
    if not found:
        return None
    rows: list[int] = []
    values: list[Tensor] = []
    for span, part, first in found:
        start, end = max(part.start, span.start), min(part.end, span.end)
        rows += range(first + start - span.start, first + end - span.start)
        held = numpy.frombuffer(part.data, dtype="<f4").reshape(part.num_rows, -1)
        values.append(torch.tensor(held[start - part.start : end - part.start]))
    axes = None
    if any(part.places for _, part, _ in found):
        axes = torch.tensor(numpy.concatenate([_axes(span) for span in spans], 1))
    return TokenVectors(torch.tensor(rows), torch.cat(values), axes)


def text_positions(span: ScheduledSpan) -> range:
    """Return the positions of a span's tokens. Those of pictures may have others (`TokenVectors.axes`)."""
    shift = _shift(span.sequence.vectors, span.start)
    return range(span.start + shift, span.end + shift)


def _axes(span: ScheduledSpan) -> NDArray[numpy.int64]:
    """Return the positions of a span's tokens in three axes, int64 [3, tokens]."""
    vectors = span.sequence.vectors
    found = numpy.empty((3, span.num_tokens), numpy.int64)
    found[:] = numpy.arange(span.start, span.end)
    for part in vectors:
        if part.places and part.start < span.end:
            begin = part.start + _shift(vectors, part.start)
            low, high = max(part.start, span.start), min(part.end, span.end)
            if low < high:
                own = numpy.frombuffer(part.places, dtype="<i8").reshape(3, -1)
                found[:, low - span.start : high - span.start] = begin + own[:, low - part.start : high - part.start]
            found[:, max(part.end - span.start, 0) :] += part.shift
    return found


def _shift(vectors: Sequence[PromptVectors], position: int) -> int:
    return sum(part.shift for part in vectors if part.end <= position)


def block_rows(
    spans: Sequence[ScheduledSpan], segments_of: Callable[[ScheduledSpan], tuple[KvSegment, ...]]
) -> list[BlockRow]:
    """Return the parts of the spans in blocks whose tokens see each other."""
    found: list[BlockRow] = []
    for span, first in _with_first_rows(spans):
        for block in dict.fromkeys(part.block for part in span.sequence.vectors if part.block is not None):
            start, end = max(block[0], span.start), min(block[1], span.end)
            if start < end:
                assert end == block[1], "a step computes a block to its end"
                found.append(BlockRow(first + start - span.start, end - start, start, block, segments_of(span)))
    return found


def _with_first_rows(spans: Sequence[ScheduledSpan]) -> Iterator[tuple[ScheduledSpan, int]]:
    first = 0
    for span in spans:
        yield span, first
        first += span.num_tokens


def _computed_parts(span: ScheduledSpan) -> Iterator[PromptVectors]:
    return (part for part in span.sequence.vectors if part.start < span.end and part.end > span.start)
