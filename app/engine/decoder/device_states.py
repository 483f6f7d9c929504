"""Recurrent states of a device's slots, and which rows of them a step reads and writes.

A slot has two rows: a step reads the state from one and writes it to the other, so that it may be dropped, or computed
again in smaller parts. The position after which each row is the state says which one is the slot's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.decoder.kv_cache import KvShape
from app.engine.scheduler.batch import Batch, SampledTokens, ScheduledSpan, StateCopy, accepted_by_span
from app.engine.scheduler.speculation import MAX_SPECULATIVE_ROWS
from app.hardware.plan.memory_budget import STATE_ROWS
from armature_kernels.attention.device_recurrence import RowRun, StateRows, convolve_on_device, recur_on_device
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs, kept_inputs

ROWS_OF_SLOT = STATE_ROWS["cuda"]
_NO_STATE = -1


@dataclass(frozen=True, slots=True)
class StateStepRows:
    """The rows of a step's states: of leading sequences of one token each, and of the others.

    `saves`: copies (source row, target row) that are done after the step.
    """

    reads: Items[int] = ()
    writes: Items[int] = ()
    runs: Items[RowRun] = ()
    saves: Items[tuple[int, int]] = ()


class DeviceStates:
    """The memory of all states. A sequence's first step reads `zero_row`; what padding writes is in `padding_row`."""

    def __init__(self, shape: KvShape, device: torch.device) -> None:
        self._num_slots, rows = shape.num_slots, ROWS_OF_SLOT * shape.num_slots + shape.num_checkpoints
        self.zero_row, self.padding_row = rows, rows + 1
        self._memory = torch.zeros(rows + 2, sum(shape.state_sizes), device=device)
        self._layers = torch.split(self._memory, list(shape.state_sizes), 1) if shape.state_sizes else ()
        self._ends = [[_NO_STATE] * ROWS_OF_SLOT for _ in range(shape.num_slots)]
        self._copied: Items[StateCopy] = ()
        # By layer: the inputs of draft tokens, and the function that adds the accepted ones to the states
        self._kept: dict[int, tuple[Tensor, Callable[[Tensor, StateRows], object]]] = {}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def begin(self, slot: int, position: int) -> None:
        """Let a slot's first row be the state after this position, whatever it holds."""
        self._ends[slot] = [position, _NO_STATE]

    def copy(self, copies: Items[StateCopy]) -> None:
        """Do a batch's copies, one after the other; those of a step that is tried again are done once."""
        if copies is not self._copied:
            for source, target, position in copies:
                read = self._source(source, position)
                self._memory[self._target(target, position)].copy_(self._memory[read])
        self._copied = copies

    def rows_of(self, spans: Items[ScheduledSpan]) -> StateStepRows:
        """Return the rows of a step. A later step of the same sequences goes on from what this one writes."""
        if not self:
            return StateStepRows()
        reads: list[int] = []
        writes: list[int] = []
        runs: list[RowRun] = []
        saves: list[tuple[int, int]] = []
        first = 0
        for span in spans:
            read = self.zero_row if span.start == 0 else self._source(span.slot, span.start)
            if span.draft_ids:
                runs.append(RowRun(first, span.num_tokens, read, -1))
            else:
                write = self._written(span.slot, span.start, span.end)
                saves += [(write, self._checkpoint(row)) for at, row in span.saves if at == span.end]
                if span.num_tokens == 1 and not runs:
                    reads.append(read)
                    writes.append(write)
                else:
                    runs += self._runs(first, span, read, write)
            first += span.num_tokens
        return StateStepRows(reads, writes, runs, saves)

    def save(self, saves: Items[tuple[int, int]]) -> None:
        for source, target in saves:
            self._memory[target].copy_(self._memory[source])

    def recur(self, layer: int, inputs: RecurrentInputs, recurrence: Recurrence, step: StateRows) -> Tensor:
        states, sizes = self._layers[layer], recurrence.sizes

        def advance(kept: Tensor, accepted: StateRows) -> Tensor:
            return recur_on_device(kept_inputs(kept, sizes), recurrence, states, accepted)

        return recur_on_device(
            inputs, recurrence, states, step, self._kept_rows(layer, sizes.input_elements, step, advance)
        )

    def convolve(self, layer: int, x: Tensor, filters: Tensor, step: StateRows) -> Tensor:
        states = self._layers[layer]

        def advance(kept: Tensor, accepted: StateRows) -> Tensor:
            return convolve_on_device(kept, filters, states, accepted, gated=False)

        return convolve_on_device(x, filters, states, step, self._kept_rows(layer, filters.shape[1], step, advance))

    def accept(self, batch: Batch, runs: Items[RowRun], samples: Items[SampledTokens]) -> None:
        """Advance the states of a step's sequences with draft tokens by all tokens that are accepted."""
        accepted: list[RowRun] = []
        drafts = iter([run for run in runs if run.write < 0])
        for span, sampled in accepted_by_span(batch, samples):
            if span.draft_ids:
                run = next(drafts)
                count = span.num_tokens - len(span.draft_ids) + len(sampled) - 1
                write = self._written(span.slot, span.start, span.start + count)
                accepted.append(RowRun(run.first, count, run.read, write))
        none = torch.empty(0, dtype=torch.int64, device=self._memory.device)
        for kept, advance in self._kept.values() if accepted else ():
            advance(kept, StateRows(none, none, accepted))

    def _kept_rows(
        self, layer: int, elements: int, step: StateRows, advance: Callable[[Tensor, StateRows], object]
    ) -> Tensor | None:
        if not any(run.write < 0 for run in step.runs):
            return None
        known = self._kept.get(layer)
        rows = self._memory.new_empty((MAX_SPECULATIVE_ROWS, elements)) if known is None else known[0]
        self._kept[layer] = rows, advance
        return rows

    def _runs(self, first: int, span: ScheduledSpan, read: int, write: int) -> list[RowRun]:
        """Return the runs of a span: one up to each position at which the state is saved."""
        runs: list[RowRun] = []
        start = span.start
        for position, row in span.saves:
            if position < span.end:
                saved = self._checkpoint(row)
                runs.append(RowRun(first + start - span.start, position - start, read, saved))
                start, read = position, saved
        return [*runs, RowRun(first + start - span.start, span.end - start, read, write)]

    def _source(self, row: int, position: int) -> int:
        """Return the row of the state after this position, in a slot or at a checkpoint."""
        if row >= self._num_slots:
            return self._checkpoint(row)
        return ROWS_OF_SLOT * row + self._ends[row].index(position)

    def _target(self, row: int, position: int) -> int:
        if row >= self._num_slots:
            return self._checkpoint(row)
        self.begin(row, position)
        return ROWS_OF_SLOT * row

    def _checkpoint(self, row: int) -> int:
        return row + (ROWS_OF_SLOT - 1) * self._num_slots

    def _written(self, slot: int, start: int, end: int) -> int:
        ends = self._ends[slot]
        if start == 0:
            self.begin(slot, end)
            return ROWS_OF_SLOT * slot
        other = 1 - ends.index(start)
        ends[other] = end
        return ROWS_OF_SLOT * slot + other
