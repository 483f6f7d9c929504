"""Small batches of texts, recorded on the device once for each shape and asked for again as one: asking layer by layer takes longer than
such a batch is computed."""

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
Told = Callable[[int, int], None]  # so many of so many


class DeviceReplay:
    """Belongs to one runner. Of the usual output alone: who asks for every token's state waits for the copy, not for being asked."""

    def __init__(self, backend: DeviceBackend, texts: DeviceTexts, compute: Compute, off: str = "") -> None:
        """`compute`: the usual output [texts, size] fp32 of the batch that lies in `texts`."""
        self.reason = off  # why no more is recorded; empty: all was
        self.num_runs = 0  # steps that were run again
        self._backend, self._texts, self._compute = backend, texts, compute
        self._kept: dict[TextShape, Captured] = {}
        self._results: dict[TextShape, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        """Of the steps that are run again; 0: none is."""
        return max((shape.tokens for shape in self._kept), default=1) - 1

    def record(self, shapes: Sequence[TextShape], example: Sequence[TextSpan], told: Told = lambda done, total: None) -> None:
        """All of these; `example` is a batch that fits each of them. The largest first: the others find its memory."""
        for done, shape in enumerate(sorted(shapes, reverse=True)):
            if self.reason:
                return
            self._record(shape, example)
            told(done + 1, len(shapes))

    def _record(self, shape: TextShape, example: Sequence[TextSpan]) -> None:
        try:
            self._texts.fill(example, shape)
            result = self._compute(shape).clone()  # outside of what is recorded, where it stays
            self._backend.synchronize()
            captured = self._backend.capture(lambda: _copied(result, self._compute(shape)))
        except RuntimeError as error:  # torch's want of memory is one too
            self._backend.survives(error)
            self.reason = f"{shape.texts} texts of {shape.tokens} tokens could not be recorded: {error}"
            _LOG.warning("No more batches of texts are recorded: %s. They are computed eagerly.", self.reason)
            return
        if captured is None:
            self.reason = "this kind of device records nothing"
            return
        self._kept[shape], self._results[shape] = captured, result

    def shape_of(self, tokens: int, texts: int) -> TextShape | None:
        """What a batch is filled up to; None: it is computed as it is."""
        return filled_up(tokens, texts, self._kept)

    def __call__(self, shape: TextShape) -> Tensor:
        """The usual output of the batch that was filled in; the next step of that shape overwrites it."""
        self.num_runs += 1
        self._kept[shape].replay()
        return self._results[shape]


def _copied(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
