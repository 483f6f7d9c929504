"""Which of a Linux machine's counters tell its power: powercap zones first, then sensors whose meaning is known; the unsure is left out.

Formats: Linux Documentation/power/powercap/powercap.rst, ABI/testing/sysfs-class-powercap, hwmon/sysfs-interface.rst and the drivers named
below. All count the whole machine, or its processors, whoever uses them: neighbours in other containers too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from app.hardware.facts import PowerCounter, PowerMeter
from app.hardware.files import Files, parse_fields

_POWERCAP, _HWMON = "/sys/class/powercap", "/sys/class/hwmon"
# The same packages may be told by processor registers and by memory-mapped ones: the first that is there counts.
_RAPL_TYPES = ("intel-rapl", "intel-rapl-tpmi", "intel-rapl-mmio")
_NOTHING = "No power zones and no power sensors of a known kind: virtual machines and many Arm servers have none."


def look(files: Files) -> PowerMeter:
    """The first of RAPL, SCMI power zones and known sensors that can be read; else why none can."""
    found = [meter for find in (_rapl, _scmi, _sensors) if (meter := find(files)) is not None]
    readable = next((meter for meter in found if meter.source is not None), None)
    return readable or PowerMeter(reason=" ".join(meter.reason for meter in found) or _NOTHING)


# ---- powercap ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Zone:
    """`numbers` of `intel-rapl:0:1` are (0, 1): the second part of the first zone."""

    directory: str
    numbers: tuple[int, ...]
    name: str


def _zones(files: Files, control_type: str) -> list[_Zone]:
    """Every zone of a type lies in the class's directory, however deep it is."""
    found = []
    for entry in files.names(_POWERCAP):
        kind, _, numbers = entry.partition(":")
        if kind == control_type and re.fullmatch(r"\d+(:\d+)*", numbers):
            directory = f"{_POWERCAP}/{entry}"
            path = tuple(map(int, numbers.split(":")))
            found.append(_Zone(directory, path, files.text(f"{directory}/name") or ""))
    return sorted(found, key=lambda zone: zone.numbers)


def _rapl(files: Files) -> PowerMeter | None:
    """Packages and their memory. `core` and `uncore` are parts of a package, `psys` is more than packages: neither is added."""
    for control_type in _RAPL_TYPES:
        zones = _zones(files, control_type)
        packages = _packages(zones, mirrored=_dies_mirror(files))
        if packages:
            numbers = {package.numbers for package in packages}
            memories = [zone for zone in zones if zone.name == "dram" and zone.numbers[:-1] in numbers]
            return _rapl_meter(files, [*packages, *memories])
        if zones and not any(zone.name for zone in zones):
            return PowerMeter(reason=f"{_POWERCAP} is masked: container runtimes hide it from those inside (CVE-2020-8694).")
    return None


def _packages(zones: list[_Zone], mirrored: bool) -> list[_Zone]:
    """`package-0`, or `package-0-die-1` where a package has several; of dies that say the same, the first."""
    found: dict[str, _Zone] = {}
    for zone in zones:
        match = re.fullmatch(r"(package-\d+)(-die-\d+)?", zone.name)
        if match:
            found.setdefault(match[1] if mirrored else zone.name, zone)
    return list(found.values())


def _dies_mirror(files: Files) -> bool:
    """AMD's dies all tell their socket's counter: two of a Threadripper 1950X said 68 W each where the wall said 125 W for the machine."""
    return parse_fields(files.text("/proc/cpuinfo")).get("vendor_id") in ("AuthenticAMD", "HygonGenuine")


def _rapl_meter(files: Files, zones: list[_Zone]) -> PowerMeter:
    if any(files.number(f"{zone.directory}/energy_uj") is None for zone in zones):
        return PowerMeter(
            reason=f"{zones[0].directory}/energy_uj may be read by root alone (since CVE-2020-8694): let this user read it, or say `watts`."
        )
    counters = tuple(
        PowerCounter(
            name=zone.name if zone.name != "dram" else f"dram-{zone.numbers[0]}",
            file=f"{zone.directory}/energy_uj",
            wraps_at=files.number(f"{zone.directory}/max_energy_range_uj"),
        )
        for zone in zones
    )
    return PowerMeter("rapl", counters, "The processor's own counters, of whole packages, whoever uses them.")


