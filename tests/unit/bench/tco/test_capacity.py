"""A target is read as people write it, and refused where it says nothing."""

from __future__ import annotations

import pytest

from armature_bench.console import MeasurementFailed
from armature_bench.tco.capacity import parse_target


@pytest.mark.parametrize(
    ("text", "per_second", "unit"),
    [
        ("10000/s", 10_000, "samples"),
        ("10,000/s", 10_000, "samples"),
        ("600/min", 10, "samples"),
        ("7200 requests/hour", 2, "samples"),
        ("1e6/day", 1e6 / 86400, "samples"),
        ("864k/day", None, "is not a known unit"),
        ("5000tok/s", 5000, "tokens"),
        ("60 tokens / min", 1, "tokens"),
        ("0.5/s", 0.5, "samples"),
    ],
)
def test_what_is_asked_for_is_so_many_a_second(text: str, per_second: float | None, unit: str) -> None:
    if per_second is None:
        with pytest.raises(MeasurementFailed, match=unit):
            parse_target(text)
        return
    target = parse_target(text)
    assert target.per_second == pytest.approx(per_second)
    assert target.unit == unit


@pytest.mark.parametrize(
    "text",
    ["0/s", "-5/s", "10000", "/s", "10/fortnight", "10 horses/s", "1,5/s", "1e999/s", "nan/s", "1.2.3/s", "", "10/s/s"],
)
def test_nonsense_is_refused_with_its_own_words(text: str) -> None:
    with pytest.raises(MeasurementFailed, match="--target") as refused:
        parse_target(text)
    assert repr(text) in str(refused.value)
