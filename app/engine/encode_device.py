"""Runs a batch of texts on a GPU: one copy to the device, layers and heads, one copy back, results as bytes.

The queue decides which texts are in the batch. `encode_device_batch` defines the memory layout.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from app.backends.base import DeviceBackend, Mark
from app.engine.encode_device_batch import DeviceTexts
from app.engine.encode_device_replay import DeviceReplay, Told
from app.engine.encode_device_shapes import TextShape, recorded_shapes
from app.engine.encode_runner import EncoderModel, rows_of_texts
from app.engine.texts import TextSpan


@dataclass(frozen=True, slots=True)
class TextFlight:
    """A batch in flight. Its outputs are on the host once the device has passed the mark."""

    spans: tuple[TextSpan, ...]
    outputs: Mapping[str, Tensor]
    mark: Mark
    launched: float


class DeviceEncodeRunner:
    """Runs batches of texts on a device.

    It belongs to the worker thread and keeps no state except batches in flight.
    """

    overlaps = True

    def __init__(self, model: EncoderModel, backend: DeviceBackend, room: int, off: str = "") -> None:
        """Create the buffers for batches of at most `room` tokens.

        `off` is the reason why no batch is recorded. If it is empty, small batches are recorded once `record` is
        called.
        """
        self.model, self.backend = model, backend
        self.model_seconds = 0.0  # seconds of the last batch, until its results were on the host
        self._waited = 0.0  # time at which the results of the last batch were on the host
        self._usual = model.config.outputs[0]
        self._texts = DeviceTexts(backend, room, model.config)
        self._results = _Results(backend)
        self.replay = DeviceReplay(backend, self._texts, self._usual_output, off)

    def run(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        """Return the rows of each text by output name, as little-endian FP32 bytes."""
        return self.wait(self.launch(spans))

    @torch.inference_mode()
    def launch(self, spans: Sequence[TextSpan]) -> TextFlight:
        """Submit this batch to the device and return at once. At most one other batch may be in flight."""
        launched = time.perf_counter()
        wanted = {name for span in spans for name in span.request.order.outputs}
        names = [name for name in self.model.config.outputs if name in wanted]
        try:
            outputs = self._results.fetch(self._computed(spans, names))
        except RuntimeError:
            self.backend.synchronize()  # submitted work still reads the buffer that the next attempt overwrites
            raise
        return TextFlight(tuple(spans), outputs, self.backend.mark(), launched)

    @torch.inference_mode()
    def wait(self, flight: TextFlight) -> list[dict[str, bytes]]:
        """Wait for a batch and return its results. Call it in the order of launching."""
        flight.mark.wait()
        now = time.perf_counter()
        self.model_seconds, self._waited = now - max(flight.launched, self._waited), now
        return rows_of_texts(flight.outputs, flight.spans, self.model.config.pooling.normalizes)

    @torch.inference_mode()
    def record(self, example: Sequence[TextSpan], told: Told = lambda done, total: None) -> None:
        """Record small batches, so that each one is later submitted as a single call.

        `example` is one text of one token.
        """
        self.replay.record(recorded_shapes(self._texts.room), example, told)
        self.backend.synchronize()

    def survives(self, error: Exception) -> bool:
        """Return True if the error was a lack of memory. Memory that can be released has then been released."""
        return self.backend.survives(error)

    def _computed(self, spans: Sequence[TextSpan], names: Collection[str]) -> Mapping[str, Tensor]:
        """Submit the batch and return its outputs on the device, which may not be finished."""
        lengths = [span.num_tokens for span in spans]
        exact = TextShape(sum(lengths), len(lengths))
        shape = self.replay.shape_of(exact.tokens, exact.texts) if list(names) == [self._usual] else None
        self._texts.fill(spans, shape or exact)
        if shape is not None:
            return {self._usual: self.replay(shape)[: exact.texts]}
        return self._outputs(exact, max(lengths), names)

    def _usual_output(self, shape: TextShape) -> Tensor:
        return self._outputs(shape, shape.tokens, (self._usual,))[self._usual]

    def _outputs(self, shape: TextShape, most_tokens: int, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return the outputs of the batch that was filled in, whose longest text has at most `most_tokens` tokens."""
        texts = self._texts.view(shape, most_tokens)
        rows = self.model.rows(texts.starts, names)
        hidden = self.model.hidden(texts.context(), rows)
        return self.model.outputs(hidden, texts.starts, names, rows, texts.skipped)


class _Results:
    """Host buffers for the outputs of a batch: one copy from the device, into memory that is reused.

    There are two, since the next batch may be written while one is read.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._hosts = [torch.empty(0), torch.empty(0)]

    def fetch(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start the copy of the outputs. The FP32 host tensors are valid until the call after the next.

        A call that raises does not count.
        """
        parts = [output.flatten() for output in outputs.values()]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert flat.dtype == torch.float32, "heads return fp32"
        if len(flat) > len(self._hosts[0]):
            self._hosts[0] = self._backend.staging(_words(len(flat))).view(torch.float32)
        host = self._hosts[0][: len(flat)]
        host.copy_(flat, non_blocking=True)
        self._hosts.reverse()
        sizes = [prod(output.shape) for output in outputs.values()]
        return {name: part.view(outputs[name].shape) for name, part in zip(outputs, torch.split(host, sizes), strict=True)}


def _words(elements: int) -> int:
    """Return the size of an int64 buffer for `elements` FP32 values.

    It is a power of two, so that the buffer is seldom reallocated.
    """
    return max(1, 1 << ((elements - 1) // 2).bit_length())
