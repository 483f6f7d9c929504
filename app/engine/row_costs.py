"""Cost of decode steps by number of rows: the calibrated table, corrected by the steps seen since.

Only proportions matter. Without measurements, a default table without units is used until steps have been seen.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

from app.hardware.step_seconds import StepSeconds
from app.measured import StepStats

# Weights are read once for all rows of a step, so a few more rows are nearly free.
UNMEASURED = StepSeconds(((1, 1.0), (2, 1.02), (4, 1.06), (8, 1.5), (64, 10.0)), ((1, 1.0),))
_LOOK_BACK = 8  # recent steps that are kept for each number of rows
_FEWEST = 5  # steps needed before they count; the first few are slow because they allocate memory and are recorded
_TYPICAL = 1  # index of the typical step: the second fastest, because slower ones are slowed down by other causes
# A number of rows that no step had for this many steps is forgotten. Otherwise a few slow steps could keep it from
# ever being tried again.
FORGOTTEN_AFTER = 500


@dataclass(slots=True)
class Seen:
    """Recent steps of one number of rows.

    `factors` are the ratios of their seconds to the table's, and `typical` is the representative one. `last_step`
    is the index of the latest step.
    """

    factors: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOK_BACK))
    typical: float = 0.0
    last_step: int = 0


class RowCosts:
    """Step costs of one engine, by number of rows.

    An unseen number of rows is interpolated from its neighbors.
    """

    def __init__(self, table: StepSeconds | None = None) -> None:
        self._table = table or UNMEASURED
        self._seen: dict[int, Seen] = {}
        self._known: list[int] = []  # numbers of rows that were seen often enough, ascending
        self._num_steps = 0

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Return the cost of a decode step with this many rows and this total context."""
        return self._table.decode(rows, context_tokens) * self._factor(rows)

    def observe(self, step: StepStats) -> None:
        """Record a step. Steps with prefill are ignored, because they do not measure the rows alone."""
        rows = step.num_decode_sequences + step.drafted_tokens
        if step.prefill_tokens or not rows:
            return
        self._num_steps += 1
        if self._num_steps % FORGOTTEN_AFTER == 0:
            self._forget()
        seen = self._seen.setdefault(rows, Seen())
        seen.last_step = self._num_steps
        seen.factors.append(step.usual_seconds / self._table.decode(rows, step.context_tokens))
        if len(seen.factors) < _FEWEST:
            return
        if not seen.typical:
            insort(self._known, rows)
        seen.typical = sorted(seen.factors)[_TYPICAL]

    def _factor(self, rows: int) -> float:
        """Return the ratio to the table's seconds.

        An unseen number of rows is interpolated between its neighbors; beyond them the nearest one counts.
        """
        if not self._known:
            return 1.0
        at = bisect_right(self._known, rows)
        low, high = self._known[max(at - 1, 0)], self._known[min(at, len(self._known) - 1)]
        first, second = self._seen[low].typical, self._seen[high].typical
        return first if rows <= low or low == high else first + (second - first) * (rows - low) / (high - low)

    def _forget(self) -> None:
        recent = self._num_steps - FORGOTTEN_AFTER
        self._seen = {rows: seen for rows, seen in self._seen.items() if seen.last_step > recent}
        self._known = [rows for rows in self._known if rows in self._seen]
