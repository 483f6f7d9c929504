"""Energy meters: joules since the start, from counters, from sampled power sensors, or from a declared model.

`joules()` is fast, never decreases, and is called by one thread. A meter whose readings are slow or must be regular has
its own thread. NVML's nvmlDeviceGetTotalEnergyConsumption counts millijoules of the whole board since the driver was
loaded (Volta and newer); not tested on a device yet.
"""

from __future__ import annotations

import ctypes
import plistlib
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Protocol
from xml.parsers.expat import ExpatError

from app.hardware.facts import CudaDevice, PowerCounter, PowerMeter
from app.hardware.probe.host_files import HostFiles

Clock = Callable[[], float]
ReadWatts = Callable[[], float | None]

MICRO = 1e-6
SAMPLE_SECONDS = 1.0  # power sensors average over about this period
# Highest plausible power of one counter. An apparent wrap that exceeds it was a reset to 0, for example when a machine
# wakes up.
MAX_COUNTER_WATTS = 5_000.0
MAX_PLIST_BYTES = 2**20  # largest property list of powermetrics that is kept; real ones have tens of kilobytes
POWERMETRICS = ["powermetrics", "--samplers", "cpu_power", "-f", "plist", "-i", str(int(SAMPLE_SECONDS * 1000))]


class EnergyMeter(Protocol):
    """Energy meter; `source` is the metrics' label: rapl, scmi, hwmon, powermetrics, nvml or modelled."""

    source: str

    def joules(self) -> float: ...

    def close(self) -> None: ...


class CounterMeter:
    """Meter of microjoule files, read more often than one wraps, which takes two minutes at 500 W."""

    def __init__(
        self, source: str, counters: tuple[PowerCounter, ...], files: HostFiles, clock: Clock = time.monotonic
    ) -> None:
        self.source = source
        self._counters, self._files, self._clock = counters, files, clock
        self._last: dict[str, tuple[float, int]] = {}
        self._microjoules = 0
        self.joules()

    def joules(self) -> float:
        """Return the joules since the start; the next reading catches up on a file that cannot be read now."""
        for counter in self._counters:
            now = self._files.number(counter.file)
            if now is not None:
                moment = self._clock()
                before, last = self._last.get(counter.file, (moment, now))
                self._microjoules += _counter_difference(last, now, counter.wraps_at, moment - before)
                self._last[counter.file] = (moment, now)
        return self._microjoules * MICRO

    def close(self) -> None: ...


def _counter_difference(last: int, now: int, wraps_at: int | None, seconds: float) -> int:
    """Return the microjoules between two readings of a counter that may have wrapped or been reset."""
    if now >= last:
        return now - last
    over = now + (wraps_at - last) if wraps_at is not None else now
    return over if over * MICRO <= MAX_COUNTER_WATTS * seconds else now


@dataclass(frozen=True, slots=True)
class _PowerSample:
    """One sample. The sampling thread replaces it as a whole, so that readers see consistent values."""

    at: float
    watts: float
    joules: float


class SampledMeter:
    """Meter that samples power on its own thread: a reading through a board's controller can take milliseconds."""

    def __init__(self, source: str, watts: ReadWatts, clock: Clock = time.monotonic) -> None:
        self.source = source
        self._watts, self._clock = watts, clock
        self._last: _PowerSample | None = None
        self._reported = 0.0
        self._closed = threading.Event()

    def start(self) -> SampledMeter:
        threading.Thread(target=self._run, name="armature-power", daemon=True).start()
        return self

    def joules(self) -> float:
        """Return the joules up to the last sample plus its power times the time since then, never falling."""
        last = self._last
        if last is not None:
            since = min(self._clock() - last.at, 2 * SAMPLE_SECONDS)
            self._reported = max(self._reported, last.joules + last.watts * since)
        return self._reported

    def close(self) -> None:
        self._closed.set()

    def sample(self) -> None:
        """Take a sample and integrate with the mean of this one and the last; a failed reading is skipped."""
        watts, last, now = self._watts(), self._last, self._clock()
        if watts is not None:
            joules = 0.0 if last is None else last.joules + (last.watts + watts) / 2 * (now - last.at)
            self._last = _PowerSample(now, watts, joules)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.sample()
            self._closed.wait(SAMPLE_SECONDS)


