"""How large an encoder's steps are to be, and whether to wait for more texts: from the measured table, corrected by recent steps.

Without a table steps take all that fits, and nobody waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import Tempo
from app.measured import StepStats

NEAR_BEST = 0.95  # of the best rate: a larger step gains less than its texts pay by ending together
_RECENT_RATIOS = 9  # their median: four outliers change nothing
_BOUNDS = 0.25, 4.0  # what measured steps can change of the table
_RECENT_ARRIVALS = 8


class EncodePace:
    """Belongs to the engine; `max_batch_tokens` bounds a step whatever it gains."""

    def __init__(self, max_batch_tokens: int, steps: StepSeconds | None = None) -> None:
        points = steps.encode_points if steps is not None else ()
        self.step_tokens = max_batch_tokens if steps is None or not points else _near_best(points, max_batch_tokens)
        self.tempo: Tempo | None = None if steps is None or not points else Tempo(steps, self.step_tokens)
        self._ratios: deque[float] = deque(maxlen=_RECENT_RATIOS)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_RECENT_ARRIVALS)  # of requests: when, and their tokens

    def observe(self, step: StepStats) -> None:
        """What a step did and took."""
        if self.tempo is None:
            return
        expected = step.expected_seconds(self.tempo.steps)
        if expected > 0.0:
            self._ratios.append(step.seconds / expected)
            self.tempo = replace(self.tempo, encode_factor=min(max(median(self._ratios), _BOUNDS[0]), _BOUNDS[1]))

    def arrived(self, at: float, tokens: int) -> None:
        """A request came."""
        self._arrivals.append((at, tokens))

    def patience_seconds(self, tokens: int, oldest: float, now: float) -> float:
        """How long the next step may wait for more texts than the `tokens` there are; the oldest came at `oldest`.

        Two steps cost more than one with the texts of both, since some of a step is the same for few and for many. Where requests come
        quicker than that takes, waiting for the next one pays. If none comes the oldest has lost no more than was to be gained, so
        never twice what was needed; and whoever waited for a step before, or comes to an idle engine, waits for nobody.
        """
        if self.tempo is None or tokens >= self.step_tokens or len(self._arrivals) < _RECENT_ARRIVALS:
            return 0.0
        usual = sum(each for _, each in self._arrivals) // len(self._arrivals)
        together = min(tokens + usual, self.step_tokens)
        saved = self.tempo.encode(tokens) + self.tempo.encode(together - tokens) - self.tempo.encode(together)
        interval = (now - self._arrivals[0][0]) / len(self._arrivals)
        return max(oldest + saved - now, 0.0) if interval < saved else 0.0


def _near_best(points: tuple[tuple[int, float], ...], most: int) -> int:
    """The fewest tokens at which a step is nearly as quick a token as any."""
    within = [(tokens, seconds) for tokens, seconds in points if tokens <= most and seconds > 0.0]
    if not within:
        return most
    best = max(tokens / seconds for tokens, seconds in within)
    return next(tokens for tokens, seconds in within if tokens / seconds >= NEAR_BEST * best)
