"""Runner for a device with its own memory and queue: it launches steps and waits when their ids are needed.

All work goes into one queue, so a step that overwrites device memory runs after the previous step has read it. On the
host there are two buffers for the steps in flight: the device reads one while the other is written.

The forward pass of most steps is the replay of a graph. Tokens are sampled behind it: of all rows together, then of rows
with penalties, masks or log-probabilities alone (`DeviceRules`); the host samples beams.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from app.backends.base import DeviceBackend, DeviceEvent
from app.engine.decoder.adapters import AdapterSlots
from app.engine.decoder.cuda_graphs import GraphShape, GraphShapes, StepGraphs, captured_step_bytes
from app.engine.decoder.device_inputs import (
    ColumnArray,
    DecodeInputs,
    DeviceLayout,
    Piece,
    SamplingMode,
    SamplingViews,
    StepSizes,
    StepViews,
    block_arrays,
    block_size,
    block_views,
    fill_logit_rows,
    fill_sampling,
    fill_states,
    fill_step,
    num_single,
    pieces_of,
    sampling_arrays,
    sampling_mode,
    sampling_size,
    sampling_views,
    table_update_size,
    table_update_views,
    token_rows,
)
from app.engine.decoder.device_states import StateStepRows
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.decoder.picture_rows import NO_PICTURES, StepPictures, pictures_of
from app.engine.sampling.device_rules import DeviceRules, LogprobReport, Rule, needs_host, rule_of
from app.engine.sampling.rows import SamplingTensors, sample_greedy, sample_random
from app.engine.sampling.sampler import Sampler, SpanScores, TokenMasks, score_prompts
from app.engine.scheduler.batch import Batch, InFlightStep, LogitRow, SampledTokens, ScheduledSpan, logit_rows_of
from app.engine.scheduler.scheduler import EngineLimits
from app.hardware.plan.memory_budget import GRAPHS_BYTES
from app.messages import TokenScore
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, StepContext
from armature_kernels.attention.device_recurrence import RowRun, StateRows
from armature_kernels.attention.flash import BlockRow, attend_in_blocks
from armature_kernels.attention.paged import PagedStep
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs
from armature_kernels.linear.device_lora import DeviceLoraRows

MAX_TABLE_UPDATES = 4096  # page table entries that are sent with a step's inputs; a long cached prefix may need more


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of a step that the host must know to launch kernels. `PagedStep` and `StateRows` describe the fields."""

    num_decodes: int
    max_queries: int
    max_context: int
    fresh: bool = False
    num_states: int = 0
    runs: abc.Sequence[RowRun] = ()

    @classmethod
    def of(cls, pieces: abc.Sequence[Piece]) -> StepBounds:
        num_decodes = num_single(pieces)
        max_queries = max(len(piece.token_ids) for piece in pieces)
        max_context = max(piece.start + len(piece.token_ids) for piece in pieces)
        return cls(num_decodes, max_queries, max_context, all(piece.start == 0 for piece in pieces[num_decodes:]))

    @classmethod
    def of_shape(cls, shape: GraphShape) -> StepBounds:
        return cls(shape.decodes, max(1, shape.prompts), shape.context, shape.fresh, shape.decodes)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of one step over paged KV memory. It implements `AttendWithStates`."""

    kv_cache: PagedKvCache
    backend: DeviceBackend
    step: PagedStep
    kv_rows: Tensor
    states: StateRows
    blocks: abc.Sequence[BlockRow] = ()

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        kv = self.kv_cache.layers[layer].heads_of(heads)
        query, mixed = self.backend.attention(heads, kv, self.kv_rows, self.step, spec)
        if spec.sees_blocks and self.blocks:
            attend_in_blocks(query, kv, self.blocks, spec, mixed)
        return mixed.flatten(1)

    def recur(self, layer: int, inputs: RecurrentInputs, recurrence: Recurrence) -> Tensor:
        return self.kv_cache.states.recur(layer, inputs, recurrence, self.states)

    def convolve(self, layer: int, x: Tensor, filters: Tensor) -> Tensor:
        return self.kv_cache.states.convolve(layer, x, filters, self.states)


class DeviceForward:
    """The model, the KV cache and the buffer of a device, from which steps are computed.

    `buffer` is an int64 tensor that never moves: first the ids that steps sampled, then the input block.
    """

    def __init__(self, model: Decoder, kv_cache: PagedKvCache, backend: DeviceBackend, buffer: Tensor) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.buffer = buffer
        self.adapters: DeviceLoraRows | None = None  # set if the server has LoRA adapters
        self.has_logits = True  # False if another rank computes them

    def logits(
        self, views: StepViews[Tensor], sizes: StepSizes, bounds: StepBounds, pictures: StepPictures = NO_PICTURES
    ) -> Tensor:
        which = None if sizes.samples == sizes.tokens else views.logit_rows
        context = self._context(views, bounds, which, pictures)
        if not self.has_logits:
            return self.model.hidden(context)
        logits = self.model(context)
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def hidden(self, views: StepViews[Tensor], bounds: StepBounds, pictures: StepPictures = NO_PICTURES) -> Tensor:
        return self.model.hidden(self._context(views, bounds, None, pictures))

    def logits_of(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def _context(
        self, views: StepViews[Tensor], bounds: StepBounds, logit_rows: Tensor | None, pictures: StepPictures
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
        if self.adapters is not None:
            self.adapters.set(views.adapters, logit_rows)
        token_ids = self.token_ids(views)
        states = StateRows(views.state_reads[: bounds.num_states], views.state_writes[: bounds.num_states], bounds.runs)
        attend = PagedAttention(self.kv_cache, self.backend, step, views.kv_rows, states, pictures.blocks)
        vectors = None if pictures.vectors is None else pictures.vectors.to(token_ids.device)
        return StepContext(token_ids, views.positions, logit_rows, attend, vectors=vectors)

    def token_ids(self, views: StepViews[Tensor], rows: Tensor | None = None) -> Tensor:
        """Return the ids of a step's tokens, or of those in `rows`, before anything of the step is sampled.

        The previous step left -1 for a row whose logits were not finite. Waiting for that step raises.
        """
        sources = views.sources if rows is None else views.sources.index_select(0, rows)
        return self.buffer.index_select(0, sources).clamp_min_(0)

    def sample(self, logits: Tensor, sampling: SamplingTensors | None, mode: SamplingMode) -> None:
        """Sample each row of logits [samples, vocab] and write the ids to the buffer; -1 for rows not finite."""
        if sampling is None or mode is SamplingMode.GREEDY:
            ids = sample_greedy(logits)
        else:
            ids = sample_random(logits, sampling, filtered=mode is SamplingMode.FILTERED)
        self.buffer[: len(ids)].copy_(ids)


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of a step that the host samples, and their logits on the device."""

    places: list[int]
    rows: list[LogitRow]
    spans: list[ScheduledSpan]
    logits: Tensor


