"""Power sources are found, or a reason is given; nothing is counted twice or estimated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.hardware import power
from app.hardware.facts import PowerCounter, PowerMeter
from app.hardware.probe import macos
from app.hardware.probe.host_files import HostFiles
from recorded_hosts import read_tree, write_tree

COUNTERS = Path(__file__).parent / "counters"
NAMES = sorted(path.name for path in COUNTERS.iterdir() if path.is_dir())


def recorded(name: str, root: Path) -> PowerMeter:
    write_tree(read_tree(name, COUNTERS), root)
    return power.find_power_meter(HostFiles(root))


def written(root: Path, files: dict[str, str]) -> PowerMeter:
    write_tree(files, root)
    return power.find_power_meter(HostFiles(root))


def names(meter: PowerMeter) -> list[str]:
    return [counter.name for counter in meter.counters]


def test_no_counters_without_a_source() -> None:
    for name in NAMES:
        assert re.search(r"https://\S+", (COUNTERS / name / "SOURCE.md").read_text()), name
    assert set(NAMES) == {"threadripper", "client-dram", "laptop-psys", "grace"}


def test_a_package_and_its_memory_but_not_the_packages_parts(tmp_path: Path) -> None:
    meter = recorded("client-dram", tmp_path)
    assert (meter.source, names(meter)) == ("rapl", ["package-0", "dram-0"])
    assert meter.counters[0] == PowerCounter(
        "package-0", "/sys/class/powercap/intel-rapl:0/energy_uj", "energy", 262143328850
    )


def test_neither_the_platform_nor_the_same_package_by_another_way(tmp_path: Path) -> None:
    meter = recorded("laptop-psys", tmp_path)
    assert [counter.file.split("/")[4] for counter in meter.counters] == ["intel-rapl:0", "intel-rapl:0:2"]


def test_registers_mapped_into_memory_where_there_are_no_others(tmp_path: Path) -> None:
    tree = {name: text for name, text in read_tree("laptop-psys", COUNTERS).items() if "intel-rapl:" not in name}
    meter = written(tmp_path, tree)
    assert [counter.file.split("/")[4] for counter in meter.counters] == ["intel-rapl-mmio:0"]


def test_dies_of_amd_say_the_same_and_count_once(tmp_path: Path) -> None:
    assert names(recorded("threadripper", tmp_path)) == ["package-0-die-0"]


def test_dies_of_intel_count_each(tmp_path: Path) -> None:
    tree = read_tree("threadripper", COUNTERS) | {"/proc/cpuinfo": "vendor_id : GenuineIntel\n"}
    assert names(written(tmp_path, tree)) == ["package-0-die-0", "package-0-die-1"]


def test_every_package_of_several_with_its_own_memory(tmp_path: Path) -> None:
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "dram",
        "intel-rapl:10": "package-10",
        "intel-rapl:10:0": "dram",
    }
    zones |= {"intel-rapl:2": "package-1", "intel-rapl:2:0": "dram"}
    tree = {f"/sys/class/powercap/{zone}/name": name for zone, name in zones.items()}
    tree |= {f"/sys/class/powercap/{zone}/energy_uj": "7" for zone in zones}
    meter = written(tmp_path, tree)
    assert names(meter) == ["package-0", "package-1", "package-10", "dram-0", "dram-2", "dram-10"]
    assert meter.counters[0].wraps_at is None


def test_what_only_root_may_read_is_absent_with_the_reason(tmp_path: Path) -> None:
    write_tree(read_tree("client-dram", COUNTERS), tmp_path)
    unreadable = tmp_path / "sys/class/powercap/intel-rapl:0:2/energy_uj"
    unreadable.unlink()
    unreadable.mkdir()  # not even root reads that
    meter = power.find_power_meter(HostFiles(tmp_path))
    assert meter.source is None and not meter.counters
    assert "root alone" in meter.reason and "`watts`" in meter.reason


def test_a_container_that_is_not_shown_the_zones_says_so(tmp_path: Path) -> None:
    zones = tmp_path / "sys/class/powercap"
    zones.mkdir(parents=True)
    for name in ("intel-rapl", "intel-rapl:0", "intel-rapl:0:0"):
        (zones / name).symlink_to(tmp_path / "sys/devices/virtual/powercap" / name)
    meter = power.find_power_meter(HostFiles(tmp_path))
    assert meter.source is None and "masked" in meter.reason


def test_sockets_of_grace_without_what_they_are_made_of(tmp_path: Path) -> None:
    meter = recorded("grace", tmp_path)
    assert (meter.source, names(meter)) == ("hwmon", ["Grace Power Socket 0", "Grace Power Socket 1"])
    assert {counter.unit for counter in meter.counters} == {"power"}


def test_an_only_power_meter_is_the_machines_and_several_are_nobodys(tmp_path: Path) -> None:
    one = {"/sys/class/hwmon/hwmon3/name": "power_meter", "/sys/class/hwmon/hwmon3/power1_average": "90000000"}
    assert names(written(tmp_path / "one", one)) == ["power1"]
    two = one | {"/sys/class/hwmon/hwmon4/name": "power_meter", "/sys/class/hwmon/hwmon4/power1_average": "80000000"}
    meter = written(tmp_path / "two", two)
    assert meter.source is None and "power_meter" in meter.reason


def test_both_rails_of_an_altra_of_both_sockets(tmp_path: Path) -> None:
    tree: dict[str, str] = {}
    for socket in (1, 2):
        chip = f"/sys/class/hwmon/hwmon{socket}"
        tree |= {f"{chip}/name": "apm_xgene", f"{chip}/power1_label": "CPU power", f"{chip}/power1_input": "61000000"}
        tree |= {f"{chip}/power2_label": "IO power", f"{chip}/power2_input": "30000000", f"{chip}/temp1_input": "40000"}
    assert names(written(tmp_path, tree)) == ["CPU power", "IO power"] * 2


def test_joules_before_watts_and_the_mean_before_the_moment(tmp_path: Path) -> None:
    chip = "/sys/class/hwmon/hwmon0"
    tree = {f"{chip}/name": "scmi_sensors", f"{chip}/power1_input": "5", f"{chip}/power1_label": "soc"}
    assert [counter.unit for counter in written(tmp_path / "watts", tree).counters] == ["power"]
    averaged = written(tmp_path / "mean", tree | {f"{chip}/power1_average": "4"})
    assert [counter.file for counter in averaged.counters] == [f"{chip}/power1_average"]
    joules = written(tmp_path / "joules", tree | {f"{chip}/energy1_input": "9", f"{chip}/energy1_label": "soc"})
    assert [(counter.name, counter.unit) for counter in joules.counters] == [("soc", "energy")]


@pytest.mark.parametrize(
    "labels, known",
    [(["socket0", "socket1"], True), (["soc"], True), (["soc", "ddr"], False), (["big", "little", "gpu"], False)],
)
def test_sensors_of_the_firmware_add_up_where_they_are_alike(labels: list[str], known: bool, tmp_path: Path) -> None:
    tree = {"/sys/class/hwmon/hwmon0/name": "scmi_sensors"}
    for number, label in enumerate(labels, 1):
        tree |= {
            f"/sys/class/hwmon/hwmon0/power{number}_input": "1",
            f"/sys/class/hwmon/hwmon0/power{number}_label": label,
        }
    meter = written(tmp_path, tree)
    assert names(meter) == (labels if known else [])
    assert known or all(label in meter.reason for label in labels)


def test_outer_zones_of_the_firmware_hold_their_inner_ones(tmp_path: Path) -> None:
    zones = {"arm-scmi:0": "package", "arm-scmi:0:0": "cores", "arm-scmi:1": "memory"}
    tree = {f"/sys/class/powercap/{zone}/name": name for zone, name in zones.items()}
    tree |= {f"/sys/class/powercap/{zone}/power_uw": "50000000" for zone in zones}
    meter = written(tmp_path / "read", tree)
    assert (meter.source, names(meter)) == ("scmi", ["package", "memory"])
    del tree["/sys/class/powercap/arm-scmi:1/power_uw"]
    assert written(tmp_path / "partly", tree).source is None


def test_disks_batteries_and_graphics_are_no_machine(tmp_path: Path) -> None:
    tree: dict[str, str] = {}
    for number, name in enumerate(("nvme", "BAT0", "amdgpu", "ina3221")):
        tree |= {f"/sys/class/hwmon/hwmon{number}/name": name, f"/sys/class/hwmon/hwmon{number}/power1_input": "9"}
    meter = written(tmp_path, tree)
    assert meter.source is None and "virtual machines" in meter.reason


def test_a_mac_reports_power_to_root_alone() -> None:
    def ask(user: str) -> PowerMeter:
        answers = {
            "sysctl": "hw.memsize: 17179869184\nhw.cputype: 16777228\nhw.physicalcpu: 8\nhw.logicalcpu: 8\n",
            "id": user,
        }
        facts = macos.mac_facts(lambda command: answers.get(command[0]))
        assert facts is not None
        return facts.power

    assert ask("0\n").source == "powermetrics"
    assert ask("501\n").source is None and "root alone" in ask("501\n").reason
