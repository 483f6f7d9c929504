"""Captured decode steps of a device: common shapes are captured while loading, the others before their first use.

A step that is not captured runs eagerly with the same result. If the device captures nothing or has no memory
left, the reason is recorded and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.backends.base import Captured, DeviceBackend
from app.engine.device_step import Way
from app.hardware.device_memory import GRAPHS_BYTES

_LOG = logging.getLogger(__name__)
COMMON = 64  # sequences; steps of up to this size are captured while loading


@dataclass(frozen=True, slots=True)
class Shape:
    """The key of a captured step."""

    bucket: int
    way: Way


class Graphs:
    """The captured steps of one runner.

    `work` computes a step of a shape from the inputs in the runner's block.
    """

    def __init__(
        self, backend: DeviceBackend, work: Callable[[Shape], None], row_bytes: Mapping[Way, int], off: str = ""
    ) -> None:
        """Create an empty set of graphs.

        Args:
            backend: Device that captures and replays the steps.
            work: Function that computes a step of a shape.
            row_bytes: Memory that a captured step holds for each of its rows, by sampling mode.
            off: Reason why no step is captured; empty if steps are captured.
        """
        self._backend = backend
        self._work = work
        self._row_bytes = row_bytes
        self._too_large: dict[Way, int] = {}  # smallest bucket for which memory was insufficient, by sampling mode
        self.reason = off  # reason why no more steps are captured; empty if they are
        self.captured: dict[Shape, Captured] = {}
        self.num_replayed = 0

    @property
    def on(self) -> bool:
        """True if padding steps to a bucket is worthwhile, because steps are or will be captured."""
        return not self.reason or bool(self.captured)

    def wants(self, shape: Shape) -> bool:
        """Return True if a step of this shape must be captured before it is run."""
        too_large = self._too_large.get(shape.way, shape.bucket + 1)
        return shape.bucket < too_large and not self.reason and shape not in self.captured

    def capture(self, shape: Shape) -> None:
        """Capture a step of this shape.

        This computes the step several times, so all of its rows must be padding rows.
        """
        if self._wanted(shape) > min(GRAPHS_BYTES, self._backend.free_bytes()):
            self._give_up(shape, "its logits would take more memory than is kept for captured steps")
            return
        try:
            self._work(shape)
            captured = self._backend.capture(lambda: self._work(shape))
        except RuntimeError as error:  # torch's out-of-memory error is a RuntimeError too
            if not self._backend.survives(error):
                self._stop(f"a step of {shape.bucket} could not be captured: {error}")
                return
            self._give_up(shape, str(error))
            return
        if captured is None:
            self._stop("this kind of device captures nothing")
            return
        self.captured[shape] = captured

    def _wanted(self, shape: Shape) -> int:
        """Return the memory that the capture needs, in bytes.

        Captured steps share their memory, so only the largest counts.
        """
        return shape.bucket * self._row_bytes[shape.way]

    def run(self, shape: Shape) -> None:
        """Launch a step: replay it if it was captured, else run it eagerly."""
        captured = self.captured.get(shape)
        if captured is None:
            self._work(shape)
            return
        captured.replay()
        self.num_replayed += 1

    def _give_up(self, shape: Shape, reason: str) -> None:
        self._too_large[shape.way] = shape.bucket
        _LOG.warning("Steps of %d sequences and more with %s sampling run eagerly: %s.", shape.bucket, shape.way.value, reason)

    def _stop(self, reason: str) -> None:
        self.reason = reason
        _LOG.warning("No more steps are captured: %s. They run eagerly.", reason)


def bytes_of_rows(vocab_size: int, drawing: int) -> Mapping[Way, int]:
    """Return the memory per row that a captured step holds, in bytes, by sampling mode.

    Most of it is the logits: at most one row in fp32. Random sampling holds `scratch_rows` more rows of that size.
    """
    row = 4 * vocab_size
    return {Way.GREEDY: row, Way.DRAWN: (1 + drawing) * row, Way.FILTERED: (1 + drawing) * row}


def common_shapes(buckets: tuple[int, ...]) -> Iterator[Shape]:
    """Yield the shapes to capture while loading, largest first, so that smaller ones reuse the memory."""
    for bucket in reversed([bucket for bucket in buckets if bucket <= COMMON]):
        for way in (Way.GREEDY, Way.DRAWN, Way.FILTERED):
            yield Shape(bucket, way)
