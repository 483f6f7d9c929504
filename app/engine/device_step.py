"""The words of a step: all that a device must be told of one, in one block of int64 that is copied there at once.

What the words say is worked out here, on the host; how they travel, and what the device makes of them, is the runner's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.batch import RowToPick, Span
from app.engine.sampling_rows import LEAST_TEMPERATURE
from app.engine.sequence import Sequence
from app.engine.uniform import stream, uniforms
from app.kernels.paged import PAGE_TOKENS


class Way(Enum):
    """How the tokens of a step are picked."""

    GREEDY = "greedy"  # on the device, the likeliest
    DRAWN = "drawn"  # on the device, from all tokens, each row at its own temperature
    FILTERED = "filtered"  # on the device, each row from as few as its top_k, top_p and min_p leave
    LOGITS = "logits"  # by the sampler, from whole logits: penalties, beams, log-probabilities


def way_of(rows: Items[RowToPick], draws: bool) -> Way:
    """One way for all rows of a step: the least that is enough for each of them. `draws`: whether the device can."""
    params = [row.sequence.params for row in rows]
    if any(one.has_penalties or one.beam_width > 1 or one.logprobs is not None for one in params):
        return Way.LOGITS
    if not draws and not all(one.greedy for one in params):
        return Way.LOGITS
    if any(one.top_k > 0 or one.top_p < 1.0 or one.min_p > 0.0 for one in params if not one.greedy):
        return Way.FILTERED
    return Way.GREEDY if all(one.greedy for one in params) else Way.DRAWN


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tokens, sequences and picked rows a step has, with those that only fill a bucket."""

    tokens: int
    sequences: int
    picks: int

    @classmethod
    def of_bucket(cls, bucket: int) -> Sizes:
        return cls(bucket, bucket, bucket)

    @classmethod
    def of(cls, spans: Items[Span], picks: int) -> Sizes:
        """At least one row of logits: who picks nothing leaves no product without rows."""
        return cls(sum(span.num_tokens for span in spans), len(spans), max(1, picks))


Column = NDArray[Any]
View = TypeVar("View", Tensor, Column)


@dataclass(frozen=True, slots=True)
class StepViews(Generic[View]):
    """The words by name, as views of a block: arrays on the host to be written, tensors on the device to be read.

    [tokens] int64: `token_ids`, `sources` (where in the device's buffer each token's id stands), `positions`, `written` (rows of the KV
    cache). [picks]: `logit_rows` int64 (which tokens pick), `uniforms`, `top_p` fp64, `top_k` int32, `temperature`, `min_p` fp32.
    int32 [sequences]: `slots`, `lengths`, and [sequences + 1]: `starts`.
    """

    token_ids: View
    sources: View
    positions: View
    written: View
    logit_rows: View
    uniforms: View
    slots: View
    lengths: View
    starts: View
    top_k: View
    temperature: View
    top_p: View
    min_p: View


def _fields(sizes: Sizes) -> Mapping[str, tuple[int, torch.dtype]]:
    """In the order in which they lie; each begins at a word of its own."""
    tokens, sequences, picks = sizes.tokens, sizes.sequences, sizes.picks
    return {
        "token_ids": (tokens, torch.int64),
        "sources": (tokens, torch.int64),
        "positions": (tokens, torch.int64),
        "written": (tokens, torch.int64),
        "logit_rows": (picks, torch.int64),
        "uniforms": (picks, torch.float64),
        "top_p": (picks, torch.float64),
        "slots": (sequences, torch.int32),
        "lengths": (sequences, torch.int32),
        "starts": (sequences + 1, torch.int32),
        "top_k": (picks, torch.int32),
        "temperature": (picks, torch.float32),
        "min_p": (picks, torch.float32),
    }


def num_words(sizes: Sizes) -> int:
    return sum(_words(count, dtype) for count, dtype in _fields(sizes).values())


def views_of(block: Tensor, sizes: Sizes, draws: bool = True) -> StepViews[Tensor]:
    """Of the first words of block [words] int64. Where a device does not draw it has no float64 either: such words stay as they are."""
    views, first = {}, 0
    for name, (count, dtype) in _fields(sizes).items():
        end = first + _words(count, dtype)
        plain = dtype is torch.float64 and not draws
        views[name] = block[first:end] if plain else block[first:end].view(dtype)[:count]
        first = end
    return StepViews(**views)


