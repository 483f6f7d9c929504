"""What serving costs while it runs: a meter for the machine that was found, looked at now and then, and what is told of price and power.

The event loop's. A look reads a few files, a tenth of a millisecond every five seconds, so that no counter passes its end unseen.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from app.hardware.energy import LOOK_EVERY_SECONDS, Energy
from app.hardware.facts import PowerMeter
from app.hardware.files import Files
from app.hardware.meters import open_meter
from app.metrics import Metrics

_MODELLED = "No counter can be read ({}), so the declared watts count while steps run, and nothing between them."


class Spending:
    """Fills `metrics.energy`, from `start` to `stop`; it stays None where nothing tells the machine's power."""

    def __init__(self, metrics: Metrics, power: PowerMeter, watts: float | None, root: Path = Path("/")) -> None:
        self._metrics, self._power, self._watts, self._root = metrics, power, watts, root
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Joules count from now on."""
        meter = open_meter(self._power, Files(self._root), self._watts, lambda: self._metrics.busy_seconds)
        if meter is not None:
            self._metrics.energy = Energy(meter, self._metrics.work)
            self._look()

    def stop(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        if self._metrics.energy is not None:
            self._metrics.energy.close()

    def to_json(self) -> dict[str, Any]:
        energy = self._metrics.energy
        modelled = energy is not None and energy.source == "modelled"
        return {
            "hourly_price": self._metrics.place.hourly_price,
            "watts": self._watts,
            "energy_source": None if energy is None else energy.source,
            "energy_reason": _MODELLED.format(self._power.reason.rstrip(".")) if modelled else self._power.reason,
        }

    def _look(self) -> None:
        if self._metrics.energy is not None:
            self._metrics.energy.look()
            self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_SECONDS, self._look)