class PowermetricsMeter:
    """Meter that follows the output of macOS' powermetrics: one property list each second. Not tested on a Mac yet."""

    source = "powermetrics"

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]] | None = None) -> None:
        self._joules = 0.0
        self._process = (start or _start_powermetrics)()

    def start(self) -> PowermetricsMeter:
        assert self._process.stdout is not None, "powermetrics was started with a pipe"
        threading.Thread(target=self.follow, args=(self._process.stdout,), name="armature-power", daemon=True).start()
        return self

    def joules(self) -> float:
        return self._joules

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def follow(self, stream: IO[bytes]) -> None:
        text = b""
        for line in stream:
            text = text[-MAX_PLIST_BYTES:] + line.lstrip(b"\0")  # zero bytes separate the lists
            if b"</plist>" in line:
                self._joules += parse_powermetrics(text)
                text = b""


def _start_powermetrics() -> subprocess.Popen[bytes]:
    return subprocess.Popen(POWERMETRICS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def parse_powermetrics(text: bytes) -> float:
    """Return the joules of one sample (processor, graphics and neural engine), or 0 without valid values."""
    try:
        fields = plistlib.loads(text)
        return float(fields["processor"]["combined_power"]) / 1e3 * float(fields["elapsed_ns"]) / 1e9
    except (plistlib.InvalidFileException, ExpatError, ValueError, KeyError, TypeError):
        return 0.0


class ModelledMeter:
    """Meter that counts declared watts while steps run; idle power is unknown and not counted."""

    source = "modelled"

    def __init__(self, watts: float, busy_seconds: Callable[[], float]) -> None:
        self._watts, self._busy_seconds = watts, busy_seconds

    def joules(self) -> float:
        return self._watts * self._busy_seconds()

    def close(self) -> None: ...


def open_energy_meter(
    meter: PowerMeter, files: HostFiles, watts: float | None, busy_seconds: Callable[[], float]
) -> EnergyMeter | None:
    """Open the meter that the probe found, else the model if `watts` were declared; None without either."""
    if meter.source == "powermetrics":
        return PowermetricsMeter().start()
    if meter.source is not None and all(counter.unit == "energy" for counter in meter.counters):
        return CounterMeter(meter.source, meter.counters, files)
    if meter.source is not None:
        return SampledMeter(meter.source, lambda: _sum_of_watts(meter.counters, files)).start()
    return None if watts is None else ModelledMeter(watts, busy_seconds)


def _sum_of_watts(counters: tuple[PowerCounter, ...], files: HostFiles) -> float | None:
    """Return the sum of all counters; None if one cannot be read, because a partial sum would be wrong."""
    readings = [files.number(counter.file) for counter in counters]
    return None if None in readings else sum(microwatts for microwatts in readings if microwatts is not None) * MICRO


# NVML is called through ctypes instead of nvidia-ml-py, which wraps the same library by ctypes: four functions are needed,
# and as an optional package it would leave the energy of a GPU unknown wherever it is not installed.
MILLI = 1e-3
_SUCCESS = 0


class NvmlMeter:
    """Meter of the energy that the device has used since the meter was opened."""

    source = "nvml"

    def __init__(self, library: Any, handle: ctypes.c_void_p, first: int) -> None:
        self._library, self._handle = library, handle
        self._first = self._last = first

    def joules(self) -> float:
        """Return the joules; the last value if the driver does not answer."""
        millijoules = _millijoules(self._library, self._handle)
        self._last = max(self._last, millijoules or 0)
        return (self._last - self._first) * MILLI

    def close(self) -> None:
        self._library.nvmlShutdown()


def open_nvml_meter(device: CudaDevice, load: Callable[[str], Any] = ctypes.CDLL) -> NvmlMeter | None:
    """Open the meter; None without a driver, or if the device does not count energy."""
    try:
        library = load("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != _SUCCESS:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(device.index), ctypes.byref(handle)) == _SUCCESS:
            first = _millijoules(library, handle)
            if first is not None:
                return NvmlMeter(library, handle, first)
        library.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one that is too old for a function
        pass
    return None


def _millijoules(library: Any, handle: ctypes.c_void_p) -> int | None:
    value = ctypes.c_ulonglong()
    return value.value if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)) == _SUCCESS else None
