"""Power metering while the server runs: its gauges, and the price and power fields of `GET /info`.

It runs on the event loop. A meter is read every five seconds, so that no counter wraps around unnoticed; a read of
a few files takes a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Callable,
    Iterator,
)
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from app.hardware.energy import (
    TIMER_SECONDS,
    EnergyAccount,
    WorkCounters,
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
from app.metrics.gauges import gauge_family
from app.metrics.instruments import Metrics

_DEVICE_REASON = "The driver counts the energy of the device; the rest of the machine is not included."
_ENERGY_SCOPE = "Counts the whole machine or its processors, other processes included; source=modelled: the declared watts while steps run."
_JOULES_PER = "Joules per {} over the last 60 seconds, idle time included."
_JOULES_ABOVE_IDLE_PER = "Joules per {} over the last 60 seconds, less what the machine takes when idle."
_MODELLED_REASON = "There is no counter, so the declared watts count while steps run, and nothing between them."


class PowerMonitor:
    """Account of the machine's energy between `start` and `stop`, with its gauges and its part of `GET /info`.

    `account` stays None if the machine's power cannot be read. `device` is the GPU that computes, or None for the
    processor. With a GPU, the driver's counter is used and the processor's energy is not reported. `is_idle` returns
    True while the model is loaded and no request is open. `hourly_price` is in dollars.
    """

    def __init__(
        self,
        metrics: Metrics,
        power: PowerMeter,
        is_idle: Callable[[], bool],
        watts: float | None = None,
        hourly_price: float | None = None,
        device: CudaDevice | None = None,
    ) -> None:
        self.account: EnergyAccount | None = None
        self._metrics, self._is_idle = metrics, is_idle
        self._watts, self._hourly_price, self._device = watts, hourly_price, device
        self._power = (
            power if device is None else PowerMeter(reason="The driver does not count the energy of the device.")
        )
        self._next_read: asyncio.TimerHandle | None = None
        metrics.gauges(self._gauges)

    def start(self) -> None:
        """Open a meter and count energy from now on."""
        meter: EnergyMeter | None = None if self._device is None else open_nvml_meter(self._device)
        if meter is None:
            meter = open_energy_meter(
                self._power, HostFiles(Path("/")), self._watts, lambda: self._metrics.busy_seconds
            )
        if meter is not None:
            self.account = EnergyAccount(meter, self._work_done, self._metrics.clock)
            self._read_meter()

    def stop(self) -> None:
        """Stop reading and close the meter."""
        if self._next_read is not None:
            self._next_read.cancel()
        if self.account is not None:
            self.account.close()

    def to_json(self) -> dict[str, Any]:
        """Return the `place` object of `GET /info`: price, watts, and the energy source with its reason."""
        source = None if self.account is None else self.account.source
        reasons = {"nvml": _DEVICE_REASON, "modelled": f"{_MODELLED_REASON} {self._power.reason}".strip()}
        return {
            "hourly_price": self._hourly_price,
            "watts": self._watts,
            "energy_source": source,
            "energy_reason": reasons.get(source or "", self._power.reason),
        }

    def _read_meter(self) -> None:
        if self.account is not None:
            self.account.read()
            self._next_read = asyncio.get_running_loop().call_later(TIMER_SECONDS, self._read_meter)

    def _work_done(self) -> WorkCounters:
        metrics = self._metrics
        return WorkCounters(metrics.busy_seconds, metrics.num_tokens, metrics.num_vectors, self._is_idle())

    def _gauges(self) -> Iterator[Metric]:
        if self.account is None:
            return
        spent, source = self.account.read(), {"source": self.account.source}
        if spent.joules <= 0.0:  # some virtual machines expose a counter that stays at 0
            return
        total = CounterMetricFamily(
            "armature_energy_joules_total", f"Joules since the start. {_ENERGY_SCOPE}", labels=("source",)
        )
        total.add_metric((self.account.source,), spent.joules)
        yield total
        for name, help_text, value in (
            ("power_watts", f"Mean watts over the last 60 seconds. {_ENERGY_SCOPE}", spent.watts),
            ("energy_idle_watts", "Lowest power seen over 10 seconds without a request.", spent.idle_watts),
            ("energy_joules_per_token", _JOULES_PER.format("token, prompt and completion"), spent.per_token),
            ("energy_joules_per_vector", _JOULES_PER.format("text or row"), spent.per_vector),
            ("energy_above_idle_joules_per_token", _JOULES_ABOVE_IDLE_PER.format("token"), spent.above_idle_per_token),
            (
                "energy_above_idle_joules_per_vector",
                _JOULES_ABOVE_IDLE_PER.format("text or row"),
                spent.above_idle_per_vector,
            ),
        ):
            if value is not None:
                yield gauge_family(f"armature_{name}", help_text, value, source)
