"""Frequency, temperature and thermal throttling while the server runs, and whether they explain a slow step.

A thread reads the sensors once a second. Without sensors there is no thread, and no metric.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from app.hardware.facts import ThermalSensors
from app.hardware.probe.host_files import HostFiles
from app.hardware.probe.probe import run_command
from app.hardware.thermal_sensors import ThermalReading, read_thermal
from app.metrics.gauges import gauge_family
from app.metrics.instruments import Metrics

READ_SECONDS = 1.0
PMSET_SECONDS = 10.0  # starting a program takes longer than reading files
LOW_FREQUENCY = 0.8  # share of the typical frequency below which it explains a slow step
TYPICAL_READINGS = 300  # readings of working seconds whose median is typical
MIN_READINGS = 10  # before that, no frequency is typical
ThermalCause = Literal["thermal", "frequency"]


@dataclass(frozen=True, slots=True)
class _Observation:
    """The latest reading and its meaning; replaced as a whole."""

    reading: ThermalReading
    throttles: int  # times that heat slowed the processor since the monitor started
    cause: ThermalCause | None = None


class ThermalMonitor:
    """Reads the sensors between `start` and `stop`.

    Only seconds in which steps ran count for the typical frequency, since idle cores are slow on purpose.
    """

    def __init__(
        self,
        metrics: Metrics,
        sensors: ThermalSensors,
        read: Callable[[], ThermalReading] | None = None,
    ) -> None:
        self._metrics, self._sensors = metrics, sensors
        self._read = read or (lambda: read_thermal(sensors, HostFiles(Path("/")), run_command))
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._frequencies: deque[float] = deque(maxlen=TYPICAL_READINGS)
        self._busy = 0.0
        self._now: _Observation | None = None
        metrics.gauges(self._gauges)

    def start(self) -> None:
        """Read once, and then regularly on a thread, if there is anything to read."""
        if self._sensors.has_sources:
            self.update()
            self._thread = threading.Thread(target=self._run, name="armature-thermal", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def cause(self) -> ThermalCause | None:
        """Return what slows steps at present: heat, or a low frequency for another reason; None if neither is known."""
        now = self._now
        return None if now is None else now.cause

    def to_json(self) -> dict[str, Any]:
        """Return the `thermal` object of `GET /info`: the latest values, None where there is no source."""
        now = self._now
        reading = ThermalReading() if now is None else now.reading
        return {
            "frequency_hertz": reading.hertz,
            "temperature_celsius": reading.celsius,
            "throttled_times": None if now is None or not self._counts_throttles else now.throttles,
        }

    def update(self) -> None:
        before, reading = self._now, self._read()
        if before is None:
            self._now = _Observation(reading, 0)
            return
        new = max((reading.throttles or 0) - (before.reading.throttles or 0), 0)
        new += bool(reading.is_limited) and not before.reading.is_limited
        is_hot = new > 0 or bool(reading.is_limited)
        cause: ThermalCause | None = "thermal" if is_hot else "frequency" if self._is_low(reading.hertz) else None
        self._now = _Observation(reading, before.throttles + new, cause)

    def _is_low(self, hertz: float | None) -> bool:
        busy, self._busy = self._busy, self._metrics.busy_seconds
        if hertz is None or self._busy == busy:
            return False
        typical = median(self._frequencies) if len(self._frequencies) >= MIN_READINGS else None
        self._frequencies.append(hertz)
        return typical is not None and hertz < LOW_FREQUENCY * typical

    @property
    def _counts_throttles(self) -> bool:
        sensors = self._sensors
        return bool(sensors.throttle_files or sensors.cooling_files or sensors.has_pmset)

    def _run(self) -> None:
        period = PMSET_SECONDS if self._sensors.has_pmset else READ_SECONDS
        while not self._closed.wait(period):
            self.update()

    def _gauges(self) -> Iterator[Metric]:
        now = self._now
        if now is None:
            return
        if now.reading.hertz is not None:
            help_text = "Mean frequency of the performance cores."
            yield gauge_family("armature_cpu_frequency_hertz", help_text, now.reading.hertz)
        if now.reading.celsius is not None:
            help_text = "Highest temperature of the processor's sensors."
            yield gauge_family("armature_cpu_temperature_celsius", help_text, now.reading.celsius)
        if self._counts_throttles:
            help_text = "Times that heat slowed a core down, since the server started."
            yield CounterMetricFamily("armature_cpu_thermal_throttles_total", help_text, now.throttles)
