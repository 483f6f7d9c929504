"""Inputs of a device step, packed into one int64 block that is sent to the device in one copy.

This module computes the inputs on the host. The runner sends them and computes the step.
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
    """The method by which the tokens of a step are sampled."""

    GREEDY = "greedy"  # most likely token, on the device
    DRAWN = "drawn"  # any token, with one temperature per row, on the device
    FILTERED = "filtered"  # a token that the row's top_k, top_p and min_p leave, on the device
    LOGITS = "logits"  # the sampler needs full logits: penalties, beams, log-probabilities


def way_of(rows: Items[RowToPick], draws: bool) -> Way:
    """Return the simplest sampling mode that is sufficient for all rows of a step.

    `samples_randomly` is True if the device can sample randomly.
    """
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
    """Numbers of tokens, sequences and sampled rows of a step, padding included."""

    tokens: int
    sequences: int
    picks: int

    @classmethod
    def of_bucket(cls, bucket: int) -> Sizes:
        """Return the sizes of a step that decodes one token of each sequence, padded to this bucket."""
        return cls(bucket, bucket, bucket)

    @classmethod
    def of(cls, spans: Items[Span], picks: int) -> Sizes:
        """Return the sizes of these spans.

        There is at least one row of logits: a step that samples nothing must not multiply a matrix of zero rows.
        """
        return cls(sum(span.num_tokens for span in spans), len(spans), max(1, picks))


Column = NDArray[Any]
View = TypeVar("View", Tensor, Column)


@dataclass(frozen=True, slots=True)
class StepViews(Generic[View]):
    """The inputs of a step by name, as views of one block.

    The views are arrays on the host, which are written, or tensors on the device, which are read.

    - [tokens] int64: `token_ids`, `sources` (index of each token's id in the device buffer), `positions`,
      `kv_rows` (rows of the KV cache to write).
    - [samples]: `logit_rows` int64 (tokens whose logits are sampled), `uniforms` and `top_p` fp64, `top_k` int32,
      `temperature` and `min_p` fp32.
    - int32: `slots` and `lengths` [sequences], `starts` [sequences + 1].
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
    """Return the length and dtype of each input in the order of the block.

    Each begins at a multiple of 8 bytes.
    """
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
    """Return the length of the block of a step of these sizes, in int64 values."""
    return sum(_words(count, dtype) for count, dtype in _fields(sizes).values())


def views_of(block: Tensor, sizes: Sizes, draws: bool = True) -> StepViews[Tensor]:
    """Return views of the first part of `block`, an int64 tensor.

    A device that does not sample randomly may not support float64 either. For it, float64 inputs stay int64 views.
    """
    views, first = {}, 0
    for name, (count, dtype) in _fields(sizes).items():
        end = first + _words(count, dtype)
        plain = dtype is torch.float64 and not draws
        views[name] = block[first:end] if plain else block[first:end].view(dtype)[:count]
        first = end
    return StepViews(**views)


def arrays_of(block: Tensor, sizes: Sizes) -> StepViews[Column]:
    """Return numpy views of the first part of a block on the host."""
    views = views_of(block, sizes)
    return StepViews(**{name: getattr(views, name).numpy() for name in _fields(sizes)})


def _words(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // 8)


def update_views(block: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the views of page table updates: cells [count] int64 and pages [count] int32.

    `block` is the part of the input block that follows the step's inputs.
    """
    return block[:count], block[count : update_words(count)].view(torch.int32)[:count]


def update_words(count: int) -> int:
    """Return the length of the update views, in int64 values."""
    return count + _words(count, torch.int32)


@dataclass(frozen=True, slots=True)
class Places:
    """Constants of the device memory layout.

    `block_start` is the index at which the input block begins in the device buffer. `padding_slot` is the slot of
    padding rows.
    """

    block: int
    nobody: int


_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters and random stream of each sequence, as numpy arrays with the dtypes of `StepViews`."""

    streams: Column
    top_k: Column
    temperature: Column
    top_p: Column
    min_p: Column

    @classmethod
    def of(cls, sequences: Items[Sequence]) -> Draws:
        """Collect the parameters of these sequences."""
        params = [sequence.params for sequence in sequences]
        return cls(
            numpy.array([stream(sequence.seed) for sequence in sequences], numpy.uint64),
            numpy.array([min(one.top_k, _MOST_INT32) for one in params], numpy.int32),
            numpy.array([0.0 if one.greedy else max(one.temperature, LEAST_TEMPERATURE) for one in params], numpy.float32),
            numpy.array([one.top_p for one in params], numpy.float64),
            numpy.array([one.min_p for one in params], numpy.float32),
        )

    def fill(self, views: StepViews[Column], positions: Column) -> None:
        """Write the sampling parameters for the tokens at these positions. Padding rows are greedy."""
        write(views.uniforms, uniforms(self.streams, positions), 0.0)
        write(views.top_k, self.top_k, 0)
        write(views.temperature, self.temperature, 0.0)
        write(views.top_p, self.top_p, 1.0)
        write(views.min_p, self.min_p, 0.0)


def fill(views: StepViews[Column], spans: Items[Span], written: Items[int], places: Places) -> None:
    """Write the inputs of spans whose tokens the host knows.

    Rows beyond the spans are padding: they have no context and write to the padding page.
    """
    # the token ids are the first part of the block
    views.sources[:] = numpy.arange(places.block, places.block + len(views.sources))
    token_ids: list[int] = []
    positions: list[int] = []
    slots, lengths, starts = [], [], [0]
    for span in spans:
        token_ids += span.sequence.token_ids[span.start : span.end]
        positions += range(span.start, span.end)
        slots.append(span.slot)
        lengths.append(span.end)
        assert len(token_ids) == starts[-1] + span.num_tokens, (
            "the host must know all tokens of the spans; use DecodeInputs for a step launched ahead"
        )
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
    """Write the tokens whose logits are sampled, and the sampling parameters. Padding rows are greedy."""
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
    """Write these values to a view, and `rest` to the remaining elements (None: there are none)."""
    assert len(values) == len(view) or rest is not None, "one value for each row"
    view[: len(values)] = values
    if rest is not None:
        view[len(values) :] = rest
