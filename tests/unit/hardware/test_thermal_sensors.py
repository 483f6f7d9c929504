"""Sources of frequency and temperature are those of the processor, and readings are in hertz and degrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.hardware.facts import Core, TemperatureSensor, ThermalSensors
from app.hardware.probe import macos
from app.hardware.probe.host_files import HostFiles
from app.hardware.probe.probe import probe
from app.hardware.thermal_sensors import (
    MAX_FREQUENCY_FILES,
    PMSET,
    ThermalReading,
    find_thermal_sensors,
    parse_pmset,
    read_thermal,
)
from recorded_hosts import write_tree

CPU, HWMON, ZONES = "/sys/devices/system/cpu", "/sys/class/hwmon", "/sys/class/thermal"
# Composed from the kernel's documentation and the drivers' names; `test_readings_are_of_the_recorded_files` reads them.
RASPBERRY_PI_5 = {
    "/proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd\n",
    **{f"{CPU}/cpu{n}/cpufreq/scaling_cur_freq": "1500000" for n in range(3)},
    f"{CPU}/cpu3/cpufreq/scaling_cur_freq": "2400000",
    f"{CPU}/cpu0/cpufreq/cpuinfo_max_freq": "2400000",
    f"{HWMON}/hwmon0/name": "cpu_thermal",
    f"{HWMON}/hwmon0/temp1_input": "61250",
    f"{HWMON}/hwmon1/name": "pwmfan",
    f"{HWMON}/hwmon2/name": "rp1_adc",
    f"{HWMON}/hwmon2/temp1_input": "99000",
    f"{ZONES}/thermal_zone0/type": "cpu-thermal",
    f"{ZONES}/thermal_zone0/temp": "61250",
    f"{ZONES}/cooling_device0/type": "pwm-fan",
    f"{ZONES}/cooling_device0/cur_state": "2",
    f"{ZONES}/cooling_device1/type": "cpufreq-cpu0",
    f"{ZONES}/cooling_device1/cur_state": "0",
}
LAPTOP = {
    "/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2\ncpu MHz\t\t: 800.0\n",
    **{f"{CPU}/cpu{n}/cpufreq/scaling_cur_freq": f"{3_100_000 + n * 100_000}" for n in range(4)},
    **{f"{CPU}/cpu{n}/cpufreq/cpuinfo_max_freq": "4700000" for n in range(4)},
    **{f"{CPU}/cpu{n}/thermal_throttle/core_throttle_count": str(n) for n in range(4)},
    f"{HWMON}/hwmon0/name": "nvme",
    f"{HWMON}/hwmon0/temp1_input": "70000",
    f"{HWMON}/hwmon3/name": "coretemp",
    f"{HWMON}/hwmon3/temp1_label": "Package id 0",
    f"{HWMON}/hwmon3/temp1_input": "83000",
    f"{HWMON}/hwmon3/temp2_label": "Core 0",
    f"{HWMON}/hwmon3/temp2_input": "85000",
    f"{ZONES}/thermal_zone0/type": "acpitz",
    f"{ZONES}/thermal_zone0/temp": "27800",
    f"{ZONES}/cooling_device0/type": "Processor",
    f"{ZONES}/cooling_device0/cur_state": "0",
}
GUEST = {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 hypervisor\ncpu MHz\t\t: 2000.000\n"}
FOUR_CORES = tuple(Core((cpu,)) for cpu in range(4))


def files(root: Path, tree: dict[str, str]) -> HostFiles:
    write_tree(tree, root)
    return HostFiles(root)


def test_readings_are_of_the_recorded_files(tmp_path: Path) -> None:
    board = files(tmp_path / "board", RASPBERRY_PI_5)
    sensors = find_thermal_sensors(board, FOUR_CORES)
    assert sensors.temperatures == (TemperatureSensor("cpu_thermal", f"{HWMON}/hwmon0/temp1_input"),)
    assert (sensors.frequency_source, sensors.max_hertz) == ("cpufreq", 2.4e9)
    assert sensors.cooling_files == (f"{ZONES}/cooling_device1/cur_state",)
    assert read_thermal(sensors, board) == ThermalReading(1.725e9, 61.25, None, False)
    laptop = files(tmp_path / "laptop", LAPTOP)
    sensors = find_thermal_sensors(laptop, FOUR_CORES)
    assert [sensor.name for sensor in sensors.temperatures] == ["coretemp Package id 0"]
    assert read_thermal(sensors, laptop) == ThermalReading(3.25e9, 83.0, 6, False)


def test_a_virtual_machine_has_none(tmp_path: Path) -> None:
    sensors = find_thermal_sensors(files(tmp_path, GUEST), FOUR_CORES)
    assert sensors == ThermalSensors()
    assert not sensors.has_sources


def test_cpuinfo_is_read_where_there_is_no_cpufreq(tmp_path: Path) -> None:
    tree = {"/proc/cpuinfo": "flags\t: fpu\ncpu MHz\t\t: 2000.5\n\nflags\t: fpu\ncpu MHz\t\t: 3000.5\n"}
    sensors = find_thermal_sensors(files(tmp_path, tree), FOUR_CORES)
    assert sensors.frequency_source == "cpuinfo"
    assert read_thermal(sensors, HostFiles(tmp_path)).hertz == pytest.approx(2.5005e9)


def test_zones_stand_in_for_chips(tmp_path: Path) -> None:
    tree = {name: text for name, text in LAPTOP.items() if not name.startswith(HWMON)} | {
        f"{ZONES}/thermal_zone1/type": "x86_pkg_temp",
        f"{ZONES}/thermal_zone1/temp": "64000",
    }
    sensors = find_thermal_sensors(files(tmp_path, tree), FOUR_CORES)
    assert [sensor.name for sensor in sensors.temperatures] == ["x86_pkg_temp"]


def test_heat_that_limits_the_frequency_is_seen(tmp_path: Path) -> None:
    board = files(tmp_path, RASPBERRY_PI_5 | {f"{ZONES}/cooling_device1/cur_state": "3"})
    assert read_thermal(find_thermal_sensors(board, FOUR_CORES), board).is_limited is True


def test_efficiency_cores_are_not_read_and_of_many_cores_only_some(tmp_path: Path) -> None:
    tree = {f"{CPU}/cpu{n}/cpufreq/scaling_cur_freq": "1000000" for n in range(128)}
    host = files(tmp_path, tree)
    cores = tuple(Core((cpu,), kind="performance" if cpu < 96 else "efficiency") for cpu in range(128))
    found = find_thermal_sensors(host, cores).frequency_files
    assert len(found) == MAX_FREQUENCY_FILES
    assert found[-1] == f"{CPU}/cpu90/cpufreq/scaling_cur_freq"


def test_a_file_that_vanishes_is_left_out_of_a_reading(tmp_path: Path) -> None:
    board = files(tmp_path, RASPBERRY_PI_5)
    sensors = find_thermal_sensors(board, FOUR_CORES)
    board.path(f"{HWMON}/hwmon0/temp1_input").unlink()
    assert read_thermal(sensors, board).celsius is None


NOTES = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
INTEL = """Note: No thermal warning level has been recorded
2024-07-01 10:00:00 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= {}
"""


@pytest.mark.parametrize(
    ("text", "limited"),
    [
        (NOTES, False),
        (INTEL.format(100), False),
        (INTEL.format(62), True),
        ("", None),
        ("Thermal Warning Level = 2", True),
    ],
)
def test_pmset_says_whether_heat_limits_a_mac(text: str, limited: bool | None) -> None:
    assert parse_pmset(text) is limited
    sensors = ThermalSensors(has_pmset=True)
    reading = read_thermal(sensors, HostFiles(Path("/nowhere")), lambda command: text if command == PMSET else None)
    assert reading == ThermalReading(is_limited=limited)


def test_a_mac_asks_pmset() -> None:
    def run(command: list[str]) -> str | None:
        return (
            NOTES
            if command == PMSET
            else "hw.memsize: 17179869184\nhw.physicalcpu: 8\n"
            if command[0] == "sysctl"
            else None
        )

    facts = macos.mac_facts(run)
    assert facts is not None and facts.thermal.has_pmset


def test_the_probe_reads_this_machine() -> None:
    assert isinstance(probe().thermal, ThermalSensors)