def arrays_of(block: Tensor, sizes: Sizes) -> StepViews[Column]:
    """The same of a block on the host."""
    views = views_of(block, sizes)
    return StepViews(**{name: getattr(views, name).numpy() for name in _fields(sizes)})


def _words(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // 8)


def update_views(block: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Behind the step's words: which cells of the page tables [count] int64 change, to which pages [count] int32."""
    return block[:count], block[count : update_words(count)].view(torch.int32)[:count]


def update_words(count: int) -> int:
    return count + _words(count, torch.int32)


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on the device: the block begins at `block` of its buffer; `nobody` is the slot of what only fills a bucket."""

    block: int
    nobody: int


_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """How each sequence draws: as `StepViews` has it, and the stream of its numbers."""

    streams: Column
    top_k: Column
    temperature: Column
    top_p: Column
    min_p: Column

    @classmethod
    def of(cls, sequences: Items[Sequence]) -> Draws:
        params = [sequence.params for sequence in sequences]
        return cls(
            numpy.array([stream(sequence.seed) for sequence in sequences], numpy.uint64),
            numpy.array([min(one.top_k, _MOST_INT32) for one in params], numpy.int32),
            numpy.array([0.0 if one.greedy else max(one.temperature, LEAST_TEMPERATURE) for one in params], numpy.float32),
            numpy.array([one.top_p for one in params], numpy.float64),
            numpy.array([one.min_p for one in params], numpy.float32),
        )

    def fill(self, views: StepViews[Column], positions: Column) -> None:
        """Writes how the tokens at these positions are drawn. Rows that fill a bucket are greedy."""
        write(views.uniforms, uniforms(self.streams, positions), 0.0)
        write(views.top_k, self.top_k, 0)
        write(views.temperature, self.temperature, 0.0)
        write(views.top_p, self.top_p, 1.0)
        write(views.min_p, self.min_p, 0.0)


def fill(views: StepViews[Column], spans: Items[Span], written: Items[int], places: Places) -> None:
    """Writes what is to be computed, of tokens that the host knows.

    Rows beyond the spans fill a bucket: no context, and written where nobody reads.
    """
    views.sources[:] = numpy.arange(places.block, places.block + len(views.sources))  # the ids are the block's first words
    token_ids: list[int] = []
    positions: list[int] = []
    slots, lengths, starts = [], [], [0]
    for span in spans:
        token_ids += span.sequence.token_ids[span.start : span.end]
        positions += range(span.start, span.end)
        slots.append(span.slot)
        lengths.append(span.end)
        assert len(token_ids) == starts[-1] + span.num_tokens, "a token that is being picked is told of by a course"
        starts.append(len(token_ids))
    missing = len(views.token_ids) - len(token_ids)
    scrap = [row % PAGE_TOKENS for row in range(missing)]
    starts += range(len(token_ids) + 1, len(token_ids) + 1 + len(views.slots) - len(slots))
    write(views.token_ids, token_ids, 0)
    write(views.positions, positions, 0)
    write(views.written, [*written, *scrap])
    write(views.slots, slots, places.nobody)
    write(views.lengths, lengths, 0)
    write(views.starts, starts)


def fill_picks(views: StepViews[Column], spans: Items[Span], rows: Items[RowToPick], way: Way) -> None:
    """Writes which tokens pick, and how they draw. Rows that fill a bucket are greedy."""
    if len(views.logit_rows) != len(views.token_ids):
        write(views.logit_rows, _picking_rows(spans) or [len(views.token_ids) - 1])
    if way not in (Way.DRAWN, Way.FILTERED):
        return
    positions = numpy.array([row.position for row in rows], numpy.int64)
    Draws.of([row.sequence for row in rows]).fill(views, positions)


def _picking_rows(spans: Items[Span]) -> list[int]:
    rows: list[int] = []
    end = 0
    for span in spans:
        end += span.num_tokens
        rows += range(end - span.num_picks, end)
    return rows


def write(view: Column, values: list[int] | list[float] | Column, rest: float | None = None) -> None:
    """These values, and `rest` in what is left of the view (None: nothing is)."""
    assert len(values) == len(view) or rest is not None, "one word for each row"
    view[: len(values)] = values
    if rest is not None:
        view[len(values) :] = rest