@dataclass(slots=True)
class DeviceInFlightStep:
    """A step that was launched on a device.

    `ids` and `report` are in host memory, valid once `mark` has been reached. `host_rows` are sampled then, and `scores` is
    not empty if the step scores prompts.
    """

    batch: Batch
    inputs: DecodeInputs | None
    mark: DeviceEvent
    ids: Tensor
    report: LogprobReport | None
    host_rows: HostRows | None
    started: float
    scores: list[SpanScores]
    runs: abc.Sequence[RowRun]
    host_ids: list[int] | None = None

    def wait_ids(self) -> list[int]:
        """Wait for the step and return its sampled ids, as a list since a later step reuses the tensor."""
        if self.host_ids is None:
            self.mark.wait()
            self.host_ids = self.ids.tolist()
        return self.host_ids

    def end(self) -> None:
        """Wait for the step, and keep what it brought to the host, whose memory a later step uses."""
        self.wait_ids()
        if self.report is not None:
            self.report = self.report.kept()


class HostBuffer:
    """The host copies of a step's input block (int64), its sampled ids and its masks, reused once the device has read them.

    `mark` is the end of a transfer from this buffer that did not become an in-flight step.
    """

    def __init__(self, backend: DeviceBackend, block_length: int, max_rows: int, vocab_size: int) -> None:
        self.block, self.ids = backend.staging_buffer(block_length), backend.staging_buffer(max_rows)
        self.sampling = sampling_arrays(self.block, max_rows)
        self.mark: DeviceEvent | None = None
        self.in_flight: DeviceInFlightStep | None = None
        self._inputs = self.block[sampling_size(max_rows) :]
        self._masks = TokenMasks(vocab_size, 0)
        self._report = self._inputs[:0]
        self._backend = backend
        # views of bucket sizes, kept because creating them costs more than filling them
        self._views: dict[StepSizes, StepViews[ColumnArray]] = {}

    def free(self) -> None:
        """Wait until the device no longer uses this buffer; an in-flight step that nobody waited for ends here."""
        if self.in_flight is not None:
            self.in_flight.end()
        if self.mark is not None:
            self.mark.wait()
        self.in_flight = self.mark = None

    def block_views(self, sizes: StepSizes, keep: bool) -> StepViews[ColumnArray]:
        """Return the array views of the input block for these sizes; `keep` them for later steps of these sizes."""
        views = self._views.get(sizes)
        if views is None:
            views = block_arrays(self._inputs, sizes)
            if keep:
                self._views[sizes] = views
        return views

    def masks(self, spans: abc.Sequence[ScheduledSpan], num_rows: int) -> Tensor | None:
        """Return the masks of all rows of these spans, int32 [rows, words], in memory that is copied without waiting."""
        self._masks = self._masks.with_room(num_rows, self._backend.staging_buffer)
        masks = self._masks.for_step(spans, num_rows)
        return None if masks is None else masks.words[:num_rows]

    def report(self, length: int) -> Tensor:
        """Return int64 [length] for log-probabilities."""
        if len(self._report) < length:
            self._report = self._backend.staging_buffer(length)
        return self._report


