"""Runner for a device with its own memory and queue: it launches steps and waits when their ids are needed.

All work goes into one queue, so a step that overwrites device memory runs after the previous step has read it. On the
host there are two buffers for the steps in flight: the device reads one while the other is written.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from app.backends.base import DeviceBackend, DeviceEvent
from app.engine.decoder.cpu_runner import vectors_of
from app.engine.decoder.cuda_graphs import DecodeGraphs, GraphShape, bucket_sizes, captured_row_bytes, smallest_bucket
from app.engine.decoder.device_inputs import (
    ColumnArray,
    DecodeInputs,
    DeviceLayout,
    SamplingMode,
    StepSizes,
    StepViews,
    block_arrays,
    block_size,
    block_views,
    fill_sampling,
    fill_step,
    sampling_mode,
    table_update_size,
    table_update_views,
)
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.sampling.rows import SamplingTensors, sample_greedy, sample_random, scratch_rows
from app.engine.sampling.sampler import Sampler, SpanScores, TokenMasks, score_prompts
from app.engine.scheduler.batch import Batch, InFlightStep, LogitRow, SampledTokens, ScheduledSpan, logit_rows_of
from app.engine.scheduler.scheduler import EngineLimits
from app.messages import TokenScore
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, StepContext, TokenVectors
from armature_kernels.attention.paged import PagedStep
from armature_kernels.elementwise.rope import apply_rope_and_write_kv

MAX_TABLE_UPDATES = 4096  # page table entries that are sent with a step's inputs; a long cached prefix may need more


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of a step that the host must know to launch kernels. `PagedStep` describes the fields."""

    num_decodes: int
    max_queries: int
    max_context: int
    fresh: bool = False

    @classmethod
    def of(cls, spans: abc.Sequence[ScheduledSpan]) -> StepBounds:
        alone = [span.num_tokens == 1 for span in spans]
        num_decodes = alone.index(False) if False in alone else len(alone)
        max_queries, max_context = max(span.num_tokens for span in spans), max(span.end for span in spans)
        return cls(num_decodes, max_queries, max_context, all(span.start == 0 for span in spans[num_decodes:]))


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of one step over paged KV memory. It implements `Attend`."""

    kv_cache: PagedKvCache
    backend: DeviceBackend
    step: PagedStep
    kv_rows: Tensor

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        """Write the layer's keys and values, and return its attention output [tokens, heads * head_dim]."""
        kv = self.kv_cache.layers[layer].heads_of(heads)
        query = apply_rope_and_write_kv(heads, kv, self.kv_rows)
        return self.backend.attention(query, kv, self.step, spec).flatten(1)


