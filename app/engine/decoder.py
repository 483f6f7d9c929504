"""Continuous batching of a decoder: the scheduler decides, the runner computes, the scheduler learns what came of it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from app.engine.batch import Batch, Flight, Picked, by_span, living_picks, next_span
from app.engine.scheduler import Scheduler
from app.engine.sequence import sequence_of
from app.engine.tenants import Tenants
from app.errors import RequestError, StepFailed
from app.hardware.throttling import Stretch
from app.measured import Snapshot, StepStats
from app.messages import Abort, Event, Generate, SamplingParams

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Tensors in, ids out: one `Picked` for each row that samples, in the order of spans and positions.

    Steps are computed in the order in which they are launched. A flight need not be waited for: what it picks is then nobody's, and a
    runner keeps whatever memory it still reads or writes until it is done.
    """

    @property
    def model_seconds(self) -> float:
        """Of the last batch waited for, in the model's forward pass."""
        ...

    def launch(self, batch: Batch, after: Flight | None = None) -> Flight:
        """Starts a step. Copies and releases come first, before anything that may want memory: a step that is tried again has none.

        `after` (where `batch.ahead`): the flight whose picks are these sequences' last tokens, each in the row of its sequence there.
        """
        ...

    def wait(self, flight: Flight) -> Items[Picked]: ...

    def follows(self, batch: Batch) -> bool:
        """Whether the step after this one may be launched on top of it, what it picks not being known here yet."""
        ...

    def survives(self, error: Exception) -> bool:
        """Whether launching or waiting failed for want of memory that is given back now; the same step, or a smaller one, may be tried."""
        ...


_WANT = (RuntimeError, MemoryError)  # what a want of memory may be; whether it is one the runner says


class DecoderEngine:
    """The engine's face to the worker for models that generate. `stats` is the last step's.

    Where a device computes, the next step is launched while this one is under way, and waits for its turn as `_ahead`. Nothing of it was
    told, so it may be dropped at any time: what it would have picked is computed again.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.stats: StepStats | None = None
        self.stretch = Stretch()
        self.patience_seconds = 0.0  # who arrives finds a place in the next step anyway
        self.is_first: Callable[[], bool] = lambda: (
            False
        )  # whether the last step was of a shape that is not run again natively yet
        self._clock = clock
        self._began = 0.0  # when there was nothing to wait for any more but this step
        self._batch: Batch | None = None  # of the step that is under way, or that raised; without void rows
        self._ahead: Flight | None = None
        self._too_many = sys.maxsize  # tokens: the smallest step that wanted too much memory so far, told when it becomes smaller

    @property
    def has_work(self) -> bool:
        """Of a flight that is under way somebody lives, or it is dropped."""
        return self.scheduler.has_work

    def add(self, request: Generate) -> list[Event]:
        return self.scheduler.add(request)

    def abort(self, command: Abort) -> list[Event]:
        events = self.scheduler.abort(command)
        self._drop_void()
        return events

    def step(self) -> list[Event]:
        """Computes the next batch and returns what its clients are to be told. Where memory is wanting, in smaller parts."""
        while True:
            try:
                return self._step()
            except _WANT as error:
                if not self._does_with_less(error):
                    raise

    def _step(self) -> list[Event]:
        flight = self._next()
        if flight is None:
            return []
        self._batch = batch = flight.batch.living()
        self._ahead = self._follow(flight, batch)
        picked = living_picks(flight.batch, batch, self.runner.wait(flight))
        events = self.scheduler.update(batch, picked)
        self._batch = None
        self._drop_void()
        self._count(batch, picked)
        return events

    def fail(self) -> list[Event]:
        """After `step` raised: the requests of its batch end, the others go on. Where there was no batch, all end."""
        error = StepFailed("The step that computed this request failed; the server's log says why. It may be sent again.")
        batch, self._batch, self._ahead = self._batch, None, None
        return self.scheduler.fail(batch, error) if batch else self.scheduler.fail_all(error)

    def check(self) -> None:
        """A prompt of one token in a slot of its own, beside all requests. Where there is no slot nothing is learnt."""
        self._ahead = None
        pool = self.scheduler.pool
        tenants, sequence = Tenants(pool), sequence_of(Generate("check", (0,), SamplingParams(max_tokens=1), arrived_at=0.0))
        if not tenants.admit(sequence):
            return
        try:
            batch = Batch((next_span(sequence, 1),), tenants.take_copies(), pool.take_released())
            self.runner.wait(self.runner.launch(batch))
        finally:
            tenants.leave(sequence, keep=0)

    def fail_all(self, error: RequestError) -> list[Event]:
        self._batch = self._ahead = None
        return self.scheduler.fail_all(error)

    def snapshot(self) -> Snapshot:
        return self.scheduler.snapshot()

    def _next(self) -> Flight | None:
        """The step that was launched ahead, else the next one, launched now."""
        flight, self._ahead = self._ahead, None
        if flight is not None:
            return flight
        self._begin()
        self._batch = batch = self.scheduler.schedule()
        return None if batch is None else self.runner.launch(batch)

    def _follow(self, flight: Flight, batch: Batch) -> Flight | None:
        """The step after this one, launched on top of it where that can be."""
        following = self.scheduler.follow(batch) if self.runner.follows(batch) else None
        if following is None:
            return None
        try:
            return self.runner.launch(following, flight)
        except _WANT as error:
            if not self.runner.survives(error):
                raise
            self.scheduler.shrink(following)
            return None

    def _drop_void(self) -> None:
        if self._ahead is not None and all(span.is_void for span in self._ahead.batch.spans):
            self._ahead = None

    def _does_with_less(self, error: Exception) -> bool:
        """Whether the step was too large for the device's memory, and may be tried again in smaller parts."""
        batch = self._batch
        if batch is None or not self.runner.survives(error) or not self.scheduler.shrink(batch):
            return False
        if batch.num_tokens < self._too_many:
            self._too_many = batch.num_tokens
            log.warning("A step of %d tokens wanted more memory than there is: steps are smaller for now", batch.num_tokens)
        self._batch = self._ahead = None
        return True

    def _begin(self) -> None:
        self._began = self._clock()
        self.stretch.begin()

    def _count(self, batch: Batch, picked: Items[Picked]) -> None:
        seconds = self._clock() - self._began
        took = Took(seconds, self.runner.model_seconds, self.stretch.of(seconds), self.is_first())
        self.stats = measured(batch, picked, took)
        self.scheduler.observe(self.stats)
        if self._ahead is not None:
            self._begin()


