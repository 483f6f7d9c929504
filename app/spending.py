"""Power metering while the server runs, and the price and power fields of `GET /info`.

It runs on the event loop. A meter is read every five seconds, so that no counter wraps around unnoticed; a read of
a few files takes a tenth of a millisecond.
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

_DEVICE = "The driver counts the energy of the device; the rest of the machine is not included."
_MODELLED = "There is no counter, so the declared watts count while steps run, and nothing between them."


class Spending:
    """Fills `metrics.energy` between `start` and `stop`; it stays None if the machine's power cannot be read.

    `device` is the GPU that computes, or None for the processor. With a GPU, the driver's counter is used and the
    processor's energy is not reported.
    """

    def __init__(self, metrics: Metrics, power: PowerMeter, watts: float | None, device: CudaDevice | None = None) -> None:
        self._metrics, self._watts, self._device = metrics, watts, device
        self._power = power if device is None else PowerMeter(reason="The driver does not count the energy of the device.")
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Open a meter and count energy from now on."""
        meter: Meter | None = None if self._device is None else open_nvml(self._device)
        if meter is None:
            meter = open_meter(self._power, Files(Path("/")), self._watts, lambda: self._metrics.busy_seconds)
        if meter is not None:
            self._metrics.energy = Energy(meter, self._metrics.work)
            self._look()

    def stop(self) -> None:
        """Stop reading and close the meter."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._metrics.energy is not None:
            self._metrics.energy.close()

    def to_json(self) -> dict[str, Any]:
        """Return the `place` object of `GET /info`: price, watts, and the energy source with its reason."""
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
