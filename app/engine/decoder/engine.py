"""Continuous batching for decoders: the scheduler plans a step and takes the result of the runner."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from app.engine.scheduler.batch import (
    Batch,
    Grammars,
    InFlightStep,
    SampledTokens,
    accepted_by_span,
    active_samples,
    make_sequence,
    next_span,
)
from app.engine.scheduler.kv_allocator import KvAllocator
from app.engine.scheduler.scheduler import Scheduler
from app.errors import RequestError, StepFailed
from app.hardware.step_times import ThrottleCorrection
from app.messages import Abort, Event, Generate, RequestFailed, SamplingParams, SetAdapter, TokenScore
from app.metrics.steps import EngineSnapshot, StepStats

if TYPE_CHECKING:
    from app.engine.decoder.adapters import AdapterSlots

log = logging.getLogger(__name__)
# types that an out-of-memory error can have; the runner decides whether an error is one
_MEMORY_ERRORS = (RuntimeError, MemoryError)


class DecoderRunner(Protocol):
    """The interface of a decoder's runner: it computes batches and returns sampled token ids.

    It returns one `SampledTokens` for each row that samples, in the order of spans and positions. The engine need not
    wait for an in-flight step; the runner keeps all memory that the step uses until it is done.
    """

    @property
    def model_seconds(self) -> float:
        """Seconds in the model's forward pass, for the last batch that was waited for."""

    @property
    def is_first(self) -> bool:
        """True if the last step had a shape that is not replayed from a recording yet, so it took longer."""

    @property
    def is_native(self) -> bool: ...

    @property
    def prompt_scores(self) -> Items[tuple[TokenScore, ...]]:
        """The scores of each of `Batch.scored`, for the last batch that was waited for."""

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> InFlightStep:
        """Start a step.

        Copies and releases are done first, before anything that may run out of memory, so a step that is tried again
        has none left. If `batch.ahead` is True, `after` is the in-flight step whose samples are the last tokens of
        these sequences; each sequence has a row in it.
        """

    def wait(self, in_flight: InFlightStep) -> Items[SampledTokens]: ...

    def can_run_ahead(self, batch: Batch) -> bool: ...

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> bool:
        """Prepare for later steps while there is no request; False if `is_wanted` ended that before all was done."""

    def survives(self, error: Exception) -> bool:
        """Return True if the error is a lack of memory that has been freed again, so a step may be retried."""


