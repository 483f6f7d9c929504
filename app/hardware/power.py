"""Power of the machine: discovery of counters on Linux (powercap zones, then known sensors), and energy meters.

Formats: Linux Documentation/power/powercap/powercap.rst, ABI/testing/sysfs-class-powercap, hwmon/sysfs-interface.rst
and the drivers named below. All counters cover the whole machine, or its processors.
"""

from __future__ import annotations

import ctypes
import plistlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol
from xml.parsers.expat import ExpatError

from app.hardware.facts import CudaDevice, PowerCounter, PowerMeter
from app.hardware.probe.host_files import HostFiles, parse_fields

_POWERCAP, _HWMON = "/sys/class/powercap", "/sys/class/hwmon"
# Processor registers and memory-mapped registers may report the same packages; the first type that exists is used.
_RAPL_TYPES = ("intel-rapl", "intel-rapl-tpmi", "intel-rapl-mmio")
_NO_SOURCE = "No power zones and no known power sensors were found; virtual machines and many Arm servers have none."
Clock = Callable[[], float]
ReadWatts = Callable[[], float | None]
MICRO = 1e-6
SAMPLE_SECONDS = 1.0  # power sensors average over about this period
# Highest plausible power of one counter. An apparent wrap that exceeds it was a reset to 0, for example when a machine
# wakes up.
MAX_COUNTER_WATTS = 5_000.0
MAX_PLIST_BYTES = 2**20  # largest property list of powermetrics that is kept; real ones have tens of kilobytes
POWERMETRICS = ["powermetrics", "--samplers", "cpu_power", "-f", "plist", "-i", str(int(SAMPLE_SECONDS * 1000))]
# NVML is called through ctypes instead of nvidia-ml-py, which wraps the same library by ctypes: four functions are needed,
# and as an optional package it would leave the energy of a GPU unknown wherever it is not installed.
MILLI = 1e-3
_SUCCESS = 0


def find_power_meter(files: HostFiles) -> PowerMeter:
    """Return the first readable source of RAPL, SCMI power zones and known sensors, or the reasons for none."""
    found = [meter for find in (_rapl, _scmi, _sensors) if (meter := find(files)) is not None]
    readable = next((meter for meter in found if meter.source is not None), None)
    return readable or PowerMeter(reason=" ".join(meter.reason for meter in found) or _NO_SOURCE)


# ---- powercap ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PowerZone:
    """Powercap zone. The `numbers` of `intel-rapl:0:1` are (0, 1): the second part of the first zone."""

    directory: str
    numbers: tuple[int, ...]
    name: str


def _zones(files: HostFiles, control_type: str) -> list[_PowerZone]:
    """Return all zones of a control type, at any depth; sysfs lists them in one directory."""
    found = []
    for entry in files.names(_POWERCAP):
        kind, _, numbers = entry.partition(":")
        if kind == control_type and re.fullmatch(r"\d{1,9}(:\d{1,9})*", numbers):
            directory = f"{_POWERCAP}/{entry}"
            path = tuple(map(int, numbers.split(":")))
            found.append(_PowerZone(directory, path, files.text(f"{directory}/name") or ""))
    return sorted(found, key=lambda zone: zone.numbers)


def _rapl(files: HostFiles) -> PowerMeter | None:
    """Return the packages and their memory, without `core` and `uncore` (parts) and `psys` (their sum)."""
    for control_type in _RAPL_TYPES:
        zones = _zones(files, control_type)
        packages = _packages(zones, mirrored=_dies_mirror(files))
        if packages:
            numbers = {package.numbers for package in packages}
            memories = [zone for zone in zones if zone.name == "dram" and zone.numbers[:-1] in numbers]
            return _rapl_meter(files, [*packages, *memories])
        if zones and not any(zone.name for zone in zones):
            return PowerMeter(
                reason=f"{_POWERCAP} is masked: container runtimes hide it from containers (CVE-2020-8694)."
            )
    return None


def _packages(zones: list[_PowerZone], mirrored: bool) -> list[_PowerZone]:
    """Return zones named `package-0` or `package-0-die-1`; of `mirrored` dies only the first of a package."""
    found: dict[str, _PowerZone] = {}
    for zone in zones:
        match = re.fullmatch(r"(package-\d+)(-die-\d+)?", zone.name)
        if match:
            found.setdefault(match[1] if mirrored else zone.name, zone)
    return list(found.values())


def _dies_mirror(files: HostFiles) -> bool:
    """Return true for AMD, whose dies all report the counter of their socket.

    Two dies of a Threadripper 1950X reported 68 W each while the whole machine drew 125 W at the wall.
    """
    return parse_fields(files.text("/proc/cpuinfo")).get("vendor_id") in ("AuthenticAMD", "HygonGenuine")


