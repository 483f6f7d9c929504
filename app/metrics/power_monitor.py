"""Power metering while the server runs: energy account, gauges, and the price and power fields of `GET /info`.

It runs on the event loop: no step waits for it. A meter is read every five seconds, so that no counter wraps around
unnoticed; a read of a few files takes a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from app.hardware.facts import CudaDevice, PowerMeter
from app.hardware.power import EnergyMeter, open_energy_meter, open_nvml_meter
from app.hardware.probe.host_files import HostFiles
from app.metrics.gauges import gauge_family
from app.metrics.instruments import Metrics

WINDOW_SECONDS = 60.0
READING_SPACING_SECONDS = 1.0
MIN_READING_SECONDS = 0.1  # a scrape sooner than this repeats the last reading; endpoint pickers scrape every 50 ms
IDLE_SECONDS = 10.0
TIMER_SECONDS = (
    5.0  # period of the timer, for servers that are not scraped; counters wrap after a minute at the earliest
)

_DEVICE_REASON = "The driver counts the energy of the device; the rest of the machine is not included."
_ENERGY_SCOPE = "Counts the whole machine or its processors, other processes included; source=modelled: the declared watts while steps run."
_JOULES_PER = "Joules per {} over the last 60 seconds, idle time included."
_JOULES_ABOVE_IDLE_PER = "Joules per {} over the last 60 seconds, less what the machine takes when idle."
_MODELLED_REASON = "There is no counter, so the declared watts count while steps run, and nothing between them."


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """Work done since the start. `idle` is true if the server is ready and has no open request."""

    busy_seconds: float = 0.0
    tokens: int = 0
    vectors: int = 0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """Energy readings: `joules` since the start, the lowest idle power, the rest for the last minute; None: unknown."""

    joules: float
    watts: float | None = None
    idle_watts: float | None = None
    per_token: float | None = None
    per_vector: float | None = None
    above_idle_per_token: float | None = None
    above_idle_per_vector: float | None = None


@dataclass(frozen=True, slots=True)
class _EnergyReading:
    at: float
    joules: float
    work: WorkCounters


class EnergyAccount:
    """Energy account of one meter. Not thread-safe; used by the event loop only."""

    def __init__(
        self, meter: EnergyMeter, work: Callable[[], WorkCounters], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = meter.source
        self.close = meter.close
        self._meter, self._work, self._clock = meter, work, clock
        first = _EnergyReading(clock(), meter.joules(), work())
        self._recent: deque[_EnergyReading] = deque([first])
        self._latest = self._idle_since = first
        self._idle_watts: float | None = None

    def read(self) -> EnergyReport:
        """Read the meter if the last reading is old enough, and return the account; at least once a minute."""
        if self._clock() - self._latest.at >= MIN_READING_SECONDS:
            self._latest = _EnergyReading(self._clock(), self._meter.joules(), self._work())
            self._update_idle_watts(self._latest)
            self._record(self._latest)
        return self._spent(self._recent[0], self._latest)

    def _record(self, now: _EnergyReading) -> None:
        if now.at - self._recent[-1].at >= READING_SPACING_SECONDS:
            self._recent.append(now)
        while len(self._recent) > 1 and self._recent[1].at <= now.at - WINDOW_SECONDS:
            self._recent.popleft()

    def _update_idle_watts(self, now: _EnergyReading) -> None:
        """Update the idle power, the lowest of periods of ten seconds without a step."""
        since = self._idle_since
        if not (since.work.idle and now.work.idle and since.work.busy_seconds == now.work.busy_seconds):
            self._idle_since = now
        elif now.at - since.at >= IDLE_SECONDS:
            watts = (now.joules - since.joules) / (now.at - since.at)
            if watts > 0.0:
                self._idle_watts = watts if self._idle_watts is None else min(watts, self._idle_watts)
            self._idle_since = now

    def _spent(self, first: _EnergyReading, now: _EnergyReading) -> EnergyReport:
        seconds, joules = now.at - first.at, now.joules - first.joules
        if seconds <= 0.0 or now.joules <= 0.0:
            return EnergyReport(now.joules, idle_watts=self._idle_watts)
        above = None if self._idle_watts is None else max(0.0, joules - self._idle_watts * seconds)
        tokens, vectors = now.work.tokens - first.work.tokens, now.work.vectors - first.work.vectors
        return EnergyReport(
            joules=now.joules,
            watts=joules / seconds,
            idle_watts=self._idle_watts,
            per_token=_per_unit(joules, tokens),
            per_vector=_per_unit(joules, vectors),
            above_idle_per_token=_per_unit(above, tokens),
            above_idle_per_vector=_per_unit(above, vectors),
        )


def _per_unit(joules: float | None, number: int) -> float | None:
    return joules / number if joules is not None and number else None


class PowerMonitor:
    """Account of the machine's energy between `start` and `stop`, with its gauges and its part of `GET /info`.

    `account` stays None if the power cannot be read. `device` is the GPU that computes, whose driver's counter is used,
    or None for the processor. `is_idle`: the model is loaded and no request is open.
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
