"""Joules are added up over the ends of counters, over gaps in readings, and from what other programs print; they never fall."""

from __future__ import annotations

import io
import plistlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.hardware import power
from app.hardware.facts import CudaDevice, PowerCounter, PowerMeter
from app.hardware.power import (
    CounterMeter,
    ModelledMeter,
    PowermetricsMeter,
    SampledMeter,
    open_energy_meter,
    open_nvml_meter,
    parse_powermetrics,
)
from app.hardware.probe.host_files import HostFiles
from hypothesis_examples import examples
from recorded_hosts import read_tree, write_tree

COUNTERS = Path(__file__).parent / "counters"


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def counted(root: Path, values: dict[str, int], clock: Clock, wraps_at: int | None = 1_000_000) -> CounterMeter:
    put(root, values)
    return CounterMeter(
        "rapl", tuple(PowerCounter(name, f"/{name}", "energy", wraps_at) for name in values), HostFiles(root), clock
    )


def put(root: Path, values: Mapping[str, int | str]) -> None:
    for name, value in values.items():
        (root / name).write_text(f"{value}\n")


def test_a_recorded_counter_that_passes_its_end(tmp_path: Path) -> None:
    write_tree(read_tree("threadripper", COUNTERS), tmp_path)
    found, clock = power.find_power_meter(HostFiles(tmp_path)), Clock()
    meter = CounterMeter("rapl", found.counters, HostFiles(tmp_path), clock)
    assert meter.joules() == 0.0
    clock.seconds += 300
    write_tree(read_tree("threadripper", COUNTERS, "later.txt"), tmp_path)
    assert meter.joules() == pytest.approx((65532610987 - 10360237493 + 9360237493) / 1e6)  # 215 W over five minutes
    assert meter.joules() == pytest.approx(64532.610987)


def test_several_counters_add_up_and_what_was_there_before_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    meter = counted(tmp_path, {"a": 400_000, "b": 900_000}, clock)
    clock.seconds += 1
    put(tmp_path, {"a": 700_000, "b": 100_000})
    assert meter.joules() == pytest.approx(0.3 + 0.2)


def test_a_counter_set_to_zero_has_not_gone_all_the_way_round(tmp_path: Path) -> None:
    clock = Clock()
    meter = counted(tmp_path, {"a": 100_000}, clock, wraps_at=262_143_000_000)
    clock.seconds += 10
    put(tmp_path, {"a": 50_000})
    assert meter.joules() == pytest.approx(0.05)


def test_a_counter_without_a_known_end_that_falls_has_begun_anew(tmp_path: Path) -> None:
    clock = Clock()
    meter = counted(tmp_path, {"a": 5_000_000}, clock, wraps_at=None)
    clock.seconds += 1
    put(tmp_path, {"a": 2_000_000})
    assert meter.joules() == pytest.approx(2.0)


@pytest.mark.parametrize("broken", ["", "nonsense", "-"])
def test_a_reading_that_fails_is_caught_up_with(broken: str, tmp_path: Path) -> None:
    clock = Clock()
    meter = counted(tmp_path, {"a": 100_000}, clock)
    put(tmp_path, {"a": broken})
    clock.seconds += 1
    assert meter.joules() == 0.0
    put(tmp_path, {"a": 400_000})
    clock.seconds += 1
    assert meter.joules() == pytest.approx(0.3)


@settings(max_examples=examples(25))
@given(st.lists(st.integers(0, 900_000), max_size=20))
def test_any_use_is_reported_however_often_the_counter_begins_anew(
    tmp_path_factory: pytest.TempPathFactory, uses: list[int]
) -> None:
    root, clock, at = tmp_path_factory.mktemp("counter"), Clock(), 12_345
    meter = counted(root, {"a": at}, clock)
    for use in uses:
        at = (at + use) % 1_000_000
        clock.seconds += 1
        put(root, {"a": at})
        before = meter.joules()
        assert meter.joules() >= before
    assert meter.joules() == pytest.approx(sum(uses) / 1e6)


def test_power_is_the_mean_of_two_readings_and_gaps_are_bridged() -> None:
    clock, told = Clock(), iter([10.0, 20.0, None, 40.0])
    meter = SampledMeter("hwmon", lambda: next(told), clock)
    seen = []
    for _ in range(4):
        meter.sample()
        seen.append(meter.joules())
        clock.seconds += 1
    assert seen == pytest.approx([0.0, 15.0, 15.0 + 20.0, 15.0 + 30.0 * 2])


def test_between_readings_power_stays_what_it_was_and_joules_never_fall() -> None:
    clock, told = Clock(), iter([100.0, 20.0, 20.0])
    meter = SampledMeter("hwmon", lambda: next(told), clock)
    meter.sample()
    clock.seconds += 0.9
    assert meter.joules() == pytest.approx(90.0)
    clock.seconds += 0.1
    meter.sample()
    assert meter.joules() == pytest.approx(90.0), "60 J by now: what was told stands"
    clock.seconds += 1.0
    meter.sample()
    assert meter.joules() == pytest.approx(90.0)
    clock.seconds += 1.0
    assert meter.joules() == pytest.approx(100.0)
    clock.seconds += 60.0
    assert meter.joules() == pytest.approx(80.0 + 40.0), "a sensor that is gone is not believed for ever"


