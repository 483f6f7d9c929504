"""Whether an encoder's step is to wait for more texts: from the measured table, corrected by recent steps. Without one nobody waits."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import Tempo
from app.measured import StepStats

_RECENT_RATIOS = 9  # their median: four outliers change nothing
_BOUNDS = 0.25, 4.0  # what measured steps can change of the table
_RECENT_ARRIVALS = 8


class EncodePace:
    """Belongs to the engine. `target_tokens`: up to so many texts are put together."""

    def __init__(self, target_tokens: int, steps: StepSeconds | None = None, *, oldest_first: bool = False) -> None:
        self.target_tokens = target_tokens
        known = steps if steps is not None and steps.encode_points else None
        self.tempo = None if known is None else Tempo(known, target_tokens, oldest_first=oldest_first)
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
        if self.tempo is None or tokens >= self.target_tokens or len(self._arrivals) < _RECENT_ARRIVALS:
            return 0.0
        usual = sum(each for _, each in self._arrivals) // len(self._arrivals)
        together = min(tokens + usual, self.target_tokens)
        saved = self.tempo.encode(tokens) + self.tempo.encode(together - tokens) - self.tempo.encode(together)
        interval = (now - self._arrivals[0][0]) / len(self._arrivals)
        return max(oldest + saved - now, 0.0) if interval < saved else 0.0
