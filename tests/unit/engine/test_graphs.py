"""Captured once, then replayed; a device that cannot or must not capture says why, and its steps are computed all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.engine.buckets import buckets_for
from app.engine.device_step import Way
from app.engine.graphs import Graphs, Shape, bytes_of_rows, common_shapes

ONE = Shape(4, Way.GREEDY)


class Device:
    """Captures work as it is told to, and counts."""

    def __init__(self, captures: bool = True, free: int = 2**40, error: Exception | None = None, survives: bool = True) -> None:
        self.captures, self.free, self.error, self.alive = captures, free, error, survives
        self.replayed = 0

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
        return self.alive


def graphs_on(device: Device, done: list[Shape], off: str = "") -> Graphs:
    backend: Any = device
    return Graphs(backend, done.append, bytes_of_rows(2**18, 4), off)


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
        (Device(error=RuntimeError("not so"), survives=False), "a step of 4 could not be captured: not so"),
    ],
)
def test_whoever_cannot_capture_says_why_and_goes_on(device: Device, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    done: list[Shape] = []
    graphs = graphs_on(device, done)
    graphs.capture(ONE)
    assert reason in graphs.reason and reason in caplog.text
    assert not graphs.wants(ONE) and not graphs.wants(Shape(1, Way.GREEDY)) and not graphs.on
    done.clear()
    graphs.run(ONE)
    assert done == [ONE]


@pytest.mark.parametrize(
    ("device", "way", "reason"),
    [
        (Device(error=torch.OutOfMemoryError("no room")), Way.GREEDY, "no room"),
        (Device(free=3 * 2**20), Way.GREEDY, "its logits would take more memory"),
        (Device(free=10 * 2**20), Way.DRAWN, "its logits would take more memory"),
    ],
)
def test_where_memory_is_short_smaller_steps_are_captured(
    device: Device, way: Way, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = graphs_on(device, [])
    graphs.capture(Shape(4, way))
    assert reason in caplog.text and f"Steps of 4 sequences and more with {way.value} sampling run eagerly" in caplog.text
    assert not graphs.wants(Shape(4, way)) and not graphs.wants(Shape(8, way)) and graphs.wants(Shape(2, way)) and graphs.on
    assert graphs.wants(Shape(8, Way.FILTERED)), "another way to pick is another question"
    device.error = None
    graphs.capture(Shape(2, way))
    graphs.run(Shape(2, way))
    assert device.replayed == 1


def test_no_more_is_kept_than_the_plan_has_room_for() -> None:
    """Rows of logits of 1 MiB; a drawing step holds five times that for each."""
    graphs = graphs_on(Device(), [])
    for shape in (Shape(512, Way.GREEDY), Shape(96, Way.FILTERED), Shape(112, Way.FILTERED)):
        graphs.capture(shape)
    assert set(graphs.captured) == {Shape(512, Way.GREEDY), Shape(96, Way.FILTERED)}


def test_steps_that_draw_by_one_kernel_hold_no_more_than_others() -> None:
    """So that all buckets of a large vocabulary are captured on a GPU, where by torch's own only those up to 208 are."""
    backend: Any = Device()
    for drawing, captured in ((0, {Shape(256, Way.DRAWN)}), (4, set())):
        graphs = Graphs(backend, lambda shape: None, bytes_of_rows(128_256, drawing))
        graphs.capture(Shape(256, Way.DRAWN))
        assert set(graphs.captured) == captured


def test_the_common_shapes_come_largest_first() -> None:
    shapes = list(common_shapes(buckets_for(256)))
    assert shapes[0].bucket == 64 and shapes[-1] == Shape(1, Way.FILTERED)
    assert len(shapes) == len(set(shapes)) == 33