def test_sensors_are_read_by_a_thread_until_they_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "SAMPLE_SECONDS", 0.001)
    put(tmp_path, {"a": 60_000_000, "b": 40_000_000})
    told, read = [], threading.Event()

    def watts(counters: tuple[PowerCounter, ...], files: HostFiles) -> float | None:
        told.append(real(counters, files))
        if len(told) == 3:
            read.set()
        return told[-1]

    real = power._sum_of_watts
    monkeypatch.setattr(power, "_sum_of_watts", watts)
    sensors = PowerMeter("hwmon", (PowerCounter("a", "/a", "power"), PowerCounter("b", "/b", "power")))
    meter = open_energy_meter(sensors, HostFiles(tmp_path), None, lambda: 0.0)
    assert isinstance(meter, SampledMeter) and read.wait(30)
    thread = next(thread for thread in threading.enumerate() if thread.name == "armature-power")
    meter.close()
    thread.join()
    assert told[0] == pytest.approx(100.0) and meter.joules() > 0.0


def test_a_part_of_a_sum_is_not_taken_for_all_of_it(tmp_path: Path) -> None:
    put(tmp_path, {"a": 60_000_000})
    sensors = (PowerCounter("a", "/a", "power"), PowerCounter("b", "/b", "power"))
    assert power._sum_of_watts(sensors, HostFiles(tmp_path)) is None


def test_declared_watts_count_while_steps_run() -> None:
    busy = 0.0
    meter = open_energy_meter(PowerMeter(reason="none"), HostFiles(Path("/nowhere")), 150.0, lambda: busy)
    assert isinstance(meter, ModelledMeter) and meter.joules() == 0.0
    busy = 2.0
    assert (meter.source, meter.joules()) == ("modelled", 300.0)
    assert open_energy_meter(PowerMeter(reason="none"), HostFiles(Path("/nowhere")), None, lambda: busy) is None


def test_a_counter_goes_before_what_was_declared(tmp_path: Path) -> None:
    put(tmp_path, {"a": 1})
    meter = open_energy_meter(PowerMeter("rapl", (PowerCounter("a", "/a"),)), HostFiles(tmp_path), 150.0, lambda: 9.0)
    assert isinstance(meter, CounterMeter) and meter.joules() == 0.0


# ---- powermetrics: shapes as its property lists have them, numbers made up --------------------------------------------


def sample(milliwatts: float, nanoseconds: int) -> bytes:
    return plistlib.dumps(
        {"is_delta": True, "elapsed_ns": nanoseconds, "processor": {"combined_power": milliwatts, "clusters": []}}
    )


class Printing:
    """A program that prints and ends when it is told to."""

    def __init__(self, text: bytes) -> None:
        self.stdout, self.ended = io.BytesIO(text), False

    def terminate(self) -> None:
        self.ended = True

    def wait(self) -> int:
        return 0


def test_what_powermetrics_prints_is_added_up() -> None:
    program = Printing(sample(12_000, 1_000_000_000) + b"\0" + sample(30_000, 500_000_000) + b"\0<?xml cut")
    meter = PowermetricsMeter(lambda: cast(Any, program))
    meter.follow(program.stdout)
    assert meter.joules() == pytest.approx(12.0 + 15.0)
    meter.close()
    assert program.ended


BROKEN = (
    b"",
    b"<plist><dict></plist>",
    plistlib.dumps({"elapsed_ns": 1}),
    plistlib.dumps({"elapsed_ns": 1, "processor": {"combined_power": "much"}}),
    plistlib.dumps(["no dictionary"]),
)


@pytest.mark.parametrize("text", BROKEN)
def test_what_reports_no_power_counts_nothing(text: bytes) -> None:
    assert parse_powermetrics(text) == 0.0


# ---- NVML: the driver's library as its header declares it, played by a stand-in ---------------------------------------


class Driver:
    """Answers as `libnvidia-ml.so.1` does: 0 for success, values through pointers."""

    def __init__(self, millijoules: list[int], known: int = 1) -> None:
        self.millijoules, self.known, self.open = millijoules, known, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 7
        return 0 if index.value < self.known else 2

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, told: Any) -> int:
        value = self.millijoules.pop(0)
        told._obj.value = value
        return 0 if value >= 0 and handle.value == 7 else 3


def test_a_device_counts_its_own_joules() -> None:
    driver = Driver([90_000, 90_500, -1, 95_000])
    meter = open_nvml_meter(CudaDevice(0, "H200"), lambda name: driver)
    assert meter is not None and meter.source == "nvml"
    assert [meter.joules() for _ in range(3)] == pytest.approx([0.5, 0.5, 5.0])
    meter.close()
    assert driver.open == 0


def test_a_device_that_does_not_count_is_absent_and_the_driver_let_go() -> None:
    for driver in (Driver([-1]), Driver([], known=0)):
        assert open_nvml_meter(CudaDevice(0, "P4"), lambda name, driver=driver: driver) is None  # type: ignore[misc]
        assert driver.open == 0


def test_no_driver_no_meter() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    assert open_nvml_meter(CudaDevice(0, "none"), missing) is None
    assert open_nvml_meter(CudaDevice(0, "old"), lambda name: object()) is None
