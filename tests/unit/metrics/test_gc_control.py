"""Circles of objects wait until a step is over, and never for long; what was collected anyway is counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from app.metrics import step_monitor
from app.metrics.step_monitor import FULL_COLLECTION_SECONDS, MAX_NEW_OBJECTS, MAX_SECONDS, GcControl


class Circle:
    """Refers to itself: only a collection finds that nobody else does."""

    def __init__(self) -> None:
        self.itself = self


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tidy(clock: Clock) -> Iterator[GcControl]:
    found = GcControl(clock)
    found.freeze()
    yield found
    found.close()
    gc.unfreeze()


def dropped() -> weakref.ref[Circle]:
    """A circle that nobody holds any more."""
    return weakref.ref(Circle())


def test_nothing_is_collected_in_a_step(tidy: GcControl) -> None:
    tidy.disable()
    circle = dropped()
    kept = [[number] for number in range(100 * gc.get_threshold()[0])]
    assert circle() is not None and tidy.collections == 0 and len(kept) > 0
    tidy.enable()
    kept += [[number] for number in range(2 * gc.get_threshold()[0])]
    assert circle() is None and tidy.collections > 0, "an idle engine leaves it to Python again"


def test_between_steps_it_is_done_once_enough_has_come_together(tidy: GcControl) -> None:
    tidy.disable()
    circle = dropped()
    tidy.collect_if_due()
    assert circle() is not None and tidy.collections == 0
    kept = [[number] for number in range(MAX_NEW_OBJECTS)]
    tidy.collect_if_due()
    assert circle() is None and tidy.collections == 1 and len(kept) > 0
    tidy.collect_if_due()
    assert tidy.collections == 1, "what lives is not looked through at every step"


def test_a_busy_engine_waits_no_longer_than_a_second(tidy: GcControl, clock: Clock) -> None:
    """A few objects may hold a large body."""
    tidy.disable()
    circle = dropped()
    clock.seconds += MAX_SECONDS
    tidy.collect_if_due()
    assert circle() is None


def test_what_outlived_a_collection_is_looked_through_once_a_minute(tidy: GcControl, clock: Clock) -> None:
    tidy.disable()
    circle = Circle()
    seen = weakref.ref(circle)
    for _ in range(2):  # it grows old
        clock.seconds += MAX_SECONDS
        tidy.collect_if_due()
    del circle
    clock.seconds += MAX_SECONDS
    tidy.collect_if_due()
    assert seen() is not None
    clock.seconds += FULL_COLLECTION_SECONDS
    tidy.collect_if_due()
    assert seen() is None


def test_what_was_loaded_is_not_looked_through(tidy: GcControl) -> None:
    kept, before = [[number] for number in range(1_000)], gc.get_freeze_count()  # the tests themselves are frozen
    tidy.freeze()
    assert gc.get_freeze_count() >= before + len(kept)


def test_its_time_is_counted_whoever_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    heard = GcControl(lambda: float(next(ticks)))
    heard.freeze()
    gc.collect()
    assert (heard.collections, heard.seconds) == (1, 1.0)
    heard.close()
    gc.collect()
    assert heard.collections == 1 and gc.isenabled() and heard._on_gc_event not in gc.callbacks
    gc.unfreeze()
    assert step_monitor.MAX_SECONDS < step_monitor.FULL_COLLECTION_SECONDS