@dataclass(frozen=True, slots=True)
class _StepTask:
    batch: Batch
    rows: list[LogitRow]
    mode: SamplingMode
    shape: GraphShape | None
    sizes: StepSizes
    inputs: DecodeInputs | None
    pieces: list[Piece]
    kv_rows: list[int]
    states: StateStepRows
    pictures: StepPictures = NO_PICTURES

    @property
    def gap(self) -> int:
        """Rows of padding behind the decodes."""
        return 0 if self.shape is None or self.inputs is not None else self.shape.decodes - num_single(self.pieces)

    def eagerly(self) -> _StepTask:
        """Return the task without padding, which is computed eagerly."""
        if self.inputs is None:
            return replace(self, shape=None, sizes=StepSizes.of(self.pieces, len(self.rows)))
        return replace(self, shape=None, sizes=StepSizes.of_bucket(len(self.rows)))

    @property
    def bounds(self) -> StepBounds:
        if self.inputs is None:
            bounds = StepBounds.of(self.pieces)
        else:
            bounds = StepBounds(self.sizes.tokens, 1, max(span.end for span in self.batch.spans))
        return replace(bounds, num_states=len(self.states.reads), runs=self.states.runs)


class DeviceObserver(Protocol):
    """Learns what a runner does to the memory of its device, in this order, before it is done."""

    def moved(self, sources: list[int], targets: list[int]) -> None:
        """Rows of keys and values are copied."""

    def sent(self, begin: int, words: Tensor, cells: list[int], pages: list[int]) -> None:
        """`words` of the input block come from word `begin` on, and these pages into these cells of the page tables."""

    def captures(self, shape: GraphShape) -> None: ...

    def replays(self, shape: GraphShape) -> None: ...

    def computes(self, sizes: StepSizes, bounds: StepBounds, pictures: StepPictures, is_whole: bool) -> None:
        """An eager step is computed; `is_whole`: hidden states of all tokens."""

    def sampled(self, ids: Tensor) -> None:
        """The ids of a step's rows have been sampled, on the device."""


