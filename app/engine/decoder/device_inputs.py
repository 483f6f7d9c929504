"""Inputs of a device step, packed into one int64 block that is sent to the device in one copy.

`DecodeInputs` derives the inputs of decode steps that run one after another from those of the previous step: most
columns stay the same, the others increase by one. `fill_step` writes the inputs of other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.sampling.rows import COLUMNS, filters_of, stream_start, uniform_numbers
from app.engine.scheduler.batch import LogitRow, ScheduledSpan, Sequence
from app.messages import FIRST_VECTOR_ID
from armature_kernels.attention.paged import PAGE_TOKENS

ColumnArray = NDArray[Any]
View = TypeVar("View", Tensor, ColumnArray)
# returns the rows of the KV cache that spans write, and allocates the pages that they begin
KvRowsOfSpans = Callable[[Items[ScheduledSpan]], list[int]]


class SamplingMode(Enum):
    GREEDY = "greedy"  # most likely token, on the device
    RANDOM = "drawn"  # any token, with one temperature per row, on the device
    FILTERED = "filtered"  # a token that the row's top_k, top_p and min_p leave, on the device
    LOGITS = "logits"  # the sampler needs full logits: penalties, beams, log-probabilities


def sampling_mode(rows: Items[LogitRow], samples_randomly: bool) -> SamplingMode:
    """Return the simplest sampling mode that is sufficient for all rows of a step."""
    params = [row.sequence.params for row in rows]
    if any(one.changes_scores or one.beam_width > 1 or one.logprobs is not None for one in params):
        return SamplingMode.LOGITS
    if any(row.sequence.restricts_tokens for row in rows):
        return SamplingMode.LOGITS
    if not samples_randomly and not all(one.greedy for one in params):
        return SamplingMode.LOGITS
    drawn = [one for one in params if not one.greedy]
    if not drawn:
        return SamplingMode.GREEDY
    return SamplingMode.FILTERED if filters_of(drawn) else SamplingMode.RANDOM


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Numbers of tokens, sequences and sampled rows of a step, padding included."""

    tokens: int
    sequences: int
    samples: int

    @classmethod
    def of_bucket(cls, bucket: int) -> StepSizes:
        return cls(bucket, bucket, bucket)

    @classmethod
    def of(cls, spans: Items[ScheduledSpan], samples: int) -> StepSizes:
        """Return the sizes of these spans, with at least one row of logits: a product of zero rows is an error."""
        return cls(sum(span.num_tokens for span in spans), len(spans), max(1, samples))


@dataclass(frozen=True, slots=True)
class StepViews(Generic[View]):
    """The inputs of a step by name, as views of one block.

    The views are arrays on the host, which are written, or tensors on the device, which are read.

    - [tokens] int64: `token_ids`, `sources` (index of each token's id in the device buffer), `positions`,
      `kv_rows` (rows of the KV cache to write).
    - [samples]: `logit_rows` int64 (tokens whose logits are sampled), `uniforms` fp64, and the `columns` of the
      sampling parameters by name, each with its dtype.
    - int32: `slots` and `lengths` [sequences], `starts` [sequences + 1].
    """

    token_ids: View
    sources: View
    positions: View
    kv_rows: View
    logit_rows: View
    uniforms: View
    slots: View
    lengths: View
    starts: View
    columns: Mapping[str, View]

    @classmethod
    def of(cls, views: Mapping[str, View]) -> StepViews[View]:
        columns = {column.name: views[column.name] for column in COLUMNS}
        return cls(**{name: view for name, view in views.items() if name not in columns}, columns=columns)


def _fields(sizes: StepSizes) -> Mapping[str, tuple[int, torch.dtype]]:
    """Return the length and dtype of each input in the order of the block, each at a multiple of 8 bytes."""
    tokens, sequences, samples = sizes.tokens, sizes.sequences, sizes.samples
    return {
        "token_ids": (tokens, torch.int64),
        "sources": (tokens, torch.int64),
        "positions": (tokens, torch.int64),
        "kv_rows": (tokens, torch.int64),
        "logit_rows": (samples, torch.int64),
        "uniforms": (samples, torch.float64),
        "slots": (sequences, torch.int32),
        "lengths": (sequences, torch.int32),
        "starts": (sequences + 1, torch.int32),
        **{column.name: (samples, column.dtype) for column in COLUMNS},
    }


