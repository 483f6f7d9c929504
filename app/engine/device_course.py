"""Inputs of decode steps that a device runs one after another, derived from the inputs of the previous step.

Each input is a column with one number per sequence. Most columns stay the same from step to step; the others
increase by one. `fill_step` writes the inputs of all other steps.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy

from app.engine.batch import Span
from app.engine.device_step import Column, Draws, Places, StepViews, Way, write
from app.engine.sequence import Sequence
from app.kernels.paged import PAGE_TOKENS

# returns the rows of the KV cache that spans write, and allocates the pages that they begin
Written = Callable[[Items[Span]], list[int]]


@dataclass(frozen=True, slots=True)
class Course:
    """The inputs of a step that decodes one token of each sequence.

    `positions` are computed, and their keys and values are written to the rows `kv_rows` of the KV cache. `rows`
    gives, for each sequence, the row of the previous step that samples its token.
    """

    sequences: list[Sequence]
    way: Way
    rows: Column
    slots: Column
    positions: Column
    written: Column
    draws: Draws | None

    @classmethod
    def after(cls, before: Items[Span], spans: Items[Span], way: Way, written: Written) -> Course:
        """Build the inputs of the first step that is launched ahead, after a step `before` of any kind.

        The previous step has a row for each of these sequences, and may have rows of other sequences.
        """
        sequences = [span.sequence for span in spans]
        rows = {id(span.sequence): row for row, span in enumerate(before)}
        return cls(
            sequences,
            way,
            numpy.array([rows[id(sequence)] for sequence in sequences]),
            numpy.array([span.slot for span in spans], numpy.int32),
            numpy.array([span.start for span in spans]),
            numpy.array(written(spans)),
            Draws.of(sequences) if way in (Way.DRAWN, Way.FILTERED) else None,
        )

    def further(self, spans: Items[Span], written: Written) -> Course:
        """Return the inputs of the next step of the same sequences.

        Each KV row follows the previous one, except where a new page begins.
        """
        positions, rows = self.positions + 1, self.written + 1
        begun = numpy.flatnonzero(positions % PAGE_TOKENS == 0)
        if len(begun):
            rows[begun] = written([spans[at] for at in begun.tolist()])
        return Course(self.sequences, self.way, numpy.arange(len(rows)), self.slots, positions, rows, self.draws)

    def fill(self, views: StepViews[Column], places: Places) -> None:
        """Write all inputs of the step into the views.

        Rows beyond the sequences are padding up to the bucket size, as in `fill_step`.
        """
        rows = len(views.slots)
        views.token_ids[:] = 0
        write(views.sources, self.rows, places.block)
        write(views.positions, self.positions, 0)
        write(views.written, self.written, 0)
        views.written[len(self.written) :] = numpy.arange(rows - len(self.written)) % PAGE_TOKENS
        write(views.slots, self.slots, places.nobody)
        write(views.lengths, self.positions + 1, 0)
        views.starts[:] = numpy.arange(rows + 1)
        if self.draws is not None:
            self.draws.fill(views, self.positions + 1)
