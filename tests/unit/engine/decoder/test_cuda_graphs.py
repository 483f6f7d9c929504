"""Captured once, then replayed; a device that cannot or must not capture says why, and its steps are computed all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.engine.decoder.cuda_graphs import GraphShape, GraphShapes, StepGraphs, captured_step_bytes

ONE = GraphShape(4, 160)


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


def graphs_on(device: Device, done: list[GraphShape], off: str = "") -> StepGraphs:
    """Logits and their copy of 2 MiB a row, activations of 0.5 MiB a token."""
    backend: Any = device
    return StepGraphs(backend, done.append, captured_step_bytes(2**18, 2**13), off)


def test_a_shape_is_run_before_it_is_captured_and_replayed_afterwards() -> None:
    device, done = Device(), list[GraphShape]()
    graphs = graphs_on(device, done)
    assert graphs.should_capture(ONE)
    graphs.capture(ONE)
    assert done == [ONE, ONE] and not graphs.should_capture(ONE) and graphs.should_capture(GraphShape(4, 320))
    graphs.replay(ONE)
    assert (device.replayed, graphs.num_replayed, len(done)) == (1, 1, 2)


def test_nothing_is_captured_where_it_is_off() -> None:
    graphs = graphs_on(Device(), [], off="because")
    assert not graphs.should_capture(ONE) and not graphs.enabled


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device(captures=False), "captures nothing"),
        (Device(error=RuntimeError("not so"), survives=False), "a step of 4 tokens could not be captured: not so"),
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
        and not graphs.should_capture(GraphShape(1, 160))
        and not graphs.enabled
        and ONE not in graphs.captured
    )


@pytest.mark.parametrize("prompts", [0, 32])
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"error": torch.OutOfMemoryError("no room")}, "no room"),
        ({"free": 9 * 2**20}, "it would take more memory"),
    ],
)
def test_where_memory_is_short_smaller_steps_are_captured(
    trouble: dict[str, Any], reason: str, prompts: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(**trouble)
    graphs, shape = graphs_on(device, []), GraphShape(4, 160, prompts)
    graphs.capture(shape)
    kind = "with prompts" if prompts else "of decodes"
    assert reason in caplog.text and f"Steps {kind} of {4 + prompts} tokens and more run eagerly" in caplog.text
    assert (
        not graphs.should_capture(shape)
        and not graphs.should_capture(GraphShape(8, 160, prompts))
        and graphs.should_capture(GraphShape(2, 160, prompts))
        and graphs.enabled
    )
    assert graphs.should_capture(GraphShape(2, 160, 0 if prompts else 32)), "steps of another kind are another question"
    device.error, device.free = None, 2**40
    graphs.capture(GraphShape(2, 160, prompts))
    assert GraphShape(2, 160, prompts) in graphs.captured


def test_no_more_is_kept_than_the_plan_has_room_for() -> None:
    graphs = graphs_on(Device(), [])
    for rows in (192, 208):
        graphs.capture(GraphShape(rows, 160))
    assert set(graphs.captured) == {GraphShape(192, 160)}


def test_the_common_shapes_come_largest_first() -> None:
    shapes = GraphShapes.of(256, 8192, 131_072, has_prompts=True)
    first = list(shapes.at_startup())
    assert first[0] == GraphShape(64, 8192) and first[10] == GraphShape(1, 8192)
    assert first[11] == GraphShape(0, 131_072, 512, fresh=True) and len(first) == len(set(first)) == 18
    later = set(shapes.in_pauses())
    assert later > set(first) and {GraphShape(256, 8192), GraphShape(256, 131_072)} < later


@pytest.mark.parametrize(
    ("decodes", "context", "prompts", "found"),
    [
        (3, 100, (), GraphShape(4, 8192)),
        (3, 8193, (), GraphShape(4, 131_072)),
        (257, 100, (), None),
        (0, 90_000, (20, 30), GraphShape(0, 131_072, 64, True)),
        (3, 100, (2048,), GraphShape(8, 8192, 2048, True)),
        (3, 100, (2049,), None),
        (0, 100, (4,) * 9, None),
    ],
)
def test_a_step_is_padded_to_the_next_shape(
    decodes: int, context: int, prompts: tuple[int, ...], found: GraphShape | None
) -> None:
    shapes = GraphShapes.of(256, 8192, 131_072, has_prompts=True)
    assert shapes.find(decodes, context, prompts, fresh=bool(prompts)) == found
    largest = shapes.largest
    assert found is None or (found.sizes.tokens <= largest.tokens and found.sizes.samples <= largest.samples)


def test_prompts_are_not_padded_where_attention_would_compute_the_padding() -> None:
    shapes = GraphShapes.of(4, 64, 256, has_prompts=False)
    assert shapes.find(0, 30, (30,)) is None and shapes.find(2, 30) == GraphShape(2, 256)
    assert shapes.largest.tokens == 4 and set(shapes.in_pauses()) == {GraphShape(one, 256) for one in (1, 2, 4)}
