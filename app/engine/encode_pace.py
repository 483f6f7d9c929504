"""Decides how long an encoder's step waits for more texts, from the measured step times.

Without measurements there is no wait.

While a step runs, other requests arrive and share the next step, so waiting for new clients does not make anything
faster (tests/unit/engine/test_encode_waiting.py simulates this). Clients that were just answered are different.
Each sends its next request a moment later, just too late for the step that then begins, so two such clients would
always alternate in separate steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import Tempo
from app.measured import StepStats

_RECENT_RATIOS = 9  # their median is used, so four outliers change nothing
_BOUNDS = 0.25, 4.0  # limits of the correction that observed steps apply to the table
_RECENT_RETURNS = 8
_RECENT_ENDS = 4
_FAR_BELOW = 4  # waiting pays as long as a return takes no more than a quarter of what it saves
_WORTH = 2  # number of usual return times to wait


class EncodePace:
    """The batching delay of one engine.

    `target_tokens` is the largest number of tokens that a step is planned for. `oldest_first` is passed to
    `StepTimes`.
    """

    def __init__(self, target_tokens: int, steps: StepSeconds | None = None, *, oldest_first: bool = False) -> None:
        self.target_tokens = target_tokens
        known = steps if steps is not None and steps.encode_points else None
        self.tempo = None if known is None else Tempo(known, target_tokens, oldest_first=oldest_first)
        self._ratios: deque[float] = deque(maxlen=_RECENT_RATIOS)
        self._returns: deque[tuple[float, int]] = deque(
            maxlen=_RECENT_RETURNS
        )  # (seconds from an answer to the next request, tokens of that request)
        # end times of steps that answered a request, and after which no request has arrived yet
        self._ends: deque[float] = deque(maxlen=_RECENT_ENDS)
        self._answered_at = 0.0  # time at which the last step answered requests
        self._away = 0  # requests that this step answered, minus those that arrived since

    def observe(self, step: StepStats) -> None:
        """Update the correction factor from a finished step."""
        if self.tempo is None:
            return
        expected = step.expected_seconds(self.tempo.steps)
        if expected > 0.0:
            self._ratios.append(step.usual_seconds / expected)
            self.tempo = replace(self.tempo, encode_factor=min(max(median(self._ratios), _BOUNDS[0]), _BOUNDS[1]))

    def answered(self, at: float, requests: int) -> None:
        """Record that a step has answered `requests` requests."""
        self._answered_at, self._away = at, requests
        self._ends.append(at)

    def arrived(self, at: float, tokens: int) -> None:
        """Record a request, which may have arrived during a step, before other steps ended."""
        self._away -= at >= self._answered_at
        before = [end for end in self._ends if end <= at]
        if before:
            self._returns.append((at - before[-1], tokens))
            self._ends = deque((end for end in self._ends if end > at), maxlen=_RECENT_ENDS)

    def patience_seconds(self, tokens: int, now: float) -> float:
        """Return the seconds that the next step may wait for more texts than the `tokens` that are queued.

        Two steps cost more than one step with the texts of both, since part of a step's cost is fixed. If clients
        return much faster than that difference, waiting for them pays; if none returns, only that short wait is
        lost. The wait ends when as many requests have arrived as were answered. A request to an engine that was
        idle for longer does not wait.
        """
        if self.tempo is None or tokens >= self.target_tokens or self._away <= 0 or len(self._returns) < _RECENT_RETURNS:
            return 0.0
        until = self._answered_at + _WORTH * median(seconds for seconds, _ in self._returns)
        if until <= now:
            return 0.0
        together = min(tokens + int(median(each for _, each in self._returns)), self.target_tokens)
        saved = self.tempo.encode(tokens) + self.tempo.encode(together - tokens) - self.tempo.encode(together)
        return until - now if _FAR_BELOW * (until - self._answered_at) <= _WORTH * saved else 0.0
