"""Runner for a device with its own memory and queue: it launches steps and waits when their ids are needed.

All work of all steps goes into one queue, so a step that overwrites device memory runs after the previous step has
read it. On the host there are two buffers, because the device reads one while the other is written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.batch import Batch, Flight, Picked, RowToPick, rows_to_pick
from app.engine.buckets import bucket_of, buckets_for
from app.engine.device_course import Course
from app.engine.device_flight import DeviceFlight, Side
from app.engine.device_forward import Bounds, DeviceForward
from app.engine.device_picking import rows_held
from app.engine.device_step import Places, Sizes, Way, fill, fill_picks, num_words, update_views, update_words, views_of, way_of
from app.engine.graphs import Graphs, Shape, bytes_of_rows
from app.engine.limits import Limits
from app.engine.paged_kv import PagedKVCache
from app.engine.sampler import Sampler
from app.errors import StepFailed
from app.models.decoder import Decoder

UPDATES = 4096  # page table entries that are sent with a step's inputs; a long cached prefix may need more


@dataclass(frozen=True, slots=True)
class _Task:
    """A batch and the plan for computing it.

    `shape` is None if the step is not one of the captured shapes. `inputs` is set for a step that is launched
    ahead.
    """

    batch: Batch
    picks: int
    way: Way
    shape: Shape | None
    sizes: Sizes
    course: Course | None
    written: list[int]
    rows: list[RowToPick]


def _finite(ids: list[int], batch: Batch) -> list[int]:
    """Replace the invalid ids of finished sequences by 0.

    Raises `StepFailed` if an active sequence has an invalid id.
    """
    bad = [row for token_id, row in zip(ids, rows_to_pick(batch.spans), strict=True) if token_id < 0]
    if not batch.ahead or any(row.sequence.slot is not None for row in bad):
        raise StepFailed(
            f"The model's logits are not finite for {len(bad)} of {len(ids)} sequences of this step, so no token can be sampled."
        )
    return [max(token_id, 0) for token_id in ids]


class DeviceRunner:
    """The decode runner of a device. It is used on the worker thread only.

    `eager` is the reason why no step is captured. If it is empty, steps that only decode are captured.
    """

    def __init__(self, model: Decoder, kv_cache: PagedKVCache, backend: DeviceBackend, limits: Limits, eager: str = "") -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.buckets = buckets_for(limits.max_running_seqs)
        # duration of the last step waited for, measured from its launch or from the end of the previous step
        self.model_seconds = 0.0
        self.is_first = False  # the last step's shape had to be captured first, so the step took longer
        most = max(limits.max_running_seqs, self.buckets[-1])
        self._most = Sizes(max(limits.max_batch_tokens, most), most, most)
        words = num_words(self._most) + update_words(UPDATES)
        buffer = torch.zeros(most + words, dtype=torch.int64, device=backend.device)
        self._ids, self._block = buffer[:most], buffer[most:]
        self._sides = [Side(backend.staging(words), backend.staging(most)) for _ in range(2)]
        self._places = Places(most, kv_cache.shape.num_slots)
        self._forward = DeviceForward(model, kv_cache, backend, buffer)
        self._sampler = Sampler(model.config.vocab_size)
        self.graphs = Graphs(backend, self._of_shape, bytes_of_rows(model.config.vocab_size, rows_held(buffer)), eager)
        self._updates: dict[int, int] = {}  # changes of the page tables that are not yet on the device: cell to page
        self._carried = True  # True once the last batch's copies and releases are done
        self._last: DeviceFlight | None = None
        self._landed_at = 0.0

    def launch(self, batch: Batch, after: Flight | None = None) -> DeviceFlight:
        """Launch a step on the device and return without waiting.

        Copies are done before releases, because a released page may be the source of a copy.
        """
        assert after is None or after is self._last, "a step launched ahead must follow the last in-flight step"
        before, self._last, self._carried = self._last, None, False
        with torch.inference_mode():
            self.kv_cache.carry(batch.copies, batch.released)
            self._carried = True
            task = self._task(batch) if before is None or not batch.ahead else self._further(batch, before)
            self._updates.update(zip(*self.kv_cache.take_updates(), strict=True))
            self.is_first = task.shape is not None and self.graphs.wants(task.shape)
            if task.shape is not None and self.is_first:
                self.capture(task.shape)
            side = self._free_side()
            try:
                side.flight = self._last = self._launch(task, side)
            finally:
                if side.flight is None:
                    side.mark = self.backend.mark()
        return self._last

    def wait(self, flight: Flight) -> list[Picked]:
        """Wait for a step and return one `SampledTokens` for each row that samples, in the order of the spans.

        Raises:
            StepFailed: The logits of an active sequence are not finite.
        """
        assert isinstance(flight, DeviceFlight), "the step must come from this runner"
        ids = flight.land()
        now = time.perf_counter()
        self.model_seconds, self._landed_at = now - max(flight.started, self._landed_at), now
        if flight.logits is not None:
            with torch.inference_mode():
                logits = flight.logits if self.backend.draws else flight.logits.cpu()
                return self._sampler.pick(logits, rows_to_pick(flight.batch.spans))
        if ids and min(ids) < 0:
            ids = _finite(ids, flight.batch)
        return [Picked((token_id,)) for token_id in ids]

    def run(self, batch: Batch) -> list[Picked]:
        """Launch a step and wait for its samples."""
        return self.wait(self.launch(batch))

    def follows(self, batch: Batch) -> bool:
        """Return True if every row samples exactly one token and does so on the device."""
        if batch.ahead:  # these sequences were checked for the step before it
            return True
        decodes = all(span.is_decode and span.num_picks == 1 for span in batch.spans)
        return decodes and way_of(rows_to_pick(batch.spans), self.backend.draws) is not Way.LOGITS

    def survives(self, error: Exception) -> bool:
        """Return True if the backend survives the error and the batch's copies and releases were completed.

        Copies and releases that were left undone cannot be repeated.
        """
        return self.backend.survives(error) and self._carried

    def capture(self, shape: Shape) -> None:
        """Capture a step of this shape with padding rows only.

        The ids that the previous step sampled are preserved.
        """
        with torch.inference_mode():
            side, picked, sizes = self._free_side(), self._ids.clone(), Sizes.of_bucket(shape.bucket)
            side.mark = self.backend.mark()
            views = side.views_of(sizes, stays=True)
            fill(views, (), (), self._places)
            fill_picks(views, (), (), shape.way)
            self._tell(side, num_words(sizes))
            self.graphs.capture(shape)
            self._ids.copy_(picked)
            side.mark = self.backend.mark()

    def _free_side(self) -> Side:
        """Return the host buffer that was used longest ago, once the device no longer reads it."""
        self._sides.reverse()
        self._sides[0].free()
        return self._sides[0]

    def _task(self, batch: Batch) -> _Task:
        rows = rows_to_pick(batch.spans)
        way = way_of(rows, self.backend.draws)
        decodes = all(span.num_tokens == span.num_picks == 1 for span in batch.spans)
        shape = self._shape(len(batch.spans), way) if decodes and way is not Way.LOGITS else None
        sizes = Sizes.of(batch.spans, len(rows)) if shape is None else Sizes.of_bucket(shape.bucket)
        return _Task(batch, len(rows), way, shape, sizes, None, self.kv_cache.written_rows(batch.spans), rows)

    def _further(self, batch: Batch, before: DeviceFlight) -> _Task:
        """Return the task of a step that is launched ahead: its tokens are those that the step before it samples."""
        spans, course, written = batch.spans, before.course, self.kv_cache.written_rows
        if course is not None and course.sequences == [span.sequence for span in spans]:
            course = course.further(spans, written)
        else:
            way = way_of(rows_to_pick(spans), self.backend.draws)
            course = Course.after(before.batch.spans, spans, way, written)
        shape = self._shape(len(spans), course.way)
        sizes = Sizes.of_bucket(len(spans) if shape is None else shape.bucket)
        return _Task(batch, len(spans), course.way, shape, sizes, course, [], [])

    def _shape(self, sequences: int, way: Way) -> Shape | None:
        bucket = bucket_of(sequences, self.buckets) if self.graphs.on else None
        return None if bucket is None else Shape(bucket, way)

    def _launch(self, task: _Task, side: Side) -> DeviceFlight:
        started, sizes, spans = time.perf_counter(), task.sizes, task.batch.spans
        room = sizes.tokens <= self._most.tokens and sizes.sequences <= self._most.sequences
        assert room, "the step exceeds the limits on tokens or sequences"
        views = side.views_of(sizes, stays=task.shape is not None)
        if task.course is not None:
            task.course.fill(views, self._places)
        else:
            fill(views, spans, task.written, self._places)
            fill_picks(views, spans, task.rows, task.way)
        self._tell(side, num_words(sizes))
        logits = self._compute(task)
        ids = side.ids[: task.picks if logits is None else 0]
        if len(ids):
            ids.copy_(self._ids[: len(ids)], non_blocking=True)
        return DeviceFlight(task.batch, task.course, self.backend.mark(), ids, logits, started)

    def _tell(self, side: Side, count: int) -> None:
        """Send the first `count` int64 values of the buffer to the device, and update the page tables there."""
        if not self._updates:
            self._block[:count].copy_(side.words[:count], non_blocking=True)
            return
        cells, pages, tables = list(self._updates), list(self._updates.values()), self.kv_cache.tables.view(-1)
        with_words = len(cells) if len(cells) <= UPDATES else 0
        for view, values in zip(update_views(side.words[count:], with_words), (cells, pages), strict=True):
            view.numpy()[:] = values[:with_words]
        end = count + update_words(with_words)
        self._block[:end].copy_(side.words[:end], non_blocking=True)
        if with_words:
            tables.index_copy_(0, *update_views(self._block[count:], with_words))
        else:  # rare; these copies may wait for the device
            device = tables.device
            tables.index_copy_(0, torch.tensor(cells, device=device), torch.tensor(pages, dtype=torch.int32, device=device))
        self._updates.clear()

    def _compute(self, task: _Task) -> Tensor | None:
        """Compute a step.

        The sampled ids are left in the buffer, or the logits are returned if the sampler needs them.
        """
        if task.shape is not None:
            self.graphs.run(task.shape)
            return None
        sizes = task.sizes
        views = views_of(self._block, sizes, self.backend.draws)
        logits = self._forward.logits(views, sizes, Bounds.of(task.batch.spans))
        if task.way is Way.LOGITS:
            return logits
        self._forward.pick(logits, views, task.way)
        return None

    def _of_shape(self, shape: Shape) -> None:
        """Compute a step of a captured shape. The work depends only on the input block."""
        sizes = Sizes.of_bucket(shape.bucket)
        views = views_of(self._block, sizes, self.backend.draws)
        logits = self._forward.logits(views, sizes, Bounds(shape.bucket, 1, self.kv_cache.shape.max_len))
        self._forward.pick(logits, views, shape.way)
