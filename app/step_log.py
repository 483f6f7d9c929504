"""A log of the last steps in plain columns, for timelines of the engine rather than histograms.

One thread adds, any thread reads. 65,536 steps take 2 MB, and adding a row allocates no lasting object.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, get_args

from app.measured import Cause, Phase, StepStats

KEPT_STEPS = 65_536  # a minute of a small encoder's steps, an hour of a large decoder's
MOST_TOLD = 2048  # steps in one response: as JSON a few milliseconds of the event loop

_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_CAUSES: Final[tuple[Cause | None, ...]] = (None, *get_args(Cause))
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_CAUSE_NUMBERS = {cause: number for number, cause in enumerate(_CAUSES)}


class StepLog:
    """A ring of the last `kept` steps, which are numbered from 0."""

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self._kept = kept
        self._at, self._seconds = array("d", bytes(8 * kept)), array("d", bytes(8 * kept))
        self._phase, self._cause = array("B", bytes(kept)), array("B", bytes(kept))
        self._tokens = array("l", bytes(array("l").itemsize * kept))
        self.num_steps = 0  # written last: a row is complete before it is counted

    def add(self, began_at: float, step: StepStats, cause: Cause | None) -> None:
        """Add a step.

        Args:
            began_at: Start of the step in seconds since 1970.
            step: Its statistics.
            cause: The cause if the step was slow.
        """
        place = self.num_steps % self._kept
        self._at[place] = began_at
        self._seconds[place] = step.seconds
        self._phase[place] = _PHASE_NUMBERS[step.phase]
        self._cause[place] = _CAUSE_NUMBERS[cause]
        self._tokens[place] = step.num_tokens
        self.num_steps += 1

    def since(self, after: int) -> dict[str, Any]:
        """Return the steps from number `after` on, oldest first and at most `MAX_STEPS`.

        Returns:
            `next`, the number to request next; `dropped`, how many of the requested steps were overwritten; and
            `steps`, the columns.
        """
        first = min(max(after, self.num_steps - self._kept), self.num_steps)
        following = min(first + MOST_TOLD, self.num_steps)
        columns = [
            self._cut(column, first, following) for column in (self._at, self._seconds, self._phase, self._tokens, self._cause)
        ]
        lost = min(max(self.num_steps - self._kept - first, 0), following - first)  # overwritten while they were read
        at, seconds, phases, tokens, causes = (column[lost:] for column in columns)
        steps = {
            "at": [round(moment, 6) for moment in at],
            "seconds": [round(one, 7) for one in seconds],
            "phase": [_PHASES[number] for number in phases],
            "tokens": list(tokens),
            "cause": [_CAUSES[number] or "" for number in causes],
        }
        return {"next": following, "dropped": max(first + lost - after, 0), "steps": steps}

    def _cut(self, column: Sequence[Any], first: int, following: int) -> list[Any]:
        begin, count = first % self._kept, following - first
        around = max(begin + count - self._kept, 0)
        return [*column[begin : begin + count], *column[:around]]
