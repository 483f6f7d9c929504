"""Mixed traffic: memory, descriptors and threads stay flat. `make soak` does it for an hour."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from app.hardware.thermal_sensors import ThermalReading
from tests.attack.soak import Usage, faults, thermal_lines

SECONDS = 20


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_mixed_traffic_leaves_the_process_as_it_was(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack.soak", str(SECONDS)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def usages(resident: list[int], descriptors: int = 10, threads: int = 5) -> list[Usage]:
    return [Usage(float(second), value, descriptors, threads) for second, value in enumerate(resident)]


def test_growth_is_found() -> None:
    good = Counter({"200": 3, "left": 1})
    assert faults(usages([100, 101, 100, 102, 101, 103]), good) == []
    assert faults(usages([100, 101, 100, 102, 109, 111]), good) == ["resident_bytes grew by 8.9%"]
    assert faults(usages([100] * 8 + [130]), good) == []  # a single sample is no leak
    assert faults(usages([100] * 3) + usages([100] * 3, threads=7), good) == []
    assert faults(usages([100] * 3) + usages([100] * 3, threads=8), good) == ["3 threads were started"]
    assert faults(usages([100] * 3) + usages([100] * 3, descriptors=20), good) == ["descriptors grew by 55.6%"]
    assert faults(usages([100] * 6), good + Counter({"500": 2})) == ["2 answers were 500"]


def test_frequency_and_temperature_are_summed_up() -> None:
    readings = [(3.0e9, 60.0, 5, False), (2.0e9, 80.0, 7, True), (2.9e9, 70.0, 7, False)]
    samples = [Usage(float(n), 1, 1, 1, ThermalReading(*reading)) for n, reading in enumerate(readings)]
    assert thermal_lines(samples) == [
        "frequency: least 2.00 GHz, median 2.90 GHz",
        "temperature: median 70 °C, highest 80 °C",
        "heat slowed a core down 2 times",
        "heat limited the frequency in 1 of 3 samples",
    ]
    assert thermal_lines(usages([100])) == ["frequency and temperature: no source on this machine"]
