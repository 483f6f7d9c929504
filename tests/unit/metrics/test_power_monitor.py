"""Joules and dollars in a scrape and in `/info`: absent if unknown, and counted by the timer without scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.hardware.facts import CudaDevice, PowerCounter, PowerMeter
from app.hardware.power import ModelledMeter
from app.messages import Timings
from app.metrics.instruments import Metrics
from app.metrics.power_monitor import EnergyReport, PowerMonitor
from app.metrics.steps import EngineSnapshot, StepStats

RAPL = PowerMeter(
    "rapl", (PowerCounter("package-0", "/energy_uj", "energy", 1_000_000_000),), "The processor's own counters."
)
NONE = PowerMeter(reason="No power zones.")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def energies(metrics: Metrics) -> dict[str, float]:
    """Samples that speak of energy or power, without prefix and with their source."""
    return {
        f"{sample.name.removeprefix('armature_')}:{sample.labels['source']}": sample.value
        for family in parse_text(metrics.render()[0].decode())
        for sample in family.samples
        if "source" in sample.labels
    }


def metered(root: Path, metrics: Metrics, is_idle: Callable[[], bool]) -> PowerMonitor:
    """A started monitor of a counter of 5 joules, in a file."""
    (root / "energy_uj").write_text("5000000")
    counter = PowerCounter("package-0", str(root / "energy_uj"), "energy", 1_000_000_000)
    spending = PowerMonitor(metrics, replace(RAPL, counters=(counter,)), is_idle)
    spending.start()
    return spending


async def test_joules_in_all_and_for_each_token_and_vector(tmp_path: Path) -> None:
    clock, idle = Clock(), False
    metrics = Metrics(clock)
    spending = metered(tmp_path, metrics, lambda: idle)
    assert energies(metrics) == {}, "a counter that has not moved may never do"
    idle = True
    clock.seconds += 1
    metrics.render()
    clock.seconds += 10
    (tmp_path / "energy_uj").write_text("105000000")
    seen = energies(metrics)
    assert seen["energy_joules_total:rapl"] == pytest.approx(100.0)
    assert seen["power_watts:rapl"] == pytest.approx(100 / 11)
    assert seen["energy_idle_watts:rapl"] == pytest.approx(10.0)
    assert "energy_joules_per_token:rapl" not in seen
    clock.seconds += 5
    (tmp_path / "energy_uj").write_text("405000000")
    metrics.on_step(StepStats(4.0, encode_tokens=800, num_encode_sequences=40), EngineSnapshot(stepped_at=1.0))
    metrics.vectors_returned(40, 800, Timings(queue_seconds=0.0, encode_seconds=4.0))
    metrics.completion_tokens(200)
    seen = energies(metrics)
    assert seen["energy_joules_per_token:rapl"] == pytest.approx(400 / 1000)
    assert seen["energy_joules_per_vector:rapl"] == pytest.approx(400 / 40)
    assert seen["energy_above_idle_joules_per_token:rapl"] == pytest.approx((400 - 160) / 1000)
    assert seen["energy_above_idle_joules_per_vector:rapl"] == pytest.approx((400 - 160) / 40)
    spending.stop()


async def test_a_request_that_is_open_keeps_the_time_from_being_idle(tmp_path: Path) -> None:
    clock = Clock()
    metrics = Metrics(clock)
    spending = metered(tmp_path, metrics, lambda: False)
    for joules in (20, 40):
        clock.seconds += 10
        (tmp_path / "energy_uj").write_text(str(joules * 1_000_000))
        assert "energy_idle_watts:rapl" not in energies(metrics)
    spending.stop()


async def test_declared_watts_are_modelled_by_the_steps_and_know_no_idling() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    spending = PowerMonitor(metrics, NONE, lambda: True, 120.0)
    spending.start()
    for _ in range(3):
        clock.seconds += 10
        metrics.render()
    metrics.on_step(StepStats(0.5, decode_tokens=4, num_decode_sequences=4), EngineSnapshot())
    metrics.completion_tokens(4)
    clock.seconds += 1
    seen = energies(metrics)
    assert seen["energy_joules_total:modelled"] == pytest.approx(60.0)
    assert seen["energy_joules_per_token:modelled"] == pytest.approx(15.0)
    assert not any("idle" in name for name in seen)
    spending.stop()


async def test_the_timer_counts_where_nobody_scrapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.metrics.power_monitor.TIMER_SECONDS", 0.001)
    (tmp_path / "energy_uj").write_text("5000000")
    power = replace(RAPL, counters=(PowerCounter("package-0", str(tmp_path / "energy_uj")),))
    spending = PowerMonitor(Metrics(), power, lambda: False, 90.0)
    spending.start()
    assert spending.account is not None
    was_read = asyncio.Event()
    read = spending.account.read

    def seen() -> EnergyReport:
        was_read.set()
        return read()

    monkeypatch.setattr(spending.account, "read", seen)
    await asyncio.wait_for(was_read.wait(), 30)
    assert spending.to_json() == {
        "hourly_price": None,
        "watts": 90.0,
        "energy_source": "rapl",
        "energy_reason": "The processor's own counters.",
    }
    spending.stop()
    assert spending._next_read is not None and spending._next_read.cancelled()


async def test_what_info_says_of_a_machine_without_counters() -> None:
    spending = PowerMonitor(Metrics(), NONE, lambda: False, hourly_price=0.5)
    spending.start()
    told = spending.to_json()
    assert (told["hourly_price"], told["energy_source"], told["energy_reason"]) == (0.5, None, "No power zones.")
    spending.stop()
    declared = PowerMonitor(Metrics(), NONE, lambda: False, 65.0)
    declared.start()
    told = declared.to_json()
    declared.stop()
    assert told["energy_source"] == "modelled"
    assert "No power zones" in told["energy_reason"] and "declared watts" in told["energy_reason"]


async def test_a_device_is_counted_by_its_driver_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(0, "H200")
    counter = ModelledMeter(1.0, lambda: 0.0)
    counter.source = "nvml"
    monkeypatch.setattr("app.metrics.power_monitor.open_nvml_meter", lambda asked: counter if asked == device else None)
    counted = PowerMonitor(Metrics(), RAPL, lambda: False, device=device)
    counted.start()
    assert (counted.to_json()["energy_source"], "rest of the machine" in counted.to_json()["energy_reason"]) == (
        "nvml",
        True,
    )
    counted.stop()
    other = PowerMonitor(Metrics(), RAPL, lambda: False, device=CudaDevice(1, "P4"))
    other.start()
    assert (other.account, other.to_json()["energy_source"]) == (None, None), (
        "the processor's counter is not the device's"
    )
    assert "does not count" in other.to_json()["energy_reason"]
