"""Captured decode steps of a device: common shapes are captured while loading, the others before their first use.

A smaller step is padded to the next bucket of batch sizes. A step that is not captured runs eagerly with the same
result; the reason is logged.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.backends.base import CapturedGraph, DeviceBackend
from app.engine.decoder.device_inputs import SamplingMode
from app.hardware.plan.memory_budget import GRAPHS_BYTES

_LOG = logging.getLogger(__name__)
LARGEST_STARTUP_BUCKET = 64  # sequences; steps of up to this size are captured while loading
LARGEST_BUCKET = 256  # sequences; above this the step takes the device longer than the host needs to launch it
# (up to, in steps of). Small batches are the common case, and there a padding row costs the most.
_BUCKET_STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (LARGEST_BUCKET, 16))


@dataclass(frozen=True, slots=True)
class GraphShape:
    bucket: int
    mode: SamplingMode


class DecodeGraphs:
    """The captured steps of one runner. `work` computes a step of a shape from the inputs in the runner's block."""

    def __init__(
        self,
        backend: DeviceBackend,
        work: Callable[[GraphShape], None],
        row_bytes: Mapping[SamplingMode, int],
        off: str = "",
    ) -> None:
        """Begin without graphs. `row_bytes` is a captured step's memory per row; `off`: why no step is captured."""
        self._backend = backend
        self._work = work
        self._row_bytes = row_bytes
        self._too_large: dict[
            SamplingMode, int
        ] = {}  # smallest bucket for which memory was insufficient, by sampling mode
        self.reason = off  # reason why no more steps are captured; empty if they are
        self.captured: dict[GraphShape, CapturedGraph] = {}
        self.num_replayed = 0

    @property
    def enabled(self) -> bool:
        """True if padding steps to a bucket is worthwhile, because steps are or will be captured."""
        return not self.reason or bool(self.captured)

    def should_capture(self, shape: GraphShape) -> bool:
        too_large = self._too_large.get(shape.mode, shape.bucket + 1)
        return shape.bucket < too_large and not self.reason and shape not in self.captured

    def capture(self, shape: GraphShape) -> None:
        """Capture a step of this shape, which computes it several times: all of its rows must be padding."""
        needed_bytes = shape.bucket * self._row_bytes[shape.mode]  # captured steps share memory: the largest counts
        if needed_bytes > min(GRAPHS_BYTES, self._backend.free_bytes()):
            self._skip_size(shape, "its logits would take more memory than is kept for captured steps")
            return
        try:
            self._work(shape)
            captured = self._backend.capture(lambda: self._work(shape))
        except RuntimeError as error:  # torch's out-of-memory error is a RuntimeError too
            if not self._backend.recover_from_oom(error):
                self._disable(f"a step of {shape.bucket} could not be captured: {error}")
                return
            self._skip_size(shape, str(error))
            return
        if captured is None:
            self._disable("this kind of device captures nothing")
            return
        self.captured[shape] = captured

    def run(self, shape: GraphShape) -> None:
        captured = self.captured.get(shape)
        if captured is None:
            self._work(shape)
            return
        captured.replay()
        self.num_replayed += 1

    def _skip_size(self, shape: GraphShape, reason: str) -> None:
        self._too_large[shape.mode] = shape.bucket
        _LOG.warning(
            "Steps of %d sequences and more with %s sampling run eagerly: %s.", shape.bucket, shape.mode.value, reason
        )

    def _disable(self, reason: str) -> None:
        self.reason = reason
        _LOG.warning("No more steps are captured: %s. They run eagerly.", reason)


def captured_row_bytes(vocab_size: int, scratch_rows: int) -> Mapping[SamplingMode, int]:
    """Return the bytes per row of a captured step by sampling mode: logits, and `scratch_rows` if random."""
    row = 4 * vocab_size
    return {
        SamplingMode.GREEDY: row,
        SamplingMode.RANDOM: (1 + scratch_rows) * row,
        SamplingMode.FILTERED: (1 + scratch_rows) * row,
    }


def startup_shapes(buckets: tuple[int, ...]) -> Iterator[GraphShape]:
    for bucket in reversed([bucket for bucket in buckets if bucket <= LARGEST_STARTUP_BUCKET]):
        for mode in (SamplingMode.GREEDY, SamplingMode.RANDOM, SamplingMode.FILTERED):
            yield GraphShape(bucket, mode)


def bucket_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the bucket sizes in ascending order; the last holds `max_sequences`, or is `LARGEST_BUCKET`."""
    assert max_sequences > 0, "max_sequences must be positive"
    sizes, size = [1], 1
    for end, step in _BUCKET_STEPS:
        while size < min(end, max_sequences):
            size += step
            sizes.append(size)
    return tuple(sizes)


def smallest_bucket(sequences: int, buckets: tuple[int, ...]) -> int | None:
    place = bisect_left(buckets, sequences)
    return buckets[place] if place < len(buckets) else None
