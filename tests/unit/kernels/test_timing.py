"""Timing inside a budget: what is sampled when, what is believed of it, and what it says of a whole model. The clock is the test's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature_kernels.timing import (
    LONG_RUN_SECONDS,
    MAX_ADJUSTMENT,
    MAX_SAMPLES,
    MIN_SAMPLES,
    TimedBlock,
    TimedPoint,
    TimingRounds,
    crossover_rows,
    extrapolate_by_size,
    extrapolate_layers,
    isotonic_fit,
    monotone_table,
    relative_spread,
)  # fmt: skip


class Clock:
    """Goes on only where something is run."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, seconds: Iterator[float]) -> TimedPoint[str]:
        def run() -> None:
            self.ran.append(name)
            self.now += next(seconds)

        return TimedPoint(name, run)


def always(seconds: float) -> Iterator[float]:
    return itertools.repeat(seconds)


def nothing() -> None:
    """What a block begins with."""


def rounds_of(
    clock: Clock, budget: float, *points: TimedPoint[str], begin: Callable[[], object] = nothing
) -> TimingRounds[str]:
    rounds: TimingRounds[str] = TimingRounds(clock.now + budget, clock)
    rounds.run([TimedBlock(begin, points)])
    return rounds


def test_points_take_turns_and_the_first_run_is_no_sample() -> None:
    clock = Clock()
    first = itertools.chain([0.02], always(0.01))
    rounds = rounds_of(clock, 10.0, clock.taking("a", first), clock.taking("b", always(0.002)))
    assert clock.ran[:6] == ["a", "b", "a", "b", "a", "b"]
    assert rounds.medians() == pytest.approx({"a": 0.01, "b": 0.002})
    assert max(rounds.samples["a"]) == pytest.approx(0.01)
    assert len(rounds.samples["b"]) == MAX_SAMPLES


def test_what_takes_long_takes_few_samples_and_its_first_run_is_one() -> None:
    clock = Clock()
    rounds_of(clock, 10.0, clock.taking("long", always(2 * LONG_RUN_SECONDS)))
    assert clock.ran == ["long"] * MIN_SAMPLES


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.1])
def test_the_budget_is_kept(seconds: float) -> None:
    clock = Clock()
    points = [clock.taking(f"{size}", always(seconds * size)) for size in (1, 2, 4, 8, 16)]
    rounds = rounds_of(clock, 0.5, *points)
    assert clock.now <= 100.5 + seconds, "only the very first, of which nothing is known, may overrun it"
    assert all(len(found) >= MIN_SAMPLES for found in rounds.samples.values()), "what was begun was finished"
    assert rounds.medians() or seconds * MIN_SAMPLES > 0.5


def test_what_cannot_be_finished_is_not_begun() -> None:
    clock = Clock()
    rounds = rounds_of(clock, 0.5, clock.taking("quick", always(0.05)), clock.taking("slow", always(10.0)))
    assert "slow" not in clock.ran, (
        "after a point of 0.05 s one may take twice as long, four times over, and the first wants its own"
    )
    assert rounds.medians().keys() == {"quick"}


def test_each_block_is_begun_before_its_points() -> None:
    clock, begun = Clock(), []
    rounds: TimingRounds[str] = TimingRounds(clock.now + 1.0, clock)
    blocks = [
        TimedBlock(lambda name=name: begun.append((name, len(clock.ran))), [clock.taking(name, always(0.001))])  # type: ignore[misc]
        for name in ("two threads", "one thread")
    ]
    rounds.run(blocks)
    assert begun[:3] == [("two threads", 0), ("one thread", 1), ("two threads", 2)]


def test_a_steady_machine_is_believed_and_a_noisy_one_is_not() -> None:
    clock, dice = Clock(), random.Random(7)
    steady = (0.01 * dice.uniform(0.98, 1.02) for _ in itertools.count())
    assert rounds_of(clock, 5.0, clock.taking("steady", steady)).unusable_reason() == ""
    noisy = (0.01 * dice.choice((1.0, 1.1, 2.0, 4.0)) for _ in itertools.count())
    assert "too busy" in rounds_of(clock, 5.0, clock.taking("noisy", noisy)).unusable_reason()


def test_no_time_is_no_measurement() -> None:
    clock = Clock()
    assert "no time" in rounds_of(clock, 0.0, clock.taking("a", always(0.01))).unusable_reason()


def test_the_spread_is_of_the_middle_half() -> None:
    assert relative_spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
    assert relative_spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


@given(st.lists(st.floats(0.001, 10.0), max_size=12))
def test_a_rising_sequence_is_the_nearest_one(values: list[float]) -> None:
    found = isotonic_fit(values)
    assert len(found) == len(values)
    assert found == sorted(found)
    assert sum(found) == pytest.approx(sum(values))
    if values == sorted(values):
        assert found == values


def test_more_rows_never_cost_less() -> None:
    assert monotone_table({1: 10.0, 2: 9.0, 4: 12.0}) == {1: 9.5, 2: 9.5, 4: 12.0}
    assert monotone_table({4: 12.0, 1: 10.0}) == {1: 10.0, 4: 12.0}


@pytest.mark.parametrize("seconds", [{1: 10.0, 2: 10.0 * (1 - 3 * MAX_ADJUSTMENT)}, {1: 0.0, 2: 1.0}, {1: -1.0}])
def test_a_table_that_would_have_to_be_bent_is_none(seconds: dict[int, float]) -> None:
    assert monotone_table(seconds) is None


def test_the_whole_model_follows_from_few_layers() -> None:
    assert extrapolate_layers({1: 3.0, 4: 6.0}, 16) == pytest.approx(18.0), "2 around the layers, and 16 of 1"
    assert extrapolate_layers({1: 3.0, 4: 6.0}, 16.5) == pytest.approx(18.5)
    assert extrapolate_layers({1: 3.0, 4: 7.0}, 4) == 7.0, "all of its layers were run"
    assert extrapolate_layers({1: 3.0, 4: 2.9}, 16) is None, "more layers that take less are a mistake"
    assert extrapolate_layers({4: 3.0}, 16) is None


def test_sizes_of_which_nothing_can_be_said_are_left_out() -> None:
    assert extrapolate_by_size([(8, 1, 2.0), (8, 2, 3.0), (16, 1, 4.0)], 4) == {8: 5.0}


@pytest.mark.parametrize(
    ("few", "many", "rows"),
    [
        ({16: 1.0, 32: 2.0, 64: 4.0}, {16: 1.5, 32: 2.5, 64: 3.0}, 32),
        ({16: 1.0, 32: 2.0}, {16: 0.5, 32: 1.0}, 15),
        ({16: 1.0, 32: 2.0}, {16: 1.5, 32: 2.5}, 32),
        ({16: 1.0}, {32: 1.0}, None),
    ],
)
def test_the_border_between_two_forms(few: dict[int, float], many: dict[int, float], rows: int | None) -> None:
    assert crossover_rows(few, many) == rows