def block_size(sizes: StepSizes) -> int:
    return sum(_int64_count(count, dtype) for count, dtype in _fields(sizes).values())


def block_views(block: Tensor, sizes: StepSizes, samples_randomly: bool = True) -> StepViews[Tensor]:
    """Return views of the first part of `block`; float64 inputs stay int64 without random sampling."""
    return StepViews.of(_named_views(block, sizes, samples_randomly))


def block_arrays(block: Tensor, sizes: StepSizes) -> StepViews[ColumnArray]:
    return StepViews.of({name: view.numpy() for name, view in _named_views(block, sizes).items()})


def _named_views(block: Tensor, sizes: StepSizes, samples_randomly: bool = True) -> dict[str, Tensor]:
    views, first = {}, 0
    for name, (count, dtype) in _fields(sizes).items():
        end = first + _int64_count(count, dtype)
        plain = dtype is torch.float64 and not samples_randomly
        views[name] = block[first:end] if plain else block[first:end].view(dtype)[:count]
        first = end
    return views


def _int64_count(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // 8)


def table_update_views(block: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the views of page table updates: cells [count] int64 and pages [count] int32."""
    return block[:count], block[count : table_update_size(count)].view(torch.int32)[:count]


def table_update_size(count: int) -> int:
    return count + _int64_count(count, torch.int32)


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Layout of the device memory: index of the input block in the device buffer, and slot of padding rows."""

    block_start: int
    padding_slot: int


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Random stream and sampling parameters of each sequence, as numpy arrays with the dtypes of `StepViews`."""

    streams: ColumnArray
    values: Mapping[str, ColumnArray]

    @classmethod
    def of(cls, sequences: Items[Sequence]) -> SamplingColumns:
        params = [sequence.params for sequence in sequences]
        return cls(
            numpy.array([stream_start(sequence.seed) for sequence in sequences], numpy.uint64),
            {column.name: numpy.array(column.values(params), column.array_dtype) for column in COLUMNS},
        )

    def fill(self, views: StepViews[ColumnArray], positions: ColumnArray) -> None:
        """Write the sampling parameters for the tokens at these positions. Padding rows get neutral values."""
        write_column(views.uniforms, uniform_numbers(self.streams, positions), 0.0)
        for column in COLUMNS:
            write_column(views.columns[column.name], self.values[column.name], column.neutral)


def fill_step(
    views: StepViews[ColumnArray], spans: Items[ScheduledSpan], kv_rows: Items[int], layout: DeviceLayout
) -> None:
    """Write the inputs of spans whose tokens the host knows. The other rows write to the padding page."""
    # the token ids are the first part of the block
    views.sources[:] = numpy.arange(layout.block_start, layout.block_start + len(views.sources))
    token_ids: list[int] = []
    positions: list[int] = []
    slots, lengths, starts = [], [], [0]
    for span in spans:
        ids = span.sequence.token_ids[span.start : span.end]
        # Vectors come in place of the embedding of these.
        token_ids += [token if token < FIRST_VECTOR_ID else 0 for token in ids] if span.sequence.vectors else ids
        positions += range(span.start, span.end)
        slots.append(span.slot)
        lengths.append(span.end)
        assert len(token_ids) == starts[-1] + span.num_tokens, (
            "the host must know all tokens of the spans; use DecodeInputs for a step launched ahead"
        )
        starts.append(len(token_ids))
    missing = len(views.token_ids) - len(token_ids)
    padding_rows = [row % PAGE_TOKENS for row in range(missing)]
    starts += range(len(token_ids) + 1, len(token_ids) + 1 + len(views.slots) - len(slots))
    write_column(views.token_ids, token_ids, 0)
    write_column(views.positions, positions, 0)
    write_column(views.kv_rows, [*kv_rows, *padding_rows])
    write_column(views.slots, slots, layout.padding_slot)
    write_column(views.lengths, lengths, 0)
    write_column(views.starts, starts)


def fill_sampling(
    views: StepViews[ColumnArray], spans: Items[ScheduledSpan], rows: Items[LogitRow], mode: SamplingMode
) -> None:
    """Write the tokens whose logits are sampled, and the sampling parameters. Padding rows are greedy."""
    if len(views.logit_rows) != len(views.token_ids):
        write_column(views.logit_rows, _sampled_rows(spans) or [len(views.token_ids) - 1])
    if mode not in (SamplingMode.RANDOM, SamplingMode.FILTERED):
        return
    positions = numpy.array([row.position for row in rows], numpy.int64)
    SamplingColumns.of([row.sequence for row in rows]).fill(views, positions)


def _sampled_rows(spans: Items[ScheduledSpan]) -> list[int]:
    rows: list[int] = []
    end = 0
    for span in spans:
        end += span.num_tokens
        rows += range(end - span.num_samples, end)
    return rows


def write_column(view: ColumnArray, values: list[int] | list[float] | ColumnArray, rest: float | None = None) -> None:
    """Write these values to a view, and `rest` to the remaining elements (None: there are none)."""
    assert len(values) == len(view) or rest is not None, "one value for each row"
    view[: len(values)] = values
    if rest is not None:
        view[len(values) :] = rest


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a step that decodes one token of each sequence.

    `positions` are computed into the rows `kv_rows` of the KV cache. `rows` gives, for each sequence, the row of the
    previous step that samples its token.
    """

    sequences: list[Sequence]
    mode: SamplingMode
    rows: ColumnArray
    slots: ColumnArray
    positions: ColumnArray
    kv_rows: ColumnArray
    draws: SamplingColumns | None

    @classmethod
    def after_step(
        cls, before: Items[ScheduledSpan], spans: Items[ScheduledSpan], mode: SamplingMode, kv_rows_of: KvRowsOfSpans
    ) -> DecodeInputs:
        """Build the inputs of the first step that is launched ahead, after a step `before` of any kind."""
        sequences = [span.sequence for span in spans]
        rows = {id(span.sequence): row for row, span in enumerate(before)}
        return cls(
            sequences,
            mode,
            numpy.array([rows[id(sequence)] for sequence in sequences]),
            numpy.array([span.slot for span in spans], numpy.int32),
            numpy.array([span.start for span in spans]),
            numpy.array(kv_rows_of(spans)),
            SamplingColumns.of(sequences) if mode in (SamplingMode.RANDOM, SamplingMode.FILTERED) else None,
        )

    def next_step(self, spans: Items[ScheduledSpan], kv_rows_of: KvRowsOfSpans) -> DecodeInputs:
        positions, rows = self.positions + 1, self.kv_rows + 1
        begun = numpy.flatnonzero(positions % PAGE_TOKENS == 0)
        if len(begun):
            rows[begun] = kv_rows_of([spans[at] for at in begun.tolist()])
        return DecodeInputs(self.sequences, self.mode, numpy.arange(len(rows)), self.slots, positions, rows, self.draws)

    def fill(self, views: StepViews[ColumnArray], layout: DeviceLayout) -> None:
        """Write all inputs of the step into the views, with padding rows as in `fill_step`."""
        rows = len(views.slots)
        views.token_ids[:] = 0
        write_column(views.sources, self.rows, layout.block_start)
        write_column(views.positions, self.positions, 0)
        write_column(views.kv_rows, self.kv_rows, 0)
        views.kv_rows[len(self.kv_rows) :] = numpy.arange(rows - len(self.kv_rows)) % PAGE_TOKENS
        write_column(views.slots, self.slots, layout.padding_slot)
        write_column(views.lengths, self.positions + 1, 0)
        views.starts[:] = numpy.arange(rows + 1)
        if self.draws is not None:
            self.draws.fill(views, self.positions + 1)
