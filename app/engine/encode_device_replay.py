"""Records small batches of texts on a device, once for each shape, and replays each as one call.

Submitting such a batch layer by layer takes longer than the device needs to compute it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from app.backends.base import Captured, DeviceBackend
from app.engine.encode_device_batch import DeviceTexts
from app.engine.encode_device_shapes import TextShape, filled_up
from app.engine.texts import TextSpan

_LOG = logging.getLogger(__name__)
Compute = Callable[[TextShape], Tensor]
Told = Callable[[int, int], None]  # done, total


class DeviceReplay:
    """The recordings of one runner.

    Only the usual output is recorded: a request for the hidden state of every token waits for the copy, not for
    submission.
    """

    def __init__(self, backend: DeviceBackend, texts: DeviceTexts, compute: Compute, off: str = "") -> None:
        """Start without recordings.

        `compute` returns the usual output [texts, size] FP32 of the batch that is in `texts`. `off` is the reason
        to record nothing.
        """
        self.reason = off  # reason why nothing more is recorded; empty if all was
        self.num_runs = 0  # number of steps that were replayed
        self._backend, self._texts, self._compute = backend, texts, compute
        self._kept: dict[TextShape, Captured] = {}
        self._results: dict[TextShape, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens in a step that is replayed; 0 if none is."""
        return max((shape.tokens for shape in self._kept), default=1) - 1

    def record(self, shapes: Sequence[TextShape], example: Sequence[TextSpan], told: Told = lambda done, total: None) -> None:
        """Record all of these shapes, the largest first, so that the others reuse its memory.

        `example` is a batch that fits each of them.
        """
        for done, shape in enumerate(sorted(shapes, reverse=True)):
            if self.reason:
                return
            self._record(shape, example)
            told(done + 1, len(shapes))

    def _record(self, shape: TextShape, example: Sequence[TextSpan]) -> None:
        try:
            self._texts.fill(example, shape)
            result = self._compute(shape).clone()  # allocated outside of the recording, so that it remains
            self._backend.synchronize()
            captured = self._backend.capture(lambda: _copied(result, self._compute(shape)))
        except RuntimeError as error:  # torch's out-of-memory error is one too
            self._backend.survives(error)
            self.reason = f"{shape.texts} texts of {shape.tokens} tokens could not be recorded: {error}"
            _LOG.warning("No more batches of texts are recorded: %s. They are computed eagerly.", self.reason)
            return
        if captured is None:
            self.reason = "this kind of device records nothing"
            return
        self._kept[shape], self._results[shape] = captured, result

    def shape_of(self, tokens: int, texts: int) -> TextShape | None:
        """Return the recorded shape that a batch is padded to, or None if it is computed as it is."""
        return filled_up(tokens, texts, self._kept)

    def __call__(self, shape: TextShape) -> Tensor:
        """Return the usual output of the batch that was filled in; the next step of that shape overwrites it."""
        self.num_runs += 1
        self._kept[shape].replay()
        return self._results[shape]


def _copied(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
