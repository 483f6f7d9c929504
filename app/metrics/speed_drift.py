"""Speed drift: the step times of the last 128 steps compared with the measured ones.

The worker thread updates it; any thread may read the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.metrics.stats import Phase
from app.metrics.step_time_model import StepTimeModel

log = logging.getLogger(__name__)

DRIFT_BEGINS, DRIFT_ENDS = (
    1.20,
    1.10,
)  # drift begins beyond the first factor and ends within the second: the gap avoids flapping


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Speeds that the plan expected before the first request.

    `capacity` is tokens per second by phase and number of rows, and `roofline` the part of the hardware ceiling
    reached, by phase. With `is_estimated` there is nothing to drift from. `spread` is the relative spread of the
    calibration's samples.
    """

    capacity: Mapping[str, Mapping[int, float]]
    roofline: Mapping[str, float]
    is_estimated: bool = False
    spread: float | None = None


class SpeedDrift:
    """The factor between measured and current step times, by phase.

    `on_stale` is called once, on the worker thread, when the measurements no longer hold.
    """

    def __init__(
        self, model: StepTimeModel, expected: ExpectedSpeed, on_stale: Callable[[], None] = lambda: None
    ) -> None:
        self._model, self._expected, self._on_stale = model, expected, on_stale
        self._factors: dict[Phase, float] = {}  # replaced as a whole, since other threads read it
        self._reported_stale = False
        self.drifted = False

    def update(self) -> None:
        """Read the factors of the recent steps, which takes a tenth of a millisecond."""
        self._factors = self._model.window_factors()
        factor = None if self.is_estimated else self._model.window_model_factor()
        if factor is not None:
            self._update_drifted(factor)

    @property
    def is_estimated(self) -> bool:
        return self._expected.is_estimated

    @property
    def spread(self) -> float | None:
        return self._expected.spread

    def factor(self, phase: str) -> float:
        """Return the current step time over the measured one, 1 until enough steps were seen."""
        return next((factor for known, factor in self._factors.items() if phase.startswith(known)), 1.0)

    def capacity(self) -> Mapping[str, Mapping[int, float]]:
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
            "estimated": self.is_estimated,
            "spread": self.spread,
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