class DecoderEngine:
    """The engine of models that generate text, as the worker uses it. `stats` describes the last step.

    On a device with an asynchronous queue, the next step is launched while the current one is in flight
    (`_launched_ahead`). It may be dropped at any time: its tokens are then computed again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: DecoderRunner,
        clock: Callable[[], float] = time.perf_counter,
        throttle_correction: ThrottleCorrection | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.adapters: AdapterSlots | None = None  # set if the server has LoRA adapters
        self.grammars: Grammars | None = None  # set if the server has structured output
        self.stats: StepStats | None = None
        self.throttle_correction = throttle_correction or ThrottleCorrection()
        self.batching_delay_seconds = 0.0  # 0: a new request joins the next step in any case
        self._clock = clock
        self._started_at = 0.0  # start time of the current step: its launch, or the end of the previous step
        # batch of the step that is in flight or that raised, without finished sequences
        self._batch: Batch | None = None
        self._launched_ahead: InFlightStep | None = None
        # smallest step in tokens that ran out of memory; a warning is logged when it shrinks
        self._smallest_failed_step = sys.maxsize

    @property
    def has_work(self) -> bool:
        """True while any request is active. A step in flight without active sequences does not count."""
        return self.scheduler.has_work

    def add(self, request: Generate | SetAdapter) -> list[Event]:
        """Queue a request, or change a slot's adapter. Returns the events of a request rejected at once."""
        if isinstance(request, SetAdapter):
            assert self.adapters is not None, "only a server with adapters changes them"
            self.adapters.use_read_weights(request.slot, request.is_loaded)
            return []
        if request.grammar is None:
            return self.scheduler.add(request)
        grammar = None if self.grammars is None else self.grammars.find(request.grammar)
        if grammar is None:  # its client has left
            return [RequestFailed(request.request_id, StepFailed("The grammar of this request is not compiled."))]
        return self.scheduler.add(request, grammar)

    def abort(self, command: Abort) -> list[Event]:
        events = self.scheduler.abort(command)
        self._drop_finished()
        return events

    def step(self) -> list[Event]:
        """Compute the next batch and return its events. A step out of memory is retried in smaller parts."""
        while True:
            try:
                return self._step()
            except _MEMORY_ERRORS as error:
                if not self._retry_smaller(error):
                    raise

    def _step(self) -> list[Event]:
        in_flight = self._next()
        if in_flight is None:
            return []
        self._batch = batch = in_flight.batch.active()
        self._launched_ahead = self._launch_ahead(in_flight, batch)
        samples = active_samples(in_flight.batch, batch, self.runner.wait(in_flight))
        events = self.scheduler.update_scores(batch.scored, self.runner.prompt_scores) if batch.scored else []
        events += self.scheduler.update(batch, samples)
        self._batch = None
        self._drop_finished()
        self._record_stats(batch, samples)
        return events

    def fail(self) -> list[Event]:
        """End the requests of the batch for which `step` raised; without a batch, all requests."""
        error = StepFailed(
            "The step that computed this request failed; the server's log says why. It may be sent again."
        )
        batch, self._batch, self._launched_ahead = self._batch, None, None
        return self.scheduler.fail(batch, error) if batch else self.scheduler.fail_all(error)

    def check(self) -> None:
        """Compute a prompt of one token in a separate slot to test the device, if a slot is free."""
        self._launched_ahead = None
        pool = self.scheduler.pool
        allocator, sequence = (
            KvAllocator(pool),
            make_sequence(Generate("check", (0,), SamplingParams(max_tokens=1), arrived_at=0.0)),
        )
        if not allocator.admit(sequence):
            return
        try:
            spans, states = (next_span(sequence, 1),), pool.take_state_copies()
            batch = Batch(spans, allocator.take_copies(), pool.take_released(), state_copies=states)
            (sampled,) = self.runner.wait(self.runner.launch(batch))
            if not sampled.is_finite:
                raise StepFailed("The logits of a prompt of one token are not finite.")
        finally:
            allocator.release(sequence, keep=0)

    def fail_all(self, error: RequestError) -> list[Event]:
        self._batch = self._launched_ahead = None
        return self.scheduler.fail_all(error)

    def save_prefixes(self, is_wanted: Callable[[], bool]) -> None:
        """Keep the prefixes of finished sequences, if there is a store for them, until `is_wanted` returns True."""
        store, pool = self.scheduler.prefix_store, self.scheduler.pool
        if store is not None:
            store.move((), (), pool.take_state_copies())
            store.save(pool.slots, is_wanted)

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> bool:
        """Let the runner prepare for later steps while there is no request; True if all is done."""
        self._launched_ahead = None
        return self.runner.use_idle_time(is_wanted)

    def snapshot(self) -> EngineSnapshot:
        return self.scheduler.snapshot()

    def _next(self) -> InFlightStep | None:
        in_flight, self._launched_ahead = self._launched_ahead, None
        if in_flight is not None:
            return in_flight
        self._start_timing()
        self._batch = batch = self.scheduler.schedule()
        return None if batch is None else self.runner.launch(batch)

    def _launch_ahead(self, in_flight: InFlightStep, batch: Batch) -> InFlightStep | None:
        following = self.scheduler.schedule_ahead(batch) if self.runner.can_run_ahead(batch) else None
        if following is None:
            return None
        try:
            return self.runner.launch(following, in_flight)
        except _MEMORY_ERRORS as error:
            if not self.runner.survives(error):
                raise
            self.scheduler.shrink(following)
            return None

    def _drop_finished(self) -> None:
        if self._launched_ahead is not None and all(span.is_finished for span in self._launched_ahead.batch.spans):
            self._launched_ahead = None

    def _retry_smaller(self, error: Exception) -> bool:
        batch = self._batch
        if batch is None or not self.runner.survives(error) or not self.scheduler.shrink(batch):
            return False
        if batch.num_tokens < self._smallest_failed_step:
            self._smallest_failed_step = batch.num_tokens
            log.warning(
                "A step of %d tokens ran out of device memory. Steps are smaller until further notice.",
                batch.num_tokens,
            )
        self._batch = self._launched_ahead = None
        return True

    def _start_timing(self) -> None:
        self._started_at = self._clock()
        self.throttle_correction.begin()

    def _record_stats(self, batch: Batch, samples: Items[SampledTokens]) -> None:
        seconds = self._clock() - self._started_at
        speculation = self.scheduler.speculation
        if speculation is not None and speculation.drafting is not None:
            seconds -= speculation.drafting.model.take_seconds()
        timing = StepTiming(
            seconds,
            self.runner.model_seconds,
            self.throttle_correction.of(seconds),
            self.runner.is_first,
            self.runner.is_native,
        )
        self.stats = decoder_step_stats(batch, samples, timing)
        self.scheduler.observe(self.stats)
        if self._launched_ahead is not None:
            self._start_timing()


