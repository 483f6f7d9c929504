"""Peak rates of the processor while it is measured."""

from __future__ import annotations

import pytest
import torch

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


def test_precisions_with_the_same_products_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.dtype] = []

    class Ceiling:
        def __init__(self, dtype: torch.dtype, *about: object) -> None:
            timed.append(dtype)

        def sample(self) -> float:
            return float(len(timed))

    monkeypatch.setattr(measure, "MatmulThroughputProbe", Ceiling)
    found = measure.measure_cpu_peaks(["int4", "int8", "bf16"], 1, 0)
    assert timed == [torch.int8, torch.bfloat16]
    assert found.products_per_second == {"int4": 1.0, "int8": 1.0, "bf16": 2.0}