@dataclass(frozen=True, slots=True)
class Took:
    """What a step took: as `StepStats` has it."""

    seconds: float
    model_seconds: float = 0.0
    stretch: float = 1.0
    is_first: bool = False


def measured(batch: Batch, picked: Items[Picked], took: Took) -> StepStats:
    """A step in numbers, for the metrics and the pace."""
    if batch.ahead:
        return _decoded(batch, took)
    prompts = [span for span in batch.spans if not span.is_decode]
    decodes = len(batch.spans) - len(prompts)
    drafted = sum(len(span.draft_ids) for span in batch.spans)
    accepted = sum(len(stands) - 1 for span, stands in by_span(batch, picked) if span.draft_ids) if drafted else 0
    context = sum(span.own_end for span in batch.spans) - sum(span.own_end for span in prompts)
    return StepStats(
        seconds=took.seconds,
        prefill_tokens=batch.num_tokens - decodes - drafted,
        decode_tokens=decodes + accepted,
        num_sequences=len(batch.spans),
        num_prefill_sequences=len(prompts),
        num_decode_sequences=decodes,
        cached_tokens=batch.cached_tokens,
        preempted=batch.preempted,
        model_seconds=took.model_seconds,
        context_tokens=context,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        prefill_pairs=sum(span.num_tokens * span.start for span in prompts),
        recomputed_tokens=sum(span.num_tokens for span in prompts if span.sequence.num_admitted > 1),
        stretch=took.stretch,
        is_first=took.is_first,
    )


def _decoded(batch: Batch, took: Took) -> StepStats:
    """Of a step that was launched ahead: a token of each sequence, and nothing else."""
    count = len(batch.spans)
    return StepStats(
        seconds=took.seconds,
        decode_tokens=count,
        num_sequences=count,
        num_decode_sequences=count,
        model_seconds=took.model_seconds,
        context_tokens=sum([span.start for span in batch.spans]) + count,
        stretch=took.stretch,
        is_first=took.is_first,
    )
