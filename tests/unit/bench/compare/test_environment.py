"""Conditions during a load from two readings: server counters, a recorded `/proc`, and unknown values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from armature_bench.compare.environment import (
    HostCpuTimes,
    LoadConditions,
    ResourceReading,
    conditions_between,
    read_host_cpu_times,
)
from armature_bench.compare.result import PointEnergy

TICK = os.sysconf("SC_CLK_TCK")
JOULES = 'armature_energy_joules_total{source="%s"}'


def looked(moment: float, client: float = 0.0, host: HostCpuTimes | None = None, **counters: float) -> ResourceReading:
    names = {"throttled": "process_cgroup_cpu_throttled_seconds_total", "server": "process_cpu_seconds_total"}
    named = {names.get(name) or JOULES % name: value for name, value in counters.items()}
    return ResourceReading(moment, named, client, host)


def test_who_took_the_cores() -> None:
    before = looked(10.0, client=1.0, host=HostCpuTimes(100.0, 5.0, 4, pressure_seconds=7.0), server=50.0)
    after = looked(20.0, client=3.0, host=HostCpuTimes(130.0, 7.0, 4, pressure_seconds=9.5), server=70.0)
    around = conditions_between(before, after)
    assert around.client_cpu_ratio == 0.2
    assert around.stolen_ratio == pytest.approx((30 - 20 - 2 + 2) / 40)
    assert around.pressure_ratio == 0.25
    assert (around.watts, around.throttled_seconds) == (None, None)


def test_what_is_taken_is_never_below_nothing() -> None:
    before = looked(10.0, host=HostCpuTimes(100.0, 0.0, 2), server=50.0)
    around = conditions_between(before, looked(12.0, host=HostCpuTimes(101.0, 0.0, 2), server=51.5))
    assert (around.stolen_ratio, around.pressure_ratio) == (0.0, None)


def test_of_another_machine_or_an_instant_nothing_is_reported() -> None:
    far = conditions_between(looked(10.0, client=1.0, server=5.0), looked(20.0, client=2.0, server=6.0))
    assert (far.stolen_ratio, far.client_cpu_ratio) == (None, 0.1)
    here = HostCpuTimes(1.0, 0.0, 2)
    soon = conditions_between(looked(10.0, host=here, server=1.0), looked(10.9, client=0.9, host=here, server=1.0))
    assert (soon.stolen_ratio, soon.client_cpu_ratio, soon.pressure_ratio) == (None, None, None)
    unknown = conditions_between(looked(10.0, host=here), looked(20.0, host=here))
    assert unknown.stolen_ratio is None, "what the server took is not known"


def test_throttling_and_energy_as_the_server_counts_them() -> None:
    around = conditions_between(
        looked(10.0, throttled=1.5, modelled=3.0, rapl=100.0), looked(14.0, throttled=2.0, modelled=99.0, rapl=300.0)
    )
    assert around.throttled_seconds == 0.5
    assert (around.watts, around.source) == (50.0, "rapl")
    assert around.energy(3.0, 20.0) == PointEnergy(joules=150.0, source="rapl", idle_watts=20.0)
    modelled = conditions_between(looked(0.0, modelled=0.0), looked(2.0, modelled=5.0))
    assert (modelled.watts, modelled.source) == (2.5, "modelled")
    assert (around.idle_watts, modelled.idle_watts) == (50.0, None)


def test_counters_that_began_anew_report_nothing() -> None:
    around = conditions_between(looked(10.0, throttled=1.5, rapl=100.0), looked(14.0, throttled=0.0, rapl=3.0))
    assert around == LoadConditions(client_cpu_ratio=0.0)
    assert around.energy(1.0, None) is None
    assert conditions_between(looked(10.0), looked(14.0, rapl=3.0)).watts is None, (
        "it was not counted when the load began"
    )


def test_a_recorded_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text(
        "some avg10=1.53 avg60=0.87 avg300=0.73 total=2500000\nfull avg10=0.0 total=0\n"
    )
    lines = [
        "cpu  9 9 9 9 9 9 9 9 9 9",
        "cpu0 100 20 30 4000 50 6 7 8 0 0",
        "cpu1 9 9 9 9 9 9 9 9 9 9",
        "cpu2 200 0 0 1 1 0 0 2 5 5",
    ]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 5 5", "ctxt 5"]) + "\n")
    assert read_host_cpu_times(tmp_path) == HostCpuTimes(
        busy=363 / TICK, stolen=10 / TICK, num_cores=2, pressure_seconds=2.5
    )
    (tmp_path / "pressure" / "cpu").unlink()
    found = read_host_cpu_times(tmp_path)
    assert found is not None
    assert found.pressure_seconds is None
    (tmp_path / "stat").unlink()
    assert read_host_cpu_times(tmp_path) is None
