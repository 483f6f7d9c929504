"""Inputs of a device step, packed into one int64 block that is sent to the device in one copy.

First come the sampling parameters of as many rows as a step may have, so that they are at the same place whatever the
step's size; a greedy step does not send them. `DecodeInputs` derives the inputs of decode steps that run one after
another from those of the previous step: most columns stay the same, the others increase by one. `fill_step` writes the
inputs of other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.decoder.picture_rows import text_positions
from app.engine.sampling.rows import COLUMNS, filters_of, stream_start, uniform_numbers
from app.engine.scheduler.batch import LogitRow, ScheduledSpan, Sequence
from app.messages import FIRST_VECTOR_ID
from armature_kernels.attention.paged import PAGE_TOKENS
from armature_kernels.linear.device_lora import NO_ADAPTER

ColumnArray = NDArray[Any]
View = TypeVar("View", Tensor, ColumnArray)
Fields = Mapping[str, tuple[int, torch.dtype]]
# returns the rows of the KV cache that spans write, and allocates the pages that they begin
KvRowsOfSpans = Callable[[Items[ScheduledSpan]], list[int]]


class SamplingMode(Enum):
    GREEDY = "greedy"  # most likely token
    RANDOM = "drawn"  # any token, with one temperature per row
    FILTERED = "filtered"  # a token that the row's top_k, top_p and min_p leave


def sampling_mode(rows: Items[LogitRow]) -> SamplingMode:
    """Return the simplest sampling mode that is sufficient for all rows of a step."""
    drawn = [row.sequence.params for row in rows if not row.sequence.params.greedy]
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
    def of(cls, pieces: Items[Piece], samples: int) -> StepSizes:
        """Return the sizes of these pieces, with at least one row of logits: a product of zero rows is an error."""
        return cls(sum(len(piece.token_ids) for piece in pieces), len(pieces), max(1, samples))


@dataclass(frozen=True, slots=True)
class StepViews(Generic[View]):
    """The inputs of a step by name, as views of one block.

    The views are arrays on the host, which are written, or tensors on the device, which are read.

    - [tokens] int64: `token_ids`, `sources` (index of each token's id in the device buffer), `positions`,
      `kv_rows` (rows of the KV cache to write).
    - `logit_rows` [samples] int64: tokens whose logits are sampled. `adapters` [tokens] int32: slots of LoRA adapters.
    - int32: `slots` and `lengths` [sequences], `starts` [sequences + 1]. `state_reads`, `state_writes` [sequences] int64: rows
      of the recurrent states of the first sequences.
    """

    token_ids: View
    sources: View
    positions: View
    kv_rows: View
    logit_rows: View
    adapters: View
    slots: View
    lengths: View
    starts: View
    state_reads: View
    state_writes: View


def _fields(sizes: StepSizes) -> Fields:
    """Return the length and dtype of each input in the order of the block, each at a multiple of 8 bytes."""
    tokens, sequences, samples = sizes.tokens, sizes.sequences, sizes.samples
    return {
        "token_ids": (tokens, torch.int64),
        "sources": (tokens, torch.int64),
        "positions": (tokens, torch.int64),
        "kv_rows": (tokens, torch.int64),
        "logit_rows": (samples, torch.int64),
        "adapters": (tokens, torch.int32),
        "slots": (sequences, torch.int32),
        "lengths": (sequences, torch.int32),
        "starts": (sequences + 1, torch.int32),
        "state_reads": (sequences, torch.int64),
        "state_writes": (sequences, torch.int64),
    }


def block_size(sizes: StepSizes) -> int:
    return _size(_fields(sizes))


def block_views(block: Tensor, sizes: StepSizes) -> StepViews[Tensor]:
    """Return views of the first part of `block`, which begins behind the sampling parameters."""
    return StepViews(**_named_views(block, _fields(sizes)))


def block_arrays(block: Tensor, sizes: StepSizes) -> StepViews[ColumnArray]:
    return StepViews(**{name: view.numpy() for name, view in _named_views(block, _fields(sizes)).items()})


@dataclass(frozen=True, slots=True)
class SamplingViews(Generic[View]):
    """The sampling parameters of up to `rows` rows: `uniforms` fp64, and the `columns` by name, each with its dtype."""

    uniforms: View
    columns: Mapping[str, View]


def sampling_size(rows: int) -> int:
    return _size(_sampling_fields(rows))


def sampling_views(block: Tensor, rows: int) -> SamplingViews[Tensor]:
    views = _named_views(block, _sampling_fields(rows))
    return SamplingViews(views.pop("uniforms"), views)


def sampling_arrays(block: Tensor, rows: int) -> SamplingViews[ColumnArray]:
    views = {name: view.numpy() for name, view in _named_views(block, _sampling_fields(rows)).items()}
    return SamplingViews(views.pop("uniforms"), views)


def _sampling_fields(rows: int) -> Fields:
    return {"uniforms": (rows, torch.float64), **{column.name: (rows, column.dtype) for column in COLUMNS}}


def _size(fields: Fields) -> int:
    return sum(_int64_count(count, dtype) for count, dtype in fields.values())


def _named_views(block: Tensor, fields: Fields) -> dict[str, Tensor]:
    views, first = {}, 0
    for name, (count, dtype) in fields.items():
        end = first + _int64_count(count, dtype)
        views[name] = block[first:end].view(dtype)[:count]
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
    """Layout of the device memory: index of a step's token ids in the device buffer, and slot of padding rows.

    `states`: the rows of recurrent states that padding reads and writes.
    """

    block_start: int
    padding_slot: int
    states: tuple[int, int] = (0, 0)


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

    def fill(self, views: SamplingViews[ColumnArray], positions: ColumnArray) -> None:
        """Write the sampling parameters for the tokens at these positions. The other rows get neutral values."""
        write_column(views.uniforms, uniform_numbers(self.streams, positions), 0.0)
        for column in COLUMNS:
            write_column(views.columns[column.name], self.values[column.name], column.neutral)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence at the positions from `start` on, for which attention is computed together.

    The draft tokens of a decode are a piece each, like decodes of different lengths: each sees the ones before it, which
    are the rows before its own (`PagedStep`). `shift` is added to the positions that rotary embeddings have
    (`text_positions`).
    """

    token_ids: list[int]
    start: int
    slot: int
    adapter: int = NO_ADAPTER
    shift: int = 0


def adapter_slot(sequence: Sequence) -> int:
    return NO_ADAPTER if sequence.adapter is None else sequence.adapter.slot


def pieces_of(spans: Items[ScheduledSpan]) -> list[Piece]:
    pieces: list[Piece] = []
    for span in spans:
        token_ids = [*span.sequence.token_ids[span.start : span.known_end], *span.draft_ids]
        if span.sequence.vectors:  # they come in place of the embedding of these tokens
            token_ids = [token if token < FIRST_VECTOR_ID else 0 for token in token_ids]
        assert len(token_ids) == span.num_tokens, (
            "the host must know all tokens of the spans; use DecodeInputs for a step launched ahead"
        )
        of_span = (span.slot, adapter_slot(span.sequence), text_positions(span).start - span.start)
        if span.draft_ids and span.is_decode:
            pieces += [Piece([one], span.start + place, *of_span) for place, one in enumerate(token_ids)]
        else:
            pieces.append(Piece(token_ids, span.start, *of_span))
    return pieces


def num_single(pieces: Items[Piece]) -> int:
    """Return the number of leading pieces of one token, which are computed as decodes."""
    return next((at for at, piece in enumerate(pieces) if len(piece.token_ids) != 1), len(pieces))


def fill_step(
    views: StepViews[ColumnArray],
    pieces: Items[Piece],
    kv_rows: Items[int],
    layout: DeviceLayout,
    decodes: int | None = None,
) -> None:
    """Write the inputs of a step whose tokens the host knows.

    `decodes`: leading rows of the step that are decodes, padding included; further padding is one more sequence after the
    last prompt. Padding has no context, and its keys and values are written to the padding page.
    """
    single = num_single(pieces)
    gap = 0 if decodes is None else decodes - single
    token_ids = [one for piece in pieces for one in piece.token_ids]
    num_tokens, tokens = gap + len(token_ids), len(views.token_ids)
    assert num_tokens == tokens or len(views.slots) > gap + len(pieces), "padding needs a sequence"
    # the token ids are the first part of the block
    views.sources[:] = numpy.arange(layout.block_start, layout.block_start + tokens)
    positions = [piece.start + piece.shift + at for piece in pieces for at in range(len(piece.token_ids))]
    _write_around(views.token_ids, token_ids, single, gap, 0)
    _write_around(views.positions, positions, single, gap, 0)
    views.kv_rows[:] = numpy.arange(tokens) % PAGE_TOKENS
    views.kv_rows[:single] = kv_rows[:single]
    views.kv_rows[single + gap : num_tokens] = kv_rows[single:]
    _write_around(views.adapters, [piece.adapter for piece in pieces for _ in piece.token_ids], single, gap, NO_ADAPTER)
    _write_around(views.slots, [piece.slot for piece in pieces], single, gap, layout.padding_slot)
    _write_around(views.lengths, [piece.start + len(piece.token_ids) for piece in pieces], single, gap, 0)
    ends = accumulate((len(piece.token_ids) for piece in pieces[single:]), initial=single + gap)
    starts = [*range(single + gap), *ends]
    write_column(views.starts, starts, tokens)


def fill_states(views: StepViews[ColumnArray], reads: Items[int], writes: Items[int], layout: DeviceLayout) -> None:
    """Write the rows of the recurrent states of the first sequences."""
    write_column(views.state_reads, list(reads), layout.states[0])
    write_column(views.state_writes, list(writes), layout.states[1])


def fill_logit_rows(views: StepViews[ColumnArray], spans: Items[ScheduledSpan], gap: int = 0) -> None:
    """Write the tokens whose logits are sampled; with `gap` rows of padding behind the decodes."""
    if len(views.logit_rows) == len(views.token_ids):
        return
    last = len(views.token_ids) - 1
    write_column(views.logit_rows, token_rows(spans, gap) or [last], last)


def token_rows(spans: Items[ScheduledSpan], gap: int = 0) -> list[int]:
    """Return the row among the step's tokens of each row of logits; with `gap` rows of padding behind the decodes."""
    rows: list[int] = []
    end, is_single = 0, True
    for span in spans:
        if is_single and span.num_tokens > 1 and not (span.draft_ids and span.is_decode):
            is_single, end = False, end + gap
        end += span.num_tokens
        rows += range(end - span.num_samples, end)
    return rows


def fill_sampling(views: SamplingViews[ColumnArray], rows: Items[LogitRow]) -> None:
    positions = numpy.array([row.position for row in rows], numpy.int64)
    SamplingColumns.of([row.sequence for row in rows]).fill(views, positions)


def _write_around(view: ColumnArray, values: list[int], first: int, gap: int, rest: int) -> None:
    """Write the first values, then `gap` times `rest`, then the other values, and `rest` to the remaining elements."""
    view[:] = rest
    view[:first] = values[:first]
    view[first + gap : gap + len(values)] = values[first:]


def write_column(view: ColumnArray, values: list[int] | list[float] | ColumnArray, rest: float | None = None) -> None:
    """Write these values to a view, and `rest` to the remaining elements (None: there are none)."""
    assert len(values) == len(view) or rest is not None, "one value for each row"
    view[: len(values)] = values
    if rest is not None:
        view[len(values) :] = rest


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a step that decodes one token of each sequence.

    `positions` are computed into the rows `kv_rows` of the KV cache; `shifts` are those of `Piece`. `rows` gives, for
    each sequence, the row of the previous step that samples its token.
    """

    sequences: list[Sequence]
    mode: SamplingMode
    rows: ColumnArray
    slots: ColumnArray
    positions: ColumnArray
    shifts: ColumnArray
    kv_rows: ColumnArray
    adapters: ColumnArray
    draws: SamplingColumns | None

    @classmethod
    def after_step(
        cls, before: Items[ScheduledSpan], spans: Items[ScheduledSpan], mode: SamplingMode, kv_rows_of: KvRowsOfSpans
    ) -> DecodeInputs:
        """Build the inputs of the first step that is launched ahead, after a step `before` that samples one row per span."""
        sequences = [span.sequence for span in spans]
        rows = {id(span.sequence): row for row, span in enumerate(before)}
        return cls(
            sequences,
            mode,
            numpy.array([rows[id(sequence)] for sequence in sequences]),
            numpy.array([span.slot for span in spans], numpy.int32),
            numpy.array([span.start for span in spans]),
            numpy.array([text_positions(span).start - span.start for span in spans]),
            numpy.array(kv_rows_of(spans)),
            numpy.array([adapter_slot(sequence) for sequence in sequences], numpy.int32),
            SamplingColumns.of(sequences) if mode in (SamplingMode.RANDOM, SamplingMode.FILTERED) else None,
        )

    def next_step(self, spans: Items[ScheduledSpan], kv_rows_of: KvRowsOfSpans) -> DecodeInputs:
        positions, rows = self.positions + 1, self.kv_rows + 1
        begun = numpy.flatnonzero(positions % PAGE_TOKENS == 0)
        if len(begun):
            rows[begun] = kv_rows_of([spans[at] for at in begun.tolist()])
        return replace(self, rows=numpy.arange(len(rows)), positions=positions, kv_rows=rows)

    def fill(self, views: StepViews[ColumnArray], sampling: SamplingViews[ColumnArray], layout: DeviceLayout) -> None:
        """Write all inputs of the step into the views, with padding rows as in `fill_step`."""
        rows = len(views.slots)
        views.token_ids[:] = 0
        write_column(views.sources, self.rows, layout.block_start)
        write_column(views.positions, self.positions + self.shifts, 0)
        views.kv_rows[:] = numpy.arange(rows) % PAGE_TOKENS
        views.kv_rows[: len(self.kv_rows)] = self.kv_rows
        write_column(views.adapters, self.adapters, NO_ADAPTER)
        write_column(views.slots, self.slots, layout.padding_slot)
        write_column(views.lengths, self.positions + 1, 0)
        views.starts[:] = numpy.arange(rows + 1)
        if self.draws is not None:
            self.draws.fill(sampling, self.positions + 1)