@dataclass(frozen=True, slots=True)
class StepTiming:
    seconds: float
    model_seconds: float = 0.0
    throttle_correction: float = 1.0
    is_first: bool = False
    is_native: bool = False


def decoder_step_stats(batch: Batch, samples: Items[SampledTokens], timing: StepTiming) -> StepStats:
    """Return the `StepStats` of a computed batch, for the metrics and the prefill budget."""
    if batch.ahead:
        return _decode_step_stats(batch, timing)
    prompts = [span for span in batch.spans if not span.is_decode]
    decodes = len(batch.spans) - len(prompts)
    draft_tokens = sum(len(span.draft_ids) for span in batch.spans)
    accepted = (
        sum(len(stands) - 1 for span, stands in accepted_by_span(batch, samples) if span.draft_ids)
        if draft_tokens
        else 0
    )
    context = sum(span.known_end for span in batch.spans) - sum(span.known_end for span in prompts)
    return StepStats(
        seconds=timing.seconds,
        prefill_tokens=batch.num_tokens - decodes - draft_tokens,
        decode_tokens=decodes + accepted,
        num_sequences=len(batch.spans),
        num_prefill_sequences=len(prompts),
        num_decode_sequences=decodes,
        cached_tokens=batch.cached_tokens,
        preempted=batch.preempted,
        model_seconds=timing.model_seconds,
        context_tokens=context,
        draft_tokens=draft_tokens,
        accepted_tokens=accepted,
        prefill_pairs=sum(span.num_tokens * span.start for span in prompts),
        recomputed_tokens=sum(span.num_tokens for span in prompts if span.sequence.num_admitted > 1),
        throttle_correction=timing.throttle_correction,
        is_first=timing.is_first,
        is_native=timing.is_native,
        scored_tokens=sum(scored.end - scored.start for scored in batch.scored),
    )


def _decode_step_stats(batch: Batch, timing: StepTiming) -> StepStats:
    """Return the `StepStats` of a step that was launched ahead: one decoded token for each sequence."""
    count = len(batch.spans)
    return StepStats(
        seconds=timing.seconds,
        decode_tokens=count,
        num_sequences=count,
        num_decode_sequences=count,
        model_seconds=timing.model_seconds,
        context_tokens=sum([span.start for span in batch.spans]) + count,
        throttle_correction=timing.throttle_correction,
        is_first=timing.is_first,
        is_native=timing.is_native,
    )
