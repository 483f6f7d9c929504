"""Carries out a batch of texts on a device with memory of its own: one copy there, layers and heads, one copy back, rows as bytes.

Which texts are in the batch is the queue's decision; how they lie there is `encode_device_batch`'s.
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
    """A batch under way: its outputs are on the host when the device has passed the mark."""

    spans: tuple[TextSpan, ...]
    outputs: Mapping[str, Tensor]
    mark: Mark
    launched: float


class DeviceEncodeRunner:
    """Texts in, rows out. Lives on the worker thread; but for batches under way it holds no state, only room."""

    overlaps = True

    def __init__(self, model: EncoderModel, backend: DeviceBackend, room: int, off: str = "") -> None:
        """Batches have at most `room` tokens. `off`: why none is recorded; empty: small ones are, once `record` was called."""
        self.model, self.backend = model, backend
        self.model_seconds = 0.0  # of the last batch, until its results were here
        self._waited = 0.0  # when those of the last one were
        self._usual = model.config.outputs[0]
        self._texts = DeviceTexts(backend, room, model.config)
        self._results = _Results(backend)
        self.replay = DeviceReplay(backend, self._texts, self._usual_output, off)

    def run(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        """Of each text, by output: its rows, little-endian fp32."""
        return self.wait(self.launch(spans))

    @torch.inference_mode()
    def launch(self, spans: Sequence[TextSpan]) -> TextFlight:
        """Asks the device for this batch and returns at once. At most one other may be under way."""
        launched = time.perf_counter()
        wanted = {name for span in spans for name in span.request.order.outputs}
        names = [name for name in self.model.config.outputs if name in wanted]
        try:
            outputs = self._results.fetch(self._computed(spans, names))
        except RuntimeError:
            self.backend.synchronize()  # what was asked of it reads words that the next try overwrites
            raise
        return TextFlight(tuple(spans), outputs, self.backend.mark(), launched)

    @torch.inference_mode()
    def wait(self, flight: TextFlight) -> list[dict[str, bytes]]:
        """What became of it; in the order of launching."""
        flight.mark.wait()
        now = time.perf_counter()
        self.model_seconds, self._waited = now - max(flight.launched, self._waited), now
        return rows_of_texts(flight.outputs, flight.spans, self.model.config.pooling.normalizes)

    @torch.inference_mode()
    def record(self, example: Sequence[TextSpan], told: Told = lambda done, total: None) -> None:
        """Small batches, so that they are asked for at once from now on; `example` is a single text of one token."""
        self.replay.record(recorded_shapes(self._texts.room), example, told)
        self.backend.synchronize()

    def survives(self, error: Exception) -> bool:
        """Whether that was a want of memory; then what can be given back has been."""
        return self.backend.survives(error)

    def _computed(self, spans: Sequence[TextSpan], names: Collection[str]) -> Mapping[str, Tensor]:
        """On the device, under way."""
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
        """Of the batch that was filled in, whose longest text has at most so many tokens."""
        texts = self._texts.view(shape, most_tokens)
        rows = self.model.rows(texts.starts, names)
        hidden = self.model.hidden(texts.context(), rows)
        return self.model.outputs(hidden, texts.starts, names, rows, texts.skipped)


class _Results:
    """What a batch has computed, on its way back to the host: one copy, into memory that is kept. Two of them, since while one is read
    the next may be written."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._hosts = [torch.empty(0), torch.empty(0)]

    def fetch(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Asks for them: fp32 on the host, which the call after the next overwrites. One that raises has not been."""
        parts = [output.flatten() for output in outputs.values()]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert flat.dtype == torch.float32, "heads say what they say in fp32"
        if len(flat) > len(self._hosts[0]):
            self._hosts[0] = self._backend.staging(_words(len(flat))).view(torch.float32)
        host = self._hosts[0][: len(flat)]
        host.copy_(flat, non_blocking=True)
        self._hosts.reverse()
        sizes = [prod(output.shape) for output in outputs.values()]
        return {name: part.view(outputs[name].shape) for name, part in zip(outputs, torch.split(host, sizes), strict=True)}


def _words(elements: int) -> int:
    """Int64 words for so many fp32: a power of two, so that room is seldom made."""
    return max(1, 1 << ((elements - 1) // 2).bit_length())
