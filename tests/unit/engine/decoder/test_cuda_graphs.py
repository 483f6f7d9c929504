"""Captured once, then replayed; a device that cannot or must not capture says why, and its steps are computed all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.engine.decoder.cuda_graphs import DecodeGraphs, GraphShape, bucket_sizes, captured_row_bytes, startup_shapes
from app.engine.decoder.device_inputs import SamplingMode

ONE = GraphShape(4, SamplingMode.GREEDY)


class Device:
    """Captures work as it is told to, and counts."""

    def __init__(
        self, captures: bool = True, free: int = 2**40, error: Exception | None = None, survives: bool = True
    ) -> None:
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

    def recover_from_oom(self, error: Exception) -> bool:
        return self.alive


def graphs_on(device: Device, done: list[GraphShape], off: str = "") -> DecodeGraphs:
    backend: Any = device
    return DecodeGraphs(backend, done.append, captured_row_bytes(2**18, 4), off)


def test_a_shape_is_run_before_it_is_captured_and_replayed_afterwards() -> None:
    device, done = Device(), list[GraphShape]()
    graphs = graphs_on(device, done)
    assert graphs.should_capture(ONE)
    graphs.capture(ONE)
    assert (
        done == [ONE, ONE]
        and not graphs.should_capture(ONE)
        and graphs.should_capture(GraphShape(4, SamplingMode.RANDOM))
    )
    graphs.run(ONE)
    assert (device.replayed, graphs.num_replayed, len(done)) == (1, 1, 2)


def test_what_is_not_captured_is_computed() -> None:
    device, done = Device(), list[GraphShape]()
    graphs = graphs_on(device, done, off="because")
    assert not graphs.should_capture(ONE) and not graphs.enabled
    graphs.run(ONE)
    assert done == [ONE] and device.replayed == 0


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device(captures=False), "captures nothing"),
        (Device(error=RuntimeError("not so"), survives=False), "a step of 4 could not be captured: not so"),
    ],
)
def test_whoever_cannot_capture_says_why_and_goes_on(
    device: Device, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[GraphShape] = []
    graphs = graphs_on(device, done)
    graphs.capture(ONE)
    assert reason in graphs.reason and reason in caplog.text
    assert (
        not graphs.should_capture(ONE)
        and not graphs.should_capture(GraphShape(1, SamplingMode.GREEDY))
        and not graphs.enabled
    )
    done.clear()
    graphs.run(ONE)
    assert done == [ONE]


@pytest.mark.parametrize(
    ("device", "way", "reason"),
    [
        (Device(error=torch.OutOfMemoryError("no room")), SamplingMode.GREEDY, "no room"),
        (Device(free=3 * 2**20), SamplingMode.GREEDY, "its logits would take more memory"),
        (Device(free=10 * 2**20), SamplingMode.RANDOM, "its logits would take more memory"),
    ],
)
def test_where_memory_is_short_smaller_steps_are_captured(
    device: Device, way: SamplingMode, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = graphs_on(device, [])
    graphs.capture(GraphShape(4, way))
    assert (
        reason in caplog.text and f"Steps of 4 sequences and more with {way.value} sampling run eagerly" in caplog.text
    )
    assert (
        not graphs.should_capture(GraphShape(4, way))
        and not graphs.should_capture(GraphShape(8, way))
        and graphs.should_capture(GraphShape(2, way))
        and graphs.enabled
    )
    assert graphs.should_capture(GraphShape(8, SamplingMode.FILTERED)), "another way to pick is another question"
    device.error = None
    graphs.capture(GraphShape(2, way))
    graphs.run(GraphShape(2, way))
    assert device.replayed == 1


def test_no_more_is_kept_than_the_plan_has_room_for() -> None:
    """Rows of logits of 1 MiB; a drawing step holds five times that for each."""
    graphs = graphs_on(Device(), [])
    for shape in (
        GraphShape(512, SamplingMode.GREEDY),
        GraphShape(96, SamplingMode.FILTERED),
        GraphShape(112, SamplingMode.FILTERED),
    ):
        graphs.capture(shape)
    assert set(graphs.captured) == {GraphShape(512, SamplingMode.GREEDY), GraphShape(96, SamplingMode.FILTERED)}


def test_steps_that_draw_by_one_kernel_hold_no_more_than_others() -> None:
    """So that all buckets of a large vocabulary are captured on a GPU, where by torch's own only those up to 208 are."""
    backend: Any = Device()
    for drawing, captured in ((0, {GraphShape(256, SamplingMode.RANDOM)}), (4, set())):
        graphs = DecodeGraphs(backend, lambda shape: None, captured_row_bytes(128_256, drawing))
        graphs.capture(GraphShape(256, SamplingMode.RANDOM))
        assert set(graphs.captured) == captured


def test_the_common_shapes_come_largest_first() -> None:
    shapes = list(startup_shapes(bucket_sizes(256)))
    assert shapes[0].bucket == 64 and shapes[-1] == GraphShape(1, SamplingMode.FILTERED)
    assert len(shapes) == len(set(shapes)) == 33
