"""What serving costs while it runs: a meter for the machine that was found, looked at now and then, and what is told of price and power.

The event loop's. A look reads a few files, a tenth of a millisecond every five seconds, so that no counter passes its end unseen.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from app.hardware.energy import LOOK_EVERY_SECONDS, Energy
from app.hardware.facts import CudaDevice, PowerMeter
from app.hardware.files import Files
from app.hardware.meters import Meter, open_meter
from app.hardware.nvml import open_nvml
from app.metrics import Metrics

_DEVICE = "The driver counts what the device takes; the rest of the machine is not told."
_MODELLED = "The declared watts count while steps run, and nothing between them, since there is no counter."


class Spending:
    """Fills `metrics.energy`, from `start` to `stop`; it stays None where nothing tells the machine's power.

    `device` is what computes where that is no processor: then its own counter is asked, and the processor's joules are not told.
    """

    def __init__(self, metrics: Metrics, power: PowerMeter, watts: float | None, device: CudaDevice | None = None) -> None:
        self._metrics, self._watts, self._device = metrics, watts, device
        self._power = power if device is None else PowerMeter(reason="The driver does not count what the device takes.")
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Joules count from now on."""
        meter: Meter | None = None if self._device is None else open_nvml(self._device)
        if meter is None:
            meter = open_meter(self._power, Files(Path("/")), self._watts, lambda: self._metrics.busy_seconds)
        if meter is not None:
            self._metrics.energy = Energy(meter, self._metrics.work)
            self._look()

    def stop(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        if self._metrics.energy is not None:
            self._metrics.energy.close()

    def to_json(self) -> dict[str, Any]:
        source = None if self._metrics.energy is None else self._metrics.energy.source
        reasons = {"nvml": _DEVICE, "modelled": f"{_MODELLED} {self._power.reason}".strip()}
        return {
            "hourly_price": self._metrics.place.hourly_price,
            "watts": self._watts,
            "energy_source": source,
            "energy_reason": reasons.get(source or "", self._power.reason),
        }

    def _look(self) -> None:
        if self._metrics.energy is not None:
            self._metrics.energy.look()
            self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_SECONDS, self._look)
