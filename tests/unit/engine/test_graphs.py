"""Captured once, then replayed; a device that cannot or must not capture says why, and its steps are computed all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.engine.buckets import buckets_for
from app.engine.device_step import Way
from app.engine.graphs import Graphs, Shape, common_shapes

ONE = Shape(4, Way.GREEDY)


class Device:
    """Captures work as it is told to, and counts."""

    def __init__(self, captures: bool = True, free: int = 2**40, error: Exception | None = None) -> None:
        self.captures, self.free, self.error = captures, free, error
        self.replayed = 0
        self.survived: list[Exception] = []

    def free_bytes(self) -> int:
        return self.free

    def capture(self, work: Callable[[], None]) -> Device | None:
        if self.error is not None:
            raise self.error
        work()
        return self if self.captures else None

    def replay(self) -> None:
        self.replayed += 1

    def survives(self, error: Exception) -> bool:
        self.survived.append(error)
        return True


def graphs_on(device: Device, done: list[Shape], off: str = "") -> Graphs:
    backend: Any = device
    return Graphs(backend, done.append, off)


def test_a_shape_is_run_before_it_is_captured_and_replayed_afterwards() -> None:
    device, done = Device(), list[Shape]()
    graphs = graphs_on(device, done)
    assert graphs.wants(ONE)
    graphs.capture(ONE)
    assert done == [ONE, ONE] and not graphs.wants(ONE) and graphs.wants(Shape(4, Way.DRAWN))
    graphs.run(ONE)
    assert (device.replayed, graphs.num_replayed, len(done)) == (1, 1, 2)


def test_what_is_not_captured_is_computed() -> None:
    device, done = Device(), list[Shape]()
    graphs = graphs_on(device, done, off="because")
    assert not graphs.wants(ONE) and not graphs.on
    graphs.run(ONE)
    assert done == [ONE] and device.replayed == 0


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device(captures=False), "captures nothing"),
        (Device(free=2**20), "only 1 MiB of the device's memory are free"),
        (Device(error=torch.OutOfMemoryError("no room")), "a step of 4 could not be captured: no room"),
    ],
)
def test_whoever_cannot_capture_says_why_and_goes_on(device: Device, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    done: list[Shape] = []
    graphs = graphs_on(device, done)
    graphs.capture(ONE)
    assert reason in graphs.reason and reason in caplog.text and not graphs.wants(ONE)
    assert len(device.survived) == (device.error is not None)
    done.clear()
    graphs.run(ONE)
    assert done == [ONE]


def test_what_was_captured_before_memory_ran_short_is_still_replayed() -> None:
    device = Device()
    graphs = graphs_on(device, [])
    graphs.capture(ONE)
    device.free = 0
    graphs.capture(Shape(8, Way.GREEDY))
    assert graphs.on and graphs.reason
    graphs.run(ONE)
    assert device.replayed == 1


def test_the_common_shapes_come_largest_first() -> None:
    shapes = list(common_shapes(buckets_for(256)))
    assert shapes[0].bucket == 64 and shapes[-1] == Shape(1, Way.FILTERED)
    assert len(shapes) == len(set(shapes)) == 33
