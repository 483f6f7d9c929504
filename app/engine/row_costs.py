"""What a step that decodes so many rows takes: as was measured before the start, and as the steps themselves have shown since.

Only proportions count, so where nothing was measured a table without a unit serves until steps have been seen.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from app.hardware.step_seconds import StepSeconds
from app.messages import StepStats

# Weights are read once for all rows of a step, so a few come nearly free.
UNMEASURED = StepSeconds(((1, 1.0), (2, 1.02), (4, 1.06), (8, 1.5), (64, 10.0)), ((1, 1.0),))
_LOOK_BACK = 8  # steps of a number of rows
_FEWEST = 5  # of them before they count: the first few are slow, they make room and are recorded
_TYPICAL = 1  # the second quickest of them: what slows a step down is somebody else


class RowCosts:
    """Belongs to one engine. Rows of which no step was seen take by the table what the nearest fewer ones would."""

    def __init__(self, table: StepSeconds | None = None) -> None:
        self._table = table or UNMEASURED
        self._seen: dict[int, deque[float]] = {}  # rows → seconds of late, over the table's
        self._factors: dict[int, float] = {}  # rows → the typical one of them
        self._known: list[int] = []  # rows with a factor, rising

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Of a step by so many rows, whose sequences have so much context together."""
        at = bisect_right(self._known, rows)
        nearest = self._known[max(at - 1, 0)] if self._known else 0
        return self._table.decode(rows, context_tokens) * self._factors.get(nearest, 1.0)

    def observe(self, step: StepStats) -> None:
        """Steps that read prompts too say nothing of rows alone."""
        rows = step.num_decode_sequences + step.drafted_tokens
        if step.prefill_tokens or not rows:
            return
        seen = self._seen.setdefault(rows, deque(maxlen=_LOOK_BACK))
        seen.append(step.seconds / self._table.decode(rows, step.context_tokens))
        if len(seen) < _FEWEST:
            return
        if rows not in self._factors:
            insort(self._known, rows)
        self._factors[rows] = sorted(seen)[_TYPICAL]
