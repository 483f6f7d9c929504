"""What an engine's host is connected to in tests that need none of it."""

from __future__ import annotations

from app.metrics.step_monitor import StepBegin
from app.server.engine_host import EngineTexts, HostSurroundings


def quiet_surroundings() -> HostSurroundings:
    return HostSurroundings(
        lambda message: None, lambda prepared: EngineTexts(), lambda ended_at, step, cause: None, StepBegin()
    )
