"""What a step that decodes so many rows takes: as was measured before the start, and as the steps themselves have shown since.

Only proportions count, so where nothing was measured a table without a unit serves until steps have been seen.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

from app.hardware.step_seconds import StepSeconds
from app.measured import StepStats

# Weights are read once for all rows of a step, so a few come nearly free.
UNMEASURED = StepSeconds(((1, 1.0), (2, 1.02), (4, 1.06), (8, 1.5), (64, 10.0)), ((1, 1.0),))
_LOOK_BACK = 8  # steps of a number of rows
_FEWEST = 5  # of them before they count: the first few are slow, they make room and are recorded
_TYPICAL = 1  # the second quickest of them: what slows a step down is somebody else
# Steps after which a number of rows that none of them had is forgotten: what a bad moment showed of it would otherwise keep it from being
# tried again for ever.
FORGOTTEN_AFTER = 500


@dataclass(slots=True)
class Seen:
    """Steps of one number of rows: seconds of late over the table's, the typical one of them, and when the last was."""

    factors: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOK_BACK))
    typical: float = 0.0
    last_step: int = 0


class RowCosts:
    """Belongs to one engine. Rows of which no step was seen take by the table what those next to them would."""

    def __init__(self, table: StepSeconds | None = None) -> None:
        self._table = table or UNMEASURED
        self._seen: dict[int, Seen] = {}
        self._known: list[int] = []  # rows of which enough was seen, rising
        self._num_steps = 0

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Of a step by so many rows, whose sequences have so much context together."""
        return self._table.decode(rows, context_tokens) * self._factor(rows)

    def observe(self, step: StepStats) -> None:
        """Steps that read prompts too say nothing of rows alone."""
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
        """Over the table's seconds: as seen, else on the line between the nearest that were, beyond them the nearest one's."""
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
