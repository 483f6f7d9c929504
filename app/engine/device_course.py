"""Sequences that decode, one position further with each step: what a device is told of such a step, worked out from the step before it.

A number for each sequence, in columns: most of them stay, the others go on by one. What any other step is told is `device_step.py`'s.
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

Written = Callable[[Items[Span]], list[int]]  # the rows of the KV cache that spans write; pages that they begin are taken


@dataclass(frozen=True, slots=True)
class Course:
    """A step of sequences that decode: `positions` are computed, and written to rows `written` of the KV cache.

    `rows`: which row of the step before picks the token of each.
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
        """A first one, behind a step of these sequences (and perhaps of others) that is no course."""
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
        """One position further, of the same sequences: a row follows the one before it, but where a page begins."""
        positions, rows = self.positions + 1, self.written + 1
        begun = numpy.flatnonzero(positions % PAGE_TOKENS == 0)
        if len(begun):
            rows[begun] = written([spans[at] for at in begun.tolist()])
        return Course(self.sequences, self.way, numpy.arange(len(rows)), self.slots, positions, rows, self.draws)

    def fill(self, views: StepViews[Column], places: Places) -> None:
        """Writes all that such a step is told. Rows beyond the sequences fill a bucket, as in `device_step.fill`."""
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
