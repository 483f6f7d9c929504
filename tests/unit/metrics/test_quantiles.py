"""Quantiles and rates of the last minute against sorting all values, with a fake clock."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.metrics.instruments import RecentQuantiles, RecentRate

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def ranked(values: list[float], quantile: float) -> float:
    return sorted(values)[max(math.ceil(quantile * len(values)), 1) - 1]


@given(st.lists(st.floats(1e-5, 9e3), min_size=1, max_size=200))
def test_each_quantile_is_within_two_percent_of_the_sorted_one(values: list[float]) -> None:
    recent = RecentQuantiles(Clock())
    for value in values:
        recent.record(value)
    told = recent.read(QUANTILES)
    assert told is not None
    for quantile, value in zip(QUANTILES, told, strict=True):
        assert value == pytest.approx(ranked(values, quantile), rel=0.02)


def test_many_latencies_over_many_slices() -> None:
    clock, generator = Clock(), random.Random(1)
    values = [generator.lognormvariate(-3, 1.5) for _ in range(5000)]
    recent = RecentQuantiles(clock)
    for value in values:
        recent.record(value)
        clock.seconds += 54 / len(values)
    assert recent.read(QUANTILES) == pytest.approx([ranked(values, quantile) for quantile in QUANTILES], rel=0.02)


def test_what_is_over_a_minute_old_is_forgotten() -> None:
    clock = Clock()
    recent = RecentQuantiles(clock)
    recent.record(9.0)
    clock.seconds += 54
    recent.record(1.0)
    assert recent.read([0.99]) == pytest.approx([9.0], rel=0.02)
    clock.seconds += 7
    assert recent.read([0.99]) == pytest.approx([1.0], rel=0.02)
    clock.seconds += 600
    assert recent.read([0.99]) is None


def test_an_old_slice_of_the_same_place_in_the_ring_does_not_come_back() -> None:
    clock = Clock()
    recent = RecentQuantiles(clock)
    recent.record(9.0)
    clock.seconds += 60
    recent.record(1.0)
    assert recent.read([0.99]) == pytest.approx([1.0], rel=0.02)


@pytest.mark.parametrize("seconds, told", [(0.0, 1e-5), (-1.0, 1e-5), (1e9, 1e4)])
def test_values_beyond_the_buckets_are_reported_as_the_ends(seconds: float, told: float) -> None:
    recent = RecentQuantiles(Clock())
    recent.record(seconds)
    assert recent.read([0.5]) == pytest.approx([told], rel=0.02)


def test_a_rate_counts_from_the_beginning_then_over_a_minute() -> None:
    clock = Clock()
    rate = RecentRate(clock)
    for _ in range(10):
        rate.record(3)
        clock.seconds += 1
    assert rate.per_second() == pytest.approx(3.0)
    for _ in range(600):
        rate.record(7)
        clock.seconds += 1
    assert rate.per_second() == pytest.approx(7.0, rel=0.02)
    clock.seconds += 61
    assert rate.per_second() == 0.0


def test_one_event_at_once_after_the_start_is_no_burst() -> None:
    rate = RecentRate(Clock())
    rate.record(5)
    assert rate.per_second() == 5.0
