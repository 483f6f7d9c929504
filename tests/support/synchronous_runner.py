"""The runner interface that an engine expects, for a runner that only has `run`: a step is computed when launched."""

from __future__ import annotations

from typing import Any

from app.engine.scheduler.batch import Batch, CompletedStep, InFlightStep


class AtOnce:
    """`inner` is asked anew at each step, so that a test may put something else in the place of its `run`."""

    overlaps = False
    is_first = False
    is_native = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, batch: Any, after: InFlightStep | None = None) -> InFlightStep:
        assert after is None
        return CompletedStep(batch, self.inner.run(batch))

    def wait(self, flight: InFlightStep) -> Any:
        assert isinstance(flight, CompletedStep)
        return flight.samples

    def can_run_ahead(self, batch: Batch) -> bool:
        return False

    def use_idle_time(self, is_wanted: object) -> bool:
        return True

    def survives(self, error: Exception) -> bool:
        return False
