"""Which decode steps are captured on the device, and when: the common ones while loading, the others before their first use.

A step that is not captured runs eagerly, and is right all the same: a device that captures nothing, or has no memory left, says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.backends.base import Captured, DeviceBackend
from app.engine.device_step import Way
from app.hardware.device_memory import GRAPHS_BYTES

_LOG = logging.getLogger(__name__)
COMMON = 64  # sequences: steps of up to so many are captured while loading


@dataclass(frozen=True, slots=True)
class Shape:
    """What captured steps are told apart by."""

    bucket: int
    way: Way


class Graphs:
    """Belongs to one runner: `work` computes a step of a shape from the words in the runner's block."""

    def __init__(
        self, backend: DeviceBackend, work: Callable[[Shape], None], row_bytes: Mapping[Way, int], off: str = ""
    ) -> None:
        """`row_bytes`: what a captured step holds on to for each of its rows, by how it picks."""
        self._backend = backend
        self._work = work
        self._row_bytes = row_bytes
        self._too_large: dict[Way, int] = {}  # buckets for which there was no memory
        self.reason = off  # why nothing more is captured; empty: it is
        self.captured: dict[Shape, Captured] = {}
        self.num_replayed = 0

    @property
    def on(self) -> bool:
        """Whether it is worth filling steps up to a bucket."""
        return not self.reason or bool(self.captured)

    def wants(self, shape: Shape) -> bool:
        """Whether a step of this shape is to be captured before it is run."""
        too_large = self._too_large.get(shape.way, shape.bucket + 1)
        return shape.bucket < too_large and not self.reason and shape not in self.captured

    def capture(self, shape: Shape) -> None:
        """Computes the step several times over, so its rows must be nobody's."""
        if self._wanted(shape) > min(GRAPHS_BYTES, self._backend.free_bytes()):
            self._give_up(shape, "its logits would take more memory than is kept for captured steps")
            return
        try:
            self._work(shape)
            captured = self._backend.capture(lambda: self._work(shape))
        except RuntimeError as error:  # torch's want of memory is one too
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
        """They share their memory, so that the largest counts."""
        return shape.bucket * self._row_bytes[shape.way]

    def run(self, shape: Shape) -> None:
        """Asks the device for a step."""
        captured = self.captured.get(shape)
        if captured is None:
            self._work(shape)
            return
        captured.replay()
        self.num_replayed += 1

    def _give_up(self, shape: Shape, reason: str) -> None:
        self._too_large[shape.way] = shape.bucket
        _LOG.warning("Steps of %d sequences and more that pick %s run eagerly: %s.", shape.bucket, shape.way.value, reason)

    def _stop(self, reason: str) -> None:
        self.reason = reason
        _LOG.warning("No more steps are captured: %s. They run eagerly.", reason)


def bytes_of_rows(vocab_size: int, drawing: int) -> Mapping[Way, int]:
    """Logits and their largest are at most one row in fp32, most of what a step holds; drawing holds so many such rows beside it."""
    row = 4 * vocab_size
    return {Way.GREEDY: row, Way.DRAWN: (1 + drawing) * row, Way.FILTERED: (1 + drawing) * row}


def common_shapes(buckets: tuple[int, ...]) -> Iterator[Shape]:
    """Those to capture while loading, the largest first: smaller ones find its memory."""
    for bucket in reversed([bucket for bucket in buckets if bucket <= COMMON]):
        for way in (Way.GREEDY, Way.DRAWN, Way.FILTERED):
            yield Shape(bucket, way)
