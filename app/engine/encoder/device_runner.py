"""Runs a batch of texts on a GPU: one copy to the device, layers and heads, one copy back, results as bytes.

Small batches are recorded once for each shape and replayed as one call, because submitting them layer by layer takes
longer than the device needs to compute them.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.backends.base import CapturedGraph, DeviceBackend, DeviceEvent
from app.engine.encoder.batching import TextSpan
from app.engine.encoder.cpu_runner import output_bytes
from app.models.encoders.config import EncoderConfig, positions_of
from app.models.encoders.encoder import Encoder
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, EncodeContext
from armature_kernels.attention.paged import PackedTexts

# Tokens of a batch: a sixteenth or so above a power of two. Texts are often cut at a power of two,
# and the batch also contains a text that only fills it. Beyond the last size, computing a step takes longer than
# submitting it.
RECORDED_TOKENS = (16, 32, 48, 80, 144, 272, 528)
RECORDED_TEXTS = (2, 8, 32, 128)
_SHORT_TEXT = 3  # tokens; texts are rarely shorter, so a batch rarely has more texts than its tokens divided by this
Int64Array = NDArray[np.int64]
_ALIGNED = 16  # elements; kernels are compiled for aligned addresses, and compiled again for others
_LOG = logging.getLogger(__name__)
ProgressCallback = Callable[[int, int], None]  # done, total


@dataclass(frozen=True, slots=True, order=True)
class TextBatchShape:
    """Tokens and texts of a batch, including the texts that only fill it."""

    tokens: int
    texts: int


def recorded_shapes(most_tokens: int) -> tuple[TextBatchShape, ...]:
    """Return all shapes that are worth recording, of at most `most_tokens` tokens, the smallest first."""
    sizes = (size for size in RECORDED_TOKENS if size <= most_tokens)
    return tuple(
        TextBatchShape(size, texts)
        for size in sizes
        for texts in RECORDED_TEXTS
        if texts == RECORDED_TEXTS[0] or texts * _SHORT_TEXT <= size
    )


def padded_shape(tokens: int, texts: int, shapes: Iterable[TextBatchShape]) -> TextBatchShape | None:
    """Return the smallest shape that fits the batch and one more text of at least one token, or None."""
    return min((shape for shape in shapes if shape.tokens > tokens and shape.texts > texts), default=None)


@dataclass(frozen=True, slots=True)
class _BatchLayout:
    """The slices of a batch in its int64 buffer: `starts` [texts + 1]; `skipped` [texts], None if all are pooled."""

    token_ids: slice
    positions: slice
    starts: slice
    type_ids: slice | None
    skipped: slice | None
    count: int


class DeviceTextBatch:
    """The buffer of a batch on the device, and two staging buffers on the host, since a copy may be unfinished."""

    def __init__(self, backend: DeviceBackend, max_tokens: int, config: EncoderConfig) -> None:
        self.max_tokens = max_tokens
        self._backend = backend
        self._has_types, self._skips = config.num_types > 1, config.pooling.skips_prompt
        self._padding_id = config.padding_id
        size = self._layout(TextBatchShape(max_tokens, max_tokens)).count
        self._staged = [backend.staging_buffer(size) for _ in range(2)]
        # numpy views of the same memory, which are faster to write than tensors
        self._written = [staged.numpy() for staged in self._staged]
        self._buffer = torch.empty(size, dtype=torch.int64, device=backend.device)

    def fill(self, spans: Sequence[TextSpan], shape: TextBatchShape) -> None:
        """Describe these texts and send them; empty texts and one with all tokens left fill a larger shape."""
        starts = list(accumulate((span.num_tokens for span in spans), initial=0))
        tokens, more = starts[-1], shape.texts - len(spans)
        assert tokens <= shape.tokens <= self.max_tokens, "a step has a budget"
        assert (more == 0) == (tokens == shape.tokens), "a text that fills a batch has a token"
        layout, buffer = self._layout(shape), self._written[0]
        _fill_numbers(buffer[layout.token_ids], [span.text.token_ids for span in spans])
        if layout.type_ids is not None:
            _fill_numbers(buffer[layout.type_ids], [span.text.type_ids or (0,) * span.num_tokens for span in spans])
        if layout.skipped is not None:
            _fill_numbers(buffer[layout.skipped], [[span.text.num_prompt_tokens for span in spans]])
        _fill_numbers(buffer[layout.starts], [starts, [tokens] * (more - 1), [shape.tokens] * bool(more)])
        # Zeros follow, since a model has no more positions than its longest text.
        _fill_numbers(buffer[layout.positions], [positions_of(span.text.token_ids, self._padding_id) for span in spans])
        self._buffer[: layout.count].copy_(self._staged[0][: layout.count], non_blocking=True)
        self._staged.reverse()
        self._written.reverse()

    def view(self, shape: TextBatchShape, most_tokens: int) -> DeviceTextView:
        """Return the views of a batch of this shape, whose longest text has at most `most_tokens` tokens."""
        return DeviceTextView(self._buffer, self._layout(shape), most_tokens, self._backend)

    def _layout(self, shape: TextBatchShape) -> _BatchLayout:
        tokens, texts = shape.tokens, shape.texts
        sizes = (tokens, tokens, texts + 1, tokens * self._has_types, texts * self._skips)
        begins = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        ids, positions, starts, types, skipped = (slice(at, at + size) for at, size in zip(begins, sizes, strict=False))
        return _BatchLayout(
            ids, positions, starts, types if self._has_types else None, skipped if self._skips else None, begins[-1]
        )


class DeviceTextView:
    def __init__(self, buffer: Tensor, layout: _BatchLayout, most_tokens: int, backend: DeviceBackend) -> None:
        self.starts = buffer[layout.starts]
        self.skipped = None if layout.skipped is None else buffer[layout.skipped]
        self._token_ids, self._positions = buffer[layout.token_ids], buffer[layout.positions]
        self._type_ids = None if layout.type_ids is None else buffer[layout.type_ids]
        self._most_tokens, self._backend = most_tokens, backend

    def context(self) -> EncodeContext:
        """Return the context of one forward pass; int32 offsets are computed on the device."""
        texts = PackedTexts(self.starts.to(torch.int32), self._most_tokens)

        def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
            return self._backend.encoder_attention(heads, texts, spec)

        return EncodeContext(self._token_ids, self._positions, self._type_ids, self.starts, attend)


def _fill_numbers(target: Int64Array, rows: Sequence[Sequence[int]]) -> None:
    numbers = array("q")
    for row in rows:
        numbers.extend(row)
    target[: len(numbers)] = numbers
    target[len(numbers) :] = 0


ComputeTexts = Callable[[TextBatchShape], Tensor]


class DeviceEncoderReplay:
    """The recordings of one runner, of the usual output: other outputs wait for the copy, not for submission."""

    def __init__(
        self, backend: DeviceBackend, texts: DeviceTextBatch, compute: ComputeTexts, off_reason: str = ""
    ) -> None:
        """Start without recordings.

        `compute` returns the usual output [texts, size] FP32 of the batch in `texts`. `off_reason` is the reason to
        record nothing.
        """
        self.reason = off_reason  # reason why nothing more is recorded; empty if all was
        self.num_runs = 0  # number of steps that were replayed
        self._backend, self._texts, self._compute = backend, texts, compute
        self._captured: dict[TextBatchShape, CapturedGraph] = {}
        self._results: dict[TextBatchShape, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        return max((shape.tokens for shape in self._captured), default=1) - 1

    def record(
        self,
        shapes: Sequence[TextBatchShape],
        example: Sequence[TextSpan],
        progress: ProgressCallback = lambda done, total: None,
    ) -> None:
        """Record all of these shapes, the largest first, as the others reuse its memory; `example` fits each."""
        for done, shape in enumerate(sorted(shapes, reverse=True)):
            if self.reason:
                return
            self._record(shape, example)
            progress(done + 1, len(shapes))

    def _record(self, shape: TextBatchShape, example: Sequence[TextSpan]) -> None:
        try:
            self._texts.fill(example, shape)
            result = self._compute(shape).clone()  # allocated outside of the recording, so that it remains
            self._backend.synchronize()
            captured = self._backend.capture(lambda: _copy_into(result, self._compute(shape)))
        except RuntimeError as error:  # torch's out-of-memory error is one too
            self._backend.recover_from_oom(error)
            self.reason = f"{shape.texts} texts of {shape.tokens} tokens could not be recorded: {error}"
            _LOG.warning("No more batches of texts are recorded: %s. They are computed eagerly.", self.reason)
            return
        if captured is None:
            self.reason = "this kind of device records nothing"
            return
        self._captured[shape], self._results[shape] = captured, result

    def padded_shape(self, tokens: int, texts: int) -> TextBatchShape | None:
        return padded_shape(tokens, texts, self._captured)

    def __call__(self, shape: TextBatchShape) -> Tensor:
        """Return the usual output of the batch that was filled in; the next step of that shape overwrites it."""
        self.num_runs += 1
        self._captured[shape].replay()
        return self._results[shape]


def _copy_into(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


@dataclass(frozen=True, slots=True)
class InFlightTexts:
    """A batch in flight. Its outputs are on the host once the device has passed the mark."""

    spans: tuple[TextSpan, ...]
    outputs: Mapping[str, Tensor]
    mark: DeviceEvent
    launched: float


class DeviceEncoderRunner:
    overlaps = True

    def __init__(self, model: Encoder, backend: DeviceBackend, max_tokens: int, off_reason: str = "") -> None:
        """Create the buffers for batches of at most `max_tokens` tokens; `off_reason`: why no batch is recorded."""
        self.model, self.backend = model, backend
        self.model_seconds = 0.0  # seconds of the last batch, until its results were on the host
        self.is_native = False  # the last batch was the replay of a graph
        self._results_at = 0.0  # time at which the results of the last batch were on the host
        self._default_output = model.config.outputs[0]
        self._texts = DeviceTextBatch(backend, max_tokens, model.config)
        self._results = _HostResults(backend)
        self.replay = DeviceEncoderReplay(backend, self._texts, self._compute_default_output, off_reason)

    def run(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        return self.wait(self.launch(spans))

    @torch.inference_mode()
    def launch(self, spans: Sequence[TextSpan]) -> InFlightTexts:
        """Submit this batch to the device and return at once. At most one other batch may be in flight."""
        launched, before = time.perf_counter(), self.replay.num_runs
        wanted = {name for span in spans for name in span.request.message.outputs}
        names = [name for name in self.model.config.outputs if name in wanted]
        try:
            outputs = self._results.fetch(self._submit(spans, names))
            self.is_native = self.replay.num_runs > before
        except RuntimeError:
            self.backend.synchronize()  # submitted work still reads the buffer that the next attempt overwrites
            raise
        return InFlightTexts(tuple(spans), outputs, self.backend.record_event(), launched)

    @torch.inference_mode()
    def wait(self, in_flight: InFlightTexts) -> list[dict[str, bytes]]:
        """Wait for a batch and return its results. Call it in the order of launching."""
        in_flight.mark.wait()
        now = time.perf_counter()
        self.model_seconds, self._results_at = now - max(in_flight.launched, self._results_at), now
        return output_bytes(in_flight.outputs, in_flight.spans, self.model.config.pooling.normalizes)

    @torch.inference_mode()
    def record(self, example: Sequence[TextSpan], progress: ProgressCallback = lambda done, total: None) -> None:
        """Record small batches, so that each is submitted as one call. `example` is one text of one token."""
        self.replay.record(recorded_shapes(self._texts.max_tokens), example, progress)
        self.backend.synchronize()

    def survives(self, error: Exception) -> bool:
        """Return True if the error was a lack of memory. Memory that can be released has then been released."""
        return self.backend.recover_from_oom(error)

    def _submit(self, spans: Sequence[TextSpan], names: Collection[str]) -> Mapping[str, Tensor]:
        lengths = [span.num_tokens for span in spans]
        exact = TextBatchShape(sum(lengths), len(lengths))
        shape = self.replay.padded_shape(exact.tokens, exact.texts) if list(names) == [self._default_output] else None
        self._texts.fill(spans, shape or exact)
        if shape is not None:
            return {self._default_output: self.replay(shape)[: exact.texts]}
        return self._outputs(exact, max(lengths), names)

    def _compute_default_output(self, shape: TextBatchShape) -> Tensor:
        return self._outputs(shape, shape.tokens, (self._default_output,))[self._default_output]

    def _outputs(self, shape: TextBatchShape, most_tokens: int, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return the outputs of the batch that was filled in, whose longest text has at most `most_tokens` tokens."""
        texts = self._texts.view(shape, most_tokens)
        rows = self.model.rows(texts.starts, names)
        hidden = self.model.hidden(texts.context(), rows)
        return self.model.outputs(hidden, texts.starts, names, rows, texts.skipped)


class _HostResults:
    """Two host buffers for the outputs of a batch: the next may be written while one is read."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._hosts = [torch.empty(0), torch.empty(0)]

    def fetch(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start the copy of the outputs. The FP32 host tensors are valid until the call after the next."""
        parts = [output.flatten() for output in outputs.values()]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert flat.dtype == torch.float32, "heads return fp32"
        if len(flat) > len(self._hosts[0]):
            self._hosts[0] = self._backend.staging_buffer(_buffer_size(len(flat))).view(torch.float32)
        host = self._hosts[0][: len(flat)]
        host.copy_(flat, non_blocking=True)
        self._hosts.reverse()
        sizes = [prod(output.shape) for output in outputs.values()]
        return {
            name: part.view(outputs[name].shape) for name, part in zip(outputs, torch.split(host, sizes), strict=True)
        }


def _buffer_size(elements: int) -> int:
    """Return the size of an int64 buffer for `elements` FP32 values, a power of two."""
    return max(1, 1 << ((elements - 1) // 2).bit_length())
