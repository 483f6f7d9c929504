"""Detection of speed drift: recent steps compared with the measured step time table.

The worker thread reports steps; any thread may read the result. The capacity that the plan reported before the
first request is corrected by what steps really take.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import (
    Callable,
    Mapping,
)
from dataclasses import dataclass
from statistics import median

from app.hardware.step_times import StepTimeTable
from app.metrics.stats import (
    Phase,
    StepStats,
)

log = logging.getLogger(__name__)

_PHASES: tuple[Phase, ...] = ("decode", "prefill", "encode")  # `decode_full` counts as decode, `encode_few` as encode
WINDOW_STEPS, MIN_STEPS = 128, 50
DRIFT_BEGINS, DRIFT_ENDS = (
    1.20,
    1.10,
)  # drift begins beyond the first factor and ends within the second: the gap avoids flapping


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Speeds that the plan expected before the first request.

    `steps` is the measured step time table, `capacity` tokens per second by phase and number of rows, and
    `roofline` the part of the hardware ceiling reached, by phase.
    """

    steps: StepTimeTable
    capacity: Mapping[str, Mapping[int, float]]
    roofline: Mapping[str, float]


class SpeedDrift:
    """The factor between measured and current step times, by phase.

    `on_stale` is called once, on the worker thread, when the measurements no longer hold, so that the next start
    measures again.
    """

    def __init__(self, expected: ExpectedSpeed, on_stale: Callable[[], None] = lambda: None) -> None:
        self._expected, self._on_stale = expected, on_stale
        self._ratios: dict[Phase, deque[float]] = {phase: deque(maxlen=WINDOW_STEPS) for phase in _PHASES}
        self._model_ratios: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._factors: dict[Phase, float] = {}
        self._reported_stale = False
        self.drifted = False

    def observe(self, step: StepStats) -> None:
        """Record the time of one step; `update` evaluates it later.

        Drift of the machine is judged from the model's part of steps that only decode, which vary least, or that
        encode texts.
        """
        expected = step.expected_seconds(self._expected.steps)
        if expected <= 0.0:
            return
        self._ratios[step.phase].append(step.corrected_seconds / expected)
        if not step.prefill_tokens and step.model_seconds:
            self._model_ratios.append(step.model_seconds * step.throttle_correction / expected)

    def update(self) -> None:
        """Recompute the factors from the recent steps.

        The medians of a window take a tenth of a millisecond, so call this between two steps and only now and then.
        """
        for phase, ratios in self._ratios.items():
            if len(ratios) >= MIN_STEPS:
                self._factors[phase] = median(ratios)
        if len(self._model_ratios) >= MIN_STEPS:
            self._update_drifted(median(self._model_ratios))

    def factor(self, phase: str) -> float:
        """Return the current step time over the measured one: 1 until enough steps were seen."""
        return next((factor for known, factor in self._factors.items() if phase.startswith(known)), 1.0)

    def capacity(self) -> Mapping[str, Mapping[int, float]]:
        """Return tokens per second by phase and number of rows, at the machine's current speed."""
        return {
            phase: {rows: speed / self.factor(phase) for rows, speed in by_rows.items()}
            for phase, by_rows in self._expected.capacity.items()
        }

    def roofline(self) -> Mapping[str, float]:
        """Return by phase the part of this machine's ceiling that steps reach now."""
        return {phase: ratio / self.factor(phase) for phase, ratio in self._expected.roofline.items()}

    def to_json(self) -> dict[str, object]:
        """Return the `speed` object of `GET /info`."""
        factors = {phase: round(factor, 3) for phase, factor in self._factors.items()}
        return {
            "steps_over_measured": factors,
            "drifted": self.drifted,
            "capacity_tokens_per_second": self.capacity(),
            "roofline_ratio": self.roofline(),
        }

    def _update_drifted(self, factor: float) -> None:
        bound = DRIFT_ENDS if self.drifted else DRIFT_BEGINS
        drifted = not 1 / bound <= factor <= bound
        if drifted == self.drifted:
            return
        self.drifted = drifted
        if not drifted:
            log.info("steps take as long as measured again (%.2f times)", factor)
            return
        log.warning(
            "steps take %.2f times as long as measured: the reported capacity is corrected, and the next start measures again",
            factor,
        )
        if not self._reported_stale:
            self._reported_stale = True
            self._on_stale()
