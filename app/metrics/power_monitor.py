"""Power metering while the server runs, and the price and power fields of `GET /info`.

It runs on the event loop. A meter is read every five seconds, so that no counter wraps around unnoticed; a read of
a few files takes a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from app.hardware.energy import (
    TIMER_SECONDS,
    EnergyAccount,
)
from app.hardware.facts import (
    CudaDevice,
    PowerMeter,
)
from app.hardware.power_meters import (
    EnergyMeter,
    open_energy_meter,
    open_nvml_meter,
)
from app.hardware.probe.host_files import HostFiles
from app.metrics.instruments import Metrics

_DEVICE_REASON = "The driver counts the energy of the device; the rest of the machine is not included."
_MODELLED_REASON = "There is no counter, so the declared watts count while steps run, and nothing between them."


class PowerMonitor:
    """Fills `metrics.energy` between `start` and `stop`; it stays None if the machine's power cannot be read.

    `device` is the GPU that computes, or None for the processor. With a GPU, the driver's counter is used and the
    processor's energy is not reported.
    """

    def __init__(
        self, metrics: Metrics, power: PowerMeter, watts: float | None, device: CudaDevice | None = None
    ) -> None:
        self._metrics, self._watts, self._device = metrics, watts, device
        self._power = (
            power if device is None else PowerMeter(reason="The driver does not count the energy of the device.")
        )
        self._next_read: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Open a meter and count energy from now on."""
        meter: EnergyMeter | None = None if self._device is None else open_nvml_meter(self._device)
        if meter is None:
            meter = open_energy_meter(
                self._power, HostFiles(Path("/")), self._watts, lambda: self._metrics.busy_seconds
            )
        if meter is not None:
            self._metrics.energy = EnergyAccount(meter, self._metrics.work_done)
            self._read_meter()

    def stop(self) -> None:
        """Stop reading and close the meter."""
        if self._next_read is not None:
            self._next_read.cancel()
        if self._metrics.energy is not None:
            self._metrics.energy.close()

    def to_json(self) -> dict[str, Any]:
        """Return the `place` object of `GET /info`: price, watts, and the energy source with its reason."""
        source = None if self._metrics.energy is None else self._metrics.energy.source
        reasons = {"nvml": _DEVICE_REASON, "modelled": f"{_MODELLED_REASON} {self._power.reason}".strip()}
        return {
            "hourly_price": self._metrics.deployment.hourly_price,
            "watts": self._watts,
            "energy_source": source,
            "energy_reason": reasons.get(source or "", self._power.reason),
        }

    def _read_meter(self) -> None:
        if self._metrics.energy is not None:
            self._metrics.energy.look()
            self._next_read = asyncio.get_running_loop().call_later(TIMER_SECONDS, self._read_meter)
