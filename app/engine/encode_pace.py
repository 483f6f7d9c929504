"""Whether an encoder's step is to wait for more texts: from the measured table, corrected by recent steps. Without one nobody waits.

While a step runs, others arrive and share the next one, so waiting for strangers makes nothing quicker (tests/unit/engine/
test_encode_waiting.py plays it through). Clients that were just answered are another matter: each asks again a moment later, just too
late for the step that then begins, so two of them would for ever take turns in steps of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import Tempo
from app.measured import StepStats

_RECENT_RATIOS = 9  # their median: four outliers change nothing
_BOUNDS = 0.25, 4.0  # what measured steps can change of the table
_RECENT_RETURNS = 8
_RECENT_ENDS = 4
_FAR_BELOW = 4  # times as long a return may last at most, and waiting still pays
_WORTH = 2  # usual returns that are waited for


class EncodePace:
    """Belongs to the engine. `target_tokens`: up to so many texts are put together; `oldest_first` as `Tempo` has it."""

    def __init__(self, target_tokens: int, steps: StepSeconds | None = None, *, oldest_first: bool = False) -> None:
        self.target_tokens = target_tokens
        known = steps if steps is not None and steps.encode_points else None
        self.tempo = None if known is None else Tempo(known, target_tokens, oldest_first=oldest_first)
        self._ratios: deque[float] = deque(maxlen=_RECENT_RATIOS)
        self._returns: deque[tuple[float, int]] = deque(
            maxlen=_RECENT_RETURNS
        )  # seconds from an answer to the next request, its tokens
        self._ends: deque[float] = deque(maxlen=_RECENT_ENDS)  # of steps that answered somebody, none after which somebody came
        self._answered_at = 0.0  # by the last step that did
        self._away = 0  # requests that it answered, less those that came since

    def observe(self, step: StepStats) -> None:
        """What a step did and took."""
        if self.tempo is None:
            return
        expected = step.expected_seconds(self.tempo.steps)
        if expected > 0.0:
            self._ratios.append(step.usual_seconds / expected)
            self.tempo = replace(self.tempo, encode_factor=min(max(median(self._ratios), _BOUNDS[0]), _BOUNDS[1]))

    def answered(self, at: float, requests: int) -> None:
        """A step has answered so many."""
        self._answered_at, self._away = at, requests
        self._ends.append(at)

    def arrived(self, at: float, tokens: int) -> None:
        """A request came, perhaps while a step was under way, before which others had ended."""
        self._away -= at >= self._answered_at
        before = [end for end in self._ends if end <= at]
        if before:
            self._returns.append((at - before[-1], tokens))
            self._ends = deque((end for end in self._ends if end > at), maxlen=_RECENT_ENDS)

    def patience_seconds(self, tokens: int, now: float) -> float:
        """How long the next step may wait for more texts than the `tokens` there are.

        Two steps cost more than one with the texts of both, since some of a step is the same for few and for many. Where requests come
        back in far less time than that, waiting for them pays; if none comes, that little is lost. Once as many came as were answered,
        all are here; and whoever comes to an engine that was idle for longer waits for nobody.
        """
        if self.tempo is None or tokens >= self.target_tokens or self._away <= 0 or len(self._returns) < _RECENT_RETURNS:
            return 0.0
        until = self._answered_at + _WORTH * median(seconds for seconds, _ in self._returns)
        if until <= now:
            return 0.0
        together = min(tokens + int(median(each for _, each in self._returns)), self.target_tokens)
        saved = self.tempo.encode(tokens) + self.tempo.encode(together - tokens) - self.tempo.encode(together)
        return until - now if _FAR_BELOW * (until - self._answered_at) <= _WORTH * saved else 0.0
