"""Heat and low frequencies explain slow steps while they last, and are metrics only where there is a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from app.hardware.facts import TemperatureSensor, ThermalSensors
from app.hardware.thermal_sensors import ThermalReading
from app.metrics.instruments import Metrics
from app.metrics.step_monitor import ProcessCounters, SlowStep
from app.metrics.steps import EngineSnapshot, StepStats
from app.metrics.thermal_monitor import MIN_READINGS, ThermalMonitor

ALL = ThermalSensors(
    "cpufreq", ("/f",), 3e9, (TemperatureSensor("coretemp", "/t"),), throttle_files=("/c",), cooling_files=("/s",)
)
STEP = StepStats(0.030, decode_tokens=8, num_decode_sequences=8)
CALM = ThermalReading(3e9, 60.0, 0, False)


def monitor(*readings: ThermalReading, sensors: ThermalSensors = ALL) -> tuple[ThermalMonitor, Metrics]:
    """A monitor that has taken these readings, one step before each."""
    metrics = Metrics()
    taken: Iterator[ThermalReading] = iter(readings)
    made = ThermalMonitor(metrics, sensors, lambda: next(taken))
    for _ in readings:
        metrics.on_step(STEP, EngineSnapshot())
        made.update()
    return made, metrics


def exported(metrics: Metrics) -> str:
    return metrics.render("")[0].decode()


def test_a_calm_machine_has_no_cause() -> None:
    assert monitor(*[CALM] * 20)[0].cause() is None


def test_a_counter_that_rises_and_a_limit_are_heat() -> None:
    assert monitor(CALM, replace(CALM, throttles=2))[0].cause() == "thermal"
    assert monitor(CALM, replace(CALM, is_limited=True))[0].cause() == "thermal"
    assert monitor(CALM, replace(CALM, throttles=2), replace(CALM, throttles=2))[0].cause() is None


def test_a_low_frequency_is_compared_with_the_typical_one() -> None:
    low = replace(CALM, hertz=2.3e9)
    assert monitor(*[CALM] * (MIN_READINGS + 1), low)[0].cause() == "frequency"
    assert monitor(*[CALM] * (MIN_READINGS + 1), replace(CALM, hertz=2.5e9))[0].cause() is None
    assert monitor(CALM, low)[0].cause() is None, "too few readings to know what is typical"


def test_an_idle_processor_is_slow_on_purpose() -> None:
    readings = iter([CALM] * 12 + [replace(CALM, hertz=0.8e9)] * 50 + [CALM])
    metrics = Metrics()
    made = ThermalMonitor(metrics, ALL, lambda: next(readings))
    for _ in range(12):
        metrics.on_step(STEP, EngineSnapshot())
        made.update()
    for _ in range(50):  # no step runs
        made.update()
        assert made.cause() is None
    metrics.on_step(STEP, EngineSnapshot())
    made.update()
    assert made.cause() is None


def test_the_throttles_that_are_counted_are_those_since_the_start() -> None:
    made, metrics = monitor(replace(CALM, throttles=100), replace(CALM, throttles=103), replace(CALM, throttles=104))
    assert made.to_json() == {"frequency_hertz": 3e9, "temperature_celsius": 60.0, "throttled_times": 4}
    text = exported(metrics)
    assert "armature_cpu_frequency_hertz 3e+09" in text
    assert "armature_cpu_temperature_celsius 60.0" in text
    assert "armature_cpu_thermal_throttles_total 4.0" in text


def test_each_time_that_a_limit_begins_counts() -> None:
    hot = replace(CALM, throttles=None, is_limited=True)
    cool = replace(hot, is_limited=False)
    assert monitor(cool, hot, hot, cool, hot)[0].to_json()["throttled_times"] == 2


def test_without_a_source_there_is_no_metric_and_no_thread() -> None:
    metrics = Metrics()
    made = ThermalMonitor(metrics, ThermalSensors())
    made.start()
    made.stop()
    assert "armature_cpu" not in exported(metrics)
    assert made.cause() is None
    assert made.to_json() == {"frequency_hertz": None, "temperature_celsius": None, "throttled_times": None}


def test_the_thread_reads_once_at_the_start_and_ends() -> None:
    metrics = Metrics()
    made = ThermalMonitor(metrics, ALL, lambda: CALM)
    made.start()
    made.stop()
    assert "armature_cpu_frequency_hertz" in exported(metrics)


def test_what_took_the_time_goes_before_heat_and_heat_before_a_switch() -> None:
    slow = SlowStep(STEP, 0.1, ProcessCounters(switches=3), slowed_by="thermal")
    assert slow.cause() == "thermal"
    assert replace(slow, slowed_by="frequency").cause() == "frequency"
    assert replace(slow, throttled_seconds=0.09).cause() == "throttled"
    assert replace(slow, slowed_by=None).cause() == "descheduled"