class DeviceForward:
    """The model, the KV cache and the buffer of a device, from which steps are computed.

    `buffer` is an int64 tensor that never moves: first the ids that steps sampled, then the input block.
    """

    def __init__(self, model: Decoder, kv_cache: PagedKvCache, backend: DeviceBackend, buffer: Tensor) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.buffer = buffer

    def logits(
        self, views: StepViews[Tensor], sizes: StepSizes, bounds: StepBounds, vectors: TokenVectors | None = None
    ) -> Tensor:
        which = None if sizes.samples == sizes.tokens else views.logit_rows
        logits = self.model(self._context(views, bounds, which, vectors))
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def hidden(self, views: StepViews[Tensor], bounds: StepBounds, vectors: TokenVectors | None) -> Tensor:
        return self.model.hidden(self._context(views, bounds, None, vectors))

    def logits_of(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def _context(
        self, views: StepViews[Tensor], bounds: StepBounds, logit_rows: Tensor | None, vectors: TokenVectors | None
    ) -> StepContext:
        step = PagedStep(
            self.kv_cache.tables,
            views.slots,
            views.starts,
            views.lengths,
            bounds.num_decodes,
            bounds.max_queries,
            bounds.max_context,
            bounds.fresh,
        )
        # The previous step left -1 for a row whose logits were not finite. Waiting for that step raises.
        token_ids = self.buffer.index_select(0, views.sources).clamp_min_(0)
        attend = PagedAttention(self.kv_cache, self.backend, step, views.kv_rows)
        return StepContext(token_ids, views.positions, logit_rows, attend, vectors=vectors)

    def sample(self, logits: Tensor, views: StepViews[Tensor], mode: SamplingMode) -> None:
        """Sample each row of logits [samples, vocab] and write the ids to the buffer; -1 for rows not finite."""
        if mode is SamplingMode.GREEDY:
            ids = sample_greedy(logits)
        else:
            sampling = SamplingTensors(views.columns, views.uniforms)
            ids = sample_random(logits, sampling, filtered=mode is SamplingMode.FILTERED)
        self.buffer[: len(ids)].copy_(ids)


@dataclass(slots=True)
class DeviceInFlightStep:
    """A step that was launched on a device.

    `ids` is a host tensor, valid once `mark` has been reached. `logits` is set if the sampler runs on the host, and
    `scores` if the step scores prompts.
    """

    batch: Batch
    inputs: DecodeInputs | None
    mark: DeviceEvent
    ids: Tensor
    logits: Tensor | None
    started: float
    scores: list[SpanScores]
    host_ids: list[int] | None = None

    def wait_ids(self) -> list[int]:
        """Wait for the step and return its sampled ids, as a list since a later step reuses the tensor."""
        if self.host_ids is None:
            self.mark.wait()
            self.host_ids = self.ids.tolist()
        return self.host_ids


@dataclass(slots=True)
class HostBuffer:
    """The host copy of a step's input block (int64) and of its sampled ids, reused once the device has read it."""

    block: Tensor
    ids: Tensor
    # Marks the end of a transfer from this buffer that did not become an in-flight step
    mark: DeviceEvent | None = None
    in_flight: DeviceInFlightStep | None = None
    # views of bucket sizes, kept because creating them costs more than filling them
    views: dict[StepSizes, StepViews[ColumnArray]] = field(default_factory=dict)

    def free(self) -> None:
        """Wait until the device no longer uses this buffer; an in-flight step that nobody waited for ends here."""
        if self.in_flight is not None:
            self.in_flight.wait_ids()
        if self.mark is not None:
            self.mark.wait()
        self.in_flight = self.mark = None

    def block_views(self, sizes: StepSizes, keep: bool) -> StepViews[ColumnArray]:
        """Return the array views of the input block for these sizes; `keep` them for later steps of these sizes."""
        views = self.views.get(sizes)
        if views is None:
            views = block_arrays(self.block, sizes)
            if keep:
                self.views[sizes] = views
        return views


@dataclass(frozen=True, slots=True)
class _StepTask:
    batch: Batch
    num_samples: int
    mode: SamplingMode
    shape: GraphShape | None
    sizes: StepSizes
    inputs: DecodeInputs | None
    kv_rows: list[int]
    rows: list[LogitRow]
    vectors: TokenVectors | None = None  # on the host


class DeviceDecoderRunner:
    """The decode runner of a device, for the worker thread. `eager`: reason why no step is captured."""

    def __init__(
        self, model: Decoder, kv_cache: PagedKvCache, backend: DeviceBackend, limits: EngineLimits, eager: str = ""
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.buckets = bucket_sizes(limits.max_running_seqs)
        # duration of the last step waited for, measured from its launch or from the end of the previous step
        self.model_seconds = 0.0
        self.is_first = False  # the last step's shape had to be captured first, so the step took longer
        self.is_native = False  # the last step was the replay of a graph
        self.prompt_scores: list[tuple[TokenScore, ...]] = []  # of each of `Batch.scored`, for the last step waited for
        max_rows = max(limits.max_running_seqs, self.buckets[-1])
        self._max_sizes = StepSizes(max(limits.max_batch_tokens, max_rows), max_rows, max_rows)
        block_length = block_size(self._max_sizes) + table_update_size(MAX_TABLE_UPDATES)
        buffer = torch.zeros(max_rows + block_length, dtype=torch.int64, device=backend.device)
        self._ids, self._block = buffer[:max_rows], buffer[max_rows:]
        self._buffers = [
            HostBuffer(backend.staging_buffer(block_length), backend.staging_buffer(max_rows)) for _ in range(2)
        ]
        self._layout = DeviceLayout(max_rows, kv_cache.shape.num_slots)
        self._forward = DeviceForward(model, kv_cache, backend, buffer)
        self._sampler = Sampler(model.config.vocab_size)
        self._masks = TokenMasks(model.config.vocab_size)
        self.graphs = DecodeGraphs(
            backend, self._compute_shape, captured_row_bytes(model.config.vocab_size, scratch_rows(buffer)), eager
        )
        self._table_updates: dict[
            int, int
        ] = {}  # changes of the page tables that are not yet on the device: cell to page
        self._copies_done = True  # True once the last batch's copies and releases are done
        self._last_launched: DeviceInFlightStep | None = None
        self._finished_at = 0.0

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> DeviceInFlightStep:
        """Launch a step on the device and return without waiting. A released page may be the source of a copy."""
        assert after is None or after is self._last_launched, (
            "a step launched ahead must follow the last in-flight step"
        )
        before, self._last_launched, self._copies_done = self._last_launched, None, False
        with torch.inference_mode():
            self.kv_cache.apply_copies(batch.copies, batch.released)
            self._copies_done = True
            task = self._task(batch) if before is None or not batch.ahead else self._task_ahead(batch, before)
            self._table_updates.update(zip(*self.kv_cache.take_updates(), strict=True))
            self.is_native = task.shape is not None
            self.is_first = task.shape is not None and self.graphs.should_capture(task.shape)
            if task.shape is not None and self.is_first:
                self.capture(task.shape)
            buffer = self._free_buffer()
            try:
                buffer.in_flight = self._last_launched = self._launch(task, buffer)
            finally:
                if buffer.in_flight is None:
                    buffer.mark = self.backend.record_event()
        return self._last_launched

    def wait(self, in_flight: InFlightStep) -> list[SampledTokens]:
        assert isinstance(in_flight, DeviceInFlightStep), "the step must come from this runner"
        ids = in_flight.wait_ids()
        now = time.perf_counter()
        self.model_seconds, self._finished_at = now - max(in_flight.started, self._finished_at), now
        if in_flight.scores:
            self.prompt_scores = [scores.on_host() for scores in in_flight.scores]
        if in_flight.logits is not None:
            with torch.inference_mode():
                logits = in_flight.logits if self.backend.can_sample else in_flight.logits.cpu()
                spans = in_flight.batch.spans
                rows = logit_rows_of(spans)
                return self._sampler.sample(logits, rows, self._masks.for_step(spans, len(rows)))
        return [SampledTokens((token_id,)) for token_id in ids]

    def run(self, batch: Batch) -> list[SampledTokens]:
        return self.wait(self.launch(batch))

    def can_run_ahead(self, batch: Batch) -> bool:
        """Return True if every row samples exactly one token and does so on the device."""
        if batch.ahead:  # these sequences were checked for the step before it
            return True
        decodes = all(span.is_decode and span.num_samples == 1 for span in batch.spans)
        return decodes and sampling_mode(logit_rows_of(batch.spans), self.backend.can_sample) is not SamplingMode.LOGITS

    def survives(self, error: Exception) -> bool:
        """Return True if the backend survives the error and the batch's copies and releases were completed."""
        return self.backend.recover_from_oom(error) and self._copies_done

    def capture(self, shape: GraphShape) -> None:
        """Capture a step of this shape with padding rows only, preserving the ids of the previous step."""
        with torch.inference_mode():
            buffer, sampled_ids, sizes = self._free_buffer(), self._ids.clone(), StepSizes.of_bucket(shape.bucket)
            buffer.mark = self.backend.record_event()
            views = buffer.block_views(sizes, keep=True)
            fill_step(views, (), (), self._layout)
            fill_sampling(views, (), (), shape.mode)
            self._send(buffer, block_size(sizes))
            self.graphs.capture(shape)
            self._ids.copy_(sampled_ids)
            buffer.mark = self.backend.record_event()

    def _free_buffer(self) -> HostBuffer:
        """Return the host buffer that was used longest ago, once the device no longer reads it."""
        self._buffers.reverse()
        self._buffers[0].free()
        return self._buffers[0]

    def _task(self, batch: Batch) -> _StepTask:
        rows = logit_rows_of(batch.spans)
        mode = sampling_mode(rows, self.backend.can_sample)
        vectors = vectors_of(batch.spans)
        decodes = vectors is None and all(span.num_tokens == span.num_samples == 1 for span in batch.spans)
        shape = self._shape(len(batch.spans), mode) if decodes and mode is not SamplingMode.LOGITS else None
        sizes = StepSizes.of(batch.spans, len(rows)) if shape is None else StepSizes.of_bucket(shape.bucket)
        written = self.kv_cache.written_rows(batch.spans)
        return _StepTask(batch, len(rows), mode, shape, sizes, None, written, rows, vectors)

    def _task_ahead(self, batch: Batch, before: DeviceInFlightStep) -> _StepTask:
        """Return the task of a step that is launched ahead: its tokens are those that the step before it samples."""
        spans, inputs, written = batch.spans, before.inputs, self.kv_cache.written_rows
        if inputs is not None and inputs.sequences == [span.sequence for span in spans]:
            inputs = inputs.next_step(spans, written)
        else:
            mode = sampling_mode(logit_rows_of(spans), self.backend.can_sample)
            inputs = DecodeInputs.after_step(before.batch.spans, spans, mode, written)
        shape = self._shape(len(spans), inputs.mode)
        sizes = StepSizes.of_bucket(len(spans) if shape is None else shape.bucket)
        return _StepTask(batch, len(spans), inputs.mode, shape, sizes, inputs, [], [])

    def _shape(self, sequences: int, mode: SamplingMode) -> GraphShape | None:
        bucket = smallest_bucket(sequences, self.buckets) if self.graphs.enabled else None
        return None if bucket is None else GraphShape(bucket, mode)

    def _launch(self, task: _StepTask, buffer: HostBuffer) -> DeviceInFlightStep:
        started, sizes, spans = time.perf_counter(), task.sizes, task.batch.spans
        fits = sizes.tokens <= self._max_sizes.tokens and sizes.sequences <= self._max_sizes.sequences
        assert fits, "the step exceeds the limits on tokens or sequences"
        views = buffer.block_views(sizes, keep=task.shape is not None)
        if task.inputs is not None:
            task.inputs.fill(views, self._layout)
        else:
            fill_step(views, spans, task.kv_rows, self._layout)
            fill_sampling(views, spans, task.rows, task.mode)
        self._send(buffer, block_size(sizes))
        logits, scores = self._compute(task)
        ids = buffer.ids[: task.num_samples if logits is None else 0]
        if len(ids):
            ids.copy_(self._ids[: len(ids)], non_blocking=True)
        return DeviceInFlightStep(task.batch, task.inputs, self.backend.record_event(), ids, logits, started, scores)

    def _send(self, buffer: HostBuffer, count: int) -> None:
        if not self._table_updates:
            self._block[:count].copy_(buffer.block[:count], non_blocking=True)
            return
        cells, pages, tables = (
            list(self._table_updates),
            list(self._table_updates.values()),
            self.kv_cache.tables.view(-1),
        )
        num_sent = len(cells) if len(cells) <= MAX_TABLE_UPDATES else 0
        for view, values in zip(table_update_views(buffer.block[count:], num_sent), (cells, pages), strict=True):
            view.numpy()[:] = values[:num_sent]
        end = count + table_update_size(num_sent)
        self._block[:end].copy_(buffer.block[:end], non_blocking=True)
        if num_sent:
            tables.index_copy_(0, *table_update_views(self._block[count:], num_sent))
        else:  # rare; these copies may wait for the device
            device = tables.device
            tables.index_copy_(
                0, torch.tensor(cells, device=device), torch.tensor(pages, dtype=torch.int32, device=device)
            )
        self._table_updates.clear()

    def _compute(self, task: _StepTask) -> tuple[Tensor | None, list[SpanScores]]:
        """Compute a step. Return logits if the sampler needs them (else ids are in the buffer), and scores."""
        if task.shape is not None:
            self.graphs.run(task.shape)
            return None, []
        sizes, bounds, scores = task.sizes, StepBounds.of(task.batch.spans), []
        views, vectors = block_views(self._block, sizes, self.backend.can_sample), task.vectors
        if vectors is not None:
            device = self._block.device
            vectors = replace(vectors, rows=vectors.rows.to(device), values=vectors.values.to(device))
        if task.batch.scored:
            hidden = self._forward.hidden(views, bounds, vectors)
            scores = score_prompts(task.batch, hidden, self._forward.logits_of)
            logits = self._forward.logits_of(hidden.index_select(0, views.logit_rows))
        else:
            logits = self._forward.logits(views, sizes, bounds, vectors)
        if task.mode is SamplingMode.LOGITS:
            return logits, scores
        self._forward.sample(logits, views, task.mode)
        return None, scores

    def _compute_shape(self, shape: GraphShape) -> None:
        """Compute a step of a captured shape. The work depends only on the input block."""
        sizes = StepSizes.of_bucket(shape.bucket)
        views = block_views(self._block, sizes, self.backend.can_sample)
        logits = self._forward.logits(views, sizes, StepBounds(shape.bucket, 1, self.kv_cache.shape.max_len))
        self._forward.sample(logits, views, shape.mode)