class DeviceDecoderRunner:
    """The decode runner of a device, for the worker thread. `eager`: reason why no step is captured."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: PagedKvCache,
        backend: DeviceBackend,
        limits: EngineLimits,
        eager: str = "",
        max_rows: int = 0,
    ) -> None:
        """Create the runner; `max_rows`: the most rows of logits, if drafts make them more than sequences."""
        config = model.config
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        needs_torch = config.has_sinks or bool(config.alibi_slopes)
        captures_prompts = not kv_cache.states and backend.captures_prompts(needs_torch)
        self.shapes = GraphShapes.of(
            max(limits.max_running_seqs, max_rows), limits.max_batch_tokens, kv_cache.shape.max_len, captures_prompts
        )
        # duration of the last step waited for, measured from its launch or from the end of the previous step
        self.model_seconds = 0.0
        self.is_first = False  # the last step's shape had to be captured first, so the step took longer
        self.is_native = False  # the last step was the replay of a graph
        self.prompt_scores: list[tuple[TokenScore, ...]] = []  # of each of `Batch.scored`, for the last step waited for
        largest = self.shapes.largest
        max_rows = max(limits.max_running_seqs, max_rows, largest.samples)
        self._max_sizes = StepSizes(max(limits.max_batch_tokens, max_rows, largest.tokens), max_rows, max_rows)
        first = sampling_size(max_rows)
        block_length = first + block_size(self._max_sizes) + table_update_size(MAX_TABLE_UPDATES)
        buffer = torch.zeros(max_rows + block_length, dtype=torch.int64, device=backend.device)
        self._ids, self._block, self._inputs_start = buffer[:max_rows], buffer[max_rows:], first
        self._sampling = sampling_views(self._block, max_rows) if backend.can_sample else None
        vocab_size = config.vocab_size
        self._buffers = [HostBuffer(backend, block_length, max_rows, vocab_size) for _ in range(2)]
        self._layout = DeviceLayout(
            max_rows + first,
            kv_cache.shape.num_slots,
            (kv_cache.states.zero_row, kv_cache.states.padding_row),
        )
        self._forward = DeviceForward(model, kv_cache, backend, buffer)
        self._sampler = Sampler(vocab_size)
        self._rules = DeviceRules(vocab_size, backend.device)
        self._masks = TokenMasks(vocab_size)
        self._logits: Tensor | None = None  # [samples, vocab] of the last captured step
        self.graphs = StepGraphs(
            backend, self._compute_shape, captured_step_bytes(vocab_size, config.hidden_size), eager
        )
        self._table_updates: dict[
            int, int
        ] = {}  # changes of the page tables that are not yet on the device: cell to page
        self._copies_done = True  # True once the last batch's copies and releases are done
        self._last_launched: DeviceInFlightStep | None = None
        self._finished_at = 0.0
        self._observer: DeviceObserver | None = None

    def use_adapters(self, adapters: AdapterSlots) -> None:
        """Let steps add the adapters of their rows; before any step is captured."""
        self._forward.adapters = adapters.device_rows

    # ---- one of several ranks ----------------------------------------------------------------------------------------

    def lead(self, observer: DeviceObserver) -> None:
        """Let the observer know of everything that other ranks must do too; before any step."""
        self._observer, self.kv_cache.moved = observer, observer.moved

    def follow_block(self, begin: int, words: Tensor, cells: list[int], pages: list[int]) -> None:
        """Do what rank 0 has sent to its device."""
        self._forward.has_logits = False
        self._block[begin : begin + len(words)].copy_(words)
        if cells:
            self._update_tables(cells, pages)

    def follow_shape(self, shape: GraphShape) -> None:
        if shape in self.graphs.captured:
            self.graphs.replay(shape)
        else:
            self._compute_shape(shape)

    def follow_step(self, sizes: StepSizes, bounds: StepBounds, pictures: StepPictures, is_whole: bool) -> None:
        if is_whole:
            self._forward.hidden(self._views(sizes), bounds, pictures)
        else:
            self._forward.logits(self._views(sizes), sizes, bounds, pictures)

    def sampled_ids(self, num_rows: int) -> Tensor:
        return self._ids[:num_rows]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> DeviceInFlightStep:
        """Launch a step on the device and return without waiting. A released page may be the source of a copy."""
        assert after is None or after is self._last_launched, (
            "a step launched ahead must follow the last in-flight step"
        )
        before, self._last_launched, self._copies_done = self._last_launched, None, False
        with torch.inference_mode():
            self.kv_cache.apply_copies(batch.copies, batch.released)
            self.kv_cache.states.copy(batch.state_copies)
            self._copies_done = True
            task = self._task(batch) if before is None or not batch.ahead else self._task_ahead(batch, before)
            self._table_updates.update(zip(*self.kv_cache.take_updates(), strict=True))
            self.is_first = task.shape is not None and self.graphs.should_capture(task.shape)
            if task.shape is not None and self.is_first:
                self.capture(task.shape)
            if task.shape is not None and task.shape not in self.graphs.captured:
                task = task.eagerly()
            self.is_native = task.shape is not None
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
        samples = [SampledTokens((token_id,)) for token_id in ids]
        if in_flight.report is not None:
            in_flight.report.add_to(samples)
        if in_flight.host_rows is not None:
            self._sample_on_host(in_flight.host_rows, samples)
        if any(run.write < 0 for run in in_flight.runs):
            with torch.inference_mode():
                self.kv_cache.states.accept(in_flight.batch, in_flight.runs, samples)
        return samples

    def run(self, batch: Batch) -> list[SampledTokens]:
        return self.wait(self.launch(batch))

    def can_run_ahead(self, batch: Batch) -> bool:
        """Return True if every row samples exactly one token and the host need not know it to sample the next one."""
        can_sample = self.backend.can_sample
        if batch.ahead:  # these sequences were checked for the step before it; only their reasoning comes to its end
            return not any(span.sequence.thinking and needs_host(span.sequence, can_sample) for span in batch.spans)
        return all(
            span.is_decode and span.num_samples == 1 and not needs_host(span.sequence, can_sample)
            for span in batch.spans
        )

    def survives(self, error: Exception) -> bool:
        """Return True if the backend survives the error and the batch's copies and releases were completed.

        Other ranks would wait for what this one has not computed.
        """
        return self._observer is None and self.backend.recover_from_oom(error) and self._copies_done

    def capture(self, shape: GraphShape) -> None:
        """Capture a step of this shape with padding rows only, preserving the ids of the previous step."""
        with torch.inference_mode():
            buffer, sampled_ids, sizes = self._free_buffer(), self._ids.clone(), shape.sizes
            buffer.mark = self.backend.record_event()
            views = buffer.block_views(sizes, keep=True)
            fill_step(views, (), (), self._layout, shape.decodes)
            fill_logit_rows(views, ())
            fill_states(views, (), (), self._layout)
            self._send(buffer, block_size(sizes), SamplingMode.GREEDY)
            if self._observer is not None:
                self._observer.captures(shape)
            self.graphs.capture(shape)
            if not self.graphs.captured:
                self._logits = None
            self._ids.copy_(sampled_ids)
            buffer.mark = self.backend.record_event()

    def use_idle_time(self, is_wanted: abc.Callable[[], bool]) -> bool:
        """Capture shapes that are still missing; False if `is_wanted` ended that before all were."""
        if not self.graphs.captured:
            return True
        for shape in self.shapes.in_pauses():
            if self.graphs.should_capture(shape):
                if is_wanted():
                    return False
                self.capture(shape)
        return True

    def _free_buffer(self) -> HostBuffer:
        """Return the host buffer that was used longest ago, once the device no longer reads it."""
        self._buffers.reverse()
        self._buffers[0].free()
        return self._buffers[0]

    def _task(self, batch: Batch) -> _StepTask:
        rows, pieces = logit_rows_of(batch.spans), pieces_of(batch.spans)
        bounds, shape, states = StepBounds.of(pieces), None, self.kv_cache.states.rows_of(batch.spans)
        kv_rows = self.kv_cache.written_rows(batch.spans)
        pictures = pictures_of(batch.spans, self.kv_cache.kv_segments)
        if self.graphs.enabled and not batch.scored and pictures is NO_PICTURES and not states.runs:
            prompts = [len(piece.token_ids) for piece in pieces[bounds.num_decodes :]]
            shape = self._possible(self.shapes.find(bounds.num_decodes, bounds.max_context, prompts, bounds.fresh))
        sizes = StepSizes.of(pieces, len(rows)) if shape is None else shape.sizes
        return _StepTask(batch, rows, sampling_mode(rows), shape, sizes, None, pieces, kv_rows, states, pictures)

    def _task_ahead(self, batch: Batch, before: DeviceInFlightStep) -> _StepTask:
        """Return the task of a step that is launched ahead: its tokens are those that the step before it samples."""
        spans, inputs, written = batch.spans, before.inputs, self.kv_cache.written_rows
        rows = logit_rows_of(spans)
        if inputs is not None and inputs.sequences == [span.sequence for span in spans]:
            inputs = inputs.next_step(spans, written)
        else:
            inputs = DecodeInputs.after_step(before.batch.spans, spans, sampling_mode(rows), written)
        shape = None
        if self.graphs.enabled:
            shape = self._possible(self.shapes.find(len(spans), max(span.end for span in spans)))
        sizes = StepSizes.of_bucket(len(spans)) if shape is None else shape.sizes
        return _StepTask(batch, rows, inputs.mode, shape, sizes, inputs, [], [], self.kv_cache.states.rows_of(spans))

    def _possible(self, shape: GraphShape | None) -> GraphShape | None:
        return shape if shape is not None and self.graphs.is_possible(shape) else None

    def _launch(self, task: _StepTask, buffer: HostBuffer) -> DeviceInFlightStep:
        started, sizes, spans = time.perf_counter(), task.sizes, task.batch.spans
        fits = sizes.tokens <= self._max_sizes.tokens and sizes.sequences <= self._max_sizes.sequences
        assert fits, "the step exceeds the limits on tokens or sequences"
        views = buffer.block_views(sizes, keep=task.shape is not None)
        mode = task.mode if self.backend.can_sample else SamplingMode.GREEDY
        if task.inputs is not None:
            task.inputs.fill(views, buffer.sampling, self._layout)
        else:
            decodes = None if task.shape is None else task.shape.decodes
            fill_step(views, task.pieces, task.kv_rows, self._layout, decodes)
            fill_logit_rows(views, spans, task.gap)
            if mode is not SamplingMode.GREEDY:
                fill_sampling(buffer.sampling, task.rows)
        fill_states(views, task.states.reads, task.states.writes, self._layout)
        self._send(buffer, block_size(sizes), mode)
        logits, scores = self._compute(task)
        self.kv_cache.states.save(task.states.saves)
        report, host_rows = self._sample(task, logits, buffer, mode)
        if self._observer is not None and task.rows:
            self._observer.sampled(self.sampled_ids(len(task.rows)))
        ids = buffer.ids[: len(task.rows)]
        if len(ids):
            ids.copy_(self._ids[: len(ids)], non_blocking=True)
        mark = self.backend.record_event()
        return DeviceInFlightStep(
            task.batch, task.inputs, mark, ids, report, host_rows, started, scores, task.states.runs
        )

    def _send(self, buffer: HostBuffer, count: int, mode: SamplingMode) -> None:
        """Copy the input block, of `count` words behind the sampling parameters, and the updates of page tables."""
        begin = self._inputs_start if mode is SamplingMode.GREEDY else 0
        count += self._inputs_start
        cells, pages = list(self._table_updates), list(self._table_updates.values())
        if self._observer is not None:
            self._observer.sent(begin, buffer.block[begin:count], cells, pages)
        num_sent = len(cells) if len(cells) <= MAX_TABLE_UPDATES else 0
        for view, values in zip(table_update_views(buffer.block[count:], num_sent), (cells, pages), strict=True):
            view.numpy()[:] = values[:num_sent]
        end = count + table_update_size(num_sent)
        self._block[begin:end].copy_(buffer.block[begin:end], non_blocking=True)
        if num_sent:
            self.kv_cache.tables.view(-1).index_copy_(0, *table_update_views(self._block[count:], num_sent))
        elif cells:  # rare; these copies may wait for the device
            self._update_tables(cells, pages)
        self._table_updates.clear()

    def _update_tables(self, cells: list[int], pages: list[int]) -> None:
        tables = self.kv_cache.tables.view(-1)
        device = tables.device
        tables.index_copy_(0, torch.tensor(cells, device=device), torch.tensor(pages, dtype=torch.int32, device=device))

    def _compute(self, task: _StepTask) -> tuple[Tensor, list[SpanScores]]:
        """Compute a step. Return the logits [rows, vocab], and scores of prompts."""
        if task.shape is not None:
            if self._observer is not None:
                self._observer.replays(task.shape)
            self.graphs.replay(task.shape)
            assert self._logits is not None, "a captured step writes its logits"
            return self._logits[: len(task.rows)], []
        views, scores = self._views(task.sizes), list[SpanScores]()
        if self._observer is not None:
            self._observer.computes(task.sizes, task.bounds, task.pictures, bool(task.batch.scored))
        if task.batch.scored:
            hidden = self._forward.hidden(views, task.bounds, task.pictures)
            scores = score_prompts(task.batch, hidden, self._forward.logits_of)
            logits = self._forward.logits_of(hidden.index_select(0, views.logit_rows))
        else:
            logits = self._forward.logits(views, task.sizes, task.bounds, task.pictures)
        return logits[: len(task.rows)], scores

    def _views(self, sizes: StepSizes) -> StepViews[Tensor]:
        return block_views(self._block[self._inputs_start :], sizes)

    def _compute_shape(self, shape: GraphShape) -> None:
        """Compute a step of a captured shape. The work depends only on the input block."""
        sizes = shape.sizes
        logits = self._forward.logits(self._views(sizes), sizes, StepBounds.of_shape(shape))
        if not self._forward.has_logits:
            return
        if self._logits is None:
            vocab_size = logits.shape[1]
            rows = min(self.shapes.largest.samples, max(len(logits), GRAPHS_BYTES // (8 * vocab_size)))
            self._logits = logits.new_empty((rows, vocab_size))
        self._logits[: len(logits)].copy_(logits)

    def _sample(
        self, task: _StepTask, logits: Tensor, buffer: HostBuffer, mode: SamplingMode
    ) -> tuple[LogprobReport | None, HostRows | None]:
        """Sample all rows into the buffer. Return log-probabilities on their way, and rows that the host samples."""
        if not task.rows:
            return None, None
        rules = [rule_of(row.sequence, self.backend.can_sample) for row in task.rows]
        ruled = [place for place, rule in enumerate(rules) if rule is Rule.DEVICE]
        last_ids = self._last_ids(task, ruled) if ruled else None
        sampling = None
        if self._sampling is not None and mode is not SamplingMode.GREEDY:
            sampling = first_rows(self._sampling, len(task.rows))
        if len(ruled) < len(task.rows):
            self._forward.sample(logits, sampling, mode)
        report = None
        if last_ids is not None:
            report = self._sample_ruled(task, ruled, (logits, last_ids, sampling), buffer)
        held = [place for place, rule in enumerate(rules) if rule is Rule.HOST]
        return report, self._host_rows(task, held, logits) if held else None

    def _last_ids(self, task: _StepTask, places: list[int]) -> Tensor:
        """Return the ids of the tokens before those that these rows of logits sample."""
        at = places
        if task.inputs is None:
            rows = token_rows(task.batch.spans, task.gap)
            at = [rows[place] for place in places]
        return self._forward.token_ids(self._views(task.sizes), torch.tensor(at).to(self._block.device))

    def _sample_ruled(
        self,
        task: _StepTask,
        places: list[int],
        tensors: tuple[Tensor, Tensor, SamplingTensors | None],
        buffer: HostBuffer,
    ) -> LogprobReport | None:
        logits, last_ids, sampling = tensors
        rows = [task.rows[place] for place in places]
        ruled = self._rules.rows(places, [row.sequence for row in rows])
        kept = {id(sequence) for sequence in ruled.sequences}
        masks = buffer.masks([span for span in task.batch.spans if id(span.sequence) in kept], len(rows))
        words = None if masks is None else masks.to(logits.device, non_blocking=True)
        ids, report = self._rules.sample(logits, ruled, rows, last_ids, words, sampling)
        self._ids.index_copy_(0, ruled.at, ids)
        return None if report is None else report.on_host(buffer.report(report.packed.numel()))

    def _host_rows(self, task: _StepTask, places: list[int], logits: Tensor) -> HostRows:
        rows = [task.rows[place] for place in places]
        kept = {id(row.sequence) for row in rows}
        spans = [span for span in task.batch.spans if id(span.sequence) in kept]
        return HostRows(places, rows, spans, logits[torch.tensor(places).to(logits.device)])

    def _sample_on_host(self, held: HostRows, samples: list[SampledTokens]) -> None:
        with torch.inference_mode():
            logits = held.logits if self.backend.can_sample else held.logits.cpu()
            found = self._sampler.sample(logits, held.rows, self._masks.for_step(held.spans, len(held.rows)))
        for place, one in zip(held.places, found, strict=True):
            samples[place] = one


def first_rows(views: SamplingViews[Tensor], rows: int) -> SamplingTensors:
    return SamplingTensors({name: column[:rows] for name, column in views.columns.items()}, views.uniforms[:rows])
