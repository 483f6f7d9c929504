"""Discovery of power counters on Linux: powercap zones first, then sensors with a known meaning.

Formats: Linux Documentation/power/powercap/powercap.rst, ABI/testing/sysfs-class-powercap, hwmon/sysfs-interface.rst
and the drivers named below. All counters cover the whole machine, or its processors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from app.hardware.facts import PowerCounter, PowerMeter
from app.hardware.probe.host_files import HostFiles, parse_fields

_POWERCAP, _HWMON = "/sys/class/powercap", "/sys/class/hwmon"
# Processor registers and memory-mapped registers may report the same packages; the first type that exists is used.
_RAPL_TYPES = ("intel-rapl", "intel-rapl-tpmi", "intel-rapl-mmio")
_NO_SOURCE = "No power zones and no known power sensors were found; virtual machines and many Arm servers have none."


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
    """Return the sensors of a chip; of an average and a momentary value, the average."""
    found: dict[str, PowerCounter] = {}
    for entry in files.names(directory):
        match = re.fullmatch(r"((energy|power)\d+)_(average|input)", entry)
        if match:
            label = files.text(f"{directory}/{match[1]}_label") or files.text(f"{directory}/{match[1]}_oem_info")
            unit: Literal["energy", "power"] = "energy" if match[2] == "energy" else "power"
            found.setdefault(match[1], PowerCounter(label or match[1], f"{directory}/{entry}", unit))
    return list(found.values())
