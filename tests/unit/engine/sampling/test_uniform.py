"""Random numbers from a seed and a position: the same always, spread evenly, and no two choices of a request share a stream."""

from __future__ import annotations

import numpy

from app.engine.sampling.rows import stream_start, uniform_number, uniform_numbers
from app.engine.scheduler.batch import resolve_seed


def test_it_is_the_published_generator() -> None:
    """SplitMix64 seeded with 1234567 starts 6457827717110365317, 3203168211198807973 (Rosetta Code's and the reference's values)."""
    from app.engine.sampling import rows as module

    gamma = 0x9E3779B97F4A7C15
    assert module._splitmix64(1234567 + gamma) == 6457827717110365317
    assert module._splitmix64(1234567 + 2 * gamma) == 3203168211198807973


def test_numbers_lie_in_the_unit_interval_and_spread_evenly() -> None:
    numbers = [uniform_number(seed, position) for seed in range(40) for position in range(500)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    counts = [0] * 20
    for number in numbers:
        counts[int(number * 20)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_seed_and_position_both_matter() -> None:
    assert len({uniform_number(seed, position) for seed in range(100) for position in range(100)}) == 10_000


def test_choices_of_one_request_do_not_share_a_shifted_stream() -> None:
    streams = [{uniform_number(resolve_seed(42, choice), position) for position in range(200)} for choice in range(4)]
    assert len(set.union(*streams)) == 800


def test_many_at_once_are_the_same_to_the_last_bit() -> None:
    pairs = [(seed, position) for seed in (0, 1, 11, 2**63 - 1) for position in (0, 1, 63, 2**31)]
    found = uniform_numbers(
        numpy.array([stream_start(seed) for seed, _ in pairs], numpy.uint64),
        numpy.array([position for _, position in pairs]),
    )
    assert found.tolist() == [uniform_number(*pair) for pair in pairs]
