"""Peak rates of the processor while it is measured."""

from __future__ import annotations

import pytest

from app.engine.calibration import measure


def test_under_a_quota_that_binds_ceilings_are_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ceiling:
        def __init__(self, *about: object) -> None: ...

        def sample(self) -> float:
            return 8.0

        def close(self) -> None: ...

    monkeypatch.setattr(measure, "ReadBandwidthProbe", Ceiling)
    monkeypatch.setattr(measure, "MatmulThroughputProbe", Ceiling)
    found = measure.measure_cpu_peaks(["fp32"], 1, 0, 0.25)
    assert (found.read_bytes_per_second, found.products_per_second) == (2.0, {"fp32": 2.0})


def test_precisions_with_the_same_products_are_timed_once() -> None:
    rates = measure.measure_cpu_peaks(["int4", "int8"], 1, 0).products_per_second
    assert rates.keys() in ({"int4", "int8"}, set())
    assert len(set(rates.values())) <= 1
