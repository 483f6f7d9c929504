"""Whether the machine still is as fast as it was when it was measured: recent steps held against the table, and what follows from it.

The worker thread tells of steps, any thread reads. What was promised before the first request is corrected by what steps really take.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from app.hardware.step_seconds import StepSeconds
from app.measured import Phase, StepStats

log = logging.getLogger(__name__)

_PHASES: tuple[Phase, ...] = ("decode", "prefill", "encode")  # `decode_full` and `encode_few` are of theirs
WINDOW_STEPS, ENOUGH_STEPS = 128, 50
LEAVES, RETURNS = 1.20, 1.10  # as far off it is another machine; it has to come nearer than that to be the old one again


@dataclass(frozen=True, slots=True)
class Promise:
    """What a plan said before the first request: how long steps take, tokens a second by phase and rows, and the parts of the ceilings."""

    steps: StepSeconds
    capacity: Mapping[str, Mapping[int, float]]
    roofline: Mapping[str, float]


class Drift:
    """`on_stale` is called once, on the worker thread, when what was measured is not true any more: the next start measures anew."""

    def __init__(self, promise: Promise, on_stale: Callable[[], None] = lambda: None) -> None:
        self._promise, self._on_stale = promise, on_stale
        self._ratios: dict[Phase, deque[float]] = {phase: deque(maxlen=WINDOW_STEPS) for phase in _PHASES}
        self._model_ratios: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._factors: dict[Phase, float] = {}
        self._told = False
        self.drifted = False

    def observe(self, step: StepStats) -> None:
        """What a step took; `look` makes something of it. Whether the machine has changed is read from the model's part of steps that only
        decode, which are simplest, or of those that do texts."""
        expected = step.expected_seconds(self._promise.steps)
        if expected <= 0.0:
            return
        self._ratios[step.phase].append(step.usual_seconds / expected)
        if not step.prefill_tokens and step.model_seconds:
            self._model_ratios.append(step.model_seconds * step.stretch / expected)

    def look(self) -> None:
        """What the recent steps come to. Medians of a window cost a tenth of a millisecond, so: between two steps, and now and then."""
        for phase, ratios in self._ratios.items():
            if len(ratios) >= ENOUGH_STEPS:
                self._factors[phase] = median(ratios)
        if len(self._model_ratios) >= ENOUGH_STEPS:
            self._judge(median(self._model_ratios))

    def factor(self, phase: str) -> float:
        """How many times as long as measured before steps take: 1 until enough were seen."""
        return next((factor for known, factor in self._factors.items() if phase.startswith(known)), 1.0)

    def capacity(self) -> Mapping[str, Mapping[int, float]]:
        """Tokens a second by phase and rows, as the machine is now."""
        return {
            phase: {rows: speed / self.factor(phase) for rows, speed in by_rows.items()}
            for phase, by_rows in self._promise.capacity.items()
        }

    def roofline(self) -> Mapping[str, float]:
        """By phase, the part of this machine's ceiling that steps reach now."""
        return {phase: ratio / self.factor(phase) for phase, ratio in self._promise.roofline.items()}

    def to_json(self) -> dict[str, object]:
        factors = {phase: round(factor, 3) for phase, factor in self._factors.items()}
        return {
            "steps_over_measured": factors,
            "drifted": self.drifted,
            "capacity_tokens_per_second": self.capacity(),
            "roofline_ratio": self.roofline(),
        }

    def _judge(self, factor: float) -> None:
        bound = RETURNS if self.drifted else LEAVES
        drifted = not 1 / bound <= factor <= bound
        if drifted == self.drifted:
            return
        self.drifted = drifted
        if not drifted:
            log.info("steps take what was measured again (%.2f times)", factor)
            return
        log.warning(
            "steps take %.2f times what was measured: capacity is told as it is now, and the next start measures anew", factor
        )
        if not self._told:
            self._told = True
            self._on_stale()
