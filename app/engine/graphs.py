"""Which decode steps are captured on the device, and when: the common ones while loading, the others before their first use.

A step that is not captured runs eagerly, and is right all the same: a device that captures nothing, or has no memory left, says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.backends.base import Captured, DeviceBackend
from app.engine.device_step import Way

_LOG = logging.getLogger(__name__)
COMMON = 64  # sequences: steps of up to so many are captured while loading
# Left free on the device: below it nothing more is captured. What a prompt's step takes beside its estimate wants room.
_SPARE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """What captured steps are told apart by."""

    bucket: int
    way: Way


class Graphs:
    """Belongs to one runner: `work` computes a step of a shape from the words in the runner's block."""

    def __init__(self, backend: DeviceBackend, work: Callable[[Shape], None], off: str = "") -> None:
        self._backend = backend
        self._work = work
        self.reason = off  # why nothing more is captured; empty: it is
        self.captured: dict[Shape, Captured] = {}
        self.num_replayed = 0

    @property
    def on(self) -> bool:
        """Whether it is worth filling steps up to a bucket."""
        return not self.reason or bool(self.captured)

    def wants(self, shape: Shape) -> bool:
        """Whether a step of this shape is to be captured before it is run."""
        return not self.reason and shape not in self.captured

    def capture(self, shape: Shape) -> None:
        """Computes the step several times over, so its rows must be nobody's."""
        free = self._backend.free_bytes()
        if free < _SPARE_BYTES:
            self._stop(f"only {free // 2**20} MiB of the device's memory are free")
            return
        try:
            self._work(shape)
            captured = self._backend.capture(lambda: self._work(shape))
        except RuntimeError as error:  # torch's want of memory is one too
            self._backend.survives(error)
            self._stop(f"a step of {shape.bucket} could not be captured: {error}")
            return
        if captured is None:
            self._stop("this kind of device captures nothing")
            return
        self.captured[shape] = captured

    def run(self, shape: Shape) -> None:
        """Asks the device for a step."""
        captured = self.captured.get(shape)
        if captured is None:
            self._work(shape)
            return
        captured.replay()
        self.num_replayed += 1

    def _stop(self, reason: str) -> None:
        self.reason = reason
        _LOG.warning("No more steps are captured: %s. They run eagerly.", reason)


def common_shapes(buckets: tuple[int, ...]) -> Iterator[Shape]:
    """Those to capture while loading, the largest first: smaller ones find its memory."""
    for bucket in reversed([bucket for bucket in buckets if bucket <= COMMON]):
        for way in (Way.GREEDY, Way.DRAWN, Way.FILTERED):
            yield Shape(bucket, way)
