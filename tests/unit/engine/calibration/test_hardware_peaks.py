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


@pytest.mark.parametrize("four_bits_faster", [False, True])
def test_precisions_with_the_same_products_are_timed_once(
    monkeypatch: pytest.MonkeyPatch, four_bits_faster: bool
) -> None:
    timed: list[tuple[torch.dtype, int]] = []

    class Ceiling:
        def __init__(self, dtype: torch.dtype, shapes: object, bits: int) -> None:
            timed.append((dtype, bits))

        def sample(self) -> float:
            return float(len(timed))

    monkeypatch.setattr(measure, "MatmulThroughputProbe", Ceiling)
    monkeypatch.setattr(measure, "is_faster_in_four_bits", lambda: four_bits_faster)
    found = measure.measure_cpu_peaks(["int8", "int4", "int4-small", "bf16"], 1, 0)
    if four_bits_faster:
        assert timed == [(torch.int8, 8), (torch.int8, 4), (torch.bfloat16, 8)]
        assert found.products_per_second == {"int8": 1.0, "int4": 2.0, "int4-small": 2.0, "bf16": 3.0}
    else:
        assert timed == [(torch.int8, 8), (torch.bfloat16, 8)]
        assert found.products_per_second == {"int8": 1.0, "int4": 1.0, "int4-small": 1.0, "bf16": 2.0}
