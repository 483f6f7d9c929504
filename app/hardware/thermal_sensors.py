"""Frequency, temperature and thermal throttling of the processor: where they can be read, and readings.

Formats: Linux Documentation/admin-guide/pm/cpufreq.rst, driver-api/thermal/sysfs-api.rst, hwmon/sysfs-interface.rst,
hwmon/coretemp.rst, hwmon/k10temp.rst, arch/x86/kernel/cpu/mce/therm_throt.c; `man 1 pmset`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from app.hardware.facts import Core, TemperatureSensor, ThermalSensors
from app.hardware.probe.host_files import HostFiles, parse_fields

PMSET = ["pmset", "-g", "therm"]
MAX_FREQUENCY_FILES = 16  # cores whose frequency is read: each read takes some microseconds
HERTZ_PER_KHZ, HERTZ_PER_MHZ, DEGREES = 1e3, 1e6, 1e-3
_CPU, _HWMON, _ZONES = "/sys/devices/system/cpu", "/sys/class/hwmon", "/sys/class/thermal"
# Drivers of the processor's own sensors, and labels of the sensor that covers all of it. An empty label is unlabelled.
_CHIPS = {
    "coretemp": r"Package id \d+",
    "k10temp": r"Tctl",
    "zenpower": r"Tdie",
    "apm_xgene": r"SoC Temperature",
    "cpu_thermal": r"",
    "scpi_sensors": r"(?i).*(soc|cpu).*",
}
_ZONE_TYPES = r"x86_pkg_temp|(cpu|soc|package|cluster)\d*[-_]?thermal\d*|cpu\d*|soc"
_COOLING_TYPES = r"(thermal-)?cpufreq-(cpu)?\d+|Processor"


def find_thermal_sensors(files: HostFiles, cores: Sequence[Core]) -> ThermalSensors:
    """Return what this Linux machine lets read of the frequency and temperature of its performance cores."""
    cpus = sorted(core.cpu_ids[0] for core in cores if core.kind == "performance")
    every = -(-len(cpus) // MAX_FREQUENCY_FILES) or 1
    frequency = tuple(
        file for cpu in cpus[::every] if files.number(file := f"{_CPU}/cpu{cpu}/cpufreq/scaling_cur_freq") is not None
    )
    limits = [files.number(f"{_CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq") for cpu in cpus]
    known = [limit for limit in limits if limit]
    has_cpuinfo = not frequency and _cpuinfo_hertz(files) is not None
    return ThermalSensors(
        frequency_source="cpufreq" if frequency else "cpuinfo" if has_cpuinfo else None,
        frequency_files=frequency,
        max_hertz=max(known) * HERTZ_PER_KHZ if known else None,
        temperatures=tuple(_chip_sensors(files)) or tuple(_zone_sensors(files)),
        throttle_files=tuple(_throttle_files(files, cores)),
        cooling_files=tuple(_cooling_files(files)),
    )


def _cpuinfo_hertz(files: HostFiles) -> float | None:
    """Return the mean of the lines `cpu MHz`; None in a virtual machine, where they are a constant."""
    text = files.text("/proc/cpuinfo") or ""
    if "hypervisor" in parse_fields(text).get("flags", "").split():
        return None
    found = [float(number) for number in re.findall(r"^cpu MHz\s*: (\d{1,9}(?:\.\d{1,9})?)$", text, re.MULTILINE)]
    return mean(found) * HERTZ_PER_MHZ if found else None


def _chip_sensors(files: HostFiles) -> Iterator[TemperatureSensor]:
    for entry in files.names(_HWMON):
        directory = f"{_HWMON}/{entry}"
        driver = files.text(f"{directory}/name") or ""
        if driver not in _CHIPS:
            continue
        for name in files.names(directory):
            file = f"{directory}/{name}"
            if re.fullmatch(r"temp\d+_input", name) is None or files.number(file) is None:
                continue
            label = files.text(f"{directory}/{name.removesuffix('input')}label") or ""
            if re.fullmatch(_CHIPS[driver], label):
                yield TemperatureSensor(f"{driver} {label}".strip(), file)


def _zone_sensors(files: HostFiles) -> Iterator[TemperatureSensor]:
    for entry in files.names(_ZONES):
        kind, file = files.text(f"{_ZONES}/{entry}/type") or "", f"{_ZONES}/{entry}/temp"
        is_processor = entry.startswith("thermal_zone") and re.fullmatch(_ZONE_TYPES, kind) is not None
        if is_processor and files.number(file) is not None:
            yield TemperatureSensor(kind, file)


def _throttle_files(files: HostFiles, cores: Sequence[Core]) -> Iterator[str]:
    for core in cores:
        file = f"{_CPU}/cpu{core.cpu_ids[0]}/thermal_throttle/core_throttle_count"
        if files.number(file) is not None:
            yield file


def _cooling_files(files: HostFiles) -> Iterator[str]:
    for entry in files.names(_ZONES):
        kind, file = files.text(f"{_ZONES}/{entry}/type") or "", f"{_ZONES}/{entry}/cur_state"
        is_processor = entry.startswith("cooling_device") and re.fullmatch(_COOLING_TYPES, kind) is not None
        if is_processor and files.number(file) is not None:
            yield file


@dataclass(frozen=True, slots=True)
class ThermalReading:
    """One reading; None: no source. `hertz` is the mean of the cores, `throttles` counts since the boot."""

    hertz: float | None = None
    celsius: float | None = None
    throttles: int | None = None
    is_limited: bool | None = None


def read_thermal(
    sensors: ThermalSensors, files: HostFiles, run: Callable[[list[str]], str | None] = lambda command: None
) -> ThermalReading:
    """Read all sensors once. It takes some microseconds for each file, and `pmset` some milliseconds."""
    frequencies = [number for file in sensors.frequency_files if (number := files.number(file)) is not None]
    degrees = [number for sensor in sensors.temperatures if (number := files.number(sensor.file)) is not None]
    counts = [number for file in sensors.throttle_files if (number := files.number(file)) is not None]
    states = [number for file in sensors.cooling_files if (number := files.number(file)) is not None]
    hertz = mean(frequencies) * HERTZ_PER_KHZ if frequencies else None
    if sensors.frequency_source == "cpuinfo":
        hertz = _cpuinfo_hertz(files)
    limited = any(state > 0 for state in states) if states else None
    if sensors.has_pmset:
        limited = parse_pmset(run(PMSET) or "")
    return ThermalReading(
        hertz=hertz,
        celsius=max(degrees) * DEGREES if degrees else None,
        throttles=sum(counts) if counts else None,
        is_limited=limited,
    )


def parse_pmset(text: str) -> bool | None:
    """Return whether `pmset -g therm` says that heat limits the processor; None if it says nothing.

    Intel Macs print `CPU_Speed_Limit = 100`; Apple silicon has warning levels, or notes that none was recorded.
    """
    found = re.search(r"CPU_Speed_Limit\s*=\s*(\d{1,9})", text)
    if found is not None:
        return int(found[1]) < 100
    level = re.search(r"(?:Thermal|thermal) (?:W|w)arning (?:L|l)evel\s*[=:]?\s*(\d{1,9})", text)
    if level is not None:
        return int(level[1]) > 0
    return False if "No thermal warning level has been recorded" in text else None
