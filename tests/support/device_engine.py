"""A decoder engine on the simulated device, and the events of its clients.

A delayed queue runs only when waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.backends.base import DeviceBackend
from app.engine.decoder.device_runner import DeviceDecoderRunner, DeviceForward, DeviceInFlightStep
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import kv_shape_of
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.scheduler.batch import Batch, InFlightStep, ScheduledSpan
from app.engine.scheduler.kv_allocator import KvSlots, StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.scheduler.speculation import Speculation
from app.messages import Event, Generate, RequestFailed, SamplingParams, SequenceFinished, TokenLogprob, TokensReady
from app.metrics.steps import StepStats
from simulated_device import SimulatedDeviceBackend

MAX_LEN, SLOTS, EOS = 160, 12, 1
CHECKPOINTS, BETWEEN_STATES = 10, 16  # of recurrent states
Said = dict[tuple[str, int], list[int]]


class WatchedRunner(DeviceDecoderRunner):
    """Keeps the batches that were launched."""

    def launch(self, batch: Batch, after: InFlightStep | None = None) -> DeviceInFlightStep:
        self.batches.append(batch)
        return super().launch(batch, after)

    @property
    def batches(self) -> list[Batch]:
        kept: list[Batch] = self.__dict__.setdefault("_batches", [])
        return kept


class DeviceServed:
    """One model's engine over fresh pages."""

    def __init__(
        self,
        model: Any,
        backend: DeviceBackend | None = None,
        pages: int = SLOTS * 3,
        max_batch_tokens: int = 24,
        eager: str = "",
        engine: DecoderEngine | None = None,
        speculation: Speculation | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Build the engine; `engine`: another one takes its place, of a processor."""
        config, backend = model.config, backend or SimulatedDeviceBackend(torch.float32)
        shape = kv_shape_of(config, SLOTS, MAX_LEN, CHECKPOINTS if config.state_sizes else 0)
        self.cache = PagedKvCache(shape, kv_dtype or backend.dtype, pages, backend.device)
        limits = EngineLimits(MAX_LEN, SLOTS // 2, max_batch_tokens)
        self.runner = WatchedRunner(model, self.cache, backend, limits, eager, 0 if speculation is None else 64)
        checkpoints = StateCheckpoints(SLOTS, CHECKPOINTS, BETWEEN_STATES) if config.state_sizes else None
        self.pool = KvSlots(SLOTS, self.cache.capacity_tokens, self.cache.tokens_per_page, checkpoints=checkpoints)
        self.scheduler = Scheduler(self.pool, PrefillBudget(max_batch_tokens), limits, {EOS}, speculation=speculation)
        self.engine = engine or DecoderEngine(self.scheduler, self.runner, clock=count().__next__)
        self.said: Said = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprob]] = {}
        self.stats: list[StepStats] = []

    def add(self, *requests: Generate) -> DeviceServed:
        for request in requests:
            self.hear(self.engine.add(request))
        return self

    def step(self) -> None:
        self.hear(self.engine.step())
        if self.engine.stats is not None:
            self.stats.append(self.engine.stats)

    def finish(self) -> DeviceServed:
        while self.engine.has_work:
            self.step()
        return self

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            assert not isinstance(event, RequestFailed), event
            said = self.said.setdefault((event.request_id, getattr(event, "choice", 0)), [])
            if isinstance(event, TokensReady | SequenceFinished):
                said.extend(event.token_ids)
                if event.logprobs:
                    self.logprobs.setdefault((event.request_id, event.choice), []).extend(event.logprobs)

    @property
    def num_ahead(self) -> int:
        return sum(batch.ahead for batch in self.runner.batches)


def request_of(name: str, prompt: list[int], **params: Any) -> Generate:
    return Generate(
        name, tuple(prompt), SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params}), arrived_at=0.0
    )


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def spans_of(batches: Iterable[Batch]) -> Iterator[ScheduledSpan]:
    return (span for batch in batches for span in batch.spans)


@dataclass(frozen=True, slots=True)
class Replayed:
    queue: Queue
    work: Callable[[], None]

    def replay(self) -> None:
        self.queue.ask(self.work)


@dataclass(frozen=True, slots=True)
class Place:
    queue: Queue
    number: int

    def wait(self) -> None:
        self.queue.until(self.number)


class Queue:
    """What was asked for and is not done yet."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], object]] = deque()
        self.asked = self.done = 0
        self.most_pending = 0
        self.is_moving = False

    def ask(self, work: Callable[[], object]) -> None:
        self.pending.append(work)
        self.asked += 1
        self.most_pending = max(self.most_pending, len(self.pending))

    def until(self, number: int) -> None:
        self.is_moving = True
        while self.done < number:
            self.done += 1
            with torch.inference_mode():  # as when it was asked for
                self.pending.popleft()()
        self.is_moving = False


class DelayedSimulatedDevice(SimulatedDeviceBackend):
    """What it is asked for is done when somebody waits: whoever writes too early what it will read is found out.

    Copies that need not wait and replays are put off; whatever else is computed waits for all that was asked before.
    """

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.queue = Queue()

    def capture(self, work: Callable[[], None]) -> Any:
        return Replayed(self.queue, work)

    def record_event(self) -> Place:
        return Place(self.queue, self.queue.asked)

    def synchronize(self) -> None:
        self.queue.until(self.queue.asked)

    @contextmanager
    def watching(self) -> Iterator[DelayedSimulatedDevice]:
        sample = DeviceForward.sample

        def later(forward: DeviceForward, *given: Any) -> None:
            self.queue.ask(lambda: sample(forward, *given))

        with _Delay(self.queue), pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceForward, "sample", later)
            yield self


class _Delay(TorchDispatchMode):
    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._queue.is_moving:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and args[2:3] == (True,):
            self._queue.ask(lambda: func(*args))
            return args[0]
        if not func.is_view:
            self._queue.until(self._queue.asked)
        return func(*args, **kwargs)