def _scmi(files: Files) -> PowerMeter | None:
    """Zones that the firmware of an Arm server tells the power of (drivers/powercap/arm_scmi_powercap.c); inner ones are parts of outer."""
    zones = [zone for zone in _zones(files, "arm-scmi") if len(zone.numbers) == 1]
    counters = tuple(PowerCounter(zone.name, f"{zone.directory}/power_uw", "power") for zone in zones)
    if not counters:
        return None
    if any(files.number(counter.file) is None for counter in counters):
        return PowerMeter(reason="The firmware's power zones (SCMI) are not measured by it, or may not be read by this user.")
    return PowerMeter("scmi", counters, "The power that the firmware tells of its zones (SCMI), integrated.")


# ---- sensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chip:
    """A driver, and which of its sensors add up to what the machine takes."""

    driver: str
    choose: Callable[[list[PowerCounter]], list[PowerCounter]]
    what: str


def _named(pattern: str) -> Callable[[list[PowerCounter]], list[PowerCounter]]:
    return lambda sensors: [sensor for sensor in sensors if re.fullmatch(pattern, sensor.name)]


def _alike(sensors: list[PowerCounter]) -> list[PowerCounter]:
    """One, or several whose names differ by a number alone, as those of sockets do; joules before watts. Others may count one another."""
    counts = [sensor for sensor in sensors if sensor.unit == "energy"] or sensors
    return counts if len({re.sub(r"\d+", "", sensor.name) for sensor in counts}) == 1 else []


def _grace_or_only(sensors: list[PowerCounter]) -> list[PowerCounter]:
    """NVIDIA Grace tells sockets, and of each its rails: the sockets are wanted. Elsewhere an only meter is the whole machine's."""
    return _named(r"Grace Power Socket \d+")(sensors) or (sensors if len(sensors) == 1 else [])


_CHIPS = (
    _Chip("amd_energy", _named(r"Esocket\d+"), "the sockets' counters"),  # github.com/amd/amd_energy
    _Chip("apm_xgene", _named(r"(CPU|IO) power"), "power of the processor's cores and of the rest of it"),  # X-Gene, Ampere Altra
    _Chip("scmi_sensors", _alike, "what the firmware tells"),  # drivers/hwmon/scmi-hwmon.c
    _Chip("scpi_sensors", _alike, "what the firmware tells"),
    _Chip("power_meter", _grace_or_only, "what the firmware's power meter tells"),  # drivers/acpi/acpi_power_meter, NVIDIA Grace
)


def _sensors(files: Files) -> PowerMeter | None:
    """Other sensors (of disks, batteries, graphics cards, single rails) are not looked at: no sum of them is the machine."""
    unsure = None
    for chip in _CHIPS:
        sensors = [sensor for directory in _chip_directories(files, chip.driver) for sensor in _of_chip(files, directory)]
        chosen = chip.choose(sensors)
        if chosen and all(files.number(sensor.file) is not None for sensor in chosen):
            return PowerMeter("hwmon", tuple(chosen), f"Sensors of the driver {chip.driver}: {chip.what}.")
        if sensors:
            names = ", ".join(sorted({sensor.name for sensor in sensors}))
            unsure = PowerMeter(reason=f"Sensors of the driver {chip.driver} ({names}): which of them add up is not known.")
    return unsure


def _chip_directories(files: Files, driver: str) -> Iterator[str]:
    """Old drivers keep their files a level deeper."""
    for entry in files.names(_HWMON):
        for directory in (f"{_HWMON}/{entry}", f"{_HWMON}/{entry}/device"):
            if files.text(f"{directory}/name") == driver:
                yield directory
                break


def _of_chip(files: Files, directory: str) -> list[PowerCounter]:
    """Of a sensor that tells an average and a moment, the average."""
    found: dict[str, PowerCounter] = {}
    for entry in files.names(directory):
        match = re.fullmatch(r"((energy|power)\d+)_(average|input)", entry)
        if match:
            label = files.text(f"{directory}/{match[1]}_label") or files.text(f"{directory}/{match[1]}_oem_info")
            unit: Literal["energy", "power"] = "energy" if match[2] == "energy" else "power"
            found.setdefault(match[1], PowerCounter(label or match[1], f"{directory}/{entry}", unit))
    return list(found.values())