def _rapl_meter(files: HostFiles, zones: list[_PowerZone]) -> PowerMeter:
    if any(files.number(f"{zone.directory}/energy_uj") is None for zone in zones):
        return PowerMeter(
            reason=f"{zones[0].directory}/energy_uj may be read by root alone (since CVE-2020-8694): let this user read it, or set `watts`."
        )
    counters = tuple(
        PowerCounter(
            name=zone.name if zone.name != "dram" else f"dram-{zone.numbers[0]}",
            file=f"{zone.directory}/energy_uj",
            wraps_at=files.number(f"{zone.directory}/max_energy_range_uj"),
        )
        for zone in zones
    )
    return PowerMeter(
        "rapl", counters, "The processor's counters of whole packages, including the work of other programs."
    )


def _scmi(files: HostFiles) -> PowerMeter | None:
    """Return the outermost zones of an Arm server's firmware. Source: drivers/powercap/arm_scmi_powercap.c."""
    zones = [zone for zone in _zones(files, "arm-scmi") if len(zone.numbers) == 1]
    counters = tuple(PowerCounter(zone.name, f"{zone.directory}/power_uw", "power") for zone in zones)
    if not counters:
        return None
    if any(files.number(counter.file) is None for counter in counters):
        return PowerMeter(
            reason="The firmware does not measure its power zones (SCMI), or this user may not read them."
        )
    return PowerMeter(
        "scmi", counters, "The power that the firmware reports for its zones (SCMI), integrated over time."
    )


# ---- sensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SensorDriver:
    """Sensor driver, and a function that chooses the sensors that add up to the machine's power."""

    driver: str
    choose: Callable[[list[PowerCounter]], list[PowerCounter]]
    what: str


def _named(pattern: str) -> Callable[[list[PowerCounter]], list[PowerCounter]]:
    return lambda sensors: [sensor for sensor in sensors if re.fullmatch(pattern, sensor.name)]


def _same_kind_sensors(sensors: list[PowerCounter]) -> list[PowerCounter]:
    """Return the only sensor, or all if names differ only by a number; energy counters before power sensors."""
    counts = [sensor for sensor in sensors if sensor.unit == "energy"] or sensors
    return counts if len({re.sub(r"\d+", "", sensor.name) for sensor in counts}) == 1 else []


def _grace_or_single_sensor(sensors: list[PowerCounter]) -> list[PowerCounter]:
    """Return the socket sensors of NVIDIA Grace, which also reports rails; elsewhere the only sensor."""
    return _named(r"Grace Power Socket \d+")(sensors) or (sensors if len(sensors) == 1 else [])


_SENSOR_DRIVERS = (
    _SensorDriver("amd_energy", _named(r"Esocket\d+"), "the sockets' counters"),  # github.com/amd/amd_energy
    _SensorDriver(
        "apm_xgene", _named(r"(CPU|IO) power"), "power of the processor's cores and of its other parts"
    ),  # X-Gene, Ampere Altra
    _SensorDriver("scmi_sensors", _same_kind_sensors, "power reported by the firmware"),  # drivers/hwmon/scmi-hwmon.c
    _SensorDriver("scpi_sensors", _same_kind_sensors, "power reported by the firmware"),
    _SensorDriver(
        "power_meter", _grace_or_single_sensor, "the reading of the firmware's power meter"
    ),  # drivers/acpi/acpi_power_meter, NVIDIA Grace
)


def _sensors(files: HostFiles) -> PowerMeter | None:
    """Return the sensors of a known driver, without disks, batteries, graphics cards and single rails."""
    unsure = None
    for chip in _SENSOR_DRIVERS:
        sensors = [
            sensor for directory in _chip_directories(files, chip.driver) for sensor in _chip_sensors(files, directory)
        ]
        chosen = chip.choose(sensors)
        if chosen and all(files.number(sensor.file) is not None for sensor in chosen):
            return PowerMeter("hwmon", tuple(chosen), f"Sensors of the driver {chip.driver}: {chip.what}.")
        if sensors:
            names = ", ".join(sorted({sensor.name for sensor in sensors}))
            unsure = PowerMeter(
                reason=f"Sensors of the driver {chip.driver} ({names}): it is unknown which of them add up to the machine's power."
            )
    return unsure


def _chip_directories(files: HostFiles, driver: str) -> Iterator[str]:
    """Yield the directories of a driver's chips; old drivers have their files one level deeper."""
    for entry in files.names(_HWMON):
        for directory in (f"{_HWMON}/{entry}", f"{_HWMON}/{entry}/device"):
            if files.text(f"{directory}/name") == driver:
                yield directory
                break


def _chip_sensors(files: HostFiles, directory: str) -> list[PowerCounter]:
    found: dict[str, PowerCounter] = {}
    for entry in files.names(directory):
        match = re.fullmatch(r"((energy|power)\d+)_(average|input)", entry)
        if match:
            label = files.text(f"{directory}/{match[1]}_label") or files.text(f"{directory}/{match[1]}_oem_info")
            unit: Literal["energy", "power"] = "energy" if match[2] == "energy" else "power"
            found.setdefault(match[1], PowerCounter(label or match[1], f"{directory}/{entry}", unit))
    return list(found.values())


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
